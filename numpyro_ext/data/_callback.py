"""A call from a compiled program to the host, for rows by their numbers."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
import jax.numpy as jnp
import numpy as np

Read = Callable[[Any], Any]


def read_on_host(read: Read, row: Any, index: Array) -> Any:
    """``read(index)``, with ``index.shape`` in front of the shape of each array of a row.

    It is ``jax.pure_callback`` without the arrays of JAX that this makes before each call, which
    takes longer than to read some hundred rows.

    :param row: shape and dtype of each array of a row, a tree.
    """
    leaves, tree = jax.tree.flatten(row)
    shapes = tuple((x.shape, np.dtype(x.dtype)) for x in leaves)
    return jax.tree.unflatten(tree, _read_p.bind(index, read=read, shapes=shapes))


_read_p = Primitive("read_on_host")
_read_p.multiple_results = True


@_read_p.def_abstract_eval
def _shapes_of(index: Any, *, read: Read, shapes: tuple) -> list[ShapedArray]:
    return [ShapedArray((*index.shape, *shape), dtype) for shape, dtype in shapes]


@_read_p.def_impl
def _read_now(index: Any, *, read: Read, shapes: tuple) -> list[Array]:
    return [jnp.array(x) for x in jax.tree.leaves(read(np.asarray(index)))]


def _read_of_batch(args: Any, axes: Any, **params: Any) -> tuple[Any, list[int]]:
    rows = _read_p.bind(jnp.moveaxis(args[0], axes[0], 0), **params)
    return rows, [0] * len(rows)


def _lower(ctx: Any, index: Any, *, read: Read, shapes: tuple) -> Any:
    def call(index: Any) -> tuple[np.ndarray, ...]:
        return tuple(jax.tree.leaves(read(index)))

    # With several devices, ``jax.pure_callback`` knows on which of them it is called.
    if getattr(ctx.module_context.axis_context, "num_devices", None) != 1:
        out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_out)
        on_one_of_them = mlir.lower_fun(lambda i: jax.pure_callback(call, out, i))
        return on_one_of_them(ctx, index)
    return mlir.emit_python_callback(
        ctx, call, None, [index], ctx.avals_in, ctx.avals_out, has_side_effect=False
    )[0]


batching.primitive_batchers[_read_p] = _read_of_batch
mlir.register_lowering(_read_p, _lower)
