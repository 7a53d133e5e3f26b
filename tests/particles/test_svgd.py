"""SVGD: reference values, the double loop, its laws, and what it does to known targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.particles import SVGD
from numpyro_ext.scores import RBF, BaseKernel, MatrixRBF
from tests.particles.fixture import G, X, slow_velocity


def test_kernels_of_ones_own_and_blocks_equal_the_slow_loop():
    class Gaussian(BaseKernel):
        def __call__(self, x, y):
            return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1) / 0.81)

    x, g = jnp.array(X), jnp.array(G)
    expected = slow_velocity("SVGD", RBF(0.9), x, g)
    for kernel in (RBF(0.9), Gaussian(), Gaussian().__call__):
        for block_size in (None, 3):
            v = SVGD(kernel, block_size=block_size).velocity(x, g)
            np.testing.assert_allclose(v, expected, atol=1e-5)


def test_memory_is_that_of_a_block():
    x = jax.ShapeDtypeStruct((3000, 16), jnp.float32)

    def temporary_bytes(**options):
        fn = jax.jit(SVGD(RBF(1.0), **options).velocity)
        return fn.lower(x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(block_size=100) < 4e6 < 9e6 < temporary_bytes(block_size=3000)
    # Above 2048 particles blocks are the default.
    assert temporary_bytes() < 0.5 * temporary_bytes(block_size=3000)


def test_metrics_are_not_preconditioned():
    with pytest.raises(ValueError, match=r"kernel is MatrixRBF.*give one of the two"):
        SVGD(MatrixRBF(jnp.eye(2)), precondition="covariance")
