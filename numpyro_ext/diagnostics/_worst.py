"""Lines of the worst of many ratios or shifts, each with a Monte Carlo error."""

from collections.abc import Callable
import math

import numpy as np

from numpyro_ext.diagnostics._points import worst_of
from numpyro_ext.diagnostics.table import Row

__all__ = ["judged_ratios", "judged_shifts", "together"]


_KNOWN = 0.1
"""The largest error of a ratio that is judged."""


def _noise(errors: np.ndarray) -> np.ndarray:
    """What the largest of n errors may be; if all is right, that is no reason to complain."""
    return (1 + math.sqrt(2 * math.log(len(errors)))) * errors


def judged_ratios(
    quantity: str,
    ratios: np.ndarray,
    errors: np.ndarray,
    limits: tuple[float, float],
    right: str,
    wrong: Callable[[int, float], str],
) -> Row:
    """The line of the ratio that is farthest from 1; NaN where a number does not vary.

    It is wrong if it is outside of the limits by more than its error. It is not judged if it is
    outside by less, or if one of the ratios is not known to a tenth: of a heavy tail a few draws
    are all that is seen.

    :param wrong: the sentence about the ratio with this index.
    """
    low, high = limits
    ratios, errors = np.nan_to_num(ratios, nan=1.0), np.nan_to_num(errors)
    with np.errstate(divide="ignore"):
        significant = np.where(np.abs(np.log(ratios)) > _noise(errors / ratios), ratios, 1.0)
    outside = bool(np.any((significant + errors < low) | (significant - errors > high)))
    worst = worst_of(significant if outside else ratios, limits)
    ratio, error = float(ratios[worst]), float(errors[worst])
    limit = f"{low} to {high}"
    if not outside and not (low <= ratio <= high and errors.max(initial=0) <= _KNOWN):
        worst = worst if not low <= ratio <= high else int(np.argmax(errors))
        ratio, error = float(ratios[worst]), float(errors[worst])
        verdict = (
            "not judged: the ratio is not known well enough, because a few draws far out make most"
            " of a standard deviation, or there are few draws; take more of them."
        )
        return Row(quantity, ratio, error, limit, None, verdict, of_draws=True)
    verdict = wrong(worst, ratio) if outside else right
    return Row(quantity, ratio, error, limit, not outside, verdict, of_draws=True)


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
    shifts, errors = np.abs(np.nan_to_num(shifts)), np.nan_to_num(errors)
    significant = np.where(shifts > _noise(errors), shifts, 0.0)
    worst = int(np.argmax(significant - errors))
    outside = bool(significant[worst] - errors[worst] > limit)
    worst = worst if outside else int(np.argmax(shifts))
    shift, error = float(shifts[worst]), float(errors[worst])
    verdict = wrong(worst, shift) if outside else right
    return Row(quantity, shift, error, f"{limit}", not outside, verdict, of_draws=True)


def together(rows: list[Row]) -> list[Row]:
    """These lines, none of which is right if one is not judged: means alone are no verdict."""
    if not any(row.not_judged for row in rows):
        return rows
    why = "not judged, since another line of this check could not be; the number is in its limits."
    return [row._replace(ok=None, verdict=why) if row.ok else row for row in rows]
