"""Particles on minibatches, whose other rows a Taylor proxy stands in for."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext.objectives import taylor_proxy
from numpyro_ext.particles import AutoParticles, EnsembleLangevin, ParVI, RegularizedSVGD

N = 60
X = np.stack([np.ones(N), 3 * np.sin(np.arange(N))], 1)
Y = X @ [1.0, -0.3] + np.cos(1.7 * np.arange(N))


def linear(x, y, batch=None):
    """Quadratic, so that the expansion is exact; with a factor outside of the plate."""
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
    numpyro.factor("outside", -jnp.sum(w**2) / 8)
    with numpyro.plate("rows", N, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(jnp.asarray(x)[i] @ w, 0.7), obs=jnp.asarray(y)[i])


@pytest.fixture(scope="module")
def proxy():
    return taylor_proxy(linear, X, Y, batch=7)


@pytest.mark.slow
@pytest.mark.x64
def test_the_step_of_a_minibatch_is_that_of_all_rows(proxy, tol):
    guide = AutoParticles(linear, 5, init_from=None)
    numpyro.handlers.seed(guide, random.key(0))(X, Y)
    z = {"w": jnp.array([[0.1, 2.0], [1.0, -1.0], [0.5, 0.4], [-2.0, 0.3], [0.7, -0.4]])}
    params = {"auto_particles": z["w"]}

    def step(field, **batch):
        def loss(params):
            return field.loss(random.key(1), params, linear, guide, X, Y, **batch)

        return jax.value_and_grad(loss)(params)

    value, grad = step(RegularizedSVGD(proxy=proxy), batch=7)
    expected, of_all = step(RegularizedSVGD())
    noisy = step(RegularizedSVGD(), batch=7)[1]["auto_particles"]
    np.testing.assert_allclose(value, expected, rtol=tol(1e-5, 1e-10))
    grad, of_all = grad["auto_particles"], of_all["auto_particles"]
    scale = jnp.abs(of_all).max()
    np.testing.assert_allclose(grad, of_all, atol=float(scale) * tol(1e-4, 1e-9))
    assert jnp.abs(noisy - of_all).max() > 0.05 * scale


@pytest.mark.slow
@pytest.mark.x64
def test_draws_on_minibatches_are_those_of_all_rows(proxy, tol):
    def drawn(dynamics, **batch):
        mcmc = MCMC(
            ParVI(linear, optim=dynamics, init_from=proxy),
            num_warmup=5,
            num_samples=1,
            num_chains=6,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(0), X, Y, **batch)
        return mcmc.get_samples()["w"]

    of_all = drawn(EnsembleLangevin())
    size = float(jnp.std(of_all))
    w = drawn(EnsembleLangevin(proxy=proxy), batch=7)
    np.testing.assert_allclose(w, of_all, atol=size * tol(1e-3, 1e-9))
