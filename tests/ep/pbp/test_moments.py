"""Moments of a network and their updates: reference values, Monte Carlo, the paper's own form."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from numpyro_ext.ep.pbp.moments import (
    forward_moments,
    gamma_update,
    normal_update,
    prior_update,
    rectified_normal_moments,
)

M = [jnp.array([[0.5, -0.3, 0.1], [-0.2, 0.8, 0.4]]), jnp.array([[1, -0.5, 0.2]])]
V = [jnp.full((2, 3), 0.1), jnp.full((1, 3), 0.05)]
X = jnp.array([1.0, -0.5])


@pytest.mark.x64
def test_rectified_moments(tol):
    mean, var = jnp.array([0, 0.5, -1, 1.3]), jnp.array([1, 1, 1, 0.49])
    mu, s2 = rectified_normal_moments(mean, var)
    expected = [1 / np.sqrt(2 * np.pi), 0.6977965574013061, 0.08331547058768629, 1.3086428860186912]
    np.testing.assert_allclose(mu, expected, rtol=tol(2e-6, 1e-13))
    expected = [0.5 - 0.5 / np.pi, 0.553440704453552, 0.06839831570452315, 0.4631832947998]
    np.testing.assert_allclose(s2, expected, rtol=tol(3e-6, 1e-12))


@pytest.mark.x64
def test_rectified_moments_and_derivatives_in_the_tails(tol):
    """By quadrature of E x and E x^2 on x > 0, and of their derivatives."""
    for mean, sd in [(-3.2, 0.8), (-7.0, 1.0), (0.4, 2.0), (9.0, 1.5)]:
        q = stats.norm(mean, sd)

        def expect(fn, q=q, mean=mean, sd=sd):
            high = max(mean, 0) + 12 * sd
            return integrate.quad(lambda x: fn(x) * q.pdf(x), 0, high, epsabs=0, epsrel=1e-12)[0]

        mu, second = expect(lambda x: x), expect(lambda x: x * x)
        above, below, at_zero = q.sf(0), q.cdf(0), q.pdf(0)
        computed = rectified_normal_moments(jnp.array(mean), jnp.array(sd**2))
        rtol = tol(3e-3 if mean < -2 else 1e-5, 1e-8)
        np.testing.assert_allclose(computed, (mu, second - mu**2), rtol=rtol)
        derivatives = jax.jacobian(rectified_normal_moments, (0, 1))(
            jnp.array(mean), jnp.array(sd**2)
        )
        expected = ((above, at_zero / 2), (2 * mu * below, above - mu * at_zero))
        np.testing.assert_allclose(derivatives, expected, rtol=rtol)


@pytest.mark.slow
@pytest.mark.x64
def test_rectified_moments_where_nothing_is_left():
    """Thirty standard deviations off, or without any variance: no NaN, in derivatives neither."""
    mean = jnp.array([-29.9, -30.1, -80.0, -1e4, 50.0, 1e4, 2.0, -2.0, 0.0])
    var = jnp.array([1.0, 1, 1, 1, 1, 1, 0, 0, 0])
    mu, s2 = rectified_normal_moments(mean, var)
    np.testing.assert_allclose(mu, jnp.maximum(mean, 0), atol=1e-14)
    np.testing.assert_allclose(s2, jnp.where(mean > 3, var, 0), atol=1e-14)

    def total(mean, var):
        mu, s2 = rectified_normal_moments(mean, var)
        return jnp.sum(mu + s2)

    d_mean, d_var = jax.grad(total, (0, 1))(mean[:-1], var[:-1])
    np.testing.assert_allclose(d_mean, mean[:-1] > 0, atol=1e-14)
    np.testing.assert_allclose(d_var, mean[:-1] > 0, atol=1e-14)


@pytest.mark.x64
def test_prior_update(tol):
    computed = prior_update(0.5, 1.2, 6.0, 6.0)
    expected = [0.25, 0.6, 6.408451161015722, 6.164744999683146]
    np.testing.assert_allclose(computed, expected, rtol=tol(1e-6, 1e-13))


@pytest.mark.x64
def test_forward_moments(tol):
    expected = 0.35167634165564904, 0.04512876423743636
    np.testing.assert_allclose(forward_moments(M, V, X), expected, rtol=tol(1e-6, 1e-13))


@pytest.mark.slow
@pytest.mark.x64
def test_likelihood_update(tol):
    means, variances, log_z, r2, s2 = normal_update(M, V, 6.0 / (6.0 - 1), X, 0.7)
    a, b = gamma_update(6.0, 6.0, r2, s2)
    close = partial(np.testing.assert_allclose, rtol=tol(2e-6, 1e-9))
    close(log_z, -1.0772796240016056)
    close([a, b], [6.643109206271456, 6.143252001959403])
    close(means[1], [[1.0027314273, -0.499419297, 0.2080756611]])
    close(variances[1], [[0.0498348125, 0.0499886724, 0.0493307252]])
    close(means[0][0], [0.5081383607, -0.3040691803, 0.1081383607])


def test_one_hidden_layer_is_exact():
    """Its units are independent. 200,000 draws: errors of .0022 sd of the mean, .3 % of the
    variance, and a fifth of a percent more because f is not normal."""
    keys = random.split(random.key(0), 2)
    w = [
        m + jnp.sqrt(v) * random.normal(k, (200_000, *m.shape))
        for m, v, k in zip(M, V, keys, strict=True)
    ]
    z = jax.nn.relu((w[0][..., :2] @ X + w[0][..., 2]) / 3**0.5)
    f = (jnp.einsum("ni,ni->n", w[1][:, 0, :2], z) + w[1][:, 0, 2]) / 3**0.5
    mean, var = forward_moments(M, V, X)
    np.testing.assert_allclose(jnp.mean(f), mean, atol=0.01 * float(var) ** 0.5)
    np.testing.assert_allclose(jnp.var(f), var, rtol=0.02)


def printed(a, b, r2, s2):
    """The update of the paper, from three evidences, with more digits than double precision."""
    a, b, r2, s2 = (np.longdouble(x) for x in (a, b, r2, s2))
    V = [s2 + b / (a - 1 + s) for s in range(3)]
    K = [-np.log(v) / 2 - r2 / (2 * v) for v in V]
    a_new = 1 / (np.exp(K[0] + K[2] - 2 * K[1]) * (a + 1) / a - 1)
    b_new = 1 / (np.exp(K[2] - K[1]) * (a + 1) / b - np.exp(K[1] - K[0]) * a / b)
    return float(a_new), float(b_new)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("a", "b", "r2", "s2"),
    [(6, 6, 0.4, 0.1), (1.3, 0.2, 0.01, 3.0), (115, 8, 0.2, 0), (7e4, 1.2e4, 0.5, 0.02)],
)
def test_the_gamma_update_is_the_papers(a, b, r2, s2, tol):
    """What is added to a is known to some digits even where a has few left for it."""
    computed = gamma_update(*map(jnp.asarray, map(float, (a, b, r2, s2))))
    expected = printed(a, b, r2, s2)
    np.testing.assert_allclose(computed, expected, rtol=tol(2e-7, 1e-12))
    if a < 1000:
        np.testing.assert_allclose(computed[0] - a, expected[0] - a, rtol=tol(1e-3, 1e-9))


@pytest.mark.parametrize("residual", [50.0, 1e10, np.inf, np.nan])
def test_a_gamma_without_a_mean_variance_is_not_taken(residual):
    """At a residual of 50 the update would have a shape of 1e-4, by the paper's own form."""
    assert printed(6, 6, 2500.0, 1.0)[0] < 1e-3
    computed = gamma_update(
        jnp.array(6.0), jnp.array(6.0), jnp.array(residual) ** 2, jnp.array(1.0)
    )
    assert tuple(map(float, computed)) == (6.0, 6.0)
