"""Operations of programs that are known."""

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_ext._model.operations import count_operations


def test_counts_of_known_programs():
    x = jnp.ones((7, 5))
    assert count_operations(lambda x: x + x, x) == 35
    assert count_operations(lambda x: x.T @ x, x) >= 2 * 5 * 7 * 5
    assert count_operations(lambda x: x.T @ x, x) <= 2 * 5 * 7 * 5 + 70
    big = jnp.eye(50)
    assert 50**3 <= count_operations(jnp.linalg.cholesky, big) <= 3 * 50**3

    def loop(x):
        return lax.scan(lambda x, _: (x + 1, None), x, None, length=100)[0]

    assert 3500 <= count_operations(loop, x) <= 3700
    # Of two branches the longer one.
    branches = count_operations(lambda x: lax.cond(x[0, 0] > 0, loop, lambda x: x, x), x)
    assert 3500 <= branches <= 3700


def test_what_does_not_depend_on_the_point_is_not_counted():
    """As the normaliser of a prior with known parameters, which one program computes once."""

    def energy(concentration, x):
        normaliser = jax.jit(lambda c: jnp.sum(jnp.exp(c * jnp.arange(10_000.0))))(concentration)
        return jnp.sum(concentration * x**2) - normaliser

    gradient = jax.value_and_grad(energy, 1)
    x = jnp.ones(5)
    assert count_operations(gradient, 2.0, x) > 10_000
    assert 10 <= count_operations(gradient, 2.0, x, fixed=1) < 100
