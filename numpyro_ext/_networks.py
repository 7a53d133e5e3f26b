"""Networks as users have them: Flax linen, Flax nnx and Equinox modules as stax pairs.

No library is imported for it: an object of a library is there only once the library is.
"""

from collections.abc import Callable, Iterable
from functools import partial
import math
import sys
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

type Pair = tuple[Callable[..., Any], Callable[..., Any]]
"""``(init_fn, apply_fn)`` as in ``jax.example_libraries.stax``."""
type Network = Pair | Callable[..., Any]
"""A pair, or a module: an object of Flax linen, Flax nnx or Equinox."""


class _Linen:
    def __init__(self, module: Any) -> None:
        self.name, self.module = type(module).__name__, module

    def weights(self, rng_key: Array, x: Array) -> Any:
        variables = self.module.init(rng_key, x)
        check_stateless(self.name, set(variables) - {"params"})
        return variables.get("params", {})

    def apply(self, weights: Any, x: Array) -> Any:
        return self.module.apply({"params": weights}, x)


class _Nnx:
    """What is not a weight, such as the statistics of a trained module, is held constant."""

    def __init__(self, module: Any) -> None:
        from flax import nnx

        self.name = type(module).__name__
        self.graph, self.state, self.others = nnx.split(module, nnx.Param, ...)
        self.start = nnx.to_pure_dict(self.state)

    def weights(self, rng_key: Array, x: Array) -> Any:
        return self.start

    def apply(self, weights: Any, x: Array) -> Any:
        from flax import nnx

        state = jax.tree.map(lambda leaf: leaf, self.state)
        nnx.replace_by_pure_dict(state, weights)
        module = nnx.merge(self.graph, state, self.others, copy=True)
        out = module(x)
        after: Any = nnx.split(module, nnx.Param, ...)[2]
        old, new = jax.tree.leaves(self.others), jax.tree.leaves(after)
        if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
            check_stateless(
                self.name, {type(leaf).__name__ for _, leaf in nnx.to_flat_state(after)}
            )
        return out


class _Equinox:
    """A module takes one row; ``jax.vmap`` gives it all rows."""

    def __init__(self, module: Any) -> None:
        import equinox

        def is_state(leaf: Any) -> bool:
            return isinstance(leaf, equinox.nn.StateIndex)

        self.name = type(module).__name__
        states = filter(is_state, jax.tree.leaves(module, is_leaf=is_state))
        check_stateless(self.name, {type(leaf).__name__ for leaf in states})
        self.arrays, self.rest = equinox.partition(module, equinox.is_inexact_array)
        leaves = jax.tree_util.tree_leaves_with_path(self.arrays)
        self.start = {jax.tree_util.keystr(path)[1:]: leaf for path, leaf in leaves}

    def weights(self, rng_key: Array, x: Array) -> Any:
        return self.start

    def apply(self, weights: Any, x: Array) -> Any:
        import equinox

        # The structure of the module pickles, where a structure of Equinox does not.
        structure = jax.tree.structure(self.arrays)
        arrays = jax.tree.unflatten(structure, [weights[name] for name in self.start])
        return jax.vmap(equinox.combine(arrays, self.rest))(x)


def _first_weights(
    adapted: Any, rng_key: Array, shape: tuple[int, ...], dtype: Any = float
) -> tuple[tuple[int, ...], Any]:
    return shape, adapted.weights(rng_key, jnp.ones((1, *shape[1:]), dtype))


def _apply(adapted: Any, row_ndim: int | None, weights: Any, x: Array, **kwargs: Any) -> Any:
    """All batch axes become one, which the module sees as its first."""
    axes = 1 if row_ndim is None else jnp.ndim(x) - row_ndim
    batch, row = x.shape[:axes], x.shape[axes:]
    n = math.prod(batch)
    out = adapted.apply(weights, jnp.reshape(x, (n, *row)))
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(out)]
    if any(shape[:1] != (n,) for shape in shapes):
        raise ValueError(
            f"the network {adapted.name} turns shape {(n, *row)} into"
            f" {', '.join(map(str, shapes))}; the first axis must have the {n} rows."
        )
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (*batch, *leaf.shape[1:])), out)


class ModulePair(NamedTuple):
    """The pair of a module; ``init_fn`` takes a shape with the rows as its first axis."""

    init: Any
    apply: Any

    def of_rows(self, row_ndim: int) -> "ModulePair":
        """The pair for rows of so many axes, with any number of batch axes; one by default."""
        return self._replace(apply=partial(_apply, *self.init.args, row_ndim))

    def __repr__(self) -> str:
        return self.init.args[0].name


def as_pair(network: Any, name: str = "network", *, optional: bool = False) -> Any:
    """The pair ``(init_fn, apply_fn)`` of a module; a pair is returned unchanged. ``init_fn`` draws
    the first weights of a Flax linen module; other modules have weights."""
    if network is None and optional:
        return None
    if isinstance(network, tuple | list) and len(network) == 2 and all(map(callable, network)):
        return network
    for library, adapter in {"flax.linen": _Linen, "flax.nnx": _Nnx, "equinox": _Equinox}.items():
        base = getattr(sys.modules.get(library), "Module", ())
        if isinstance(network, base):
            adapted = adapter(network)
            return ModulePair(partial(_first_weights, adapted), partial(_apply, adapted, None))
    raise TypeError(
        f"{name} is {network!r}; it must be a stax pair (init_fn, apply_fn), or an object (not"
        f" the class) of a Flax linen, Flax nnx or Equinox module{', or None' if optional else ''}."
    )


def check_stateless(name: str, kinds: Iterable[str]) -> None:
    """An error if a module has state besides its weights."""
    kinds = sorted(kinds)
    if kinds:
        raise ValueError(
            f"the network {name} has or changes state besides its weights ({', '.join(kinds)}); use"
            " layers without state, such as layer norm, or call .eval() of an nnx module."
        )
