"""Operations of programs that are known."""

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
