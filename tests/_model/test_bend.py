"""The map that bends coordinates with the scales of a hierarchy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext._model.bend import Bend

BEND = Bend(
    of=jnp.array([6, 1]),
    slopes=jnp.array([[0.3 if i in (0, 2, 3, 4) else 0.0] * 2 for i in range(7)]),
    rows=jnp.array([3, 4, 4]),  # the numbers 2, 3 and 4 are one effect
    columns=jnp.array([2, 2, 3]),
    shears=jnp.array([[0.5, -0.2], [0.1, 0.4], [-0.7, 0.3]]),
)


def test_inverse_and_determinant_are_those_of_the_map():
    v = jnp.asarray(np.random.default_rng(0).normal(size=7), float)
    bent, log_det = BEND(v)
    np.testing.assert_allclose(BEND.inverse(bent), v, atol=1e-5)
    jacobian = np.asarray(jax.jacfwd(lambda v: BEND(v)[0])(v), float)
    assert float(log_det) == pytest.approx(np.linalg.slogdet(jacobian)[1], abs=1e-5)
    again = Bend.unpacked(*BEND.packed, 7)
    np.testing.assert_array_equal(again(v)[0], bent)
