"""An integral of one variable against densities that are known."""

import jax
import jax.numpy as jnp
from jax.scipy import stats
from jax.scipy.special import gammaln
import numpy as np
import pytest

from numpyro_ext._model.integral import log_integral

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
