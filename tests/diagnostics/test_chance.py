"""R-hat of right chains that are short, and of chains that differ."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.signal import lfilter

from numpyro_ext.diagnostics.checks.chains import _OF_SIZES, Agreement, _ess, _rhat
from numpyro_ext.diagnostics.limits import RHAT


def autoregressions(chains, each, numbers, rng):
    """Stationary ones with unit variance, as long as so many independent draws: of a coefficient a
    each draw is worth (1 - a) / (1 + a) of one, here 1/19."""
    noise = (1 - 0.9**2) ** 0.5 * rng.normal(size=(chains, 19 * each, numbers))
    noise[:, 0] /= (1 - 0.9**2) ** 0.5
    return lfilter([1.0], [1.0, -0.9], noise, axis=1)


@pytest.mark.parametrize("chains", [1, 4])
def test_right_chains_are_not_said_to_differ(chains):
    """Of 20 numbers with an effective size of 400 each about a tenth has an R-hat above 1.01 by
    chance, or half with four chains; one run in a hundred has one above the limit of the line."""
    x = autoregressions(chains, 400 // chains, 20, np.random.default_rng(0))
    found = Agreement({"x": x})
    assert np.any(found.rhat > RHAT)
    row = _rhat(found, found.by_chance(RHAT, 100 * chains))
    assert row.ok and float(row.limit) < 1.1, row


def test_chains_that_differ_are_said_to():
    """By 0.6 standard deviations, with an effective size of 1,000 each: R-hat is about 1.04."""
    x = autoregressions(2, 1000, 3, np.random.default_rng(1))
    x[1, :, 1] += 0.6
    found = Agreement({"x": x})
    row = _rhat(found, found.by_chance(RHAT, 200))
    assert row.ok is False and "x[1]" in row.verdict and 1.02 < row.value < 1.08


@pytest.mark.slow
def test_the_error_of_an_effective_size_is_its_scatter():
    """Over 200 numbers of two chains that are worth 160 draws: the scatter of a standard deviation
    of 200 values is 5 %, and the factor is the largest of several autoregressions."""
    x = autoregressions(2, 80, 200, np.random.default_rng(2))
    scatter = float(np.std(Agreement({"x": x}).ess))
    assert 0.75 < scatter / (_OF_SIZES * 160) ** 0.5 < 1.1


@pytest.mark.parametrize(("size", "ok"), [(230.0, True), (159.0, None), (100.0, False)])
def test_an_effective_size_is_wrong_only_beyond_its_error(size, ok):
    row = _ess(SimpleNamespace(ess=np.array([size]), names=["x"]), 200)
    assert row.ok is ok
    assert ok or "about" in row.verdict
