"""Gradient estimators: unbiased, with the variance that their formula says, and the laws that
follow.
"""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy
import pytest

from numpyro_ext.mcmc import (
    SGLD,
    SVRG,
    ControlVariate,
    MinibatchGradient,
)
from tests.mcmc.models import (
    gaussian_mean,
    gaussian_mean_data,
    linear,
    linear_data,
    linear_full,
    run,
    within,
)


def two_plates(x, counts, sizes=(5, 4)):
    """Independent plates, a nested one, and a positive site."""
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    rate = numpyro.sample("rate", dist.Gamma(3.0, 2.0))
    with numpyro.plate("rows", 30, subsample_size=sizes[0], dim=-2) as i:
        numpyro.sample("x", dist.Normal(loc, rate), obs=x[i][:, None])
        with numpyro.plate("columns", 12, subsample_size=sizes[1], dim=-1) as j:
            numpyro.sample("n", dist.Poisson(rate * jnp.exp(0.1 * loc)), obs=counts[i][:, j])


def two_plates_data():
    n = jnp.arange(30.0)
    counts = jnp.floor(3 + 2 * jnp.sin(n[:, None] + 0.7 * jnp.arange(12.0)))
    return 1 + jnp.sin(1.1 * n), counts


Z = {"loc": jnp.array(0.4), "rate": jnp.array(0.7)}


def full_gradient(model, args, z):
    return jax.value_and_grad(lambda z: potential_energy(model, args, {}, z))(z)


@pytest.mark.slow
def test_unbiased_with_two_plates_and_a_positive_site():
    """|z-score| of the mean of 4000 estimates below 4, for potential and gradient."""
    kernel = SGLD(two_plates, 1e-3)
    data = two_plates_data()
    estimate = jax.vmap(lambda key: kernel.estimate_gradient(key, Z, data))
    potential, grad = jax.jit(estimate)(random.split(random.key(0), 4000))
    u, g = full_gradient(lambda x, n: two_plates(x, n, (None, None)), data, Z)
    for draws, exact in [(potential, u), (grad["loc"], g["loc"]), (grad["rate"], g["rate"])]:
        assert jnp.std(draws) > 0
        within(jnp.mean(draws), float(exact), float(jnp.std(draws)) / 4000**0.5)


@pytest.mark.parametrize(("minibatch", "factor"), [("replace", 1.0), ("epoch", 90 / 99)])
def test_variance_is_that_of_the_formula(minibatch, factor):
    """Gaussian mean: N^2/B times the population variance of x, 499.608. 20 000 estimates: error 1
    %.
    """
    kernel = SGLD(gaussian_mean, 1e-3, minibatch=minibatch)
    x = gaussian_mean_data()
    estimate = jax.vmap(lambda key: kernel.estimate_gradient(key, {"loc": jnp.array(0.3)}, (x,)))
    _, grad = jax.jit(estimate)(random.split(random.key(1), 20_000))
    expected = 100**2 / 10 * float(jnp.var(x)) * factor
    assert np.isclose(expected / factor, 499.6082696, rtol=1e-4)
    within(jnp.var(grad["loc"]), expected, expected * 0.01)


@pytest.mark.slow
def test_full_gradient_is_exact(tol):
    """Seen through SVRG at its own center, where the minibatch cancels."""
    kernel = SGLD(two_plates, 1e-3, gradient=SVRG(5))
    data = two_plates_data()
    z = {name: jnp.asarray(value, float) for name, value in Z.items()}
    potential, grad = jax.jit(kernel.estimate_gradient)(random.key(0), z, data)
    u, g = full_gradient(lambda x, n: two_plates(x, n, (None, None)), data, z)
    assert jnp.isclose(potential, u, rtol=tol(1e-5, 1e-12))
    for name in g:
        assert jnp.isclose(grad[name], g[name], rtol=tol(2e-4, 1e-10))


