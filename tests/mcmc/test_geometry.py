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
from tests.mcmc.laws import start

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


def test_step_of_expanded_mean_is_the_formula(tol):
    """At T = 0: ``theta - eps (b theta - a)``, and its mirror image where that is negative; other
    sites move as in SGLD."""

    def model():
        numpyro.sample("x", dist.Normal(3.0, 2.0))
        numpyro.sample("z", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Gamma(jnp.array([3.0, 2.0]), 2.0).to_event(1))

    theta = np.array([1.4, 4.0])
    kernel = SGRLD(model, 1.2, metric=ExpandedMean(["y"]), temperature=0.0)
    state, step = start(kernel, x=1.0, y=np.log(theta), z=0.0)
    new = step(state).z
    np.testing.assert_allclose(new["x"], 1.0 + 1.2 * 2 / 4, rtol=tol(1e-5, 1e-12))
    np.testing.assert_allclose(new["z"], 0.0, atol=tol(1e-5, 1e-12))  # its density is flat there
    expected = np.abs(theta - 1.2 * (2 * theta - np.array([3.0, 2.0])))
    np.testing.assert_allclose(np.exp(new["y"]), expected, rtol=tol(1e-5, 1e-12))
    assert (theta - 1.2 * (2 * theta - np.array([3.0, 2.0])))[1] < 0


def model_without_positive_sites():
    numpyro.sample("w", dist.Normal(0, 1))
    numpyro.sample("p", dist.Beta(2.0, 2.0))


@pytest.mark.parametrize("chosen", [None, ["p"], ["q"]])
def test_sites_that_are_not_positive(chosen):
    kernel = SGRLD(model_without_positive_sites, 0.1, metric=ExpandedMean(chosen))
    with pytest.raises(ValueError, match=r"the positive latent sites of the model are \[\]"):
        kernel.init(random.key(0), 0, None, (), {})
