"""Score matching equals its reference values and minimises Hyvarinen's objective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import IMQ, RBF, Cauchy, Epanechnikov, ScoreMatchingScore

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
Y = np.array([[0.5, 0.5], [-0.2, 0.1]])
REFERENCE = {
    RBF(1.5): (
        [0.1292654155, 1.9066615508, -0.3679780208, 2.8196401670, 3.2558296799],
        [-0.6658976568, 0.2542226333],
    ),
    Cauchy(1.5): (
        [-0.1452739611, 3.2749408874, -1.0707407560, 4.7079632162, 6.2209811942],
        None,
    ),
    Epanechnikov(): ([0.2568053416] * 5, [-0.7960965588, -0.2568053416]),
}


@pytest.mark.x64
def test_matches_reference_values_wherever_the_origin_is(tol):
    offset = 3.0
    for kernel, (a, at_y) in REFERENCE.items():
        fitted = ScoreMatchingScore(0.1, kernel).fit(jnp.array(X) + offset)
        np.testing.assert_allclose(fitted.coefficients, a, atol=tol(2e-3, 1e-9))
        if at_y is not None:
            ours = fitted(jnp.array(Y) + offset)[0]
            np.testing.assert_allclose(ours, at_y, atol=tol(1e-3, 1e-9))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("kernel", "ridge"),
    [(RBF(1.3), 0.4), (Cauchy(0.9), 0.4), (Epanechnikov(1.7), 4 * 5 * 0.4)],
    ids=["RBF", "Cauchy", "Epanechnikov"],
)
def test_minimises_the_objective_of_hyvarinen_plus_the_ridge(kernel, ridge, needs_x64):
    """sum_n |g(x_n)|^2 + 2 div g(x_n) + ridge |a|^2 / h^4, every derivative by autodiff."""
    x = jnp.array(X)
    h = kernel.resolve(x).length
    basis = jax.jit(jax.vmap(jax.grad(lambda y, c: kernel(c[None], y[None])[0, 0]), (None, 0)))
    at = jnp.stack([basis(y, x) for y in x])
    div = jnp.stack([jnp.trace(jax.jacfwd(basis)(y, x), axis1=1, axis2=2) for y in x])
    a = ScoreMatchingScore(0.4, kernel).fit(x).coefficients

    def objective(a):
        g = jnp.einsum("nkd,k->nd", at, a)
        return jnp.sum(g**2) + 2.0 * jnp.sum(div @ a) + ridge * jnp.sum(a**2) / h**4

    assert jnp.abs(a).max() > 0.1
    assert jnp.abs(jax.grad(objective)(a)).max() < 1e-11
    np.testing.assert_allclose(
        ScoreMatchingScore(0.4, kernel)(x), jnp.einsum("nkd,k->nd", at, a), atol=1e-9
    )


@pytest.mark.x64
def test_epanechnikov_fits_an_isotropic_gaussian(needs_x64):
    """sum a = d h^2 / (2 msd) for a vanishing ridge, so that g = -d (y - mean) / msd."""
    fitted = ScoreMatchingScore(1e-9, Epanechnikov()).fit(jnp.array(X))
    np.testing.assert_allclose(fitted.coefficients.sum(), 1.3007284079, rtol=1e-7)
    centred = X - X.mean(0)
    expected = -2.0 * (Y - X.mean(0)) / np.mean(np.sum(centred**2, 1))
    np.testing.assert_allclose(fitted(jnp.array(Y)), expected, rtol=1e-6)


def test_kernels_without_a_formula_are_refused():
    with pytest.raises(ValueError, match="it must be RBF, Cauchy or Epanechnikov"):
        ScoreMatchingScore(kernel=IMQ())
