"""Arrays that have fewer rows than the plate whose indices take them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import GatherScatterMode
from numpyro.primitives import Messenger

__all__ = ["marked_plates", "shapes_on_plates"]

_MARK = "rows of the plate "


class marked_plates(Messenger):
    """Put a mark on the indices of plates, by which :func:`shapes_on_plates` knows them."""

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["value"] is not None:
            mark = f"{_MARK}'{msg['name']}' {msg['args'][0]}"
            msg["value"] = checkpoint_name(msg["value"], mark)


def shapes_on_plates(run: Callable[..., Any], *args: Any) -> Any:
    """
    ``jax.eval_shape``, with an error where a plate of :class:`marked_plates` indexes a shorter
    array, as in ``x[idx]``: JAX would take the last row for all that are missing, and say nothing.

    An index that is computed, such as ``group[idx]``, and one with a mode of its own, as
    ``jnp.take`` has, are left alone.
    """
    program, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    _follow(program.jaxpr, {})
    return shapes


def _follow(jaxpr: Any, marks: dict[Any, dict[int, str]]) -> list[dict[int, str]]:
    """Follow the marks of variables through a program, to those of its results.

    A mark is ``{k: plate}`` of a variable whose last axis holds one index for each axis of an
    array; of a plain index k is 0.
    """
    negative: dict[Any, Any] = {}

    def mark(x: Any) -> dict[int, str]:
        return {} if hasattr(x, "val") else marks.get(x, {})  # a literal is not hashable

    for eqn in jaxpr.eqns:
        kind, inputs, params = eqn.primitive.name, eqn.invars, eqn.params
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        result: list[dict[int, str]] = []
        if kind == "name" and params["name"].startswith(_MARK):
            result = [{0: params["name"].removeprefix(_MARK)}]
        elif kind in ("broadcast_in_dim", "convert_element_type", "name", "reshape", "squeeze"):
            result = [mark(inputs[0])]
        elif kind == "lt" and mark(inputs[0]) and getattr(inputs[1], "val", None) == 0:
            negative[eqn.outvars[0]] = inputs[0]
        elif kind == "select_n" and negative.get(inputs[0]) is inputs[1]:
            result = [mark(inputs[1])]  # negative indices count from the end
        elif kind == "concatenate":
            start, joined = 0, {}
            for x in inputs:
                joined |= {start + k: plate for k, plate in mark(x).items()}
                start += x.aval.shape[-1]
            result = [joined]
        elif kind == "gather" and params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS:
            axes = params["dimension_numbers"].start_index_map
            for k, plate in mark(inputs[1]).items():
                _check_length(inputs[0].aval.shape, axes[k], plate)
        elif inner is not None and len(inner.invars) == len(inputs):
            before = zip(inner.invars, map(mark, inputs), strict=True)
            result = _follow(inner, dict(before))
        marks.update(zip(eqn.outvars, result, strict=False))
    return [mark(x) for x in jaxpr.outvars]


def _check_length(shape: tuple[int, ...], axis: int, plate: str) -> None:
    name, size = plate.rsplit(" ", 1)
    if shape[axis] < int(size):
        where = "rows" if axis == 0 else f"entries along axis {axis}"
        raise ValueError(
            f"the model takes the rows of the plate {name}, which has {size}, from an array of"
            f" shape {shape}, which has only {shape[axis]} {where}: JAX would take the last one for"
            " all that are missing; pass an array with as many rows as the plate, or give the plate"
            " the size of the data, as by len(x)."
        )
