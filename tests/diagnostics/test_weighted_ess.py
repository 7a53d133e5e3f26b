"""The effective sample size of weighted draws: laws of independent and autoregressive chains."""

import numpy as np
import pytest
from scipy.signal import lfilter

from numpyro_ext.diagnostics import weighted_ess

T = 10_000


def ratios(weights, exact, rho=0.0, runs=200):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(runs, T)) * (1 - rho**2) ** 0.5
    noise[:, 0] /= (1 - rho**2) ** 0.5
    chains = 30.0 + 5.0 * lfilter([1.0], [1.0, -rho], noise, axis=1)
    return np.array([weighted_ess(x, weights) for x in chains]) / exact


def test_independent_draws_of_equal_weight():
    """100 batches: the estimate has a standard deviation of .143, its mean of 200 of .010."""
    found = ratios(None, T)
    assert abs(np.mean(found) - 1.02) < 0.05 and np.std(found) == pytest.approx(0.143, rel=0.25)


def test_falling_weights_are_not_overestimated():
    """The spec of batches of equal length fails this by half."""
    w = (1.0 + np.arange(T)) ** -0.5
    found = ratios(w, w.sum() ** 2 / np.sum(w**2))
    assert abs(np.mean(found) - 1.0) < 0.08
    low, high = np.quantile(found, [0.05, 0.95])
    assert 0.6 < low < 0.85 and 1.15 < high < 1.5


@pytest.mark.parametrize("rho", [0.5, -0.4])
def test_correlated_draws(rho):
    found = ratios(np.full(T, 0.3), T * (1 - rho) / (1 + rho), rho)
    assert abs(np.mean(found) - 1.03) < 0.06


def test_invariances():
    """Of shift, scale and the unit of weights; a draw of weight 0 does not count; chains add."""
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(2, 1000)), rng.uniform(0.1, 2, size=1000)
    one = weighted_ess(x[0], w)
    np.testing.assert_allclose(weighted_ess(7 - 3 * x[0], 50 * w), one, rtol=1e-9)
    np.testing.assert_allclose(weighted_ess(x, w), one + weighted_ess(x[1], w), rtol=1e-12)
    np.testing.assert_allclose(
        weighted_ess(np.append(x[0], 99.0), np.append(w, 0.0), num_batches=31), one, rtol=1e-9
    )
    assert one.shape == ()


def test_limits():
    """A single draw with all the weight, numbers that are equal, and alternating ones."""
    w = np.zeros(100)
    w[40] = 2.0
    x = np.random.default_rng(2).normal(size=100)
    assert np.isnan(weighted_ess(x, w))  # a single draw has no variance
    w[41:] = 1e-9
    assert weighted_ess(x, w) < 2.01  # log10 of 100, times the one draw that counts
    assert np.isnan(weighted_ess(np.full(100, 0.1)))
    alternating = np.tile([1.0, -1.0], 50)
    assert weighted_ess(alternating, num_batches=10) == pytest.approx(200)


def test_bad_arguments():
    x = np.arange(10.0)
    for bad in ((x, -np.ones(10)), (x, np.zeros(10)), (np.array([1.0, np.nan, 2.0, 3.0]),)):
        with pytest.raises(ValueError, match="x holds nan or inf, or a weight"):
            weighted_ess(*bad)


@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_the_unit_of_the_weights_does_not_matter(unit):
    x, w = np.random.default_rng(0).normal(size=400), 1 / np.sqrt(1.0 + np.arange(400))
    assert weighted_ess(x, unit * w) == pytest.approx(float(weighted_ess(x, w)), rel=1e-9)
