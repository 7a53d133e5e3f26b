"""The known answers are right: against quadrature and simulation."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
import pytest

from numpyro_ext.targets import (
    banana,
    banana_potential,
    breast_cancer,
    crosshair,
    latent_cycle,
    logistic_regression,
    normal_mean,
    normal_mean_answer,
    pinwheel,
    swirl,
)


@pytest.mark.x64
def test_normal_mean_answer_matches_quadrature(tol):
    x = jnp.array([0.5, -1.0, 2.0, 3.5])
    grid = jnp.linspace(-6.0, 8.0, 20_001)
    log_joint = jax.jit(jax.vmap(lambda z: log_density(normal_mean, (x,), {}, {"z": z})[0]))(grid)
    weight = jnp.exp(log_joint - log_joint.max()) * (grid[1] - grid[0])
    answer = normal_mean_answer(x)
    mean = (weight * grid).sum() / weight.sum()
    variance = (weight * (grid - mean) ** 2).sum() / weight.sum()
    np.testing.assert_allclose(answer.mean, mean, rtol=tol(1e-4, 1e-9))
    np.testing.assert_allclose(answer.variance, variance, rtol=tol(1e-3, 1e-9))
    log_evidence = jnp.log(weight.sum()) + log_joint.max()
    np.testing.assert_allclose(answer.log_evidence, log_evidence, rtol=tol(1e-5, 1e-10))


def test_banana_moments():
    """Each within 4 standard errors of 100,000 draws."""
    draws = Predictive(banana, num_samples=100_000)(random.key(1))
    x1, x2 = 10.0 * draws["z1"], draws["x2"]
    for value, expected in [(x1**2, 100.0), (x2, 0.0), (x2**2, 19.0), (x1**2 * x2, 600.0)]:
        error = value.std() / jnp.sqrt(value.size)
        assert abs(value.mean() - expected) < 4 * error


def test_banana_potential_is_the_models_density():
    points = jnp.array([[0.0, -3.0], [12.0, 1.0], [-7.0, 4.0]])

    @jax.jit
    @jax.vmap
    def both(p):
        given = {"z1": p[0] / 10.0, "x2": p[1]}
        return banana_potential(p), log_density(banana, (), {}, given)[0]

    potential, log_joint = both(points)
    np.testing.assert_allclose(potential + log_joint, -jnp.log(2 * jnp.pi), atol=1e-4)


def test_breast_cancer_is_standardised_and_split():
    data = breast_cancer()
    assert data.x_train.shape == (455, 10) and data.x_test.shape == (114, 10)
    np.testing.assert_allclose(data.x_train.mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(data.x_train.std(0), 1.0, atol=1e-5)
    assert float(data.y_train.mean()) == pytest.approx(212 / 569, abs=2e-3)


def test_logistic_regression_minibatch_is_unbiased():
    """The scaled minibatch likelihood averages to the full one over all rows taken one by one."""
    key_x, key_y = random.split(random.key(2))
    x = random.normal(key_x, (6, 2))
    y = random.bernoulli(key_y, 0.4, (6,)).astype(int)
    point = {"scale": jnp.array(0.8), "weights": jnp.array([0.3, -2.0]), "intercept": jnp.array(1)}

    def on_rows(rows):
        given, size = {**point, "data": rows}, {"subsample_size": len(rows)}
        return log_density(logistic_regression, (x, y), size, given)[0]

    batches = jax.jit(jax.vmap(on_rows))(jnp.arange(6)[:, None])
    np.testing.assert_allclose(jnp.mean(batches), jax.jit(on_rows)(jnp.arange(6)), rtol=1e-5)


def test_pinwheel_is_its_formula():
    """Without noise all points of an arm are the same."""
    y, labels = pinwheel(random.key(0), radial_std=0.0, tangential_std=0.0, num_per_class=3)
    first = y[labels == 0]
    np.testing.assert_allclose(first, [[7.778427405785, -6.284589651913]] * 3, rtol=1e-5)
    angle = 2 * jnp.pi * 2 / 5 + 0.25 * jnp.exp(1.0)
    third = [10 * jnp.cos(angle), -10 * jnp.sin(angle)]
    np.testing.assert_allclose(y[labels == 2][0], third, rtol=1e-5)
    assert np.bincount(labels).tolist() == [3] * 5 and not bool(jnp.all(jnp.diff(labels) >= 0))


@pytest.mark.nightly
def test_latent_cycle_has_the_components_of_the_crosshair():
    """Means of the clusters before the warp within 4 standard errors."""
    data = latent_cycle(random.key(3), num_data=4000)
    np.testing.assert_allclose(swirl(jnp.array([1.0, 0.0])), [0.5**0.5] * 2, rtol=1e-5)
    np.testing.assert_allclose(data.y, swirl(data.x), rtol=1e-5)
    loc, covariance = crosshair()
    pair = 2 * data.z + jnp.roll(data.z, -1, axis=1)
    for k in range(4):
        x = data.x[pair == k]
        variance = covariance[k // 2, k % 2].diagonal()
        assert np.all(abs(x.mean(0) - loc[k // 2, k % 2]) < 4 * jnp.sqrt(variance / len(x)))
        np.testing.assert_allclose(x.var(0), variance, rtol=0.1)
    assert np.all(abs(data.z.mean(0) - data.pi) < 4 * 0.5 / 4000**0.5)
