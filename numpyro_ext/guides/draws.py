"""Draws and quantiles of guides that are run once for each of them."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from numpyro.util import not_jax_tracer

__all__ = ["draws_of", "levels_of"]


def draws_of[T](
    one: Callable[[Array], T],
    rng_key: Array,
    sample_shape: tuple[int, ...],
    batch_size: int | None = None,
) -> T:
    """``one(key)`` for a key of each draw, with the sample shape in front of every array.

    :param batch_size: draws that are made at a time, at most; one after the other if None.
    """
    keys = random.split(rng_key, math.prod(sample_shape))
    if batch_size is not None:
        batch_size = min(batch_size, len(keys))
    draws = lax.map(one, keys, batch_size=batch_size)
    return jax.tree.map(lambda x: x.reshape(*sample_shape, *x.shape[1:]), draws)


def levels_of(quantiles: Any) -> Array:
    """The levels of quantiles as an array, with an error unless they are between 0 and 1."""
    q = jnp.asarray(quantiles, dtype=jnp.result_type(float))
    if not_jax_tracer(q) and not bool(((q >= 0) & (q <= 1)).all()):
        raise ValueError(f"quantiles is {quantiles!r}; every entry must be between 0 and 1.")
    return q
