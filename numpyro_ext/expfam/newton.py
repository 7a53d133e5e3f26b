"""Newton's method for the maps from means to natural parameters that have no closed form."""

from collections.abc import Callable

from jax import Array, lax
import jax.numpy as jnp


def newton(step: Callable[[Array], Array], start: Array, max_steps: int = 50) -> Array:
    """``step`` repeated until every element stays within rounding, or ``max_steps`` times.

    Elements that are NaN stay so and do not delay the others.
    """
    tol = 4 * jnp.finfo(start.dtype).eps

    def moving(carry: tuple[Array, Array, Array]) -> Array:
        i, old, new = carry
        return (i < max_steps) & jnp.any(jnp.abs(new - old) > tol * jnp.abs(new))

    def advance(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, _, new = carry
        return i + 1, new, step(new)

    return lax.while_loop(moving, advance, (jnp.ones((), int), start, step(start)))[2]
