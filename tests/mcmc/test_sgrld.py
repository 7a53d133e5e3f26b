"""SGRLD with constant and with changing metrics: laws, formulas and wrong metrics."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.linalg import solve_discrete_lyapunov

from numpyro_ext.mcmc import SGRLD
from numpyro_ext.mcmc.geometry import ExpandedMean, recipe_correction
from tests.mcmc.laws import average, normal, start, step_at
from tests.mcmc.models import NoisyGradient

PRECISION = np.array([[2.0, 0.8], [0.8, 1.0]])
METRIC = np.array([[1.5, -0.4], [-0.4, 0.7]])


def correlated():
    numpyro.sample(
        "z",
        dist.MultivariateNormal(jnp.array([1.0, -2.0]), precision_matrix=jnp.asarray(PRECISION)),
    )


@pytest.mark.filterwarnings("ignore:the mean of .* times what it should be")
@pytest.mark.slow
def test_constant_dense_metric_has_the_exact_covariance():
    """``S = M S M' + 2 eps T A + eps^2 s2 A A`` with ``M = I - eps A H``."""
    eps, T, s2, A = 0.2, 0.7, 2.0, np.linalg.inv(METRIC)
    kernel = SGRLD(
        correlated,
        eps,
        metric=lambda z: jnp.asarray(METRIC, z.dtype),
        temperature=T,
        gradient=NoisyGradient(s2),
    )

    def products(state):
        d = state.z["z"] - jnp.array([1.0, -2.0])
        return d[:, :, None] * d[:, None, :]

    out, _ = average(kernel, {"dd": products, "z": lambda s: s.z["z"]}, 1000, 50, chains=300)
    M = np.eye(2) - eps * A @ PRECISION
    law = solve_discrete_lyapunov(M, 2 * eps * T * A + eps**2 * s2 * A @ A)
    mean, error = out["dd"].mean(0), out["dd"].std(0) / 300**0.5
    assert np.all(error < 0.02 * np.diag(law).max())
    assert np.all(np.abs(mean - law) < 4 * error), (mean, law, error)
    mean, error = out["z"].mean(0), out["z"].std(0) / 300**0.5
    assert np.all(np.abs(mean - np.array([1.0, -2.0])) < 4 * error)


def varying(z):
    return 1 / (1 + jnp.array([[1.0, 0.3], [0.3, 0.5]]) @ jnp.tanh(z) ** 2)


def varying_dense(z):
    low = jnp.array([[1.0, 0.0], [0.5, 1.2]]) * (1 + 0.3 * jnp.sin(z.sum()))
    return low @ low.T


@pytest.mark.x64
@pytest.mark.parametrize(("metric", "own"), [(varying, True), (varying_dense, False)])
def test_step_is_the_formula(metric, own, tol):
    """``z' - z`` at T = 1 and 4 separates noise and drift."""
    z, eps = jnp.array([0.7, -1.1]), 0.01
    g = 2.0 * z  # of the model below

    def A(x):
        G = metric(x)
        return jnp.linalg.inv(G if G.ndim == 2 else jnp.diag(G))

    Gam, here = jax.jit(lambda z: (recipe_correction(A, None, z), A(z)))(z)
    correction = (lambda x: recipe_correction(A, None, x)) if own else "autodiff"
    make = partial(SGRLD, normal([2.0, 2.0]), eps, metric=metric, correction=correction)
    at, key = step_at(make, z)
    moved = [at(T) for T in (0.0, 1.0, 4.0)]
    drift = -eps * here @ g
    np.testing.assert_allclose(moved[0], drift, rtol=0, atol=tol(1e-6, 1e-13))
    noise_free = 2 * (moved[1] - moved[0]) - (moved[2] - moved[0])
    np.testing.assert_allclose(noise_free, -2 * eps * Gam, rtol=0, atol=tol(2e-6, 1e-13))
    zeta = random.normal(key, (2,))
    noise = moved[1] - drift - eps * np.asarray(Gam)
    # Any square root of A will do: its length is that of zeta in the metric.
    squared = noise @ np.linalg.inv(here) @ noise
    assert squared == pytest.approx(2 * eps * float(zeta @ zeta), rel=tol(1e-4, 1e-10))


def test_metric_that_turns_indefinite_is_a_divergence():
    kernel = SGRLD(normal([1.0, 1.0]), 0.1, metric=lambda z: 3 - z**2)
    state, step = start(kernel, z=[0.5, 0.5])
    state = step(state._replace(z={"z": jnp.array([0.5, 2.0])}))
    assert state.diverging
    assert state.z["z"].tolist() == [0.5, 2.0]


@pytest.mark.parametrize("step_size", [0.1, None])
@pytest.mark.parametrize(
    "metric",
    [lambda z: jnp.array([[1.0, 2.0], [2.0, 1.0]]), lambda z: jnp.array([1.0, -1.0])],
)
def test_metric_that_is_not_positive_is_refused(metric, step_size):
    """Every transition would be refused, and the chain would stay where it began."""
    kernel = SGRLD(normal([1.0, 1.0]), step_size, metric=metric)
    with pytest.raises(ValueError, match="metric is not positive definite at the initial point"):
        kernel.init(random.key(0), 0, None, (), {})


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"metric": lambda z: jnp.array([[2.0, 1.0], [0.0, 2.0]])}, "metric is not posit"),
        ({"metric": lambda z: jnp.ones(1)}, r"metric returns shape \(1,\) for a vector of 2"),
        (
            {"metric": jnp.ones_like, "correction": lambda z: jnp.zeros(1)},
            r"correction returns shape \(1,\) for a vector of 2 numbers; it must be \(2,\)",
        ),
    ],
)
def test_functions_of_another_shape_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        SGRLD(normal([1.0, 1.0]), 0.1, **arguments).init(random.key(0), 0, None, (), {})


def test_correction_of_an_expanded_mean_is_refused():
    with pytest.raises(ValueError, match="correction is given with an ExpandedMean metric"):
        SGRLD(normal([1.0, 1.0]), 0.1, metric=ExpandedMean(), correction=jnp.zeros_like)
