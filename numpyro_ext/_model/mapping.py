"""Maps over particles, by ``vectorize_particles`` of NumPyro's losses, and over blocks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["map_blocks", "map_over"]


def map_over(how: Any, fn: Callable[..., Any], xs: Any) -> Any:
    """``fn`` over the leading axis of the pytree ``xs``; ``how`` is a ``vectorize_particles``."""
    if how is False:  # each is computed again in the backward pass, so that memory is that of one
        return jax.lax.map(jax.checkpoint(fn, prevent_cse=False), xs)
    how = jax.vmap if how is True else how
    # jax.vmap and jax.pmap, bare or in a functools.partial, return a function; others map at once.
    return how(fn)(xs) if getattr(how, "func", how) in (jax.vmap, jax.pmap) else how(fn, xs)


def map_blocks(fn: Callable[[jax.Array], Any], size: int, most: int) -> Any:
    """``fn`` of 0 to ``size - 1``, of at most so many at once.

    Blocks have one size, because a shorter one would be compiled by itself; the last number fills
    the last block.
    """
    blocks = -(-size // most)
    if blocks == 1:
        return jax.vmap(fn)(jnp.arange(size))
    length = -(-size // blocks)
    places = jnp.minimum(jnp.arange(blocks * length), size - 1)
    return jax.tree.map(lambda x: x[:size], jax.lax.map(fn, places, batch_size=length))
