"""The spread of particles, or of draws, before and after a Markov chain moves them.

Reference: Neal, *MCMC using Hamiltonian dynamics* (Handbook of MCMC, 2011), section 5.3.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_ext.diagnostics._modes import NUMBERS
from numpyro_ext.diagnostics._ranges import LEVELS, as_widths, inside, is_heavy, tail_size
from numpyro_ext.diagnostics.table import equally_spaced

__all__ = ["LEAPS", "Spread", "least_spread", "spread_after_moves", "unit_root"]

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
    draws_each: Any = 1.0
    """Points that are worth an independent one."""


def least_spread(centre: Any, eps: Any) -> Any:
    """The standard deviation below which numbers differ by rounding alone."""
    return 2 * eps * abs(centre)


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
    centre, sd = jnp.mean(before, axis=0), jnp.std(before, axis=0)
    # Points that are all the same are compared with their rounding, and chains that leave them
    # are wider.
    rounding = least_spread(centre, jnp.finfo(x.dtype).eps)
    varies = sd > rounding
    unit = jnp.where(varies, sd, jnp.maximum(rounding, 1e-12))
    root = unit_root(x)
    some = before[: max(1000, _SORTED // max(n, 1))]
    ranked = jnp.sort(some, axis=0)
    levels = ranked[jnp.round(jnp.array(LEVELS) * (len(some) - 1)).astype(int)]
    distances = jnp.abs(some - levels[2]).T
    farthest = lax.top_k(distances, min(tail_size(len(some)) + 1, len(some)))[0].T
    heavy = is_heavy(farthest, len(some))

    def times(root: Array, v: Array) -> Array:
        return root * v if root.ndim == 1 else jnp.matmul(root, v, precision="highest")

    def at(x: Array) -> tuple[Array, Array, Array]:
        value, grad = potential(x)
        return x, -value, times(root.T, -grad)

    def move(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, Array]:
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
        return (here, log_h, sums, accepted), here[0] if root.ndim == 2 else here[0][:0]

    def one(inputs: tuple[Array, Array, Array]) -> tuple[Any, Array, list[Array], Array]:
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
        return *means, [least, most], places[kept]

    starts = x if num_starts is None else x[:num_starts]
    # What the chains still know of their starts is no news: it is off by what the starts are.
    known = (before[: len(starts)] - centre) / unit
    inputs = starts, known, random.split(rng_key, len(starts))
    (first, second, shares), accepted, ends, later = lax.map(one, inputs, batch_size=block)
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
        points=x if root.ndim == 2 else None,
        later=later if root.ndim == 2 else None,
        root=root if root.ndim == 2 else None,
        draws_each=jnp.max(draws_each),
    )


def unit_root(x: Array) -> Array:
    """The lower triangular root of the covariance of ``(m, d)`` points; standard deviations alone,
    ``(d,)``, where there are too many coordinates."""
    m, d = x.shape
    scale = jnp.where(jnp.std(x, axis=0) > 0, jnp.std(x, axis=0), 1.0)
    if d >= m or d > _MOST_CORRELATED:
        return scale
    u = (x - jnp.mean(x, axis=0)) / scale
    # The correlations are shrunk, as those of the particles' own step are.
    shrunk = jnp.matmul(u.T, u, precision="highest") / (m + d)
    return scale[:, None] * jnp.linalg.cholesky(jnp.fill_diagonal(shrunk, 1.0, inplace=False))
