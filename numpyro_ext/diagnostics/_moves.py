"""Points before and after moves by Hamiltonian Monte Carlo, number by number.

Reference: Neal, *MCMC using Hamiltonian dynamics* (Handbook of MCMC, 2011), section 5.3.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from scipy import linalg

from numpyro_ext._model.normal import as_factor, mean_and_sd
from numpyro_ext.diagnostics.comparison import (
    LEVELS,
    inside,
    is_heavy,
    least_spread,
    shares_to_sd_ratios,
    unit_root,
)
from numpyro_ext.diagnostics.table import equally_spaced

LEAPS = 4
"""Leapfrog steps of a trajectory: the fewer, the longer a point in a narrow place takes."""
_ACCEPTED = 0.7
"""Share of accepted trajectories to which the step sizes are tuned."""
_LATER = 4
"""Places of every chain in its second half, equally spaced, that are kept."""
_SORTED = 2 * 10**6
"""Numbers of draws that are sorted for their quantiles."""
_ROUNDED = 4.0
"""Standard deviations in units of rounding above which a number has moved."""


class Moved(NamedTuple):
    """The result of :func:`move_points`.

    A number with a heavy tail is compared by its middle half and its median. Ratios, shifts and
    ``between`` are NaN where a number does not vary.
    """

    values: Any
    """Shifts, their errors, ratios of sds and their errors, as in :class:`Comparison`."""
    between: Array
    """``(n,)`` share of the variance of the chains that is between them: 1 if they stay."""
    accepted: Array
    """Share of accepted trajectories."""
    widths: Any = None
    """Ratios of the widths of intervals, and their errors, as in :class:`Comparison`."""
    draws_each: Any = 1.0
    """Points that are worth an independent one."""
    places: Any = None
    """Where the covariance is compared, ``(m, d)`` points, ``(chain, k, d)`` places in the second
    half of the chains, and the :func:`unit_root` of the points."""
    numbers: Any = None
    """There the numbers, ``(m, n)`` at the points and ``(chain, k, n)`` at the later places."""


class _Scale(NamedTuple):
    """In which units the numbers of the points are compared, ``(n,)`` each."""

    centre: Array
    unit: Array
    """Standard deviations; of points that are all the same their rounding."""
    varies: Array
    levels: Array
    """``(5, n)`` quantiles."""
    heavy: Array
    """Whether the tail is too heavy for standard deviations."""


def _scale_of(before: Array, eps: Any) -> _Scale:
    """The scale of ``(m, n)`` numbers of the points."""
    centre, sd = mean_and_sd(before)
    rounding = least_spread(centre, eps)
    unit = jnp.where(sd > rounding, sd, jnp.maximum(rounding, 1e-12))
    some = before[: max(1000, _SORTED // max(before.shape[1], 1))]
    ranked = jnp.sort(some, axis=0)
    levels = ranked[jnp.round(jnp.array(LEVELS) * (len(some) - 1)).astype(int)]
    return _Scale(centre, unit, sd > rounding, levels, is_heavy(some, levels[2]))


class _Tally(NamedTuple):
    """Means over the second half of a chain: of numbers, their squares and :func:`inside`."""

    first: Array
    second: Array
    shares: Array
    accepted: Array


class _Place(NamedTuple):
    """A point with its log density, and the force there in the coordinates of the moves."""

    x: Array
    log_density: Array
    force: Array


def _trajectory(
    place_at: Callable[[Array], _Place], root: Array, here: _Place, h: Array, leaps: Any, keys: Any
) -> tuple[_Place, Array]:
    """The end of a trajectory, or its start if it is refused; and how likely it was taken."""

    def leap(_: int, state: tuple[_Place, Array]) -> tuple[_Place, Array]:
        place, p = state
        p = p + 0.5 * h * place.force
        there = place_at(place.x + as_factor(root).push(h * p))
        return there, p + 0.5 * h * there.force

    momentum = random.normal(keys[0], here.x.shape, here.x.dtype)
    there, p = lax.fori_loop(0, leaps, leap, (here, momentum))
    log_ratio = there.log_density - here.log_density
    log_ratio = log_ratio + 0.5 * (jnp.sum(momentum**2) - jnp.sum(p**2))
    chance = jnp.exp(jnp.minimum(jnp.where(jnp.isfinite(log_ratio), log_ratio, -jnp.inf), 0.0))
    return jax.tree.map(lambda new, old: jnp.where(keys[1] < chance, new, old), there, here), chance


def _chain_from(
    potential: Callable[[Array], tuple[Array, Array]],
    numbers: Callable[[Array], Array],
    scale: _Scale,
    root: Array,
    num_moves: int,
) -> Callable[[tuple[Array, Array, Array]], tuple[_Tally, tuple[Array, Array]]]:
    """A function of a point, its scaled numbers and a key to the tally and later places."""
    half, tuned = num_moves // 2, 3 * num_moves // 4

    def place_at(x: Array) -> _Place:
        value, grad = potential(x)
        return _Place(x, -value, as_factor(root).pull(-grad))

    def move(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        here, log_h, tally = state
        i, (key_momentum, key_uniform) = inputs
        length, threshold = random.uniform(key_uniform, (2,), here.x.dtype)
        # Of random length, or a trajectory could end where it began. The first one stays at its
        # start to find the gradient there: compiled at two places, it would take longer.
        h = jnp.where(i < 0, 0.0, jnp.exp(log_h) * (0.5 + 0.5 * length))
        leaps = jnp.where(i < 0, 1, LEAPS)
        here, chance = _trajectory(place_at, root, here, h, leaps, (key_momentum, threshold))
        log_h = log_h + jnp.where((i >= 0) & (i < tuned), chance - _ACCEPTED, 0.0)
        now = numbers(here.x)
        y = (now - scale.centre) / scale.unit
        new = _Tally(y, y**2, inside(now, scale.levels), chance)
        tally = jax.tree.map(lambda total, x: total + jnp.where(i >= half, x, 0.0), tally, new)
        kept = (here.x, now) if root.ndim == 2 else (here.x[:0], now[:0])
        return (here, log_h, tally), kept

    def chain(inputs: tuple[Array, Array, Array]) -> tuple[_Tally, tuple[Array, Array]]:
        start, y, key = inputs
        nothing, dtype = jnp.zeros_like(y), start.dtype
        here = _Place(start, jnp.asarray(-1e30, dtype), jnp.zeros_like(start))
        log_h = jnp.asarray(math.log(1.6 * start.size ** (-1 / 6)), dtype)
        shares = jnp.zeros((3, y.size), float)
        tally = _Tally(nothing, nothing, shares, jnp.zeros((), dtype))
        steps = jnp.arange(-1, num_moves), random.split(key, (num_moves + 1, 2))
        (_, _, tally), places = lax.scan(move, (here, log_h, tally), steps)
        count = num_moves - half
        kept = half + 1 + equally_spaced(count, _LATER)
        means = jax.tree.map(lambda total: total / count, tally)
        return means, jax.tree.map(lambda y: y[kept], places)

    return chain


def move_points(
    potential: Callable[[Array], tuple[Array, Array]],
    numbers: Callable[[Array], Array],
    x: Array,
    rng_key: Array,
    num_moves: int,
    block: int,
    num_starts: int | None = None,
    independent: Array | float = True,
) -> Moved:
    """The spread of points, compared with their spread while a Markov chain moves them.

    Every point makes trajectories of Hamiltonian Monte Carlo in the coordinates of
    :func:`unit_root`, with a step size of its own that is tuned in the first three quarters of the
    trajectories. The second half counts.

    :param potential: the potential energy at a ``(d,)`` point and its gradient.
    :param numbers: the ``(n,)`` numbers of a point that are compared.
    :param x: ``(m, d)`` particles, or draws, ``block`` of which move at a time.
    :param num_starts: so many of the points are moved, the first ones; None for all.
    :param independent: whether the points are independent draws with errors of their own, which
        count; or ``(n,)`` numbers of draws that are worth an independent one.
    """
    before, root = lax.map(numbers, x, batch_size=block), unit_root(x)
    scale = _scale_of(before, jnp.finfo(x.dtype).eps)
    starts = x if num_starts is None else x[:num_starts]
    scaled = (before[: len(starts)] - scale.centre) / scale.unit
    chain = _chain_from(potential, numbers, scale, root, num_moves)
    inputs = starts, scaled, random.split(rng_key, len(starts))
    tally, (later, after) = lax.map(chain, inputs, batch_size=block)
    moved = _compare_with_chains(before, scaled, scale, tally, independent)
    if root.ndim < 2:
        return moved
    return moved._replace(places=(x, later, root), numbers=(before, after))


def _compare_with_chains(
    before: Array, scaled: Array, scale: _Scale, tally: _Tally, independent: Array | float
) -> Moved:
    """The points beside the chains from some of them, with the numbers ``scaled`` at the start."""
    m, num_chains, heavy = len(before), len(scaled), scale.heavy
    draws_each = jnp.maximum(jnp.asarray(independent, float), 1.0)
    mean = jnp.mean(tally.first, axis=0)
    variance = jnp.mean(tally.second, axis=0) - mean**2
    ratio = 1 / jnp.sqrt(variance)
    # Relative errors of both variances; for the chains by what each chain contributes.
    of_points = independent * jnp.var(((before - scale.centre) / scale.unit) ** 2, axis=0) / m
    of_chains = jnp.var((tally.second - 2 * mean * tally.first) / variance, axis=0) / num_chains
    # What the chains still know of their starts is no news: it is off by what the starts are.
    slope = jnp.mean((tally.first - mean) * scaled, axis=0)
    slope = slope / jnp.maximum(jnp.var(scaled, axis=0), 1e-30)
    rest = jnp.var(tally.first - slope * scaled, axis=0) / num_chains
    shift = mean - slope * jnp.mean(scaled, axis=0)
    shift_error = jnp.sqrt(rest + independent * (1 - slope) ** 2 / m)

    held = jnp.mean(inside(before, scale.levels), axis=1)
    widths, width_errors, median_shift, median_error = shares_to_sd_ratios(
        held,
        jnp.sqrt(held * (1 - held) * draws_each / m),
        jnp.mean(tally.shares, axis=0),
        jnp.std(tally.shares, axis=0) / math.sqrt(num_chains),
        0.5 / num_chains,
    )
    below = jnp.mean(tally.shares[:, 2], axis=0)
    between_medians = jnp.var(tally.shares[:, 2], axis=0) / (below * (1 - below))
    between_means = jnp.var(tally.first, axis=0) / variance
    judged = scale.varies | (jnp.sqrt(variance) > _ROUNDED)

    def choose(by_moments: Array, by_ranges: Array, otherwise: float = jnp.nan) -> Array:
        return jnp.where(judged, jnp.where(heavy, by_ranges, by_moments), otherwise)

    return Moved(
        values=(
            choose(shift, median_shift),
            choose(shift_error, median_error, 0.0),
            choose(ratio, widths[0]),
            choose(0.5 * ratio * jnp.sqrt(of_points + of_chains), width_errors[0], 0.0),
        ),
        between=choose(between_means, between_medians),
        accepted=jnp.mean(tally.accepted),
        widths=(
            jnp.where(scale.varies, widths, jnp.nan),
            jnp.where(scale.varies, width_errors, 0.0),
        ),
        draws_each=jnp.max(draws_each),
    )


def worst_combinations(moved: Moved) -> tuple[np.ndarray, np.ndarray] | None:
    """The extreme eigenvectors of the moved covariance where the points have unit covariance.

    One half of the chains chooses them and the other says how they are spread, both ways, because
    chance makes the largest of many eigenvalues large.

    :return: of the narrowest and the widest linear combination the ``(4, 2)`` values of a
        :class:`Comparison`, which have no shift, and NaN of a heavy tail; and ``(2, 2)`` the two
        coordinates that have most of each. None for a single coordinate, or too many.
    """
    if moved.places is None:
        return None
    x, later, root = (np.asarray(y, np.float64) for y in moved.places)
    enough = len(root) > 1 and len(later) >= 8
    if not (enough and all(np.all(np.isfinite(y)) for y in (root, x, later))):
        return None
    d = len(root)

    def whitened(y: np.ndarray) -> np.ndarray:
        flat = (y - x.mean(0)).reshape(-1, d).T
        return linalg.solve_triangular(root, flat, lower=True).T.reshape(y.shape)

    before, after = whitened(x), whitened(later)
    halves, chosen = [], []
    for first in (0, 1):
        choosing, judging = after[first::2], after[1 - first :: 2]
        directions = linalg.eigh(np.cov(choosing.reshape(-1, d).T))[1][:, [0, -1]]
        halves.append(_compare(before @ directions, judging @ directions, float(moved.draws_each)))
        weights = np.abs(linalg.solve_triangular(root, directions, lower=True, trans=1))
        chosen.append(np.argsort(-weights * x.std(0)[:, None], 0)[:2].T)
    log_ratio, relative = np.stack(halves, 1)
    ratio, unknown = np.exp(log_ratio.mean(0)), np.full(2, np.nan)
    error = ratio * np.sqrt(np.sum(relative**2, 0)) / 2
    return np.stack([unknown, unknown, ratio, error]), chosen[0]


def _compare(x: np.ndarray, y: np.ndarray, draws_each: float) -> np.ndarray:
    """``(2, 2)`` log ratios of the sds of ``(m, 2)`` and ``(chain, k, 2)``, and their errors."""
    away, later = (x - x.mean(0)) ** 2, (y - y.mean((0, 1))) ** 2
    variance = np.stack([away.mean(0), later.mean((0, 1))])
    of_draws = draws_each * np.var(away / variance[0], 0) / len(x)
    of_chains = np.var(later.mean(1) / variance[1], 0) / len(y)
    log_ratio = 0.5 * np.log(variance[0] / variance[1])
    heavy = is_heavy(x, np.median(x, 0))
    return np.stack([np.where(heavy, np.nan, log_ratio), 0.5 * np.sqrt(of_draws + of_chains)])
