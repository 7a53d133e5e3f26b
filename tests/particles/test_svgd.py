"""SVGD: reference values, the double loop, its laws, and what it does to known targets."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.particles import SVGD
from numpyro_ext.scores import RBF, BaseKernel, MatrixRBF
from tests.particles.fixture import G, X


def test_kernel_of_ones_own_equals_the_radial_path():
    class Gaussian(BaseKernel):
        def __call__(self, x, y):
            return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1) / 0.81)

    x, g = jnp.array(X), jnp.array(G)
    expected = SVGD(RBF(0.9)).velocity(x, g)
    for kernel in (Gaussian(), Gaussian().__call__):
        for block_size in (None, 3):
            v = SVGD(kernel, block_size=block_size).velocity(x, g)
            np.testing.assert_allclose(v, expected, atol=1e-6)


def test_memory_is_that_of_a_block():
    x = jax.ShapeDtypeStruct((3000, 16), jnp.float32)

    def temporary_bytes(**options):
        fn = jax.jit(SVGD(RBF(1.0), **options).velocity)
        return fn.lower(x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(block_size=100) < 4e6 < 9e6 < temporary_bytes(block_size=3000)
    # Above 2048 particles blocks are the default.
    assert temporary_bytes() < 0.5 * temporary_bytes(block_size=3000)


@pytest.mark.slow
def test_blocks_see_their_neighbourhoods_alone():
    x, g = random.normal(random.key(6), (2, 12, 3)) * jnp.array([1.0, 5.0, 0.3])
    plain = jax.jit(SVGD().velocity)(x, g)
    whole = jax.jit(SVGD(blocks=[([0, 2, 1], [0, 1, 2])]).velocity)(x, g)
    np.testing.assert_allclose(whole, plain, atol=1e-5)
    v = jax.jit(SVGD(blocks=[([1], [1]), ([2, 0], [0, 1, 2])], block_size=5).velocity)(x, g)
    np.testing.assert_allclose(v[:, [0, 2]], plain[:, [0, 2]], atol=1e-5)
    alone = jax.jit(SVGD().velocity)(x[:, 1:2], g[:, 1:2])
    np.testing.assert_allclose(v[:, 1:2], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([([0], [1])], r"pair \(\[0\], \[1\]\).*contains them"),
        ([([0], [0, 1]), ([0, 1], [0, 1])], "every coordinate must be in one block"),
        ([([0], [0])], "blocks move 1 coordinates, but a particle has 2"),
    ],
)
def test_blocks_must_cover_every_coordinate_once(blocks, words):
    with pytest.raises(ValueError, match=words):
        SVGD(blocks=blocks).velocity(jnp.array(X), jnp.array(G))


def test_blocks_and_metrics_are_not_preconditioned():
    with pytest.raises(ValueError, match="which precondition='covariance' mixes"):
        SVGD(blocks=[([0], [0])], precondition="covariance")
    with pytest.raises(ValueError, match=r"kernel is MatrixRBF.*give one of the two"):
        SVGD(MatrixRBF(jnp.eye(2)), precondition="covariance")
