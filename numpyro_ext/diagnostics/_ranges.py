"""Ranges that hold given shares of draws: they see shapes, and a heavy tail does not change them.

Reference: Dekkers, Einmahl and de Haan, *A moment estimator for the index of an extreme-value
distribution* (Annals of Statistics 1989).
"""

import math
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jax.scipy.stats import norm
import numpy as np

__all__ = ["HEAVY", "LEVELS", "as_widths", "inside", "is_heavy", "tail_size"]

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
HEAVY = 0.3
"""Tail index from which on standard deviations are not compared: without a fourth moment, which
exists below 1/4, their error is not known. It is estimated with an error of 0.06 or more."""
_FEWEST = 1000
"""Draws from which on the index is known well enough."""
_NEARLY = 0.02
"""Shares nearer to 0 or 1 than this are those of a number that has one value in most draws."""


def tail_size(m: int) -> int:
    """The number of draws, farthest from their median, that make the tail."""
    return math.ceil(3 * math.sqrt(m))


def is_heavy(farthest: Any, m: int) -> Any:
    """``(n,)``: whether a tail is so heavy that its standard deviation has no error.

    :param farthest: ``(k + 1, n)`` largest distances of ``m`` draws from their median, the largest
        first.
    """
    # In the precision of the distances: in a smaller one, those of a collapse would overflow.
    xp: Any = np if isinstance(farthest, np.ndarray) else jnp
    with np.errstate(divide="ignore", invalid="ignore"):
        e = xp.log(farthest[:-1] / farthest[-1])
        first, second = xp.mean(e, 0), xp.mean(e**2, 0)
        index = first + 1 - 0.5 / (1 - first**2 / second)
    return (index > HEAVY) & (m >= _FEWEST)


def inside(y: Any, levels: Any) -> Any:
    """``(3, ..., n)``: 1 in the middle half, in the middle nine tenths, and below the median.

    :param levels: ``(5, n)`` quantiles at :data:`LEVELS`.
    """
    low, quarter, middle, three_quarters, high = levels
    half, most = (y >= quarter) & (y <= three_quarters), (y >= low) & (y <= high)
    return jnp.stack([half, most, y <= middle]).astype(float)


def as_widths(
    before: Any, error: Any, after: Any, error_after: Any, least: float
) -> tuple[Array, Array, Array, Array]:
    """Shares of draws and of what they became, in the units of normals that have these shares.

    A normal has 90 % of its draws in the interval; if 96 % of what they became are in it, the sd of
    these is 0.8 of theirs. A number that has one value in most of the draws has no such ratio.

    :param before: ``(3, n)`` shares of :func:`inside`, and ``after`` the later ones.
    :param least: a share that is smaller cannot be told from 0, nor one as near to 1 from 1.
    :return: ``(2, n)`` ratios of the standard deviation to the later one, their errors, ``(n,)``
        shifts of the median in standard deviations, and their errors.
    """
    spread, middle = slice(0, 2), 2

    def half_width(share: Any, error: Any) -> tuple[Array, Array]:
        c = ndtri(0.5 + 0.5 * jnp.clip(share[spread], least, 1 - least))
        return c, error[spread] / (2 * norm.pdf(c) * c)

    def place(share: Any, error: Any) -> tuple[Array, Array]:
        z = ndtri(jnp.clip(share[middle], least, 1 - least))
        return z, error[middle] / norm.pdf(z)

    error_after = jnp.maximum(error_after, least)
    (c, e), (c_after, e_after) = half_width(before, error), half_width(after, error_after)
    (z, f), (z_after, f_after) = place(before, error), place(after, error_after)
    ratio = c_after / c
    known = (before > _NEARLY) & (before < 1 - _NEARLY)
    ratio_error = ratio * jnp.sqrt(e**2 + e_after**2)
    return (
        jnp.where(known[spread], ratio, jnp.nan),
        jnp.where(known[spread], ratio_error, 0.0),
        jnp.where(known[middle], z - z_after, jnp.nan),
        jnp.where(known[middle], jnp.sqrt(f**2 + f_after**2), 0.0),
    )
