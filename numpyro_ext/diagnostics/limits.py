"""The thresholds of :func:`diagnose`, and the rules by which a value with an error is right.

Those by which a running ensemble warns too are in ``scores.implied_sd``.

A value is **wrong** if it is beyond its limit by more than its Monte Carlo error makes of it by
chance, **right** if it is within and known, **not judged** if its error is larger than that or no
number, and **for information** if it has no limit.
"""

from collections.abc import Callable
import math
from typing import Any

import numpy as np

from numpyro_ext.diagnostics.table import Row

__all__ = ["decide", "farthest", "judged", "judged_mean", "judged_ranges", "judged_ratios"]
__all__ += ["judged_shifts", "void_if_any_unjudged", "worst_rows"]

TEMPERATURE = 0.1
"""Relative error of a temperature or of an implied variance that is still fine."""
DIVERGING = 0.01
RHAT = 1.01
ESS, ESS_EACH = 400, 100
"""The limit of the effective sample size, and that of it per chain where this is less."""
SLOWER = 20
"""Measured over predicted transitions per independent draw that is still near normal."""

FALL, LOST = 0.1, 0.01
"""Nats by which the losses may still fall over the last fifth, and the share of the last ones that
may not be finite."""
STEP_NOISE = 0.1
PROXY_NOISE, PENALTY_NOISE = 0.1, 0.1
"""Nats of noise up to which some rows stand in for all, and draws for the expectations in a
penalty: the means move by as many sds at most."""

BAD_UNITS, NO_DENSITY = 0.05, 0.1
"""Shares of units with a large k-hat, and of draws without a density under the model."""
WEIGHTED_RATIO, WEIGHTED_SHIFT = (0.85, 1.2), 0.2
GAP, GAP_EACH = 0.5, 0.05
"""Nats, and more for each number: 0.02 to 0.05 is what a number at the limits of its mean and its
standard deviation adds to the Kullback-Leibler divergence."""

PARTICLES_RATIO, PARTICLES_SHIFT = (0.8, 1.2), 0.3
"""The mean of 100 particles that are random draws is off by 0.1, and the worst of ten by more."""
MOVED_RATIO, MOVED_SHIFT = (0.85, 1.15), 0.2
"""The same limits as of the implied ratio: short chains have not left all of their bias behind."""
RANGE, RANGE_KNOWN = (0.8, 1.25), 0.22
"""Limits of ranges, and the largest error of one that is judged, which is as large as the limit."""
RATIO_KNOWN = 0.1
"""The largest error of a ratio that is judged."""
CROSSING = 0.6
"""Of chains that are slow but have one mode more change sides: 0.67 and more in a banana whose
width is a tenth of its length, and at most 0.6 with modes 8 standard deviations apart."""
STAY = 0.4
"""Share of the variance that is between chains above which they are too short to judge alone."""
STUCK, FREE = 0.1, 0.995
"""Share of accepted trajectories below which the points are stuck, and above which the steps are so
small that they say nothing."""
MOST_DENSITIES, MOST_OPERATIONS = 10**9, 2 * 10**10
"""The most log densities of sites for particles, and the most floats for draws, that moves compute
without being asked: a few seconds of a core."""
FEWEST_EFFECTIVE = 50
"""Draws of chains below which moves would say nothing that the effective size does not."""
UNVISITED = 0.02
"""The smallest share of the mass at which an unvisited mode is named."""

SHARES = 0.2
"""Standard deviations by which means may be off because modes have other shares of the draws."""
DEPARTURE, ELSEWHERE = 0.3, 0.1
"""The distance of the posterior from a normal at a mode above which Laplace's evidence is doubtful,
and the share of draws that may be at no known mode."""

UNCONVERGED, COLLAPSED = 0.01, 0.99
"""Shares of the data whose local inference may stop early, and that may be in one state."""
NARROW = 0.86
"""The ratio to a Gibbs step of normals whose standard deviation is 0.8 of the right one."""


def particles_shift(m: int) -> float:
    """The limit of the mean of m particles, which is nearer where they are more than 100."""
    return max(MOVED_SHIFT, min(PARTICLES_SHIFT, 3 / math.sqrt(m)))


def farthest(d: int) -> float:
    """The square of the distance from the center of N(0, I) in d dimensions within which nearly all
    draws lie: four standard deviations above its mean."""
    return d + 4 * math.sqrt(2 * d)


def judged(
    quantity: str,
    value: float,
    limit: str,
    ok: bool,
    right: str,
    wrong: str,
    error: float | None = None,
    *,
    of_draws: bool = False,
) -> Row:
    """A line with one of two verdicts."""
    return Row(quantity, value, error, limit, ok, right if ok else wrong, of_draws)


def judged_mean(
    quantity: str,
    x: np.ndarray,
    limit: str,
    bounds: tuple[float, float],
    allowed: float,
    right: str,
    wrong: Callable[[float], str],
) -> Row:
    """The line of the mean of ``(chain, draw)`` numbers, which may be outside of the bounds by what
    is allowed, or by three errors; ``wrong`` is the sentence about this mean."""
    from arviz_stats.base.array import array_stats

    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Any = array_stats.mcse(x, chain_axis=0, draw_axis=1, method="mean")
    value, error = float(np.mean(x)), float(found)
    excess = max(bounds[0] - value, value - bounds[1])
    if math.isfinite(value) and math.isnan(error):
        verdict = "its error takes 4 draws of each chain, so it is not judged; draw more."
        return Row(quantity, value, None, limit, None, verdict, True)
    if allowed < excess <= 3 * error and error > allowed:
        verdict = (
            "not judged: the value is outside of its limits, and its error is larger than they are;"
            " look at the other lines, or draw more."
        )
        return Row(quantity, value, error, limit, None, verdict, True)
    ok = not (excess > allowed and excess > 3 * error) and math.isfinite(value)
    return Row(quantity, value, error, limit, ok, right if ok else wrong(value), True)


