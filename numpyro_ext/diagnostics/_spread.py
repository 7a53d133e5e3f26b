"""How wide points are beside a Markov chain that starts from them.

Reference: Neal, *MCMC using Hamiltonian dynamics* (Handbook of MCMC, 2011), section 5.3.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

__all__ = ["LEAPS", "Spread", "has_correlations", "spread_after_moves"]

LEAPS = 4
"""Leapfrog steps of a trajectory: the fewer, the longer a point in a narrow place takes."""
_ACCEPTED = 0.7
"""Share of accepted trajectories to which the step sizes are tuned."""
_MOST_CORRELATED = 300
"""Coordinates up to which the chains move in units of the whole covariance."""

ValueAndGrad = Callable[[Array], tuple[Array, Array]]


class Spread(NamedTuple):
    """What :func:`spread_after_moves` finds."""

    ratio: Array
    """``(n,)`` standard deviations of the points over those of the chains; NaN where a number does
    not vary."""
    error: Array
    """``(n,)`` Monte Carlo errors of these ratios, if the points are independent draws."""
    accepted: Array
    """Share of accepted trajectories."""


def has_correlations(m: int, d: int) -> bool:
    """Whether ``(m, d)`` points are moved in units of their whole covariance."""
    return d < m and d <= _MOST_CORRELATED


def spread_after_moves(
    potential: ValueAndGrad,
    numbers: Callable[[Array], Array],
    x: Array,
    rng_key: Array,
    num_moves: int,
    block: int,
    num_starts: int | None = None,
) -> Spread:
    r"""Standard deviations of points over those that they have while a Markov chain moves them.

    Every point makes trajectories of Hamiltonian Monte Carlo in the coordinates in which the points
    have unit covariance, or unit variances where there are too many coordinates. Its step size is
    its own, because points may lie where the density is much narrower than all of them together. It
    is tuned in the first three quarters of the trajectories, and the second half counts: a point
    that comes back needs longer steps on its way.

    :param potential: the potential energy at a ``(d,)`` point and its gradient.
    :param numbers: the ``(n,)`` numbers of a point whose standard deviations are compared.
    :param x: ``(m, d)`` particles, or draws.
    :param block: so many points move at a time.
    :param num_starts: so many of the points are moved, the first ones; None for all.
    """
    m, d = x.shape
    half, tuned = num_moves // 2, 3 * num_moves // 4
    before = jax.vmap(numbers)(x)
    centre, sd = jnp.mean(before, axis=0), jnp.std(before, axis=0)
    varies = sd > 1e-6 * jnp.abs(centre)
    unit = jnp.where(varies, sd, 1.0)
    scale = jnp.where(jnp.std(x, axis=0) > 0, jnp.std(x, axis=0), 1.0)
    root = scale
    if has_correlations(m, d):
        u = (x - jnp.mean(x, axis=0)) / scale
        # The correlations are shrunk, as those of the particles' own step are.
        shrunk = jnp.matmul(u.T, u, precision="highest") / (m + d)
        root = scale[:, None] * jnp.linalg.cholesky(jnp.fill_diagonal(shrunk, 1.0, inplace=False))

    def times(root: Array, v: Array) -> Array:
        return root * v if root.ndim == 1 else jnp.matmul(root, v, precision="highest")

    def at(x: Array) -> tuple[Array, Array, Array]:
        value, grad = potential(x)
        return x, -value, times(root.T, -grad)

    def move(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, None]:
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
        y = jnp.where(counts, (numbers(here[0]) - centre) / unit, 0.0)
        sums = sums[0] + y, sums[1] + y**2
        return (here, log_h, sums, accepted + jnp.where(counts, chance, 0.0)), None

    def one(inputs: tuple[Array, Array]) -> tuple[Any, Array]:
        start, key = inputs
        nothing = jnp.zeros_like(centre)
        log_h = jnp.asarray(math.log(1.6 * d ** (-1 / 6)), x.dtype)
        here = start, jnp.asarray(-1e30, x.dtype), jnp.zeros_like(start)
        state = here, log_h, (nothing, nothing), jnp.zeros((), x.dtype)
        steps = jnp.arange(-1, num_moves), random.split(key, (num_moves + 1, 2))
        (_, _, sums, accepted), _ = lax.scan(move, state, steps)
        return jax.tree.map(lambda a: a / (num_moves - half), (sums, accepted))

    starts = x if num_starts is None else x[:num_starts]
    inputs = starts, random.split(rng_key, len(starts))
    (first, second), accepted = lax.map(one, inputs, batch_size=block)
    mean = jnp.mean(first, axis=0)
    variance = jnp.mean(second, axis=0) - mean**2
    ratio = jnp.where(varies, 1 / jnp.sqrt(variance), jnp.nan)
    # Relative errors of both variances, that of the chains by what each contributes to it.
    of_points = jnp.var(((before - centre) / unit) ** 2, axis=0) / m
    of_chains = jnp.var(second - 2 * mean * first, axis=0) / len(starts) / variance**2
    return Spread(ratio, 0.5 * ratio * jnp.sqrt(of_points + of_chains), jnp.mean(accepted))
