"""The one rule by which many numbers, each with a Monte Carlo error, are right or wrong."""

from collections.abc import Callable
import math
from typing import Any

import numpy as np

from numpyro_ext.diagnostics.table import Row

__all__ = ["decide", "judged_ranges", "judged_ratios", "judged_shifts", "together"]

_KNOWN = 0.1
"""The largest error of a ratio that is judged."""
RANGE, _RANGE_KNOWN = (0.8, 1.25), 0.22
"""Of ranges, whose error is larger than that of a standard deviation: as large as the limit."""


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
    known: float = _KNOWN,
) -> Row:
    """The line of the ratio that is farthest from 1; NaN where a number does not vary.

    :param wrong: the sentence about the ratio with this index.
    :param known: the largest error of a ratio that is judged.
    """
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
    """The line of the ranges of a half and of nine tenths of the draws, ``(2, n)`` ratios.

    They see shapes: one wide normal for two narrow modes has the right mean and the right sd.

    :param begins: the subject of the sentence about a wrong one, and its ``end``.
    """
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
        known=_RANGE_KNOWN,
    )


def judged_shifts(
    quantity: str,
    shifts: np.ndarray,
    errors: np.ndarray,
    limit: float,
    right: str,
    wrong: Callable[[int, float], str],
) -> Row:
    """The line of the largest shift, in standard deviations; the same for its limit.

    :param wrong: the sentence about the shift with this index.
    """
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


def together(rows: list[Row]) -> list[Row]:
    """These lines, none of which is right if one is not judged: means alone are no verdict."""
    if not any(row.not_judged for row in rows):
        return rows
    why = "not judged, since another line of this check could not be; the number is in its limits."
    return [row._replace(ok=None, verdict=why) if row.ok else row for row in rows]
