"""RiemannianSVGD: the formula by automatic differentiation of a single pair, and its errors."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.particles import RiemannianSVGD
from numpyro_ext.scores import IMQ

X = random.normal(random.key(0), (5, 2)) - 0.5
G = -X


def metric(x):
    return jnp.array([[1.0 + x[0] ** 2, 0.3 * x[1]], [0.3 * x[1], 2.0 + jnp.cos(x[0])]])


def one_pair(kernel, x, g, y):
    """The term of f(y) that one particle x with gradient g gives, index by index."""
    k = lambda a, b: kernel(a[None], b[None])[0, 0]  # noqa: E731
    inverse = lambda x: jnp.linalg.inv(metric(x))  # noqa: E731
    slope, curvature = jax.grad(k)(x, y), jax.hessian(k)(x, y)
    d_inverse = jax.jacfwd(inverse)(x)  # [a, b, c]: derivative of g^ab in x^c
    total = 0.0
    for a in range(2):
        for b in range(2):
            total += (inverse(x)[a, b] * g[a] + d_inverse[a, b, a]) * slope[b]
            total += inverse(x)[a, b] * curvature[a, b]
    return total


@pytest.mark.slow
@pytest.mark.x64
def test_equals_the_formula_index_by_index(tol):
    kernel = IMQ(1.1)
    field = RiemannianSVGD(metric, kernel)
    f = lambda y: jnp.mean(jax.vmap(lambda x, g: one_pair(kernel, x, g, y))(X, G))  # noqa: E731
    slow = jax.vmap(lambda y: jnp.linalg.solve(metric(y), jax.grad(f)(y)))
    v = jax.jit(field.velocity)(X, G)
    np.testing.assert_allclose(v, jax.jit(slow)(X), atol=tol(1e-4, 1e-10))
    blocks = RiemannianSVGD(metric, kernel, block_size=2)
    np.testing.assert_allclose(jax.jit(blocks.velocity)(X, G), v, atol=tol(1e-5, 1e-12))
