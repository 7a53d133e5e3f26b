"""Means, standard deviations and shapes of draws beside a reference, and the lines about them."""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

import numpy as np

from numpyro_ext.diagnostics.limits import RATIO_KNOWN, SHAPE, SHAPE_KNOWN, SHIFT
from numpyro_ext.diagnostics.table import Row

MEAN, SD, SHAPES = "shift of the mean, worst", "sd ratio, worst", "shape, worst"
OF_DRAWS = MEAN, SD, SHAPES
"""The lines that compare the draws with the posterior."""
_INTERVALS = "the middle half", "nine tenths"


class Comparison(NamedTuple):
    """Numbers of the draws beside the same numbers of a reference, such as the draws after moves of
    a Markov chain. Errors are Monte Carlo errors; NaN is a number that does not vary."""

    reference: str
    """What the draws are compared with, as the subject of a sentence."""
    by: str
    """The same in a word or two."""
    name: Callable[[int], str]
    """The name of a number."""
    remedy: str
    shift: np.ndarray
    """``(n,)`` mean of the reference minus the mean of the draws, in sds of the draws."""
    shift_error: np.ndarray
    ratio: np.ndarray
    """``(n,)`` sd of the draws over the sd of the reference."""
    ratio_error: np.ndarray
    widths: np.ndarray | None = None
    """``(2, n)`` the widths of the intervals with a half and nine tenths of the draws over the same
    widths of the reference, in sds of a normal: they see the shape, as of one wide normal for two
    modes."""
    width_errors: np.ndarray | None = None
    limits: tuple[float, float] = (0.85, 1.15)
    """Limits of the ratios of sds."""
    farthest: float = SHIFT
    """The limit of the shift."""
    elsewhere: str = ""
    """The remedy where the draws are 10 sds and more from where they belong."""

    def rows(self) -> list[Row]:
        """The lines of the worst shift, ratio and shape. None of them is right if one of the first
        two could not be judged, because a mean alone does not judge the draws."""
        most = self.farthest
        decided = decide(self.shift, self.shift_error, (-most, most), most)
        distances, right = np.abs(self.shift), "the means are right"
        mean = self._row(
            MEAN, distances, self.shift_error, f"{most:.2g}", decided, right, self._wrong_mean
        )
        right, known = "the sds are right", RATIO_KNOWN
        sd = self._row_of_ratio(
            SD, self.ratio, self.ratio_error, self.limits, known, right, self._wrong_sd
        )
        rows = void_if_any_unjudged([mean, sd])
        # Where the draws lie elsewhere, the intervals have other shares in any case.
        if self.widths is None or self.width_errors is None or rows[0].ok is False:
            return rows
        widths, errors = np.ravel(self.widths), np.ravel(self.width_errors)
        right = "the middle half and nine tenths of the draws are as wide as they should be"
        shape = self._row_of_ratio(
            SHAPES, widths, errors, SHAPE, SHAPE_KNOWN, right, self._wrong_shape
        )
        return [*rows, void_if_any_unjudged([*rows, shape])[-1]]

    def _wrong_mean(self, k: int) -> str:
        by = abs(self.shift[k])
        remedy = self.elsewhere if self.elsewhere and by > 10 else self.remedy
        return f"moves the mean of {self.name(k)} by {by:.2g} of its sds; {remedy}."

    def _wrong_sd(self, k: int) -> str:
        by = 1 / self.ratio[k]
        return f"makes the sd of {self.name(k)} {by:.2g} times as large; {self.remedy}."

    def _wrong_shape(self, k: int) -> str:
        assert self.widths is not None
        interval, number = divmod(k, self.widths.shape[1])
        return (
            f"makes the interval with {_INTERVALS[interval]} of the draws of {self.name(number)}"
            f" {1 / np.ravel(self.widths)[k]:.2g} times as wide, so the shape is another one;"
            f" {self.remedy}."
        )

    def _row_of_ratio(
        self,
        quantity: str,
        ratios: np.ndarray,
        errors: np.ndarray,
        limits: tuple[float, float],
        known: float,
        right: str,
        wrong: Callable[[int], str],
    ) -> Row:
        low, high = limits
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(ratios), errors / ratios
        decided = decide(*logs, (math.log(low), math.log(high)), known)
        return self._row(quantity, ratios, errors, f"{low} to {high}", decided, right, wrong)

    def _row(
        self,
        quantity: str,
        values: np.ndarray,
        errors: np.ndarray,
        limit: str,
        decided: tuple[bool | None, int],
        right: str,
        wrong: Callable[[int], str],
    ) -> Row:
        ok, worst = decided
        value, error = float(values[worst]), float(errors[worst])
        if ok is not None:
            verdict = f"{right} (by {self.by})." if ok else f"{self.reference} {wrong(worst)}"
        elif math.isnan(value):
            verdict = "not judged: none of the numbers varies by more than its rounding."
        elif not error > 0:
            verdict = "not judged: the value has no Monte Carlo error, as if no draw had moved."
        else:
            verdict = (
                "not judged: the value is not known well enough, because there are few draws or a"
                " few far out make most of it; take more of them."
            )
        return Row(quantity, value, error, limit, ok, verdict, of_draws=True)


def void_if_any_unjudged(rows: Sequence[Row]) -> list[Row]:
    """These lines, none of which is right if one is not judged."""
    if all(row.ok is not None for row in rows):
        return list(rows)
    verdict = "not judged: within its limits, but another line of this check could not be judged."
    return [row._replace(ok=None, verdict=verdict) if row.ok else row for row in rows]


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
