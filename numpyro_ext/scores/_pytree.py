"""Frozen dataclasses as pytrees: kernels, estimators and fitted estimates."""

from dataclasses import fields
from functools import partial
from typing import Any

import jax


def pytree[T](cls: type[T]) -> type[T]:
    """Register a frozen dataclass: arrays and kernels are children, words and static fields not."""
    jax.tree_util.register_pytree_node(cls, _flatten, partial(_unflatten, cls))
    return cls


def _flatten(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = [(f, getattr(value, f.name)) for f in fields(value)]
    static = {f.name for f, v in values if f.metadata.get("static") or _is_structure(v)}
    children = [(f.name, v) for f, v in values if f.name not in static]
    structure = tuple((f.name, v) for f, v in values if f.name in static)
    return tuple(v for _, v in children), (tuple(name for name, _ in children), structure)


def _unflatten(cls: type, aux: tuple[Any, ...], children: Any) -> Any:
    # Not through __init__: JAX rebuilds pytrees with placeholders that are no valid arguments.
    value = object.__new__(cls)
    for name, v in [*zip(aux[0], children, strict=True), *aux[1]]:
        object.__setattr__(value, name, v)
    return value


def _is_structure(value: Any) -> bool:
    # A kernel of one's own is a leaf that no transformation would accept.
    return isinstance(value, str) or (callable(value) and not is_pytree(value))


def is_pytree(value: Any) -> bool:
    """True for the kernels of this package, into which JAX looks, and false for a user's own."""
    return not jax.tree_util.all_leaves([value])
