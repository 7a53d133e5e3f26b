"""The denoising score: its loss, what minimises it, and what it refuses."""

import pickle

import jax
from jax import random
from jax.example_libraries import stax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import DenoisingScore

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])


def without_parameters(residual):
    return (lambda key, shape: (shape, ())), lambda params, x: residual(x)


def test_loss_is_that_of_the_score_of_the_noise():
    """E|v(x + sigma e) - x|^2 = sigma^4 E|g(x + sigma e) + e / sigma|^2, term by term."""
    x, sigma, key = jnp.array(X), 0.7, random.key(3)
    score = DenoisingScore(sigma, without_parameters(lambda x: jnp.sin(2.0 * x)))
    e = random.normal(key, x.shape)
    g = score.score((), x + sigma * e)
    np.testing.assert_allclose(g, jnp.sin(2.0 * (x + sigma * e)) / sigma**2, rtol=1e-5)
    total = 0.0
    for i in range(len(x)):
        total += sigma**4 * float(jnp.sum((g[i] + e[i] / sigma) ** 2))
    np.testing.assert_allclose(score.loss((), key, x), total / len(x), rtol=1e-5)


def test_linear_network_finds_the_score_of_the_convolution():
    """N(m, s^2): -(x - m) / (s^2 + sigma^2), by two Newton steps on 40,000 samples: to 4 %."""
    m, s, sigma = 3.0, 1.5, 0.8
    score = DenoisingScore(sigma, stax.Dense(1))
    x = m + s * random.normal(random.key(0), (40_000, 1))
    flat, unravel = ravel_pytree(score.init(random.key(1), 1))
    loss = lambda w: score.loss(unravel(w), random.key(2), x)  # noqa: E731
    newton = jax.jit(lambda w: w - jnp.linalg.solve(jax.hessian(loss)(w), jax.grad(loss)(w)))
    params = unravel(newton(newton(flat)))
    at = jnp.array([[1.0], [5.0]])
    np.testing.assert_allclose(
        score.score(params, at), -(at - m) / (s**2 + sigma**2), rtol=0.04, atol=0.01
    )


def test_default_network_trains_and_pickles():
    score = DenoisingScore(0.5, hidden_dims=(8, 4))
    params = score.init(random.key(0), 2)
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == [
        *((2, 8), (8,), (8, 4), (4,), (4, 2), (2,))
    ]
    x = jnp.array(X)
    loss, slope = jax.jit(jax.value_and_grad(score.loss))(params, random.key(1), x)
    lower = jax.tree.map(lambda p, g: p - 1e-2 * g, params, slope)
    assert score.loss(lower, random.key(1), x) < loss
    again = pickle.loads(pickle.dumps(score))
    np.testing.assert_array_equal(again.score(params, x), score.score(params, x))
    assert repr(score) == "DenoisingScore(sigma=0.5, hidden_dims=(8, 4))"


def test_residuals_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(5, 2\) to \(5, 1\)"):
        DenoisingScore(1.0, without_parameters(lambda x: x[:, :1])).score((), jnp.array(X))
