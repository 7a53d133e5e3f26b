"""The Gaussian kernel in a metric: the coordinates in which it is an RBF, and SVGD made of it."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import RBF, MatrixRBF, SteinScore, as_kernel, median_bandwidth
from numpyro_ext.scores.discrepancy import squared_ksd

X = np.array([[0.0, 0.0], [1.0, 0.5], [-0.5, 2.0], [3.0, -1.0]])
Q = np.array([[2.0, 0.3], [0.3, 0.5]])
G = -(X - np.array([1.0, -1.0])) @ Q
ROOT = np.linalg.cholesky(Q)


def velocity(kernel, x, g):
    """SVGD of a kernel that may be matrix-valued."""
    return kernel.to_velocity(kernel(x, x) @ g + kernel.repulsion(x, x)) / len(x)


@pytest.mark.slow
def test_derivatives_are_those_of_autodiff_and_of_the_metric():
    x, y = jnp.array(X) + 3.0, jnp.array(X[:2]) + 2.0
    kernel = MatrixRBF(Q, 1.2)

    def value(x, y):
        r = x[:, None] - y
        return jnp.exp(-jnp.einsum("ija,ab,ijb->ij", r, jnp.array(Q), r) / (2 * 1.2**2))

    by_autodiff = as_kernel(value)
    np.testing.assert_allclose(kernel(x, y), value(x, y), rtol=1e-5)
    for name in ("grad_x", "grad_y", "cross_trace", "repulsion"):
        ours, theirs = getattr(kernel, name)(x, y), getattr(by_autodiff, name)(x, y)
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_is_svgd_and_stein_discrepancy_of_an_rbf_in_the_coordinates_of_the_metric():
    x, g = jnp.array(X), jnp.array(G)
    y, g_y = x @ ROOT, g @ np.linalg.inv(ROOT).T
    plain = velocity(RBF("median_distance"), y, g_y) @ np.linalg.inv(ROOT)
    kernel = MatrixRBF(Q, "median_distance")
    np.testing.assert_allclose(velocity(kernel, x, g), plain, atol=1e-5)
    np.testing.assert_allclose(
        squared_ksd(x, g, kernel), squared_ksd(y, g_y, RBF("median_distance")), rtol=1e-4
    )


def test_rules_measure_in_the_metric():
    x = jnp.array(X) + 12288.0
    expected = 2.0 * median_bandwidth(jnp.array(X) @ ROOT)
    resolved = MatrixRBF(Q, factor=2.0).resolve(x)
    np.testing.assert_allclose(resolved.bandwidth * resolved.factor, expected, rtol=1e-4)
    assert resolved.resolve(x) is resolved


def test_crosses_jit_and_pickle_and_estimates_a_score_by_its_scalar_factor():
    x, kernel = jnp.array(X), MatrixRBF(Q, 1.2)
    expected = SteinScore(0.1, RBF(1.2))(x @ ROOT) @ ROOT.T
    for k in (kernel, pickle.loads(pickle.dumps(kernel))):
        ours = jax.jit(lambda k, x: SteinScore(0.1, k)(x))(k, x)
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: MatrixRBF(jnp.array([[1.0, 0.5], [0.0, 1.0]])), "symmetric"),
        (lambda x: MatrixRBF(-jnp.eye(2)), "positive definite"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.array(X))
