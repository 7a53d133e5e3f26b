"""Minima of a function from many starts, by one compiled program.

Reference: Nocedal and Wright, *Numerical Optimization* (2006), section 6.1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array, lax
import jax.numpy as jnp

__all__ = ["EACH", "GRADIENTS", "SEARCHES", "End", "descend"]

EACH = 8
SEARCHES, _STEPS = 4 * EACH, 200
"""Starts, of four kinds, and gradients from each of them."""
GRADIENTS = SEARCHES * _STEPS
_FARTHEST = 30.0
"""Length of a step."""
_ARMIJO, _SHORTER, _SHORTEST = 1e-4, 0.25, 1e-6
_NEAR = 0.02
"""Decrement at which a point is a minimum."""


class End(NamedTuple):
    """Where a descent ended."""

    x: Array
    """``(d,)``"""
    value: Array
    """inf where the start has no finite value and gradient."""
    decrement: Array
    r""":math:`\\sqrt{g^\\top H g}` with the inverse curvature H that the steps have shown."""


def descend(value_and_grad: Callable[[Array], tuple[Array, Array]], start: Array) -> End:
    r"""BFGS from one start, for ``vmap``, with one gradient in each pass of one loop.

    From :math:`x` it tries :math:`x' = x - t H g` and takes it where :math:`f(x') \le f(x) -
    10^{-4}\, t\, g^\top H g`; else t becomes a quarter of what it was. With :math:`s = x' - x` and
    :math:`y = g' - g`, a step with :math:`s^\top y > 0` changes the inverse curvature to

    .. math:: H' = (I - \rho s y^\top) H (I - \rho y s^\top) + \rho s s^\top, \qquad
        \rho = 1 / s^\top y.

    :param start: ``(d,)``, in coordinates in which a curvature of 1 is usual.
    """
    eye = jnp.eye(len(start), dtype=start.dtype)
    eps = float(jnp.finfo(start.dtype).eps)

    def goes_on(state: Any) -> Array:
        k, _, value, g, H, _, _ = state
        return (k < _STEPS) & ((k == 0) | (jnp.isfinite(value) & (g @ H @ g > _NEAR**2)))

    def step(state: Any) -> Any:
        k, x, value, g, H, p, t = state
        s = t * p
        new, new_g = value_and_grad(x + s)
        fine = jnp.isfinite(new) & jnp.all(jnp.isfinite(new_g))
        # What rounding leaves of a difference of two values near a minimum.
        rounding = jnp.where(jnp.isfinite(value), 8 * eps * jnp.abs(value), 0.0)
        taken = fine & (new <= value + _ARMIJO * (g @ s) + rounding)
        y = new_g - g
        rise = s @ y
        shows = taken & (rise > eps * jnp.linalg.norm(s) * jnp.linalg.norm(y))
        rho, Hy = 1 / jnp.where(shows, rise, 1.0), H @ y
        both = jnp.outer(Hy, s)
        updated = H + (rho + rho**2 * (y @ Hy)) * jnp.outer(s, s) - rho * (both + both.T)
        H = jnp.where(shows, updated, H)
        x, value, g = (jnp.where(taken, a, b) for a, b in ((x + s, x), (new, value), (new_g, g)))
        lost = ~taken & (_SHORTER * t < _SHORTEST)
        H = jnp.where(lost | (taken & ~(g @ H @ g > 0)), eye, H)
        p = jnp.where(taken | lost, -H @ g, p)
        p = p * jnp.minimum(1.0, _FARTHEST / jnp.maximum(jnp.linalg.norm(p), 1e-30))
        return k + 1, x, value, g, H, p, jnp.where(taken | lost, 1.0, _SHORTER * t)

    none, one = jnp.zeros_like(start), jnp.ones((), start.dtype)
    # The first step stays at the start, to find the gradient there.
    state = jnp.asarray(0, jnp.int32), start, jnp.inf * one, none, eye, none, one
    _, x, value, g, H, _, _ = lax.while_loop(goes_on, step, state)
    return End(x, value, jnp.sqrt(jnp.maximum(g @ H @ g, 0.0)))
