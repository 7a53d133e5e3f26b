"""How widely draws are spread, by ranges that hold given shares of them too, and how a Markov chain
changes that; linear combinations of coordinates that change most; and modes between which no chain
moves.

Ranges see shapes, and a heavy tail does not change them.

References: Dekkers, Einmahl and de Haan, *A moment estimator for the index of an extreme-value
distribution* (Annals of Statistics 1989); Neal, *MCMC using Hamiltonian dynamics* (Handbook of
MCMC, 2011), section 5.3.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.special import ndtri
import numpy as np
from scipy import linalg, special

from numpyro_ext.diagnostics.table import equally_spaced

__all__ = ["LEAPS", "LEVELS", "NUMBERS", "Spread", "as_widths", "inside", "is_heavy"]
__all__ += ["least_crossing", "least_spread", "mean_and_sd", "spread_after_moves", "unit_root"]
__all__ += ["worst_combinations"]

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
HEAVY = 0.3
"""Tail index from which on standard deviations are not compared: without a fourth moment, which
exists below 1/4, their error is not known. It is estimated with an error of 0.06 or more."""
_FEWEST = 1000
"""Draws from which on the index is known well enough."""
_NEARLY = 0.02
"""Shares nearer to 0 or 1 than this are those of a number that has one value in most draws."""
LEAPS = 4
"""Leapfrog steps of a trajectory: the fewer, the longer a point in a narrow place takes."""
_ACCEPTED = 0.7
"""Share of accepted trajectories to which the step sizes are tuned."""
_MOST_CORRELATED = 300
"""Coordinates up to which the chains move in units of the whole covariance."""
_LATER = 4
"""Places of every chain in its second half, equally spaced, that are kept."""
_SORTED = 2 * 10**6
"""Numbers of draws that are sorted for their quantiles."""
_ROUNDED = 4.0
"""Standard deviations in units of rounding above which a number has moved."""
NUMBERS = 1000
"""The largest number of numbers, equally spaced, that are looked at."""
FEWEST_ON_A_SIDE = 5
WELL_MIXED = 1.9
"""Chains over those on the smaller side: if all cross, 2 do where it holds half of them."""
CUTS = 20
"""The number of places where few chains pass that are looked at closely."""


def is_heavy(x: Any, median: Any) -> Any:
    """``(n,)``: whether the tail of ``(m, n)`` draws, far from their median, is so heavy that its
    standard deviation has no error."""
    m = len(x)
    size = min(math.ceil(3 * math.sqrt(m)) + 1, m)
    # In the precision of the distances: in a smaller one, those of a collapse would overflow.
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
    """``(3, ..., n)``: 1 in the middle half, in the middle nine tenths, and below the median.

    :param levels: ``(5, n)`` quantiles at :data:`LEVELS`.
    """
    low, quarter, middle, three_quarters, high = levels
    half, most = (y >= quarter) & (y <= three_quarters), (y >= low) & (y <= high)
    xp = np if isinstance(half, np.ndarray) else jnp
    return xp.stack([half, most, y <= middle]).astype(float)


def as_widths(
    before: Any, error: Any, after: Any, error_after: Any, least: float
) -> tuple[Any, Any, Any, Any]:
    """Shares of draws and of what they became, in the units of normals that have these shares.

    A normal has 90 % of its draws in the interval; if 96 % of what they became are in it, the sd of
    these is 0.8 of theirs. A number that has one value in most of the draws has no such ratio.

    :param before: ``(3, n)`` shares of :func:`inside`, and ``after`` the later ones.
    :param least: a share that is smaller cannot be told from 0, nor one as near to 1 from 1.
    :return: ``(2, n)`` ratios of the standard deviation to the later one, their errors, ``(n,)``
        shifts of the median in standard deviations, and their errors.
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
    known = (before > _NEARLY) & (before < 1 - _NEARLY)
    ratio_error = ratio * xp.sqrt(e**2 + e_after**2)
    return (
        xp.where(known[spread], ratio, xp.nan),
        xp.where(known[spread], ratio_error, 0.0),
        xp.where(known[middle], z - z_after, xp.nan),
        xp.where(known[middle], xp.sqrt(f**2 + f_after**2), 0.0),
    )


