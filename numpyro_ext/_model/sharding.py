"""Rows, minibatches and arrays of data that are spread over devices."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding


def num_devices(sharding: NamedSharding | None) -> int:
    """The number of devices over which a batch is spread."""
    if sharding is None:
        return 1
    if len(sharding.spec) != 1 or sharding.spec[0] is None:
        raise ValueError(
            f"sharding has the spec {sharding.spec}; it must name the mesh axis of the rows, such"
            " as P('data')."
        )
    axes = sharding.spec[0] if isinstance(sharding.spec[0], tuple) else (sharding.spec[0],)
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


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
