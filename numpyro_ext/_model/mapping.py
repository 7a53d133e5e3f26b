"""The argument ``vectorize_particles`` of NumPyro's losses."""

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["map_over"]


def map_over(how: Any, fn: Callable[..., Any], xs: Any) -> Any:
    """``fn`` over the leading axis of the pytree ``xs``; ``how`` is a ``vectorize_particles``."""
    if how is False:  # each is computed again in the backward pass, so that memory is that of one
        return jax.lax.map(jax.checkpoint(fn, prevent_cse=False), xs)
    how = jax.vmap if how is True else how
    # jax.vmap and jax.pmap, bare or in a functools.partial, return a function; others map at once.
    return how(fn)(xs) if getattr(how, "func", how) in (jax.vmap, jax.pmap) else how(fn, xs)
