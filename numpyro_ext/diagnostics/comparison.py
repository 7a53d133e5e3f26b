"""Means, standard deviations and shapes of draws beside a reference, and the lines about them.

Reference: Dekkers, Einmahl and de Haan, *A moment estimator for the index of an extreme-value
distribution* (Annals of Statistics 1989).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math
from typing import Any

from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import ndtri
import numpy as np

from numpyro_ext._model.normal import correlation_root, mean_and_sd
from numpyro_ext.diagnostics.limits import RATIO_KNOWN, SHAPE, SHAPE_KNOWN, SHIFT
from numpyro_ext.diagnostics.table import Row

MEAN, SD, SHAPES = "shift of the mean, worst", "sd ratio, worst", "shape, worst"
OF_DRAWS = MEAN, SD, SHAPES
"""The lines that compare the draws with the posterior."""
_SENTENCES = {
    MEAN: ("the means are right", "moves the mean of {name} by {by:.2g} of its sds"),
    SD: ("the sds are right", "makes the sd of {name} {by:.2g} times as large"),
    SHAPES: (
        "the middle half and nine tenths of the draws are as wide as they should be",
        "makes the interval with {interval} of the draws of {name} {by:.2g} times as wide, so the"
        " shape is another one",
    ),
}
"""What a line says where it is right, and where it is wrong."""
_SUBJECTS = {
    "weights": "importance weighting",
    "Markov chains": "a Markov chain on all data from each draw",
}
_INTERVALS = "the middle half", "nine tenths"

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
HEAVY = 0.3
"""Tail index from which on standard deviations are not compared: without a fourth moment, which
exists below 1/4, their error is not known. It is estimated with an error of 0.06 or more."""
_FEWEST = 1000
"""Draws from which on the index is known well enough."""
_NEARLY = 0.02
"""Shares nearer to 0 or 1 than this belong to a number that has one value in most draws."""
_MOST_CORRELATED = 300
"""Coordinates up to which the unit of points is their whole covariance."""


@dataclass(frozen=True)
class Comparison:
    """Numbers of the draws beside a reference, with Monte Carlo errors; NaN does not vary."""

    name: Callable[[int], str]
    """The name of a number."""
    remedy: str
    values: np.ndarray
    """``(4, n)`` means of the reference minus means of the draws, in sds of the draws, with errors;
    sds of the draws over sds of the reference, with errors."""
    widths: np.ndarray | None = None
    """``(2, 2, n)`` the widths of the intervals with a half and nine tenths of the draws, over
    widths of the reference, in sds of a normal, and errors: they see the shape."""
    limits: tuple[float, float] = (0.85, 1.15)
    """Limits of the ratios of sds."""
    farthest: float = SHIFT
    """The limit of the shift."""
    by: str = "weights"
    """What the draws are compared with."""
    num_combined: int = 0
    """How many of the numbers, the last ones, are linear combinations, which have no shift."""
    doubt: str | None = None
    """Why a reference that finds nothing wrong does not judge the draws, if so."""
    lost: str | None = None
    """Why the reference says nothing at all, which is wrong, if so."""
    draws: Any = None
    """The numbers of the draws, ``(m, n)``, and of the reference, for a picture."""

    def rows(self) -> list[Row]:
        """The lines of the worst shift, ratio and shape, none right if one could not be judged."""
        numbers = self.values[:, : self.values.shape[1] - self.num_combined]
        if self.lost is not None:
            least = float(np.nanmin(np.append(numbers[2], np.inf)))
            return [Row(SD, least, None, between(self.limits), False, self.lost, True)]
        rows = self._judged(self.values)
        if self.num_combined and not any(row.ok is False for row in rows[:2]):
            # The worst of many linear combinations is known less well.
            rows = self._judged(numbers)
        if self.doubt is not None and all(row.ok for row in rows):
            return [row._replace(ok=None, verdict=f"not judged: {self.doubt}.") for row in rows]
        return rows

    def _judged(self, values: np.ndarray) -> list[Row]:
        shift, shift_error, ratio, ratio_error = values
        mean = self._row(MEAN, shift, shift_error, (-self.farthest, self.farthest), self.farthest)
        sd = self._row(SD, ratio, ratio_error, self.limits, RATIO_KNOWN)
        rows = void_if_any_unjudged([mean, sd])
        # Where the draws lie elsewhere, the intervals have other shares in any case.
        if self.widths is None or rows[0].ok is False:
            return rows
        ratios, errors = self.widths.reshape(2, -1)
        shape = self._row(SHAPES, ratios, errors, SHAPE, SHAPE_KNOWN)
        return [*rows, void_if_any_unjudged([*rows, shape])[-1]]

    def _row(
        self,
        quantity: str,
        values: np.ndarray,
        errors: np.ndarray,
        limits: tuple[float, float],
        known: float,
    ) -> Row:
        """The line of the number that decides: of a distance, or of a ratio by its logarithm."""
        (low, high), (right, wrong) = limits, _SENTENCES[quantity]
        if quantity == MEAN:
            ok, worst = decide(values, errors, limits, known)
            value, limit = abs(float(values[worst])), f"{high:.2g}"
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(values), errors / values
            ok, worst = decide(*logs, (math.log(low), math.log(high)), known)
            value, limit = float(values[worst]), between(limits)
        if ok:
            verdict = f"{right} (by {self.by})."
        elif ok is False:
            per_number = len(_INTERVALS) if quantity == SHAPES else 1
            interval, number = divmod(worst, len(values) // per_number)
            by = value if quantity == MEAN else 1 / values[worst]
            wrong = wrong.format(name=self.name(number), by=by, interval=_INTERVALS[interval])
            verdict = f"{_SUBJECTS[self.by]} {wrong}; {self.remedy}."
        elif math.isnan(value):
            verdict = "not judged: none of the numbers varies by more than its rounding."
        else:
            verdict = (
                "not judged: the value is not known well enough, because there are few draws, a few"
                " far out make most of it, or none has moved; take more of them."
            )
        return Row(quantity, value, float(errors[worst]), limit, ok, verdict, of_draws=True)


def between(limits: tuple[float, float]) -> str:
    return f"{limits[0]} to {limits[1]}"


def void_if_any_unjudged(rows: Sequence[Row]) -> list[Row]:
    """These lines; if one is not judged, no other is right."""
    if all(row.ok is not None for row in rows):
        return list(rows)
    verdict = "not judged: within its limits, but another line of this check could not be judged."
    return [row._replace(ok=None, verdict=verdict) if row.ok else row for row in rows]


def decide(
    values: np.ndarray, errors: np.ndarray, limits: tuple[float, float], known: float
) -> tuple[bool | None, int]:
    """Whether all numbers are right, one is wrong, or neither is known; and which one says so.

    Wrong is a number beyond a limit by more than its error, and off by more than the error that the
    largest of so many has by chance. Right are numbers within the limits that are known. An error
    of 0 or NaN is no evidence: chains are stuck, or a few outliers dominate a mean.

    :param values: ``(n,)`` distances from the right value; NaN for numbers that say nothing.
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


