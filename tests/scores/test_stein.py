"""The Stein estimator equals its reference values, minimises what it says, and keeps its laws."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import (
    IMQ,
    RBF,
    Cauchy,
    Epanechnikov,
    SteinScore,
    _conjugate_gradients,
    stein,
    stein_kernel_matrix,
)

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
Y = np.array([[0.5, 0.5], [-0.2, 0.1]])
AT_X = [
    [-0.3596075382, 1.2089663853],
    [-1.1013750401, -0.0783811267],
    [1.0415702210, -0.4736305131],
    [-0.3123735102, -1.0363513232],
    [0.7061421140, 0.4745882067],
]
AT_Y = [[-0.0891407565, 0.1259007480], [-0.0184131412, 0.2313027875]]


def name_of(kernel):
    return getattr(kernel, "__name__", str(kernel))


def quadratic(x, y):
    """A kernel of neither the distance nor the difference."""
    return (1.0 + x @ y.T) ** 2


def lopsided(x, y):
    """A kernel of the difference, but not of the distance."""
    z = (x[:, None] - y[None]) / jnp.array([0.7, 1.9])
    return jnp.exp(-0.5 * jnp.sum(z**2, axis=-1))


@pytest.mark.x64
def test_matches_reference_values(tol):
    x, y = jnp.array(X), jnp.array(Y)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=tol(3e-5, 2e-9))  # noqa: E731
    estimator = SteinScore(0.1, RBF(1.5))
    close(estimator(x), AT_X)
    close(estimator.fit(x)(y), AT_Y)
    close(SteinScore(0.5, RBF(1.5), statistic="u")(x)[0], [-1.5756117864, 2.2712814773])


@pytest.mark.x64
def test_parametric_form_matches_reference_values_and_is_blind_to_the_origin(tol):
    a = [0.9891679201, 1.1748128129, 0.9687768417, 1.3015569166, 1.2151221255]
    at_y = [[-0.6376587649, -0.0687647971], [0.1250279371, 0.3538880167]]
    estimator = SteinScore(0.1, RBF(1.5), form="parametric")
    for offset in (0.0, 3.0):
        fitted = estimator.fit(jnp.array(X) + offset)
        np.testing.assert_allclose(fitted.coefficients, a, rtol=tol(1e-3, 1e-9))
        np.testing.assert_allclose(fitted(jnp.array(Y) + offset), at_y, atol=tol(1e-3, 1e-9))


@pytest.mark.x64
@pytest.mark.parametrize("statistic", ["v", "u"])
@pytest.mark.parametrize(
    ("kernel", "eta"),
    [(RBF(0.8), 1.3), (IMQ(1.1), 1.3), (lopsided, 1.3), (Epanechnikov(2.0), 9.0)],
    ids=name_of,
)
def test_estimate_minimises_the_stein_discrepancy_plus_ridge(kernel, eta, statistic, needs_x64):
    """Zero gradient of sum k0 (without its diagonal for "u") + eta k(0) |G|^2, by autodiff."""
    x = jnp.array(X)
    at_zero = float(kernel(x, x)[0, 0])

    def objective(g):
        k0 = stein_kernel_matrix(x, g, kernel)
        total = k0.sum() - (jnp.trace(k0) if statistic == "u" else 0.0)
        return total + eta * at_zero * jnp.sum(g**2)

    g = SteinScore(eta, kernel, statistic=statistic)(x)
    assert jnp.abs(g).max() > 0.1
    assert jnp.abs(jax.jit(jax.grad(objective))(g)).max() < 1e-12


@pytest.mark.x64
@pytest.mark.parametrize("family", [RBF, Cauchy])
@pytest.mark.parametrize("statistic", ["v", "u"])
def test_parametric_form_minimises_the_stein_discrepancy_plus_ridge(statistic, family, needs_x64):
    x, h, eta = jnp.array(X), 1.5, 2.0
    kernel = family(h)
    basis = jnp.swapaxes(kernel.grad_y(x, x), 0, 1)

    def objective(a):
        k0 = stein_kernel_matrix(x, jnp.einsum("nkd,k->nd", basis, a), kernel)
        total = k0.sum() - (jnp.trace(k0) if statistic == "u" else 0.0)
        return h**4 * total + eta * jnp.sum(a**2)

    estimator = SteinScore(eta, kernel, statistic=statistic, form="parametric")
    a = estimator.fit(x).coefficients
    assert jnp.abs(a).max() > 0.1
    assert jnp.abs(jax.jit(jax.grad(objective))(a)).max() < 1e-11
    np.testing.assert_allclose(estimator(x), jnp.einsum("nkd,k->nd", basis, a), atol=1e-5)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("kernel", "eta"),
    [
        (RBF(1.5), 0.05),
        (IMQ(1.1, beta=-0.3), 0.05),
        (lopsided, 0.05),
        (quadratic, 0.05),
        (Epanechnikov(1.2), 9.0),
    ],
    ids=name_of,
)
def test_prediction_is_the_estimate_on_the_sample_with_the_point_added(kernel, eta, needs_x64):
    x, y = jnp.array(X), jnp.array(Y)
    ridge = eta * jnp.mean(jnp.diagonal(kernel(x, x)))
    fitted = SteinScore(eta, kernel).fit(x)

    @jax.jit
    def last_row(point):
        both = jnp.concatenate([x, point[None]])
        gradient = jax.jacfwd(lambda t: kernel(both, both + t).sum(1))(jnp.zeros(2))
        return -jnp.linalg.solve(kernel(both, both) + ridge * jnp.eye(6), gradient)[-1]

    expected = jnp.stack([last_row(point) for point in y])
    np.testing.assert_allclose(fitted(y), expected, rtol=1e-9)


@pytest.mark.nightly
@pytest.mark.x64
def test_many_samples_are_solved_in_blocks_with_the_same_answer(monkeypatch, tol):
    x = random.normal(random.key(5), (90, 3)) * jnp.array([0.3, 1.0, 4.0]) + 50.0
    estimator, direction = SteinScore(0.1, IMQ("median_distance")), jnp.cos(x)

    def answers(x):
        (g, residual), pull = jax.vjp(estimator.with_residual, x)
        return g, pull((direction, jnp.zeros_like(residual)))[0], residual

    dense, dense_slope, exact = jax.jit(answers)(x)
    monkeypatch.setattr(stein, "_DENSE_UP_TO", 80)
    monkeypatch.setattr(_conjugate_gradients, "ROWS_AT_A_TIME", 32)
    monkeypatch.setattr(_conjugate_gradients, "RANK", 20)
    blocks, slope, residual = jax.jit(lambda x: answers(x))(x)
    assert exact < tol(1e-4, 1e-12)
    assert 0.0 < residual < tol(1e-4, 2e-6)
    for ours, theirs in ((blocks, dense), (slope, dense_slope)):
        atol = tol(2e-3, 1e-4) * float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, atol=atol)
    monkeypatch.setattr(_conjugate_gradients, "MAX_ITERATIONS", 1)
    assert jax.jit(lambda x: answers(x))(x)[2] > 1e-4


def test_many_samples_take_memory_in_blocks():
    x = jax.ShapeDtypeStruct((5000, 3), jnp.float32)
    compiled = jax.jit(SteinScore(kernel=RBF(1.0))).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * 5000**2 * 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: SteinScore(0.0), "eta is 0.0; it must be a positive"),
        (lambda x: SteinScore(statistic="u").fit(x), "statistic='v' or form='parametric'"),
        (lambda x: SteinScore(statistic="w"), "statistic is 'w'.*'u'"),
        (lambda x: SteinScore(form="linear"), "form is 'linear'.*'parametric'"),
        (lambda x: SteinScore(kernel=IMQ(), form="parametric"), r"use RBF\(\) or form="),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.array(X))