class Spread(NamedTuple):
    """The result of :func:`spread_after_moves`.

    A number whose tail is so heavy that its standard deviation has no error is compared by the
    range of the middle half of it, and by its median.
    """

    ratio: Array
    """``(n,)`` standard deviations of the points over those of the chains; NaN where a number does
    not vary."""
    error: Array
    """``(n,)`` Monte Carlo errors of these ratios."""
    shift: Array
    """``(n,)`` mean of the chains minus that of the points, in standard deviations of the points;
    NaN where a number does not vary."""
    shift_error: Array
    """``(n,)`` Monte Carlo errors of these shifts."""
    between: Array
    """``(n,)`` share of the variance of the chains that is between them: 0 for chains that have
    forgotten where they began, 1 for chains that stay there; NaN where a number does not vary."""
    ends: Array
    """``(3, chain, k)``: up to 1,000 numbers, equally spaced, at the start of the chains, and the
    least and the largest that they are later."""
    accepted: Array
    """Share of accepted trajectories."""
    range_ratio: Any = None
    """``(2, n)`` ratios of the ranges of a half and of nine tenths, as :func:`as_widths` has them;
    NaN where a number does not vary, and None for numbers that are not compared so."""
    range_error: Any = None
    """``(2, n)`` Monte Carlo errors of these ratios."""
    points: Any = None
    """``(m, d)``; None where the covariance is not compared, and so are the next ones."""
    later: Any = None
    """``(chain, k, d)`` places in the second half of the chains."""
    root: Any = None
    """``(d, d)`` :func:`unit_root` of the points."""
    before: Any = None
    """``(m, n)`` numbers at the points, and ``(chain, k, n)`` at the later places."""
    after: Any = None
    draws_each: Any = 1.0
    """Points that are worth an independent one."""
    combined: Any = None
    """The :func:`worst_combinations`, where they were looked for already."""


def least_spread(centre: Any, eps: Any) -> Any:
    """The standard deviation below which numbers differ by rounding alone."""
    return 2 * eps * abs(centre)


def mean_and_sd(x: Any) -> tuple[Any, Any]:
    """Mean and standard deviation over the first axis; of equal numbers they are the number and 0.

    The rounding of their sum makes another mean of them, and a standard deviation of that error.
    """
    away = x - x[0]
    return x[0] + away.mean(0), away.std(0)


