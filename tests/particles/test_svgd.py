"""SVGD: reference values, the double loop, its laws, and what it does to known targets."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_ext.particles import SVGD
from numpyro_ext.scores import RBF, BaseKernel, median_bandwidth
from tests.particles.fixture import G, X


def test_median_bandwidth_of_the_fixture(tol):
    np.testing.assert_allclose(
        median_bandwidth(jnp.array(X)), 1.2922219765307186, rtol=tol(1e-6, 1e-14)
    )


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


def test_repulsion_sums_to_zero(tol):
    x = random.normal(random.key(0), (30, 3)) * jnp.array([0.1, 1.0, 10.0]) + 7.0
    repulsion = SVGD().velocity(x, jnp.zeros_like(x))
    assert jnp.abs(repulsion).max() > 1e-3
    np.testing.assert_allclose(repulsion.sum(0), 0.0, atol=tol(1e-5, 1e-13))


def test_distances_keep_their_digits_far_from_the_origin():
    # Between two powers of two, so that taking the offset away again is exact.
    x = 0.1 * random.normal(random.key(1), (40, 3)) + 1536.0
    g = (1536.0 - x) / 0.01
    velocity = jax.jit(SVGD().velocity)
    np.testing.assert_allclose(velocity(x, g), velocity(x - 1536.0, g), rtol=1e-4, atol=1e-4)


def test_memory_is_that_of_a_block():
    x = jax.ShapeDtypeStruct((3000, 16), jnp.float32)

    def temporary_bytes(**options):
        fn = jax.jit(SVGD(RBF(1.0), **options).velocity)
        return fn.lower(x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(block_size=100) < 4e6 < 9e6 < temporary_bytes(block_size=3000)
    # Above 2048 particles blocks are the default.
    assert temporary_bytes() < 0.5 * temporary_bytes(block_size=3000)


def follow(field, log_p, x, step_size, num_steps):
    """Adagrad along the velocity, started at ``x``."""
    optim = optax.adagrad(step_size)

    def step(carry, _):
        x, state = carry
        updates, state = optim.update(
            -field.tempered_velocity(x, jax.vmap(jax.grad(log_p))(x), None), state
        )
        return (x + updates, state), None

    return jax.lax.scan(step, (x, optim.init(x)), None, num_steps)[0][0]


def test_spread_on_a_normal_and_twice_the_variance_at_temperature_two():
    """N(1, 2), 100 particles: published sd 1.96; T = 2 doubles the variance. Deterministic runs."""
    x = random.normal(random.key(2), (100, 1))
    log_p = lambda x: jnp.sum(-0.5 * ((x - 1.0) / 2.0) ** 2)  # noqa: E731
    both = jax.vmap(lambda T: follow(SVGD(temperature=T), log_p, x, 1.0, 500))
    cold, warm = jax.jit(both)(jnp.array([1.0, 2.0]))
    assert abs(cold.mean() - 1.0) < 0.02
    assert abs(cold.std() - 1.96) < 0.06
    np.testing.assert_allclose(warm.var() / cold.var(), 2.0, rtol=0.02)


def test_gaussian_fit_improves_at_once():
    """KL(N(mean, var) || N(0, 1)) falls over the first 100 small steps from N(3, 0.5^2)."""
    x = 3.0 + 0.5 * random.normal(random.key(3), (50, 1))

    def kl(x):
        return 0.5 * (x.var() + x.mean() ** 2 - 1.0 - jnp.log(x.var()))

    def step(x, _):
        return x + 0.05 * SVGD().velocity(x, -x), kl(x)

    fits = jax.jit(lambda x: jax.lax.scan(step, x, None, 100)[1])(x)
    assert jnp.all(jnp.diff(fits) < 0) and fits[-1] < 0.5 * fits[0]


def test_narrow_posterior_far_from_the_origin_in_float32():
    """N(1000, 0.1) in three dimensions, from its own draws: the bandwidth must not collapse."""
    x = 1000.0 + 0.1 * random.normal(random.key(4), (100, 3), jnp.float32)
    log_p = lambda x: -50.0 * jnp.sum((x - 1000.0) ** 2)  # noqa: E731
    x = jax.jit(lambda x: follow(SVGD(), log_p, x, 0.02, 500))(x)
    assert jnp.all(jnp.abs(x.mean(0) - 1000.0) < 0.01)
    assert jnp.all((x.std(0) > 0.07) & (x.std(0) < 0.11))
