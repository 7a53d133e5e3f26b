"""A kernel that finds its settings, on a model with a differential equation, beside NUTS."""

from jax import random
from jax.experimental.ode import odeint
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_median
import pytest

from numpyro_ext.mcmc import SGHMC

TIMES = jnp.linspace(0.0, 6.0, 9)
TRUE = jnp.array([1.0, 0.5, 1.0, 0.4])
NAMES = ("growth", "predation", "death", "reproduction")


def animals(rates):
    """Prey and predators of Lotka and Volterra from (2, 1) on, ``(9, 2)``."""

    def slope(y, t, rates):
        a, b, c, d = rates
        return jnp.stack([(a - b * y[1]) * y[0], (d * y[0] - c) * y[1]])

    return odeint(slope, jnp.array([2.0, 1.0]), TIMES, rates, rtol=1e-5, atol=1e-5, mxstep=200)


def lotka_volterra(counts):
    rates = [
        numpyro.sample(name, dist.LogNormal(jnp.log(TRUE[k]), 0.5)) for k, name in enumerate(NAMES)
    ]
    numpyro.sample("counts", dist.LogNormal(jnp.log(animals(jnp.stack(rates))), 0.2), obs=counts)


@pytest.mark.nightly
def test_lotka_and_volterra_as_by_nuts():
    """Means within 0.2 standard deviations, and standard deviations within a fifth."""
    noise = np.random.default_rng(0).normal(size=(len(TIMES), 2))
    counts = animals(TRUE) * jnp.exp(0.2 * noise)
    draws = []
    nuts = NUTS(lotka_volterra, init_strategy=init_to_median())
    for kernel, num in ((nuts, 1500), (SGHMC(lotka_volterra), 10_000)):
        mcmc = MCMC(kernel, num_warmup=500, num_samples=num, progress_bar=False)
        mcmc.run(random.key(0), counts)
        draws.append(mcmc.get_samples())
    for name in NAMES:
        exact, x = (np.asarray(d[name], float) for d in draws)
        assert abs(x.mean() - exact.mean()) < 0.2 * exact.std(), name
        assert 0.8 < x.std() / exact.std() < 1.25, name
