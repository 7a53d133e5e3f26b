"""Modes in one number of short chains, and chains that are too short, without running any."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ndtri

from numpyro_ext.diagnostics import Diagnosis
from numpyro_ext.diagnostics._spread import MoveComparison, least_crossing
from numpyro_ext.diagnostics.judges.exact_moves import GUIDE, PARTICLES, HMCCheck, rows_of_moves

TWO = np.concatenate([np.linspace(-5, -3, 300), np.linspace(3, 5, 100)])[:, None]
ONE = ndtri((np.arange(400) + 0.5) / 400)[:, None]


def test_chains_that_stay_on_their_side():
    """Of 100 chains on the smaller side none crosses: 3 at most, with 95 % confidence."""
    assert least_crossing(TWO, TWO - 1, TWO + 1) == (pytest.approx(3 / 100), 0)
    # Of a Poisson number that is 50 the limit is 50 + 2 sqrt(50) + 3.
    low = TWO - 1
    low[-50:] = -4
    assert least_crossing(TWO, low, TWO + 1)[0] == pytest.approx((53 + 2 * 50**0.5) / 100)
    # The least of two.
    both = np.concatenate([ONE, TWO], 1)
    value, index = least_crossing(both, both - 1, both + 1)
    assert (value, index) == (pytest.approx((3 + math.log(2)) / 100), 1)


def test_one_mode_has_no_sides_however_slow_its_chains_are():
    for x in (ONE, np.exp(ONE), ONE**3, np.ones((400, 1)), np.linspace(0, 1, 400)[:, None]):
        for step in (1e-3, 0.05, 1.0):
            assert least_crossing(x, x - step, x + step)[0] == math.inf
    few = np.array([[-1.0], [1.0]] * 4)
    assert least_crossing(few, few, few)[0] == math.inf


def spread(x, between):
    """Of chains that find nothing wrong, and of which so much variance is between them."""
    one, zero, ends = jnp.ones(1), jnp.zeros(1), jnp.stack([x, x - 1, x + 1])
    return MoveComparison(one, 0.01 * one, zero, 0.01 * one, between * one, ends, jnp.array(0.7))


def test_chains_that_are_too_short_judge_nothing_unless_weights_do():
    for between, known, ok in ((0.9, False, None), (0.9, True, True), (0.2, False, True)):
        rows = rows_of_moves(HMCCheck(spread(ONE, between), str, GUIDE, shares_known=known))
        assert [row.ok for row in rows] == [ok, ok]
        assert Diagnosis("", tuple(rows)).ok is bool(ok)
    assert (
        "too short for 0, of whose variance 90% is"
        in rows_of_moves(HMCCheck(spread(ONE, 0.9), str, GUIDE))[0].verdict
    )


def test_draws_far_away_are_to_begin_elsewhere_and_not_to_be_trained_longer():
    near = spread(ONE, 0.2)
    for shift, words in ((2.0, "train longer"), (-30.0, "elsewhere: begin at the modes")):
        row = rows_of_moves(HMCCheck(near._replace(shift=jnp.array([shift])), str, GUIDE))[1]
        assert row.ok is False and words in row.verdict


@pytest.mark.parametrize(("kind", "words"), [(GUIDE, "of the guide"), (PARTICLES, "began there")])
def test_shares_of_modes_that_nothing_has_checked_are_wrong(kind, words):
    row = rows_of_moves(HMCCheck(spread(TWO, 0.95), str, kind))[-1]
    assert row.quantity == "crossing rate between modes" and row.ok is False
    assert words in row.verdict
    assert len(rows_of_moves(HMCCheck(spread(TWO, 0.95), str, kind, shares_known=True))) == 2
