"""Rows, minibatches and arrays of data that are spread over devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding


def check_sharding(sharding: NamedSharding | None) -> None:
    """An error unless a sharding names the axis along which rows are spread."""
    if sharding is not None and (len(sharding.spec) != 1 or sharding.spec[0] is None):
        raise ValueError(
            f"sharding has the spec {sharding.spec}; it must name the mesh axis of the rows, such"
            " as P('data')."
        )


def spread_arrays(
    args: tuple, kwargs: dict[str, Any]
) -> tuple[dict[int, Array], Callable[[dict[int, Array]], tuple[tuple, dict[str, Any]]]]:
    """The arrays that are spread over devices, which a compiled function must take as arguments of
    its own, and the arguments with these put in."""
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
