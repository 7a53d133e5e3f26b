"""The thresholds of :func:`diagnose`, and the rules by which a value with an error is right.

Those by which a running ensemble warns too are in ``scores.implied_sd``.
"""

from collections.abc import Callable
import math
from typing import Any

import numpy as np

from numpyro_ext.diagnostics.table import Row

TEMPERATURE = 0.1
"""Relative error of a temperature or of an implied variance that is still fine."""
DIVERGING = 0.01
"""Share of the transitions of a stochastic-gradient kernel that may be refused."""
RHAT = 1.01
ESS, ESS_EACH = 400, 100
"""The limit of the effective sample size, and that of it per chain where this is less."""

FALL, LOST = 0.1, 0.01
"""Nats by which the losses may still fall over the last fifth, and the share of the last ones that
may not be finite."""
STEP_NOISE = 0.1
PROXY_NOISE, PENALTY_NOISE = 0.1, 0.1
"""Nats of noise up to which some rows stand in for all, and draws for the expectations in a
penalty: the means move by as many sds at most."""

BAD_UNITS, NO_DENSITY = 0.05, 0.1
"""Shares of units with a large k-hat, and of draws without a density under the model."""
WEIGHTED_RATIO = (0.85, 1.2)
GAP, GAP_EACH = 0.5, 0.05
"""Nats, and more for each number: 0.02 to 0.05 is what a number at the limits of its mean and its
standard deviation adds to the Kullback-Leibler divergence."""

SHIFT = 0.2
PARTICLES_RATIO, PARTICLES_SHIFT = (0.8, 1.2), 0.3
"""The mean of 100 particles that are random draws is off by 0.1, and the worst of ten by more."""
MOVED_RATIO = (0.85, 1.15)
"""Nearer than by weights: short chains have not left all of their bias behind."""
SHAPE, SHAPE_KNOWN = (0.8, 1.25), 0.22
"""Limits of the widths of intervals, and the largest error of one that is judged, which is as large
as the limit."""
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
FEWEST_EFFECTIVE = 50
"""Draws of chains below which moves would say nothing that the effective size does not."""
NARROW = 0.86
"""The ratio to a Gibbs step of normals whose standard deviation is 0.8 of the right one."""

SHARES = 0.2
"""Standard deviations by which means may be off because modes have other shares of the draws."""
DEPARTURE, ELSEWHERE = 0.3, 0.1
"""The distance of the posterior from a normal at a mode above which Laplace's evidence is doubtful,
and the share of draws that may be at no known mode."""


def particles_shift(m: int) -> float:
    """The limit of the mean of m particles, which is nearer where they are more than 100."""
    return max(SHIFT, min(PARTICLES_SHIFT, 3 / math.sqrt(m)))


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
) -> Row:
    """A line with one of two verdicts."""
    return Row(quantity, value, error, limit, ok, right if ok else wrong)


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
    is allowed, or by three errors; ``wrong`` makes the sentence about this mean."""
    from arviz_stats.base.array import array_stats

    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mcse: Any = array_stats.mcse(x, chain_axis=0, draw_axis=1, method="mean")
    value, error = float(np.mean(x)), float(mcse)
    excess = max(bounds[0] - value, value - bounds[1])
    if math.isfinite(value) and math.isnan(error):
        verdict = "not judged: the Monte Carlo error needs 4 draws of each chain; draw more."
        return Row(quantity, value, None, limit, None, verdict, True)
    if allowed < excess <= 3 * error and error > allowed:
        verdict = (
            "not judged: the value is outside of its limits by less than three Monte Carlo errors;"
            " draw more."
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
    - **Not judged** (None) otherwise. An error of 0 or NaN is no evidence: it comes from chains
      that are stuck, or from a mean that a few outliers dominate.

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
        distance = np.where(some, np.maximum(values / limits[0], values / limits[1]), -np.inf)
    if np.max(beyond) > 1:
        return False, int(np.argmax(np.where(beyond > 1, distance, -np.inf)))
    if np.max(distance) > 1:
        return None, int(np.argmax(distance))
    if np.max(errors[some]) > known:
        return None, int(np.argmax(np.where(some, errors, -np.inf)))
    return True, int(np.argmax(distance))
