"""The spectral estimator equals its reference values, its formula and its law."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import IMQ, RBF, SpectralScore

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
Y = np.array([[0.5, 0.5], [-0.2, 0.1]])


@pytest.mark.x64
def test_matches_reference_values(tol):
    ours = SpectralScore(3, RBF(1.5)).fit(jnp.array(X))(jnp.array(Y))
    expected = [[-0.6706596500, -0.0965922965], [0.0787206105, 0.2693580755]]
    np.testing.assert_allclose(ours, expected, atol=tol(1e-4, 1e-9))


@pytest.mark.x64
def test_equals_the_explicit_sums_over_eigenfunctions(needs_x64):
    x, y, kernel, num = jnp.array(X) + 2.0, jnp.array(Y) + 2.0, IMQ(0.8), 4
    values, vectors = np.linalg.eigh(kernel(x, x))
    gradients, at_y = np.asarray(kernel.grad_y(x, x)), np.asarray(kernel(x, y))
    expected = np.zeros_like(Y)
    for j in range(1, num + 1):
        factor = 5**0.5 / values[-j]
        beta = np.zeros(2)
        for n in range(5):
            beta -= sum(factor * vectors[m, -j] * gradients[m, n] for m in range(5)) / 5
        for n in range(2):
            expected[n] += beta * sum(factor * vectors[m, -j] * at_y[m, n] for m in range(5))
    fitted = SpectralScore(num, kernel).fit(x)
    np.testing.assert_allclose(fitted(y), expected, rtol=1e-9)
    np.testing.assert_allclose(fitted(x), SpectralScore(num, kernel)(x), rtol=1e-9)
    np.testing.assert_allclose(
        np.abs(fitted.eigenfunctions(x)), 5**0.5 * np.abs(vectors[:, ::-1][:, :num]), atol=1e-9
    )


def test_terms_of_small_eigenvalues_are_left_out():
    x, y = jnp.array(X), jnp.array(Y)
    values = jnp.linalg.eigvalsh(RBF(1.5)(x, x))[::-1]
    between = float(values[1] * values[2]) ** 0.5 / float(values[0])
    ours = SpectralScore(5, RBF(1.5), min_ratio=between).fit(x)(y)
    np.testing.assert_allclose(ours, SpectralScore(2, RBF(1.5)).fit(x)(y), rtol=1e-5)


def test_more_eigenfunctions_than_samples_are_refused():
    with pytest.raises(ValueError, match="num_eigen is 6, but 5 samples have 5"):
        SpectralScore(6)(jnp.array(X))
