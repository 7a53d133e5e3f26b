"""The integral of a density of one variable whose place and scale are not known."""

from collections.abc import Callable

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

__all__ = ["NUM_NODES", "log_integral"]

_GRID = np.sinh(np.linspace(-7.0, 7.0, 61))
"""From -550 to 550, dense at 0: unconstrained space is in units of order 1."""
NUM_NODES = 91
_REACH = 1e3
"""The farthest node, in units of the width at the mode."""


def log_integral(h: Callable[[Array, Array], Array], x: Array) -> Array:
    r"""The logarithm of :math:`\int e^{h(z, x)} dz`, by the trapezoid rule after a sinh map.

    .. math:: z_k = c + b \sinh \tau_k, \qquad b = |h''(c)|^{-1/2}

    with equally spaced :math:`\tau_k`. c is the mode, found from the best point of a grid by damped
    Newton steps; b is 1 where h is flat there. Derivatives are those of the sum at fixed nodes. A
    second mode counts as far as nodes fall on it.
    """
    fixed = lax.stop_gradient(x)

    def frozen(z: Array) -> Array:  # so that a search is not differentiated
        return h(z, fixed)

    grad, hess = jax.grad(frozen), jax.grad(jax.grad(frozen))
    grid = jnp.asarray(_GRID, float)
    values = jax.vmap(frozen)(grid)
    c = grid[jnp.argmax(jnp.where(jnp.isfinite(values), values, -jnp.inf))]

    def newton(_: int, c: Array) -> Array:
        curvature = jnp.maximum(jnp.abs(hess(c)), 1e-6)
        step = jnp.nan_to_num(grad(c) / curvature)
        limit = 0.5 * (1 + jnp.abs(c))
        new = c + jnp.clip(step, -limit, limit)
        return jnp.where(frozen(new) >= frozen(c), new, c)

    c = lax.fori_loop(0, 12, newton, c)
    curvature = jnp.abs(hess(c))
    b = jnp.where(curvature > 1e-6, 1 / jnp.sqrt(jnp.maximum(curvature, 1e-6)), 1.0)
    c, b = lax.stop_gradient((c, b))  # of what else h depends on
    tau = jnp.linspace(-np.arcsinh(_REACH), np.arcsinh(_REACH), NUM_NODES, dtype=float)
    z = c + b * jnp.sinh(tau)
    log_w = jnp.log(b * jnp.cosh(tau) * (tau[1] - tau[0]))
    # Far nodes, which weigh nothing, may have a derivative that overflows.
    values = jax.vmap(frozen)(z)
    counts = jnp.isfinite(values) & (values > frozen(c) - 200)
    values = jax.vmap(lambda z: h(z, x))(jnp.where(counts, z, c)) + log_w
    return jax.nn.logsumexp(jnp.where(counts, values, -jnp.inf))
