"""The mode, the curvature there, and the noise of gradients around it."""

from functools import cache

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext._model import descent
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import read_model
from numpyro_ext.mcmc import ControlVariate
from numpyro_ext.mcmc.settings import look_around
from numpyro_ext.optim import find_modes

ROWS, BATCH, SD = 200, 10, 0.7


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, SD), obs=y[i])


@cache
def found():
    """Two correlated columns of unequal scale, with heavy tails so that rows differ much."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(5, (ROWS, 2)) @ np.array([[1.0, 0.8], [0.0, 0.1]])
    y = x @ np.array([3.0, -2.0]) + SD * rng.standard_normal(ROWS)
    args = jnp.asarray(x), jnp.asarray(y)
    potential = Potential(regression, read_model(regression, args), {}, args, {})
    return x, y, potential, next(descent.make_search(random.key(0), potential)([jnp.zeros(2)]))


@pytest.mark.slow
def test_the_mode_and_the_curvature_of_a_linear_regression():
    x, y, _, mode = found()
    H = x.T @ x / SD**2 + np.eye(2) / 100
    sd = np.sqrt(np.diag(np.linalg.inv(H)))
    assert np.max(np.abs(mode.center - np.linalg.solve(H, x.T @ y / SD**2)) / sd) < 0.06
    np.testing.assert_allclose(mode.factor, np.linalg.cholesky(np.linalg.inv(H)), rtol=1e-3)
    assert mode.num_negative == 0


def test_searches_end_at_the_mode_where_the_potential_has_no_digits_for_it(monkeypatch):
    """34 million nats, as of 50 million rows, of which float32 resolves 4. By a plain sum of them a
    search stopped up to 0.7 standard deviations away, after up to 55 passes over the rows."""
    rng, size = np.random.default_rng(2), 1_000_000
    x = rng.standard_normal(size)
    y = rng.random(size) < 1 / (1 + np.exp(-0.7 * x))

    def logistic(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", size, subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Bernoulli(logits=w * x[i]), obs=y[i])
            numpyro.factor("offset", jnp.full(len(i), -33.3))

    w, sd = 0.0, np.inf
    for _ in range(6):
        p = 1 / (1 + np.exp(-w * x))
        sd = (1 + np.sum(x**2 * p * (1 - p))) ** -0.5
        w += (np.sum(x * (y - p)) - w) * sd**2
    args = jnp.asarray(x), jnp.asarray(y, jnp.float32)
    potential = Potential(logistic, read_model(logistic, args), {}, args, {})
    monkeypatch.setattr(descent, "_MOST_OF_ADAM", 0)
    search = descent.make_search(random.key(0), potential)
    for end in search([jnp.array([w + k * sd]) for k in (-3, -1, -0.5, 0.3, 0.5, 1, 2)]):
        assert abs(end.center[0] - w) < 0.06 * sd
        assert end.row_gradients <= 4 * size


def test_a_search_has_a_budget(monkeypatch):
    """One gradient of all rows does not do for a Newton step."""
    _, _, potential, _ = found()  # before, because its budget is the usual one
    monkeypatch.setattr(descent, "MOST_PASSES", 1)
    stopped = next(descent.make_search(random.key(0), potential)([jnp.array([40.0, -40.0])]))
    assert stopped.row_gradients < 2000 * BATCH + 14 * ROWS


def noises(rng_key, estimator=None):
    _, _, potential, mode = found()
    return look_around(rng_key, potential, estimator, mode)[1]


@pytest.mark.slow
def test_the_noise_is_the_mean_over_the_normal_approximation():
    """N^2/B times the variance of a row's gradient, in closed form; 5 to 8 % by chance."""
    x, y, _, mode = found()
    A, Sigma = np.asarray(mode.factor), np.asarray(mode.factor) @ np.asarray(mode.factor).T
    # Of x_n x_n^T (w - c) / sd^2 for w - c of covariance Sigma, over rows n.
    second, length = x.T @ x / ROWS, np.einsum("ni,ij,nj->n", x, Sigma, x)
    corrected = (x * length[:, None]).T @ x / ROWS - second @ Sigma @ second
    residual = y - x @ np.asarray(mode.center)
    at_center = (x * residual[:, None] ** 2).T @ x / ROWS
    scale = ROWS**2 / BATCH / SD**4
    plain = corrected + at_center  # the mean gradient at the mode is 0
    measured = noises(random.key(1)) + noises(random.key(1), ControlVariate({"w": mode.center}))
    for noise, covariance in zip(measured, (plain, corrected, corrected), strict=True):
        np.testing.assert_allclose(noise, scale * np.diag(A.T @ covariance @ A), rtol=0.35)


class Overflowing:
    """Noise of variance 2, and a gradient that overflows more than a deviation above the mode."""

    def __init__(self, limit):
        self.limit = limit

    def init(self, z, potential):
        return ()

    def estimate(self, rng_key, i, z, idx, potential, state):
        grad = 2**0.5 * random.normal(rng_key, (2,))
        return jnp.zeros(()), {"w": jnp.where(z["w"][0] > self.limit, jnp.inf, grad)}, state


def test_points_where_the_gradient_overflows_are_left_out_of_the_noise():
    _, _, _, mode = found()
    A = np.asarray(mode.factor)
    (noise,) = noises(random.key(2), Overflowing(mode.center[0] + A[0, 0]))
    np.testing.assert_allclose(noise, 2 * np.diag(A.T @ A), rtol=0.25)
    (none,) = noises(random.key(2), Overflowing(-jnp.inf))
    assert np.all(np.isnan(none))


@pytest.mark.slow
def test_many_coordinates_are_whitened_one_by_one():
    """513 of them, normal with standard deviations from 0.01 to 100."""
    sd = jnp.geomspace(0.01, 100.0, 513)

    def model():
        numpyro.sample("z", dist.Normal(3 * sd, sd).to_event(1))

    whitening = find_modes(model).whitening
    np.testing.assert_allclose(whitening.matrix / sd[:, None], np.eye(513), atol=1e-4)
    np.testing.assert_allclose(whitening.center / sd, 3, atol=0.05)


@pytest.mark.slow
def test_many_coordinates_are_found_from_minibatches_of_rows():
    """513 normals with two rows each; the curvature along a direction is taken on given rows."""
    rng = np.random.default_rng(0)
    column, sd = np.tile(np.arange(513), 2), 0.5
    y = 2 + rng.normal(size=513)[column] + sd * rng.normal(size=len(column))

    def model(column, y):
        z = numpyro.sample("z", dist.Normal(2.0, 1.0).expand([513]).to_event(1))
        with numpyro.plate("rows", len(y), subsample_size=64) as i:
            numpyro.sample("y", dist.Normal(z[column[i]], sd), obs=y[i])

    normal = find_modes(model, jnp.asarray(column), jnp.asarray(y)).whitening
    precision = 1 + 2 / sd**2
    mean = (2 + np.bincount(column, y) / sd**2) / precision
    np.testing.assert_allclose(normal.center, mean, atol=0.05 * precision**-0.5)
    np.testing.assert_allclose(normal.matrix * precision**0.5, np.eye(513), atol=1e-3)
