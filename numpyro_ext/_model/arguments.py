"""The arguments of a model split into arrays, and what a compiled program takes as it is."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
import numpy as np

__all__ = ["Arguments", "split_arguments"]


@dataclass(frozen=True)
class Arguments:
    """Arguments of a model without their arrays: hashable, a static argument of ``jax.jit``.

    Two are equal if a program that was compiled for one serves for the other.
    """

    tree: Any
    fixed: tuple[tuple[int, Any], ...]
    """The leaves that are no arrays (numbers, words, functions), with their places."""

    def whole(self, arrays: list[Array]) -> tuple[tuple, dict[str, Any]]:
        """The arguments and keyword arguments with these arrays."""
        leaves: list[Any] = list(arrays)
        for place, value in self.fixed:
            leaves.insert(place, value)
        return jax.tree.unflatten(self.tree, leaves)


def split_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
    """The arrays among the arguments of a model, and the rest."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    fixed = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, np.ndarray | Array))
    return Arguments(tree, fixed), [x for x in leaves if isinstance(x, np.ndarray | Array)]
