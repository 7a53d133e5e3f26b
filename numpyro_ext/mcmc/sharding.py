"""Minibatches and arrays of data that are spread over devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

__all__ = ["check_batches", "spread_arrays"]


def check_batches(plates: dict[str, tuple[int, int]], devices: int) -> None:
    """A ``ValueError`` if a batch cannot be spread evenly over the devices."""
    for name, (_, batch_size) in plates.items():
        if batch_size % devices:
            raise ValueError(
                f"plate '{name}' has subsample_size {batch_size}; spread over {devices} devices it"
                f" must be a multiple of {devices}."
            )


def spread_arrays(
    args: tuple, kwargs: dict[str, Any]
) -> tuple[dict[int, Array], Callable[[dict[int, Array]], tuple[tuple, dict[str, Any]]]]:
    """The arrays that are spread over devices, and the arguments with these put in.

    A compiled function takes these as arguments of its own: closed over they would be copied, and
    those of other processes cannot be. The rest stays as it is, so that a model may look at it.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    spread = {
        k: x
        for k, x in enumerate(leaves)
        if isinstance(x, Array) and not isinstance(x, Tracer) and len(x.sharding.device_set) > 1
    }

    def whole(spread: dict[int, Array]) -> tuple[tuple, dict[str, Any]]:
        if not spread:  # the order of a dict would be lost
            return args, kwargs
        return jax.tree.unflatten(tree, [spread.get(k, x) for k, x in enumerate(leaves)])

    return spread, whole
