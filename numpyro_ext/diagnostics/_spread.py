"""Standard deviations, shares in intervals, and heavy tails of draws.

Reference: Dekkers, Einmahl and de Haan, *A moment estimator for the index of an extreme-value
distribution* (Annals of Statistics 1989).
"""

import math
from typing import Any

from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import ndtri
import numpy as np
from scipy import special

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


def is_heavy(x: Any, median: Any) -> Any:
    """``(n,)``: whether the tail of ``(m, n)`` draws, far from their median, is so heavy that its
    standard deviation has no error."""
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
    xp = np if isinstance(half, np.ndarray) else jnp
    return xp.stack([half, most, y <= middle]).astype(float)


def shares_to_sd_ratios(
    before: Any, error: Any, after: Any, error_after: Any, least: float
) -> tuple[Any, Any, Any, Any]:
    """Ratios ``(2, n)`` of the standard deviations of two normals that have these shares ``(3, n)``
    of :func:`inside`, and shifts ``(n,)`` of their medians, each with its error; NaN of a number
    that has one value in most of the draws.

    :param least: a share that is smaller cannot be told from 0, nor one as near to 1 from 1.
    """
    spread, middle = slice(0, 2), 2
    # On numbers of the host nothing is to be compiled.
    xp, quantile = (np, special.ndtri) if isinstance(before, np.ndarray) else (jnp, ndtri)

    def density(z: Any) -> Any:
        return xp.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    def half_width(share: Any, error: Any) -> tuple[Any, Any]:
        c = quantile(0.5 + 0.5 * xp.clip(share[spread], least, 1 - least))
        return c, error[spread] / (2 * density(c) * c)

    def place(share: Any, error: Any) -> tuple[Any, Any]:
        z = quantile(xp.clip(share[middle], least, 1 - least))
        return z, error[middle] / density(z)

    error_after = xp.maximum(error_after, least)
    (c, e), (c_after, e_after) = half_width(before, error), half_width(after, error_after)
    (z, f), (z_after, f_after) = place(before, error), place(after, error_after)
    ratio = c_after / c
    spreads = (before > _NEARLY) & (before < 1 - _NEARLY)
    ratio_error = ratio * xp.sqrt(e**2 + e_after**2)
    return (
        xp.where(spreads[spread], ratio, xp.nan),
        xp.where(spreads[spread], ratio_error, 0.0),
        xp.where(spreads[middle], z - z_after, xp.nan),
        xp.where(spreads[middle], xp.sqrt(f**2 + f_after**2), 0.0),
    )


def least_spread(centre: Any, eps: Any) -> Any:
    """The standard deviation below which numbers differ by rounding alone."""
    return 2 * eps * abs(centre)


def mean_and_sd(x: Any) -> tuple[Any, Any]:
    """Mean and standard deviation over the first axis; of equal numbers the number and 0."""
    away = x - x[0]
    return x[0] + away.mean(0), away.std(0)


def unit_root(x: Array) -> Array:
    """The lower triangular root of the covariance of ``(m, d)`` points; standard deviations alone,
    ``(d,)``, where there are too many coordinates."""
    (m, d), (mean, sd) = x.shape, mean_and_sd(x)
    scale = jnp.where(sd > 0, sd, 1.0)
    if d >= m or d > _MOST_CORRELATED:
        return scale
    u = (x - mean) / scale
    # The correlations are shrunk, as in the particles' own step.
    shrunk = jnp.matmul(u.T, u, precision="highest") / (m + d)
    return scale[:, None] * jnp.linalg.cholesky(jnp.fill_diagonal(shrunk, 1.0, inplace=False))
