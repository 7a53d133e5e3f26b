"""Models whose gradient has no derivative in forward mode: curvature is that of differences."""

from functools import partial

import jax
from jax import random
from jax.experimental.ode import odeint
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext._model.operations import STEP, has_forward_mode, linearized
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.mcmc import PSGLD, SGHMC
from numpyro_ext.objectives import VRELBO, taylor_proxy
from numpyro_ext.optim import find_modes

COUNTS = jnp.array([[90.0, 1100.0], [110.0, 900.0], [104.0, 1010.0]])
K, B = 2 + COUNTS.sum(0), 1 / 100 + 3  # of the Gamma posterior of each rate


@jax.custom_vjp
def by_hand(x):
    """x, with a gradient that somebody has written, as of a solver or a program of the host."""
    return x


by_hand.defvjp(lambda x: (by_hand(x), None), lambda _, g: (g,))


def rates(counts, batch=None):
    """The logarithms of the rates have the mode log(K / B), and the variance 1 / K there."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.01).expand([2]).to_event(1))
    with numpyro.plate("rows", len(counts), subsample_size=batch) as i:
        numpyro.sample("y", dist.Poisson(by_hand(rate)).to_event(1), obs=counts[i])


def test_a_difference_stands_in_for_a_derivative_that_is_not_there():
    """Of a quadratic it is exact; of the exponential of x its error is STEP^2 / 6 = 0.0017."""
    x, v = jnp.array([0.3, -1.0]), jnp.array([1.0, 0.5])
    assert has_forward_mode(jnp.exp, x)
    assert not has_forward_mode(jax.grad(lambda x: jnp.sum(jnp.exp(by_hand(x)))), x)
    for forward, tol in ((True, 1e-6), (False, STEP**2 / 5)):
        y, aux, along = linearized(lambda x: (jnp.exp(x), 3), x, forward=forward)
        np.testing.assert_allclose(y, np.exp(x), rtol=1e-6)
        np.testing.assert_allclose(along(v), v * np.exp(x), rtol=tol)
        assert aux == 3
    long = linearized(lambda x: (x**2, None), x, forward=False, length=jnp.linalg.norm)[2]
    np.testing.assert_allclose(long(1e4 * v), 2e4 * x * v, rtol=1e-4)


@pytest.mark.slow
def test_a_search_and_its_normal_are_right_without_a_second_derivative():
    """Laplace's normal of log K / B. An error of a difference would be STEP^2 / (6 K) < 1e-5."""
    modes = find_modes(rates, COUNTS, starts=1)
    mode = modes.heaviest
    assert mode.at_mode and not modes.problems and mode.departure < 0.03
    assert mode.distance(jnp.log(K / B)) < 0.1
    np.testing.assert_allclose(mode.factor @ mode.factor.T, np.diag(1 / K), rtol=0.02, atol=2e-6)


@pytest.mark.slow
def test_a_proxy_is_right_without_a_second_derivative():
    """Of rows with l = y x - e^x and the center c: G = sum y - 3 e^c, H = -3 diag(e^c). Rows
    differ in their linear terms alone, so that the estimate from any of them is exact, but for the
    rounding of l, 5e-4, and STEP^2 / 6 of the fourth term, 0.004."""
    center = {"rate": 1.01 * K / B}
    proxy = taylor_proxy(rates, COUNTS, 1, center=center)
    np.testing.assert_allclose(proxy.grad, COUNTS.sum(0) - 3 * center["rate"], atol=0.05)
    np.testing.assert_allclose(proxy.hessian, -3 * np.diag(center["rate"]), rtol=2e-3, atol=1.0)
    v = jnp.array([0.3, -0.1])
    x = proxy.normal.center + v

    def row(x):
        return jnp.sum(COUNTS[1] * x - jnp.exp(x))[None]

    change, _ = proxy.change(x, row(x), row)
    exact = float(jnp.sum(COUNTS.sum(0) * v - 3 * jnp.exp(proxy.normal.center) * jnp.expm1(v)))
    assert float(change) == pytest.approx(exact, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("make", [SGHMC, partial(PSGLD, gamma="hutchinson")])
def test_a_kernel_finds_its_settings_and_is_right_without_a_second_derivative(make):
    """4,000 draws, of which 400 and more are independent, against the Gamma posterior; a variance
    may be .05 off."""
    mcmc = MCMC(
        make(rates, steps_per_sample=10), num_warmup=500, num_samples=4000, progress_bar=False
    )
    mcmc.run(random.key(0), COUNTS)
    draws = np.asarray(mcmc.get_samples()["rate"])
    np.testing.assert_allclose((draws.mean(0) - K / B) / (K**0.5 / B), 0, atol=0.2)
    np.testing.assert_allclose(draws.std(0) / (K**0.5 / B), 1, atol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO(), VRELBO(0.5)])
def test_a_flow_begins_at_the_mode_without_a_second_derivative(loss):
    guide = AutoRealNVPNormal(rates)
    svi = SVI(rates, guide, optax.adam(1e-3), loss)
    result = svi.run(random.key(0), 200, COUNTS, progress_bar=False)
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(4000,))["rate"]
    np.testing.assert_allclose((draws.mean(0) - K / B) / (K**0.5 / B), 0, atol=0.15)
    np.testing.assert_allclose(draws.std(0) / (K**0.5 / B), 1, atol=0.1)


TIMES = jnp.linspace(0, 5, 12)
LEVELS = 2 * jnp.exp(-0.7 * TIMES) + 0.1 * random.normal(random.key(1), TIMES.shape)


def decay(solve):
    def model(y):
        k, y0 = (numpyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("k", "y0"))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(solve(k, y0), noise), obs=y)

    return model


@pytest.mark.nightly
def test_a_differential_equation_has_the_posterior_of_its_solution():
    """By ``odeint`` and in closed form; the tolerance of the solver is 1.4e-8."""
    by_solver = find_modes(
        decay(lambda k, y0: odeint(lambda y, t, k: -k * y, y0, TIMES, k)), LEVELS
    )
    exact = find_modes(decay(lambda k, y0: y0 * jnp.exp(-k * TIMES)), LEVELS).heaviest
    mode = by_solver.heaviest
    assert mode.distance(exact.center) < 0.02
    np.testing.assert_allclose(mode.sds / exact.sds, 1, atol=0.01)
    assert mode.log_evidence == pytest.approx(exact.log_evidence, abs=0.01)
