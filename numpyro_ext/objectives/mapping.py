"""How an objective maps over its particles: what ``vectorize_particles`` stands for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

__all__ = ["MapT", "map_of"]

MapT = Callable[[Callable[..., Any], Any], Any]
"""``mapT(fn, xs)`` maps over the leading axis of the pytree ``xs``."""


def map_of(vectorize_particles: Any) -> MapT | None:
    """The map, or None where NumPyro's own reading of the argument is right.

    ``False`` recomputes each particle in the backward pass, so that memory does not grow with their
    number. ``jax.vmap`` and ``jax.pmap``, bare or in a ``functools.partial``, return a function.
    """
    if vectorize_particles is False:
        return _map_with_checkpoint
    if getattr(vectorize_particles, "func", vectorize_particles) in (jax.vmap, jax.pmap):
        return partial(_apply, vectorize_particles)
    return None


def _apply(transform: Callable[..., Any], fn: Callable[..., Any], xs: Any) -> Any:
    return transform(fn)(xs)


def _map_with_checkpoint(fn: Callable[..., Any], xs: Any) -> Any:
    return jax.lax.map(jax.checkpoint(fn, prevent_cse=False), xs)
