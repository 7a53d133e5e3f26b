"""PSGHMC: reference values, the two flows, what it leaves invariant, what it refuses."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.particles import PSGHMC, Blob, RegularizedSVGD
from numpyro_ext.scores import RBF
from tests.particles.fixture import G, X

R = np.array([[0.3, -0.2], [-1.0, 0.4], [0.6, 1.1], [-0.1, -0.9]])
# Fixture with l = 0.9, mass 1.5, friction 0.4, step 0.05, from a second implementation.
REFERENCE = [
    [0.3940751911398888, -0.2122800250364853],
    [-1.0314786416557697, 0.3659244284061178],
    [0.708461126653201, 1.0513047359979866],
    [-0.3008910094706536, -0.9402824727009526],
]


@pytest.mark.x64
def test_matches_reference_values(tol):
    dynamics = PSGHMC(0.05, friction=0.4, mass=1.5, kernel=RBF(0.9))
    x, r = jax.jit(lambda *a: dynamics.step(*a, Blob()))(X, R, G)
    np.testing.assert_allclose(r, REFERENCE, atol=tol(1e-6, 1e-12))
    np.testing.assert_allclose(x, X + 0.05 * R / 1.5, atol=tol(1e-6, 1e-12))


def test_second_flow_moves_by_the_velocities_of_both(tol):
    field, own = Blob(RBF(0.7)), Blob(RBF(0.9))
    dynamics = PSGHMC(0.05, flow="fgh", friction=0.4, mass=1.5, kernel=RBF(0.9))
    x, r = dynamics.step(jnp.array(X), jnp.array(R), jnp.array(G), field)
    v_r = own.velocity(R, -R / 1.5)
    np.testing.assert_allclose(x, X - 0.05 * v_r, atol=tol(1e-6, 1e-12))
    expected = R + 0.05 * (field.velocity(X, G) + 0.4 * v_r)
    np.testing.assert_allclose(r, expected, atol=tol(1e-6, 1e-12))


def test_momenta_start_at_their_target():
    r = PSGHMC(0.1, mass=9.0).init(random.key(0), jnp.zeros((4000, 2)))
    # The standard error of a standard deviation is 3 / sqrt(8000).
    np.testing.assert_allclose(r.std(0), 3.0, atol=0.15)


def test_fields_that_smooth_the_gradient_are_refused():
    with pytest.raises(TypeError, match=r"field is .*; use Blob\(\), GFSD\(\) or GFSF\(\)"):
        PSGHMC(0.1).step(X, R, G, RegularizedSVGD())
