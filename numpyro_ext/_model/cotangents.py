"""The identity with a backward pass of one's own, in each transformation of JAX."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

__all__ = ["change_cotangents"]


def change_cotangents[T](tree: T, change: Callable[[T], T]) -> T:
    """``tree``, whose cotangents become ``change(cotangents)`` on the way back. Its tangents in
    forward mode are untouched.

    :param tree: floating-point arrays.
    """

    def solve_transposed(_: Any, cts: T) -> T:
        return change(cts)

    # A linear map that is its own solution is the one way of JAX to give a transpose that works in
    # forward and reverse mode and under vmap.
    same = lax.custom_linear_solve(lambda x: x, _tied(tree), lambda _, b: b, solve_transposed)
    return _tied(same)


def _tied[T](tree: T) -> T:
    """``tree``, each array of which depends on all, by a choice that the compiler knows and drops.

    The rule of the map for forward mode asks for a tangent of each array, also where only some are
    differentiated, and that of its transpose for one of each cotangent.
    """
    tree = jax.tree.map(jnp.asarray, tree)
    tie = jnp.sum(jnp.stack([jnp.sum(x).astype(float) for x in jax.tree.leaves(tree)]))
    return jax.tree.map(lambda x: jnp.where(True, x, tie.astype(x.dtype)), tree)
