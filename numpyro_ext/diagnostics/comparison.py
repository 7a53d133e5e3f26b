"""Means, standard deviations and shapes of draws beside those of a reference, and their lines."""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

import numpy as np

from numpyro_ext.diagnostics.limits import RATIO_KNOWN, SHAPE, SHAPE_KNOWN, SHIFT, decide
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
    """``(n,)`` mean of the reference minus that of the draws, in sds of the draws."""
    shift_error: np.ndarray
    ratio: np.ndarray
    """``(n,)`` sd of the draws over that of the reference."""
    ratio_error: np.ndarray
    widths: np.ndarray | None = None
    """``(2, n)`` the widths of the intervals with a half and nine tenths of the draws over those of
    the reference, in sds of a normal: they see the shape, as of one wide normal for two modes."""
    width_errors: np.ndarray | None = None
    limits: tuple[float, float] = (0.85, 1.15)
    """Of the ratios of sds."""
    farthest: float = SHIFT
    """The limit of the shift."""
    elsewhere: str = ""
    """The remedy where the draws are 10 sds and more from where they belong."""

    def rows(self) -> list[Row]:
        """The lines of the worst shift, ratio and shape. None of them is right if one of the first
        two could not be judged, because a mean alone says nothing of the draws."""
        rows = void_if_any_unjudged([self._row_of_shift(), self._row_of_ratio()])
        # Where the draws lie elsewhere, the intervals have other shares in any case.
        if self.widths is not None and rows[0].ok is not False:
            rows.append(void_if_any_unjudged([*rows, self._row_of_shape()])[-1])
        return rows

    def _row_of_shift(self) -> Row:
        limits = -self.farthest, self.farthest
        decided = decide(self.shift, self.shift_error, limits, self.farthest)

        def wrong(k: int) -> str:
            by = abs(self.shift[k])
            remedy = self.elsewhere if self.elsewhere and by > 10 else self.remedy
            return f"moves the mean of {self.name(k)} by {by:.2g} of its sds; {remedy}."

        right = "the means are right"
        values = np.abs(self.shift), self.shift_error
        return self._row(MEAN, *values, f"{self.farthest:.2g}", decided, right, wrong)

    def _row_of_ratio(self) -> Row:
        def wrong(k: int) -> str:
            by = 1 / self.ratio[k]
            return f"makes the sd of {self.name(k)} {by:.2g} times as large; {self.remedy}."

        decided = _decide_ratios(self.ratio, self.ratio_error, self.limits, RATIO_KNOWN)
        low, high = self.limits
        values, right = (self.ratio, self.ratio_error), "the sds are right"
        return self._row(SD, *values, f"{low} to {high}", decided, right, wrong)

    def _row_of_shape(self) -> Row:
        assert self.widths is not None
        assert self.width_errors is not None
        values, errors = np.ravel(self.widths), np.ravel(self.width_errors)
        n = self.widths.shape[1]

        def wrong(k: int) -> str:
            return (
                f"makes the interval with {_INTERVALS[k // n]} of the draws of {self.name(k % n)}"
                f" {1 / values[k]:.2g} times as wide, so the shape is another one; {self.remedy}."
            )

        decided = _decide_ratios(values, errors, SHAPE, SHAPE_KNOWN)
        right = "the middle half and nine tenths of the draws are as wide as they should be"
        low, high = SHAPE
        return self._row(SHAPES, values, errors, f"{low} to {high}", decided, right, wrong)

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


def _decide_ratios(
    ratios: np.ndarray, errors: np.ndarray, limits: tuple[float, float], known: float
) -> tuple[bool | None, int]:
    low, high = limits
    with np.errstate(divide="ignore", invalid="ignore"):
        return decide(np.log(ratios), errors / ratios, (math.log(low), math.log(high)), known)


def not_judged(why: str, limits: tuple[float, float]) -> Row:
    """The line that says why the draws could not be compared."""
    low, high = limits
    return Row(SD, math.nan, None, f"{low} to {high}", None, f"not judged: {why}.", True)


def void_if_any_unjudged(rows: Sequence[Row]) -> list[Row]:
    """These lines, none of which is right if one is not judged."""
    if all(row.ok is not None for row in rows):
        return list(rows)
    verdict = "not judged: within its limits, but another line of this check could not be judged."
    return [row._replace(ok=None, verdict=verdict) if row.ok else row for row in rows]