def is_heavy(x: Any, median: Any) -> Any:
    """``(n,)``: whether the tail of ``(m, n)`` draws is too heavy for their sd to have an error."""
    m = len(x)
    size = min(math.ceil(3 * math.sqrt(m)) + 1, m)
    # In the precision of the distances: in a smaller one a collapse would overflow.
    if isinstance(x, np.ndarray):
        xp, farthest = np, np.sort(np.abs(x - median), 0)[::-1][:size]
    else:
        xp, farthest = jnp, lax.top_k(jnp.abs(x - median).T, size)[0].T
    with np.errstate(divide="ignore", invalid="ignore"):
        e = xp.log(farthest[:-1] / farthest[-1])
        first, second = xp.mean(e, 0), xp.mean(e**2, 0)
        index = first + 1 - 0.5 / (1 - first**2 / second)
    return (index > HEAVY) & (m >= _FEWEST)


def inside(y: Any, levels: Any) -> Any:
    """``(3, ..., n)``: 1 in the middle half, in the middle nine tenths, and below the median, by
    ``(5, n)`` quantiles at :data:`LEVELS`."""
    low, quarter, middle, three_quarters, high = levels
    half, most = (y >= quarter) & (y <= three_quarters), (y >= low) & (y <= high)
    return jnp.stack([half, most, y <= middle]).astype(float)


def shares_to_sd_ratios(
    before: Any, error: Any, after: Any, error_after: Any, least: float
) -> tuple[Any, Any, Any, Any]:
    """Ratios ``(2, n)`` of the sds of two normals that have these shares ``(3, n)`` of
    :func:`inside`, and shifts ``(n,)`` of their medians, each with its error.

    :param least: a share that is smaller cannot be told from 0, nor one as near to 1 from 1.
    """
    spread, middle = slice(0, 2), 2

    def density(z: Any) -> Any:
        return jnp.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    def half_width(share: Any, error: Any) -> tuple[Any, Any]:
        c = ndtri(0.5 + 0.5 * jnp.clip(share[spread], least, 1 - least))
        return c, error[spread] / (2 * density(c) * c)

    def place(share: Any, error: Any) -> tuple[Any, Any]:
        z = ndtri(jnp.clip(share[middle], least, 1 - least))
        return z, error[middle] / density(z)

    error_after = jnp.maximum(error_after, least)
    (c, e), (c_after, e_after) = half_width(before, error), half_width(after, error_after)
    (z, f), (z_after, f_after) = place(before, error), place(after, error_after)
    ratio = c_after / c
    spreads = (before > _NEARLY) & (before < 1 - _NEARLY)
    ratio_error = ratio * jnp.sqrt(e**2 + e_after**2)
    return (
        jnp.where(spreads[spread], ratio, jnp.nan),
        jnp.where(spreads[spread], ratio_error, 0.0),
        jnp.where(spreads[middle], z - z_after, jnp.nan),
        jnp.where(spreads[middle], jnp.sqrt(f**2 + f_after**2), 0.0),
    )


def least_spread(centre: Any, eps: Any) -> Any:
    """The standard deviation below which numbers differ by rounding alone."""
    return 2 * eps * abs(centre)


def unit_root(x: Array) -> Array:
    """The lower root of the covariance of ``(m, d)`` points; their sds ``(d,)`` if d is large."""
    (m, d), (mean, sd) = x.shape, mean_and_sd(x)
    scale = jnp.where(sd > 0, sd, 1.0)
    if d >= m or d > _MOST_CORRELATED:
        return scale
    return scale[:, None] * correlation_root((x - mean) / scale, m)
