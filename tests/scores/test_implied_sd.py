"""The implied sd ratio: exact on Gaussians, and the definition, by loops, elsewhere."""

import jax
import numpy as np
import pytest

from numpyro_ext.scores.implied_sd import implied_sd_ratio

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
ratio_of = jax.jit(implied_sd_ratio)
MEAN = np.array([3.0, -200.0, 0.02])
# Unequal scales and a correlation of .8 between the first two.
FACTOR = np.array([[0.5, 0.0, 0.0], [40.0, 30.0, 0.0], [0.0, 0.0, 0.001]])
COV = FACTOR @ FACTOR.T


def standardised(m, d, seed=0):
    """Skew points of mean 0 and covariance I, exactly."""
    e = np.random.default_rng(seed).exponential(size=(m, d))
    e = e - e.mean(0)
    return e @ np.linalg.inv(np.linalg.cholesky(np.cov(e.T, ddof=0))).T


def gaussian_score(x):
    return -(x - MEAN) @ np.linalg.inv(COV)


def by_loops(x, g):
    """The definition, in float64."""
    (m, d), mean = x.shape, x.mean(0)
    M, C = np.zeros((d, d)), np.zeros((d, d))
    for i in range(m):
        M -= np.outer(x[i] - mean, g[i]) / m
        C += np.outer(x[i] - mean, x[i] - mean) / m
    implied = np.linalg.inv(M) @ C
    shift = np.linalg.cholesky(C).T @ g.mean(0)
    ratios = [np.sqrt(C[a, a] / (0.5 * (implied + implied.T))[a, a]) for a in range(d)]
    return np.array(ratios), np.sqrt(np.mean(shift**2))


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_points_with_the_moments_of_a_gaussian_times_a_factor_have_that_ratio(factor):
    x = MEAN + factor * standardised(20, 3) @ FACTOR.T
    ratio, shift = ratio_of(x, gaussian_score(x))
    np.testing.assert_allclose(ratio, factor, rtol=1e-4)
    # The mean of 200 sds in the second coordinate is rounded in float32.
    np.testing.assert_allclose(shift, 0.0, atol=1e-4)


def test_the_shift_is_the_distance_of_the_means_in_sds():
    x = MEAN + (standardised(20, 3) + np.array([2.0, -1.0, 0.5])) @ FACTOR.T
    ratio, shift = ratio_of(x, gaussian_score(x))
    np.testing.assert_allclose(ratio, 1.0, rtol=1e-4)
    np.testing.assert_allclose(shift, np.sqrt((4 + 1 + 0.25) / 3), rtol=1e-4)


def test_agrees_with_loops_where_the_score_is_not_linear():
    x = 0.7 + X
    g = np.stack([-np.sinh(x[:, 0]) + 0.3 * x[:, 1], 0.3 * x[:, 0] - x[:, 1] ** 3], axis=1)
    expected = by_loops(x, g)
    np.testing.assert_allclose(expected[0], [1.08017136, 1.73372856], rtol=1e-8)
    for ours, theirs in zip(ratio_of(x, g), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_minibatches_at_the_same_points_are_averaged():
    x = MEAN + standardised(20, 3) @ FACTOR.T
    noise = np.linspace(-3.0, 3.0, 7)[:, None, None] * np.random.default_rng(1).normal(size=(20, 3))
    many = gaussian_score(x) * (1 + noise)
    np.testing.assert_allclose(ratio_of(x, many)[0], 1.0, rtol=1e-4)
    # One of them is off, or implies no spread at all.
    assert not np.all(np.abs(np.asarray(ratio_of(x, many[0])[0]) - 1) < 0.1)


def test_what_cannot_be_said_is_nan():
    assert np.isnan(ratio_of(X[:2], -X[:2])[0]).all()
    assert np.isnan(ratio_of(X[:2], -X[:2])[1])
    # A density that grows outwards in the second coordinate has no variance there.
    ratio, _ = ratio_of(X, X * np.array([-1.0, 1.0]))
    assert np.isnan(ratio).tolist() == [False, True]
    collapsed = X * np.array([1.0, 0.0])
    assert np.isnan(ratio_of(collapsed, -collapsed)[0]).any()
