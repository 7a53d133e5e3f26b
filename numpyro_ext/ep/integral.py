"""The integral of a density of one variable at any place and of any scale."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

_GRID = np.sinh(np.linspace(-7.0, 7.0, 61))
"""From -550 to 550, dense at 0: unconstrained space is in units of order 1."""
NUM_NODES = 91
_BEFORE = np.tri(2 * NUM_NODES - 2, k=-1)
_REACH = 1e3  # the farthest node, in units of the width at the mode


def log_integral(h: Callable[[Array, Array], Array], x: Array) -> Array:
    r"""The logarithm of :math:`\int e^{h(z, x)} dz`, by the trapezoid rule after a sinh map.

    .. math:: z_k = c + b \sinh \tau_k, \qquad b = |h''(c)|^{-1/2}

    with equally spaced :math:`\tau_k`. c is the mode, found from the best point of a grid by damped
    Newton steps; b is 1 where h is flat there. Derivatives are of the sum at fixed nodes.
    """
    fixed = lax.stop_gradient(x)

    def frozen(z: Array) -> Array:  # so that a search is not differentiated
        return h(z, fixed)

    # No derivative either by what else h depends on.
    z, log_w, _, counts = lax.stop_gradient(_at_nodes(frozen, NUM_NODES))
    # Far nodes, which weigh nothing, may have a derivative that overflows.
    there = jnp.where(counts, z, z[NUM_NODES // 2])
    values = jax.vmap(lambda z: h(z, x))(there) + log_w
    return jax.nn.logsumexp(jnp.where(counts, values, -jnp.inf))


def draw(h: Callable[[Array], Array], rng_key: Array) -> tuple[Array, Array]:
    """A draw of the density :math:`e^{h(z)}`, with h linear between nodes, and its log integral."""
    z, log_w, values, counts = _at_nodes(h, 2 * NUM_NODES - 1)
    log_p = jnp.where(counts, values, -jnp.inf)
    low, high = log_p[:-1], log_p[1:]
    inside = counts[:-1] & counts[1:]
    s = jnp.maximum(jnp.abs(jnp.where(inside, high - low, 1.0)), 1e-6)
    log_mass = jnp.maximum(low, high) + jnp.log(-jnp.expm1(-s) / s * jnp.diff(z))
    log_mass = jnp.where(inside, log_mass, -jnp.inf)
    mass, places = jnp.exp(log_mass - jnp.max(log_mass)), jnp.arange(len(s))
    # Sums, since a categorical, an argmax and a gather take longer.
    below = jnp.matmul(_BEFORE, mass, precision="highest")
    u, v = random.uniform(rng_key, (2,), z.dtype)
    k = jnp.max(jnp.where((mass > 0) & (below <= u * jnp.sum(mass)), places, 0))
    s, start, step, rise = (
        jnp.sum(jnp.where(places == k, x, 0)) for x in (s, z[:-1], jnp.diff(z), high - low)
    )
    share = -jnp.log1p(v * jnp.expm1(-s)) / s  # of the way from the higher end
    share = jnp.where(rise > 0, 1 - share, share)
    return start + share * step, jax.nn.logsumexp(log_p + log_w)


def _at_nodes(
    frozen: Callable[[Array], Array], num_nodes: int
) -> tuple[Array, Array, Array, Array]:
    """The nodes, their log weights, h there, and which of them count."""
    grid = jnp.asarray(_GRID, float)
    values = jax.vmap(frozen)(grid)
    c = grid[jnp.argmax(jnp.where(jnp.isfinite(values), values, -jnp.inf))]

    def along(fn: Callable[[Array], Any], z: Array) -> tuple[Any, Any]:
        return jax.jvp(fn, (z,), (jnp.ones_like(z),))

    def newton(_: int, state: tuple[Array, ...]) -> tuple[Array, ...]:
        c, value, slope, curvature = state
        step = jnp.nan_to_num(slope / jnp.maximum(jnp.abs(curvature), 1e-6))
        limit = 0.5 * (1 + jnp.abs(c))
        new = c + jnp.clip(step, -limit, limit)
        (height, first), (_, second) = along(partial(along, frozen), new)
        there = new, height, first, second
        return jax.tree.map(partial(jnp.where, height >= value), there, state)

    # The first step stays where it is, so that h is compiled once.
    start = c, jnp.full_like(c, -jnp.inf), jnp.zeros_like(c), jnp.zeros_like(c)
    c, top, _, curvature = lax.fori_loop(0, 13, newton, start)
    curvature = jnp.abs(curvature)
    b = jnp.where(curvature > 1e-6, 1 / jnp.sqrt(jnp.maximum(curvature, 1e-6)), 1.0)
    tau = jnp.linspace(-np.arcsinh(_REACH), np.arcsinh(_REACH), num_nodes, dtype=float)
    z = c + b * jnp.sinh(tau)
    values = jax.vmap(frozen)(z)
    counts = jnp.isfinite(values) & (values > top - 200)
    return z, jnp.log(b * jnp.cosh(tau) * (tau[1] - tau[0])), values, counts
