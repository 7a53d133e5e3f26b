"""The correction equals its closed forms, and ExpandedMean keeps the law of the Gamma."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.mcmc import SGRLD, ExpandedMean
from numpyro_ext.mcmc.geometry import recipe_correction
from tests.mcmc.laws import average, mean_and_error, start

X = np.array([0.7, -1.3])


def dense(x):
    return jnp.array([[1 + x[0] ** 2, x[0] * x[1]], [x[0] * x[1], 1 + x[1] ** 2]])


def curl(x):
    return jnp.array([[0, x[0] * x[1]], [-x[0] * x[1], 0]])


@pytest.mark.x64
def test_correction_has_its_reference_value(tol):
    correction, without = jax.jit(
        lambda x: (recipe_correction(dense, curl, x), recipe_correction(dense, None, x))
    )(X)
    np.testing.assert_allclose(correction, [4 * X[0], 2 * X[1]], rtol=tol(1e-6, 1e-13))
    np.testing.assert_allclose(without, 3 * X, rtol=tol(1e-6, 1e-13))


def test_scalar_diagonal_and_matrix_agree(tol):
    def scalar(x):
        return jnp.sin(x[0]) + x[1] ** 3 + 3

    fields = scalar, lambda x: scalar(x) * jnp.ones(2), lambda x: scalar(x) * jnp.eye(2)
    for field in fields:
        correction = recipe_correction(field, None, X)
        expected = [np.cos(X[0]), 3 * X[1] ** 2]
        np.testing.assert_allclose(correction, expected, rtol=tol(1e-6, 1e-13))


def sites(a, b, n):
    """Gammas, and a Normal that the metric must leave alone."""

    def model():
        shape, rate = jnp.repeat(jnp.asarray(a), n), jnp.repeat(jnp.asarray(b), n)
        numpyro.sample("x", dist.Normal(3.0, 0.5).expand([n]).to_event(1))
        numpyro.sample("y", dist.Gamma(shape, rate).to_event(1))
        numpyro.sample("z", dist.HalfNormal(1.0).expand([2]).to_event(1))

    return model


@pytest.mark.nightly
def test_expanded_mean_has_the_law_of_the_gamma():
    """Mean a/b and ``Var = T (a / b^2) / (1 - eps b / 2)``; the other site as in SGLD."""
    a, b, eps, n, T = np.array([20.0, 12.0]), np.array([2.0, 0.5]), 0.1, 1000, 0.5
    kernel = SGRLD(
        sites(a, b, n), eps, metric=ExpandedMean(["y"]), temperature=T, steps_per_sample=10
    )
    fns = {
        "y": lambda s: jnp.exp(s.z["y"]),
        "yy": lambda s: (jnp.exp(s.z["y"]) - jnp.repeat(jnp.asarray(a / b), n)) ** 2,
        "x": lambda s: (s.z["x"] - 3.0) ** 2,
    }
    out, _ = average(kernel, fns, 400, 40)
    assert a[0] / b[0] ** 2 / (1 - eps * b[0] / 2) == pytest.approx(5.555556)
    for k in range(2):
        mean, error = mean_and_error(out["y"][k * n : (k + 1) * n])
        assert error < 0.005 * a[k] / b[k]
        assert abs(mean - a[k] / b[k]) < 4 * error
        law = T * a[k] / b[k] ** 2 / (1 - eps * b[k] / 2)
        mean, error = mean_and_error(out["yy"][k * n : (k + 1) * n])
        assert error < 0.01 * law
        assert abs(mean - law) < 4 * error
    mean, error = mean_and_error(out["x"])
    assert abs(mean - T / 4 / (1 - eps * 4 / 2)) < 4 * error


def test_step_of_expanded_mean_is_the_formula(tol):
    """At T = 0: ``theta - eps (b theta - a)``, and its mirror image where that is negative."""

    def model():
        numpyro.sample("y", dist.Gamma(jnp.array([3.0, 2.0]), 2.0).to_event(1))

    theta = np.array([1.4, 4.0])
    kernel = SGRLD(model, 1.2, metric=ExpandedMean(), temperature=0.0)
    state, step = start(kernel, y=np.log(theta))
    expected = np.abs(theta - 1.2 * (2 * theta - np.array([3.0, 2.0])))
    np.testing.assert_allclose(np.exp(step(state).z["y"]), expected, rtol=tol(1e-5, 1e-12))
    assert (theta - 1.2 * (2 * theta - np.array([3.0, 2.0])))[1] < 0


def model_without_positive_sites():
    numpyro.sample("w", dist.Normal(0, 1))
    numpyro.sample("p", dist.Beta(2.0, 2.0))


@pytest.mark.parametrize("chosen", [None, ["p"], ["q"]])
def test_sites_that_are_not_positive(chosen):
    kernel = SGRLD(model_without_positive_sites, 0.1, metric=ExpandedMean(chosen))
    with pytest.raises(ValueError, match=r"the positive latent sites of the model are \[\]"):
        kernel.init(random.key(0), 0, None, (), {})
