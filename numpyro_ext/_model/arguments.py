"""The arguments of a model split into arrays, and what a compiled program takes as it is."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

__all__ = ["Arguments", "indexed", "is_traced", "split_arguments"]


def is_traced(tree: Any) -> bool:
    """Return whether a leaf has no numbers yet, as under ``jax.jit``."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


class _Indexed(np.ndarray):
    """A NumPy array of which a traced index takes rows, as it does of a JAX array.

    It is no JAX array, so that a model can still read its numbers, as in ``int(group.max())``.
    """

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, Tracer) for part in parts):
            return jnp.asarray(np.asarray(self))[index]
        return super().__getitem__(index)


def indexed(x: Any) -> Any:
    """Arguments of a model whose NumPy arrays of numbers take traced indices."""
    if type(x) in (np.ndarray, np.memmap) and x.dtype.kind in "biufc":
        return x.view(_Indexed)
    if type(x) in (list, tuple):
        return type(x)(indexed(item) for item in x)
    if type(x) is dict:  # not by jax.tree, which sorts the keys
        return {key: indexed(value) for key, value in x.items()}
    return x


class _Held:
    """An array that a compiled program holds; equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


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
            leaves.insert(place, value.value if isinstance(value, _Held) else value)
        return jax.tree.unflatten(self.tree, leaves)


def split_arguments(
    args: tuple, kwargs: dict[str, Any], *, hold: bool = False
) -> tuple[Arguments, list[Any]]:
    """The arrays among the arguments of a model, and the rest.

    :param bool hold: whether arrays are part of the rest, for a model that looks at their numbers.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [isinstance(x, np.ndarray | Array) for x in leaves]
    fixed = [
        (i, _Held(x) if is_array else x)
        for i, (x, is_array) in enumerate(zip(leaves, arrays, strict=True))
        if hold or not is_array
    ]
    free = [] if hold else [x for x, is_array in zip(leaves, arrays, strict=True) if is_array]
    return Arguments(tree, tuple(fixed)), free