@pytest.mark.slow
def test_one_epoch_averages_to_the_full_gradient(tol):
    data = linear_data()
    z = {"w": jnp.array([0.3, -0.8]), "sigma": jnp.array(-0.4)}
    grads = []

    class Record(MinibatchGradient):
        def estimate(self, rng_key, i, z_now, idx, potential, state):
            return *potential.value_and_grad(z, idx), state

    kernel = SGLD(linear, 1e-3, gradient=Record(), minibatch="epoch", temperature=0.0)
    state = kernel.init(random.key(0), 0, None, data, {})
    step = jax.jit(lambda state: kernel.sample(state, data, {}))
    for _ in range(10):
        new = step(state)
        # At temperature 0 a transition is z - eps * g.
        grads.append(jax.tree.map(lambda a, b: (a - b) / 1e-3, state.z, new.z))
        state = new
    assert int(state.plates["data"].epoch) == 2
    _, exact = full_gradient(linear_full, data, z)
    for half in (grads[:5], grads[5:]):
        mean = jax.tree.map(lambda *g: sum(g) / 5, *half)
        for name in exact:
            assert jnp.allclose(mean[name], exact[name], rtol=tol(5e-3, 1e-8), atol=tol(0.1, 1e-7))
    assert not jnp.allclose(grads[0]["w"], grads[1]["w"], rtol=0.01)


@pytest.mark.x64
def test_control_variate_without_noise_for_equal_curvature(tol):
    """The Gaussian mean is quadratic with one curvature: any center removes all the noise."""
    x = gaussian_mean_data()
    kernel = SGLD(gaussian_mean, 1e-3, gradient=ControlVariate({"loc": -2.0}))
    z = {"loc": jnp.asarray(0.3, float)}
    grads = jax.jit(jax.vmap(lambda key: kernel.estimate_gradient(key, z, (x,))[1]["loc"]))(
        random.split(random.key(2), 50)
    )
    exact = 100.1 * 0.3 - float(jnp.sum(x))
    assert jnp.allclose(grads, exact, rtol=tol(1e-4, 1e-10))


# Draws 20 transitions apart are independent up to 0.9^20 = 0.12, so that the variance of 20 000 of
# them has a standard error of 1.02 %.
@pytest.mark.slow
def test_gaussian_mean_law():
    x, h, expected = gaussian_mean_data(), 100.1, 0.01051579999
    kernel = SGLD(gaussian_mean, 0.1 / h, gradient=SVRG(50), steps_per_sample=20)
    draws = run(kernel, x, draws=20_000).get_samples()["loc"]
    within(jnp.var(draws), expected, expected * 0.0103)
    within(jnp.mean(draws), 0.6978412627, (expected / 20_000 * 1.25) ** 0.5)


@pytest.mark.nightly
def test_svrg_moves_its_center_at_the_right_transitions():
    data = linear_data()
    kernel = SGLD(linear, 1e-3, gradient=SVRG(3))
    state = kernel.init(random.key(0), 0, None, data, {})
    step = jax.jit(lambda state: kernel.sample(state, data, {}))
    before = state
    for i in range(7):
        before, state = state, step(state)
        moved = bool(jnp.all(state.gradient.z["w"] == before.z["w"]))
        assert moved == (i % 3 == 0), i
    _, exact = full_gradient(linear_full, data, state.gradient.z)
    assert jnp.allclose(state.gradient.grad["w"], exact["w"], rtol=1e-3)


@pytest.mark.parametrize("gradient", [ControlVariate({"loc": 1.0}), SVRG(1000)])
def test_other_data_for_a_chain_with_an_anchor_are_refused(gradient):
    x = gaussian_mean_data()
    kernel = SGLD(gaussian_mean, 1e-3, gradient=gradient)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=3, progress_bar=False, jit_model_args=True)
    mcmc.run(random.key(0), x)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(1), x + 0.0)
    with pytest.raises(ValueError, match="goes on with other data, of which its state has no sums"):
        mcmc.run(random.key(2), x + 5.0)


def test_data_that_are_changed_in_place_are_other_data():
    x = np.array(gaussian_mean_data())
    kernel = SGLD(gaussian_mean, 1e-3, gradient=SVRG(1000))
    state = kernel.init(random.key(0), 0, None, (x,), {})
    kernel.takes_up_a_chain = lambda: True
    kernel.init(random.key(0), 0, None, (x,), {})
    x[3] += 1.0
    with pytest.raises(ValueError, match="goes on with other data, of which its state has no sums"):
        kernel.init(random.key(0), 0, None, (x,), {})
    assert state.i == 0


def test_a_refreshed_state_has_the_gradient_of_other_data():
    """As a block of a Gibbs sampler needs it, where the others are data that change."""
    x = gaussian_mean_data()
    kernel = SGLD(gaussian_mean, 1e-3, gradient=ControlVariate({"loc": 1.0}))
    state = kernel.init(random.key(0), 0, None, (x,))
    grad = kernel.refresh(state, (x + 5,), {}).gradient.grad["loc"]
    np.testing.assert_allclose(grad, state.gradient.grad["loc"] - 500, rtol=1e-3)
