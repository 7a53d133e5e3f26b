"""Where chains start: at every mode with its share, and where the likelihood overflows, or has no
gradient, in most of the prior."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import mask
from numpyro.infer.util import potential_energy
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.mcmc import SGHMC, SGLD
from numpyro_ext.optim import find_modes
from tests.two_modes import two_modes


def weibull(x, time, event, unit=1.8):
    """The survival function of rows with an event is masked, its gradient is not: 0 times inf, at
    29 of 30 starts."""
    b = numpyro.sample("b", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 1.0))
    life = dist.Weibull(jnp.exp(b[0] + b[1] * x), unit * shape)
    with numpyro.plate("rows", len(x)):
        with mask(mask=event):
            numpyro.sample("time", life, obs=time)
        with mask(mask=~event):
            numpyro.factor("alive", jnp.log1p(-life.cdf(time)))


@cache
def lives():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(200)
    time = np.exp(8 + 0.5 * x) * rng.weibull(1.5, 200)
    event = rng.uniform(size=200) < 0.7
    # The others are alive when last seen, early.
    return x, np.where(event, time, np.minimum(time, 2.0)), event


@pytest.mark.slow
def test_settings_are_found_where_most_starts_are_not_finite():
    """At the mode, with the curvature there, and every chain starts."""
    kernel = SGHMC(weibull)
    data = jax.tree.map(jnp.asarray, lives())
    state = kernel.init(random.split(random.key(1), 32), 10, None, data)
    assert np.all(np.isfinite(state.grad_norm))
    whitening = kernel.settings.whitening

    def potential(xi):
        z = whitening.to_z(xi)
        return potential_energy(weibull, data, {}, {"b": z[:2], "shape": z[2]})

    at_mode = jnp.zeros(3)
    np.testing.assert_allclose(jax.jit(jax.grad(potential))(at_mode), 0, atol=0.15)
    np.testing.assert_allclose(jax.jit(jax.hessian(potential))(at_mode), np.eye(3), atol=0.1)


@pytest.mark.slow
def test_a_chain_with_a_given_step_starts_where_its_gradient_is_finite():
    args = (*jax.tree.map(jnp.asarray, lives()), 1.0)  # a unit with which every chain finds one
    state = SGLD(weibull, 1e-6).init(random.split(random.key(0), 8), 0, None, args)
    assert np.all(np.isfinite(state.grad_norm)) and np.all(np.isfinite(state.potential_energy))


@cache
def modes():
    with pytest.warns(InferenceWarning, match="different modes"):
        return find_modes(two_modes, starts=16)  # most points lead to the wider one


@cache
def of_eight_chains():
    """The settings for them."""
    kernel = SGHMC(two_modes, whitening=modes())
    with pytest.warns(InferenceWarning, match="different modes"):
        kernel.init(random.split(random.key(0), 8), 20, None)
    return kernel.settings


@pytest.mark.slow
def test_one_chain_starts_at_the_heaviest_mode_and_needs_no_step_for_the_others():
    kernel = SGHMC(two_modes, whitening=modes())
    with pytest.warns(InferenceWarning, match="different modes"):
        state = kernel.init(random.key(0), 10, None)
    assert kernel.chains_at.tolist() == [0] and float(state.z["z"]) < 0
    # Twice as narrow: half the step of a kernel with momentum. For more chains it is found again.
    together = of_eight_chains().step_size
    assert kernel.settings.step_size > 1.5 * together
    with pytest.warns(InferenceWarning, match="different modes"):
        kernel.init(random.split(random.key(0), 8), 10, None)
    assert kernel.settings.step_size == pytest.approx(together)


@pytest.mark.slow
def test_modes_found_once_are_given_to_a_kernel_with_a_step_and_without():
    keys = random.split(random.key(1), 8)
    assert of_eight_chains().row_gradients < 1000 < modes().row_gradients
    state = SGLD(two_modes, 1e-3, whitening=modes()).init(keys, 10, None)
    np.testing.assert_array_equal(state.z["z"] < 0, [True] * 5 + [False] * 3)
    assert np.all(np.abs(np.abs(state.z["z"]) - 2) < 1.5)  # 5 standard deviations

    def other():
        numpyro.sample("b", dist.Normal().expand([2]).to_event(1))

    with pytest.raises(ValueError, match="whitening has the unconstrained latent sites"):
        SGLD(other, 1e-3, whitening=modes()).init(keys, 10, None)