def decide(
    values: np.ndarray, errors: np.ndarray, limits: tuple[float, float], known: float
) -> tuple[bool | None, int]:
    """Whether all numbers are right, one of them is wrong, or they are not judged; and the one that
    says so.

    - **Wrong**: a number is beyond a limit by more than its error, and off by more than the error
      that the largest of so many has by chance.
    - **Right**: there are numbers, and all are within the limits and known.
    - **Not judged** (None) otherwise. An error that is 0, or no number, is no evidence: draws that
      do not move give such errors, and a few draws far out that are all that is seen.

    :param values: ``(n,)`` distances from what is right; NaN for numbers that say nothing.
    :param limits: one below 0, one above.
    :param known: the largest error of a number that is known.
    """
    some = ~np.isnan(values)
    if not np.any(some):
        return None, 0
    with np.errstate(invalid="ignore"):
        errors = np.where(errors > 0, errors, np.inf)
        by_chance = (1 + math.sqrt(2 * math.log(len(values)))) * errors
        surely = some & (np.abs(values) > by_chance)
        beyond = np.maximum((values + errors) / limits[0], (values - errors) / limits[1])
        beyond = np.where(surely, beyond, -np.inf)
        farthest = np.where(some, np.maximum(values / limits[0], values / limits[1]), -np.inf)
    if np.max(beyond) > 1:
        return False, int(np.argmax(np.where(beyond > 1, farthest, -np.inf)))
    if np.max(farthest) > 1:
        return None, int(np.argmax(farthest))
    if np.max(errors[some]) > known:
        return None, int(np.argmax(np.where(some, errors, -np.inf)))
    return True, int(np.argmax(farthest))


def judged_ratios(
    quantity: str,
    ratios: np.ndarray,
    errors: np.ndarray,
    limits: tuple[float, float],
    right: str,
    wrong: Callable[[int, float], str],
    known: float = RATIO_KNOWN,
) -> Row:
    """The line of the ratio farthest from 1 (NaN does not vary); ``wrong`` is the sentence about
    that one."""
    low, high = limits
    with np.errstate(divide="ignore", invalid="ignore"):
        found = decide(np.log(ratios), errors / ratios, (math.log(low), math.log(high)), known)
    return _row(quantity, ratios, errors, f"{low} to {high}", found, right, wrong)


def judged_ranges(
    quantity: str,
    ratios: Any,
    errors: Any,
    name: Callable[[int], str],
    begins: str,
    end: str,
) -> Row:
    """The line of the ranges of a half and of nine tenths of the draws, ``(2, n)`` ratios, which
    see the shape: one wide normal for two narrow modes has the right mean and sd."""
    ratios, errors = np.asarray(ratios, float), np.asarray(errors, float)
    n = ratios.shape[1]
    share = ("the middle half", "nine tenths")
    return judged_ratios(
        quantity,
        ratios.ravel(),
        errors.ravel(),
        RANGE,
        "the middle half of the draws, and nine tenths of them, are as wide as they should be.",
        lambda k, by: (
            f"{begins} the range of {share[k // n]} of the draws of {name(k % n)} {1 / by:.2g}"
            f" times what it is (in sds of a normal), so the shape is another one; {end}"
        ),
        known=RANGE_KNOWN,
    )


def judged_shifts(
    quantity: str,
    shifts: np.ndarray,
    errors: np.ndarray,
    limit: float,
    right: str,
    wrong: Callable[[int, float], str],
) -> Row:
    """The line of the largest shift, in standard deviations; the same for its limit."""
    found = decide(shifts, errors, (-limit, limit), limit)
    return _row(quantity, np.abs(shifts), errors, f"{limit}", found, right, wrong)


def _row(
    quantity: str,
    values: np.ndarray,
    errors: np.ndarray,
    limit: str,
    found: tuple[bool | None, int],
    right: str,
    wrong: Callable[[int, float], str],
) -> Row:
    ok, worst = found
    value, error = float(values[worst]), float(errors[worst])
    if ok is not None:
        verdict = right if ok else wrong(worst, value)
    elif math.isnan(value):
        verdict = "not judged: none of the numbers varies by more than its rounding."
    elif not error > 0:
        verdict = "not judged: the value has no Monte Carlo error, as of draws that do not move."
    else:
        verdict = (
            "not judged: the value is not known well enough, because a few draws far out make most"
            " of it, or there are few draws; take more of them."
        )
    return Row(quantity, value, error, limit, ok, verdict, of_draws=True)


def void_if_any_unjudged(rows: list[Row]) -> list[Row]:
    """These lines, none of which is right if one is not judged: means alone are no verdict."""
    if not any(row.not_judged for row in rows):
        return rows
    why = "not judged, since another line of this check could not be; the number is in its limits."
    return [row._replace(ok=None, verdict=why) if row.ok else row for row in rows]


def worst_rows(groups: list[list[Row]]) -> list[Row]:
    """The worst line of each quantity in several groups: wrong, then not judged, then right."""
    found: dict[str, Row] = {}
    rank = {False: 0, None: 1, True: 2}
    for row in (row for rows in groups for row in rows):
        known = found.setdefault(row.quantity, row)
        if rank[row.ok] < rank[known.ok]:
            found[row.quantity] = row
    return list(found.values())
