"""Projections by sampling and by a formula, against quadrature and laws."""

import functools

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.ep import EP, ClosedForm, ImportanceSampling, NUTSProjection, Quadrature

MEAN, COV = jnp.array([0.5, -0.3]), jnp.array([[2.0, 0.3], [0.3, 0.5]])


def heteroscedastic(u):
    return -u[1] - 0.5 * ((1.9 - u[0]) * jnp.exp(-u[1])) ** 2


def narrow(u):
    return -0.5 * jnp.sum(((u - jnp.array([1.0, 0.4])) / 0.03) ** 2)


def cusp(u):
    """A narrow peak without a second derivative, so that both sets of points are far too wide."""
    return -30 * jnp.sum(jnp.abs(u))


def growing(u):
    """It grows faster than its cavity falls: the product has no moments."""
    return 3 * jnp.sum(u**2)


def nowhere(u):
    return jnp.where(jnp.sum(u) > 1e3, 0.0, -jnp.inf)


@functools.cache
def sampled(f):
    """Sites of a factor at 8 keys."""

    @jax.jit
    @jax.vmap
    def project(key):
        return ImportanceSampling(1024).project(f, MEAN, COV, 1.0, key)

    return project(random.split(random.key(0), 8))


@pytest.mark.slow
def test_sampling_is_right_within_its_error():
    """The error falls below 1 / sqrt(num_samples) because the points are quasi-random."""
    exact = jax.jit(lambda: Quadrature().project(heteroscedastic, MEAN, COV, 1.0))()
    computed = sampled(heteroscedastic)
    for name in ("site_shift", "site_precision", "log_normaliser"):
        values, truth = getattr(computed, name), getattr(exact, name)
        error = jnp.std(values, 0, ddof=1) / jnp.sqrt(8)
        np.testing.assert_allclose(
            jnp.mean(values, 0), truth, atol=5 * float(jnp.max(error)) + 1e-5
        )
        assert jnp.max(jnp.std(values, 0)) < 0.3
    assert jnp.all(computed.ok)


@pytest.mark.parametrize(
    "f", [cusp, *(pytest.param(f, marks=pytest.mark.slow) for f in (growing, nowhere))]
)
def test_uneven_weights_are_reported(f):
    """Of what the points reach: a part that they miss, such as the rest of a ring, is not seen."""
    assert not jnp.any(sampled(f).ok)


@pytest.mark.slow
def test_weak_factor_is_not_drowned_in_noise():
    """Among 500 rows, the noise of the covariance of the points would be 30 times the site."""
    a = jnp.array([0.3, -0.5, 0.2, 0.4, 0.1])
    cov = jnp.eye(5) / 500
    computed = jax.jit(
        lambda: ImportanceSampling().project(
            lambda u: jax.nn.log_sigmoid(a @ u), jnp.ones(5) / 5, cov, 1.0, random.key(1)
        )
    )()
    p = jax.nn.sigmoid(jnp.sum(a) / 5)
    np.testing.assert_allclose(computed.site_precision, p * (1 - p) * jnp.outer(a, a), atol=1e-3)


@pytest.mark.slow
def test_exclusive_sampling_matches_quadrature():
    computed, exact = jax.jit(
        lambda: (
            ImportanceSampling(4096).project(heteroscedastic, MEAN, COV, 0.0, random.key(2)),
            Quadrature().project(heteroscedastic, MEAN, COV, 0.0),
        )
    )()
    np.testing.assert_allclose(computed.site_precision, exact.site_precision, rtol=0.1, atol=0.1)
    np.testing.assert_allclose(computed.log_normaliser, exact.log_normaliser, rtol=0.1)


@pytest.mark.nightly
def test_nuts_has_the_precision_of_a_normal_on_average():
    """32 keys of 200 draws: the relative standard error of an entry is 1.8 %."""
    T, v = jnp.array([[3.0, 0.5], [0.5, 1.0]]), jnp.array([1.0, -2.0])
    projection = NUTSProjection(num_warmup=100, num_samples=200)
    computed = jax.jit(
        jax.vmap(
            lambda key: projection.project(lambda u: v @ u - u @ T @ u / 2, MEAN, COV, 0.5, key)
        )
    )(random.split(random.key(3), 32))
    assert jnp.all(computed.ok) and jnp.all(jnp.isnan(computed.log_normaliser))
    for values, truth in ((computed.site_precision, T), (computed.site_shift, v)):
        error = jnp.std(values, 0, ddof=1) / 32**0.5
        z = (jnp.mean(values, 0) - truth) / error
        assert jnp.max(jnp.abs(z)) < 4.5, z


@pytest.mark.parametrize("projection", [NUTSProjection(), ClosedForm(print)])
def test_no_expectations_under_q(projection):
    name = type(projection).__name__
    with pytest.raises(ValueError, match=f"power is 0, and {name} has no expectations"):
        projection.project(narrow, MEAN, COV, 0.0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ImportanceSampling(num_samples=1), "num_samples is 1; it must be an integer of"),
        (lambda: ImportanceSampling(min_ess=5.0), "min_ess is 5.0; it must be in"),
        (lambda: NUTSProjection(num_warmup=0), "num_warmup is 0; it must be an integer"),
        (lambda: Quadrature(num_points=2), "num_points is 2; it must be an integer of at least 11"),
        (lambda: EP(lambda: None, max_rank=4), "max_rank is 4; quadrature takes at most 3 directi"),
        (lambda: EP(lambda: None, tol=-1.0), "tol is -1.0; it must be a positive"),
    ],
)
def test_numbers_of_points_that_would_give_no_moments_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