def spread_after_moves(
    potential: Callable[[Array], tuple[Array, Array]],
    numbers: Callable[[Array], Array],
    x: Array,
    rng_key: Array,
    num_moves: int,
    block: int,
    num_starts: int | None = None,
    independent: Array | bool = True,
) -> Spread:
    r"""Spread of points compared with the one that they have while a Markov chain moves them.

    Every point makes trajectories of Hamiltonian Monte Carlo in the coordinates in which the points
    have unit covariance, or unit variances where there are too many coordinates. Its step size is
    its own, because points may lie where the density is much narrower than all of them together,
    and grows where the density is much wider. It is tuned in the first three quarters of the
    trajectories, and the second half counts: a point that comes back needs longer steps on its way.

    :param potential: the potential energy at a ``(d,)`` point and its gradient.
    :param numbers: the ``(n,)`` numbers of a point that are compared.
    :param x: ``(m, d)`` particles, or draws.
    :param block: so many points move at a time.
    :param num_starts: so many of the points are moved, the first ones; None for all.
    :param independent: whether the points are independent draws, whose own errors count; or
        ``(n,)`` numbers of draws that are worth an independent one.
    """
    m, d = x.shape
    half, tuned = num_moves // 2, 3 * num_moves // 4
    before = lax.map(numbers, x, batch_size=block)
    n = before.shape[1]
    centre, sd = mean_and_sd(before)
    # Points that are all the same are compared with their rounding, and chains that leave them
    # are wider.
    rounding = least_spread(centre, jnp.finfo(x.dtype).eps)
    varies = sd > rounding
    unit = jnp.where(varies, sd, jnp.maximum(rounding, 1e-12))
    root = unit_root(x)
    some = before[: max(1000, _SORTED // max(n, 1))]
    ranked = jnp.sort(some, axis=0)
    levels = ranked[jnp.round(jnp.array(LEVELS) * (len(some) - 1)).astype(int)]
    heavy = is_heavy(some, levels[2])

    def times(root: Array, v: Array) -> Array:
        return root * v if root.ndim == 1 else jnp.matmul(root, v, precision="highest")

    def at(x: Array) -> tuple[Array, Array, Array]:
        value, grad = potential(x)
        return x, -value, times(root.T, -grad)

    def move(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        here, log_h, sums, accepted = state
        i, (key_momentum, key_uniform) = inputs
        length, threshold = random.uniform(key_uniform, (2,), x.dtype)
        # Of random length, or a trajectory could end where it began. The first one stays at its
        # start to find the gradient there: compiled at two places, it would take longer.
        h = jnp.where(i < 0, 0.0, jnp.exp(log_h) * (0.5 + 0.5 * length))

        def leap(_: int, state: Any) -> Any:
            (place, _, force), p = state
            p = p + 0.5 * h * force
            there = at(place + times(root, h * p))
            return there, p + 0.5 * h * there[2]

        momentum = random.normal(key_momentum, (d,), x.dtype)
        there, p = lax.fori_loop(0, jnp.where(i < 0, 1, LEAPS), leap, (here, momentum))
        log_ratio = there[1] - here[1] + 0.5 * (jnp.sum(momentum**2) - jnp.sum(p**2))
        chance = jnp.exp(jnp.minimum(jnp.where(jnp.isfinite(log_ratio), log_ratio, -jnp.inf), 0.0))
        taken = threshold < chance
        here = jax.tree.map(lambda new, old: jnp.where(taken, new, old), there, here)
        log_h = log_h + jnp.where((i >= 0) & (i < tuned), chance - _ACCEPTED, 0.0)
        counts = i >= half
        now = numbers(here[0])
        y = (now - centre) / unit
        seen = jax.tree.map(
            lambda total, one: total + jnp.where(counts, one, 0.0),
            sums[:3],
            (y, y**2, inside(now, levels)),
        )
        sums = *seen, jnp.minimum(sums[3], y), jnp.maximum(sums[4], y)
        accepted = accepted + jnp.where(counts, chance, 0.0)
        at_place = here[0], now
        if root.ndim < 2:
            at_place = here[0][:0], now[:0]
        return (here, log_h, sums, accepted), at_place

    def one(inputs: tuple[Array, Array, Array]) -> tuple[Any, Array, list[Array], Any]:
        start, y, key = inputs
        nothing = jnp.zeros_like(centre)
        log_h = jnp.asarray(math.log(1.6 * d ** (-1 / 6)), x.dtype)
        here = start, jnp.asarray(-1e30, x.dtype), jnp.zeros_like(start)
        sums = nothing, nothing, jnp.zeros((3, n), float), y, y
        state = here, log_h, sums, jnp.zeros((), x.dtype)
        steps = jnp.arange(-1, num_moves), random.split(key, (num_moves + 1, 2))
        (_, _, (*sums, least, most), accepted), places = lax.scan(move, state, steps)
        means = jax.tree.map(lambda a: a / (num_moves - half), (sums, accepted))
        kept = half + 1 + equally_spaced(num_moves - half, _LATER)
        return *means, [least, most], jax.tree.map(lambda y: y[kept], places)

    starts = x if num_starts is None else x[:num_starts]
    # What the chains still know of their starts is no news: it is off by what the starts are.
    known = (before[: len(starts)] - centre) / unit
    inputs = starts, known, random.split(rng_key, len(starts))
    (first, second, shares), accepted, ends, (later, after) = lax.map(one, inputs, batch_size=block)
    mean = jnp.mean(first, axis=0)
    variance = jnp.mean(second, axis=0) - mean**2
    ratio = 1 / jnp.sqrt(variance)
    # Relative errors of both variances, that of the chains by what each contributes to it.
    of_points = independent * jnp.var(((before - centre) / unit) ** 2, axis=0) / m
    of_chains = jnp.var((second - 2 * mean * first) / variance, axis=0) / len(starts)
    slope = jnp.mean((first - mean) * known, axis=0) / jnp.maximum(jnp.var(known, axis=0), 1e-30)
    rest = jnp.var(first - slope * known, axis=0) / len(starts)
    draws_each = jnp.maximum(jnp.asarray(independent, float), 1.0)
    held = jnp.mean(inside(before, levels), axis=1)
    widths, of_widths, moved, of_moved = as_widths(
        held,
        jnp.sqrt(held * (1 - held) * draws_each / m),
        jnp.mean(shares, axis=0),
        jnp.std(shares, axis=0) / math.sqrt(len(starts)),
        0.5 / len(starts),
    )
    below = jnp.mean(shares[:, 2], axis=0)
    between = jnp.where(
        heavy,
        jnp.var(shares[:, 2], axis=0) / (below * (1 - below)),
        jnp.var(first, axis=0) / variance,
    )
    ratio_error = 0.5 * ratio * jnp.sqrt(of_points + of_chains)
    shift = mean - slope * jnp.mean(known, axis=0)
    shift_error = jnp.sqrt(rest + independent * (1 - slope) ** 2 / m)
    judged = varies | (jnp.sqrt(variance) > _ROUNDED)

    def of(by_moments: Array, by_ranges: Array, otherwise: float = jnp.nan) -> Array:
        return jnp.where(judged, jnp.where(heavy, by_ranges, by_moments), otherwise)

    kept = {"points": x, "later": later, "root": root, "before": before, "after": after}
    kept = kept if root.ndim == 2 else {}
    return Spread(
        ratio=of(ratio, widths[0]),
        error=of(ratio_error, of_widths[0], 0.0),
        shift=of(shift, moved),
        shift_error=of(shift_error, of_moved, 0.0),
        between=of(between, between),
        ends=jnp.stack([known, *ends])[..., equally_spaced(n, NUMBERS)],
        accepted=jnp.mean(accepted),
        range_ratio=jnp.where(varies, widths, jnp.nan),
        range_error=jnp.where(varies, of_widths, 0.0),
        draws_each=jnp.max(draws_each),
        **kept,
    )


def unit_root(x: Array) -> Array:
    """The lower triangular root of the covariance of ``(m, d)`` points; standard deviations alone,
    ``(d,)``, where there are too many coordinates."""
    (m, d), (mean, sd) = x.shape, mean_and_sd(x)
    scale = jnp.where(sd > 0, sd, 1.0)
    if d >= m or d > _MOST_CORRELATED:
        return scale
    u = (x - mean) / scale
    # The correlations are shrunk, as those of the particles' own step are.
    shrunk = jnp.matmul(u.T, u, precision="highest") / (m + d)
    return scale[:, None] * jnp.linalg.cholesky(jnp.fill_diagonal(shrunk, 1.0, inplace=False))


class Combined(NamedTuple):
    """Results for the narrowest and the widest combination, and for the one that moves farthest."""

    ratios: np.ndarray
    """``(2,)`` as of single numbers."""
    errors: np.ndarray
    shift: np.ndarray
    """``(1,)``"""
    shift_error: np.ndarray
    coordinates: np.ndarray
    """``(3, 2)`` the two coordinates that have most of each."""


def worst_combinations(found: Spread) -> Combined | None:
    """The extreme eigenvectors of the moved covariance where the points have unit covariance.

    Of the largest of many eigenvalues chance makes a large one. So one half of the chains chooses
    the combination, and the other half says how it is spread; both ways, and the mean of both. None
    for a single coordinate, or too many.
    """
    if found.root is None or found.root.shape[0] < 2 or len(found.later) < 8:
        return None
    root, x, later = (np.asarray(y, np.float64) for y in (found.root, found.points, found.later))
    if not all(np.all(np.isfinite(y)) for y in (root, x, later)):
        return None
    d = len(root)

    def whitened(y: np.ndarray) -> np.ndarray:
        flat = (y - x.mean(0)).reshape(-1, d).T
        return linalg.solve_triangular(root, flat, lower=True).T.reshape(y.shape)

    before, after = whitened(x), whitened(later)
    pieces, chosen = [], []
    for first in (0, 1):
        choosing, judging = after[first::2], after[1 - first :: 2]
        flat = choosing.reshape(-1, d)
        directions = linalg.eigh(np.cov(flat.T))[1][:, [0, -1]]
        away = flat.mean(0) / max(float(np.linalg.norm(flat.mean(0))), 1e-300)
        directions = np.column_stack([directions, away])
        pieces.append(_compare(before @ directions, judging @ directions, float(found.draws_each)))
        weights = np.abs(linalg.solve_triangular(root, directions, lower=True, trans=1))
        chosen.append(np.argsort(-weights * x.std(0)[:, None], 0)[:2].T)
    log_ratio, relative, shift, shift_error = (np.stack(both) for both in zip(*pieces, strict=True))
    ratios = np.exp(log_ratio.mean(0))[:2]
    return Combined(
        ratios,
        ratios * (np.sqrt(np.sum(relative**2, 0)) / 2)[:2],
        np.abs(shift.mean(0))[2:],
        (np.sqrt(np.sum(shift_error**2, 0)) / 2)[2:],
        chosen[0],
    )


def _compare(
    x: np.ndarray, y: np.ndarray, draws_each: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``(3,)`` log ratios of the sds of ``(m, 3)`` draws to those of ``(chain, k, 3)`` later ones,
    shifts in sds of the draws, and the errors of both; NaN of a heavy tail."""
    m = len(x)
    centre, mean = x.mean(0), y.mean((0, 1))
    variance, later = x.var(0), np.mean((y - mean) ** 2, (0, 1))
    of_draws = draws_each * np.var((x - centre) ** 2 / variance, 0) / m
    of_chains = np.var(np.mean((y - mean) ** 2, 1) / later, 0) / len(y)
    light = ~is_heavy(x, np.median(x, 0))
    error = np.sqrt(draws_each / m + np.var(y.mean(1), 0) / len(y) / variance)
    return (
        np.where(light, 0.5 * np.log(variance / later), np.nan),
        np.where(light, 0.5 * np.sqrt(of_draws + of_chains), 0.0),
        np.where(light, (mean - centre) / np.sqrt(variance), np.nan),
        np.where(light, error, 0.0),
    )


def least_crossing(start: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, int]:
    """The place between two modes of a number that the fewest chains cross.

    It is the share of the chains on the smaller side that is seen to change sides, with 95 %
    confidence at most, and the number; inf where there is no such place. A place lies between two
    modes if in an interval of the width in which half of the chains on the smaller side start there
    are less than half as many.

    :param start: ``(chain, n)`` numbers at the start of the chains.
    :param low: the least that they are later, and ``high`` the largest.
    """
    m, n = start.shape
    fewest = max(FEWEST_ON_A_SIDE, m // 50)
    if m < 2 * fewest or not n:
        return math.inf, 0
    several = math.log(n)  # the least of n counts may be less
    columns = zip(start.T, low.T, high.T, strict=True)
    found = [_crossings_of(x, least, most, fewest, several) for x, least, most in columns]
    least = int(np.argmin(found))
    return float(found[least]), least


def _crossings_of(
    start: np.ndarray, low: np.ndarray, high: np.ndarray, fewest: int, several: float
) -> float:
    if not np.all(np.isfinite([start, low, high])):
        return math.inf
    order = np.argsort(start)
    start, low, high = start[order], low[order], high[order]
    m = len(start)
    left = np.arange(fewest, m - fewest + 1)
    cuts = 0.5 * (start[left - 1] + start[left])
    # Of both sides together; where it is least, the chains of the smaller side are counted.
    across = np.searchsorted(np.sort(low), cuts) - np.searchsorted(np.sort(high), cuts)
    # Equal numbers cannot be cut.
    share = np.where(start[left - 1] < start[left], across / np.minimum(left, m - left), np.inf)
    found = math.inf
    if np.min(share) >= WELL_MIXED:
        return found
    least = np.argsort(share, kind="stable")[:CUTS]
    for left_of, cut in zip(left[least].tolist(), cuts[least].tolist(), strict=True):
        found = min(found, _crossings_at(start, low, high, left_of, cut, several))
    return found


def _crossings_at(
    start: np.ndarray, low: np.ndarray, high: np.ndarray, left: int, cut: float, several: float
) -> float:
    """The share at one place, with so many chains to its left."""
    m = len(start)
    is_left = left <= m - left
    side = slice(0, left) if is_left else slice(left, m)
    there = start[side]
    half = (len(there) + 1) // 2
    width = np.min(there[half - 1 :] - there[: len(there) - half + 1])
    near = int(np.diff(np.searchsorted(start, [cut - width / 2, cut + width / 2]))[0])
    if _upper_limit(near) + several >= half / 2:
        return math.inf
    crossing = int(np.sum(high[side] >= cut) if is_left else np.sum(low[side] < cut))
    return (_upper_limit(crossing) + several) / len(there)


def _upper_limit(count: float) -> float:
    """The 95 % limit of the mean of a Poisson number, about: 3 if none was seen."""
    return count + 2 * math.sqrt(count) + 3
