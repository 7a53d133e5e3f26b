"""The factor of a hierarchy: its products against a matrix, and its root of a precision."""

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext._model.arrow import Arrow, ArrowPrecision

CORE, LEAVES = np.array([4, 0, 7]), np.array([[1, 2], [5, 3], [8, 6]])
N = CORE.size + LEAVES.size


def precision() -> tuple[ArrowPrecision, np.ndarray]:
    """A precision of three numbers and three pairs of effects, out of order, and as a matrix."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(N, N)) * np.geomspace(0.3, 30, N)[:, None]
    H = root @ root.T + np.diag(np.geomspace(1, 1000, N))
    for i, leaf in enumerate(LEAVES):
        others = np.delete(LEAVES, i, axis=0).ravel()
        H[np.ix_(leaf, others)] = 0
    H += 2 * np.diag(np.abs(H).sum(0))
    parts = H[np.ix_(CORE, CORE)], H[LEAVES][:, :, CORE]
    return ArrowPrecision(CORE, LEAVES, *parts, np.stack([H[np.ix_(x, x)] for x in LEAVES])), H


def arrow() -> tuple[Arrow, np.ndarray]:
    structured, H = precision()
    factor, num_negative = structured.factor()
    assert num_negative == 0
    return factor.astype(jnp.result_type(float)), H


def test_the_factor_is_a_root_of_the_inverse():
    factor, H = arrow()
    A, covariance = np.asarray(factor.dense(), float), np.linalg.inv(H)
    size = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    np.testing.assert_allclose(A @ A.T / size, covariance / size, atol=1e-5)
    np.testing.assert_allclose(factor.sds(), np.sqrt(np.diag(covariance)), rtol=1e-5)
    np.testing.assert_allclose(factor.conditional_sds(), np.diag(H) ** -0.5, rtol=1e-5)
    log_det = np.linalg.slogdet(covariance)[1] / 2
    assert jnp.sum(factor.log_diagonal()) == pytest.approx(log_det, rel=1e-5)


def test_products_are_those_of_the_matrix():
    factor, H = arrow()
    A, x = np.asarray(factor.dense(), float), np.asarray(random.normal(random.key(0), (N,)))
    np.testing.assert_allclose(factor.push(jnp.asarray(x)), A @ x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(factor.pull(jnp.asarray(x)), A.T @ x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(factor.solve(factor.push(jnp.asarray(x))), x, rtol=1e-4, atol=1e-5)
    assert precision()[0].negative(float).quadratic(jnp.asarray(x)) == pytest.approx(
        -x @ H @ x, rel=1e-5
    )


def test_leaves_keep_what_they_depend_on_alone():
    """Of 20 numbers of the core each of 30 leaves depends on the first and on one other."""
    rng, (k, L) = np.random.default_rng(1), (20, 30)
    own, n = rng.integers(1, k, L), k + L
    across = np.zeros((L, 1, k))
    across[:, 0, 0], across[np.arange(L), 0, own] = rng.normal(size=L), rng.normal(size=L)
    H = np.zeros((n, n))
    H[k:, :k] = across[:, 0]
    H += H.T + np.diag(2 * (1 + np.abs(H + H.T).sum(0)))
    places = np.arange(k), np.arange(k, n)[:, None]
    factor, _ = ArrowPrecision(
        *places, H[:k, :k], across, H[places[1], places[1]][..., None]
    ).factor()
    assert factor.slope.shape == (L, 1, 2) and list(factor.common) == [0]
    A, covariance = np.asarray(factor.dense(), float), np.linalg.inv(H)
    np.testing.assert_allclose(A @ A.T, covariance, atol=1e-5)
    np.testing.assert_allclose(factor.sds(), np.sqrt(np.diag(covariance)), rtol=1e-5)
    np.testing.assert_allclose(factor.conditional_sds(), np.diag(H) ** -0.5, rtol=1e-5)
    x = jnp.asarray(rng.normal(size=n), factor.root.dtype)
    np.testing.assert_allclose(factor.pull(x), A.T @ np.asarray(x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(factor.solve(factor.push(x)), x, rtol=1e-4, atol=1e-5)


def test_negative_directions_are_turned():
    structured, _ = precision()
    structured.within[1] *= -1
    structured.between[:] -= 2 * np.diag(np.diag(structured.between))
    factor, num_negative = structured.factor()
    assert num_negative >= 2
    assert np.all(np.isfinite(factor.dense())) and np.all(np.asarray(factor.sds()) > 0)


def test_without_a_core_it_is_a_product_of_blocks():
    within = np.array([[[4.0]], [[25.0]]])
    empty = np.zeros(0, int), np.array([[1], [0]]), np.zeros((0, 0)), np.zeros((2, 1, 0))
    factor, _ = ArrowPrecision(*empty, within).factor()
    np.testing.assert_allclose(factor.push(jnp.ones(2)), [0.2, 0.5], rtol=1e-6)
    np.testing.assert_allclose(factor.solve(jnp.ones(2)), [5.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(factor.conditional_sds(), [0.2, 0.5], rtol=1e-6)
