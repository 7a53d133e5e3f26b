"""An integral of one variable against densities that are known."""

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy import stats
from jax.scipy.special import gammaln
import numpy as np
import pytest

from numpyro_ext.ep.integral import draw, log_integral

DENSITIES = {
    "normal, far and narrow": lambda z, a: stats.norm.logpdf(z, 300.0 + a, 0.01),
    "normal, wide": lambda z, a: stats.norm.logpdf(z, -2.0 + a, 5.0),
    "log of a gamma": lambda z, a: 0.3 * (z - a) - jnp.exp(z - a) - gammaln(0.3),
    "heavy tails": lambda z, a: stats.t.logpdf(z, 2.0, a, 0.3),
}


@pytest.mark.x64
@pytest.mark.parametrize("name", DENSITIES)
def test_densities_integrate_to_one(name, tol):
    """With a factor of exp(1.5 a), whose derivatives come through."""
    h = DENSITIES[name]

    def integral(a):
        return log_integral(lambda z, x: h(z, x) + 1.5 * x, a)

    a = jnp.array(0.7)
    value, slope = jax.jit(jax.value_and_grad(integral))(a)
    np.testing.assert_allclose(value, 1.05, atol=tol(1e-2 if "narrow" in name else 2e-3, 2e-6))
    np.testing.assert_allclose(slope, 1.5, atol=tol(2e-1 if "narrow" in name else 2e-3, 2e-5))


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSITIES)
def test_draws_have_the_quantiles_of_the_density(name):
    """Quantiles of 20,000 draws, of which the shares below are off by at most .0035."""
    h = DENSITIES[name]
    draws, log_mass = jax.jit(jax.vmap(lambda key: draw(lambda z: h(z, 0.7) - 2.0, key)))(
        random.split(random.key(0), 20_000)
    )
    grid = np.linspace(*np.quantile(np.asarray(draws, float), [0.0005, 0.9995]), 4001)
    with jax.enable_x64(True):
        density = np.exp(np.asarray(jax.vmap(lambda z: h(z, 0.7))(jnp.asarray(grid))))
    below = np.append(0, np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(grid)))
    places = np.quantile(np.asarray(draws, float), [0.05, 0.25, 0.5, 0.75, 0.95])
    shares = np.interp(places, grid, below)
    np.testing.assert_allclose(shares, [0.05, 0.25, 0.5, 0.75, 0.95], atol=0.015)
    np.testing.assert_allclose(log_mass, -2.0, atol=1e-2)
