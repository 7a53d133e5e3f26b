"""The lookups ``x[i]`` of a program: rows of a plate that an array does not have, and levels that a
factor does not have. JAX takes the last entry for an index beyond the end, and counts a negative
one from the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import GatherScatterMode
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.operations import follow, jit_on_data, quick_options

_ROWS, _LATENT = "rows of the plate ", "latent site "
_MOVED = ("broadcast_in_dim", "convert_element_type", "name", "reshape", "squeeze")


class marked_plates(Messenger):
    """Put a mark on the indices of plates, by which :func:`shapes_on_plates` knows them."""

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["value"] is not None:
            mark = f"{_ROWS}'{msg['name']}' {msg['args'][0]}"
            msg["value"] = checkpoint_name(msg["value"], mark)


class marked_latents(Messenger):
    """Put a mark on the values of latent sites, by which :class:`Levels` knows them."""

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            msg["value"] = checkpoint_name(msg["value"], f"{_LATENT}{msg['name']}")


def shapes_on_plates(run: Callable[..., Any], *args: Any) -> Any:
    """``jax.eval_shape``, with an error where a plate of :class:`marked_plates` indexes a shorter
    array, as in ``x[idx]``."""
    program, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    _Walk().results(program, [_Node(latent={}) for _ in program.in_avals])
    return shapes


class Beyond(NamedTuple):
    """Levels of one lookup that are not among its effects."""

    lookup: int
    site: str
    size: int
    example: int
    """The largest level if it is beyond, else the least."""

    @property
    def is_negative(self) -> bool:
        """Whether it is one that JAX counts from the end."""
        return -self.size <= self.example < 0


class Levels:
    """
    The places where a program indexes latent sites by numbers of its data.

    :param program: a closed jaxpr of a random key, of a model with :class:`marked_latents`.
    """

    def __init__(self, program: Any) -> None:
        self.program = program
        self.walk, _ = self._walk(program.consts, None)

    def beyond(self) -> list[Beyond]:
        """The lookups with levels that are not among their effects. A level that counts from the
        end is allowed where the last effect has no other number, as in a ring."""
        sites = self.walk.sites
        pairs = zip(self.walk.levels, sites, strict=True)
        if all(_is_within(x.source, size) for x, (_, size) in pairs):
            return []  # without a program

        def look(consts: list[Any]) -> list[tuple[Array, Array]]:
            levels = self._walk(consts, None)[0].levels
            return [(jnp.max(x.value), jnp.min(x.value)) for x in levels]

        looked = [
            tuple(map(int, x)) for x in jit_on_data(look, quick_options())(self.program.consts)
        ]
        return [
            Beyond(k, site, size, most if most >= size else least)
            for k, ((site, size), (most, least)) in enumerate(zip(sites, looked, strict=True))
            if most >= size or least < -size or (least < 0 and most == size - 1)
        ]

    def changed(self, rng_key: Array, lookup: int) -> list[np.ndarray]:
        """Of each result of the program, the numbers that depend on what such levels of a lookup
        read."""
        moved = np.arange(len(self.walk.sites)) == lookup
        run = partial(self._program, self.program.consts, rng_key)
        pairs = zip(*jax.device_get((run(moved), run(moved & False))), strict=True)
        return [(a != b) & ~(np.isnan(a) & np.isnan(b)) for a, b in pairs]

    @cached_property
    def _program(self) -> Callable[..., list[Array]]:
        def results(consts: list[Any], rng_key: Array, moved: Array) -> list[Array]:
            return [x.value for x in self._walk(consts, rng_key, moved)[1]]

        return jit_on_data(results, quick_options())

    def _walk(
        self, consts: Sequence[Any], rng_key: Any, moved: Array | None = None
    ) -> tuple["_Walk", list["_Node"]]:
        walk = _Walk(moved)
        return walk, walk.results(self.program.replace(consts=consts), [_Node(lambda: rng_key, {})])


@dataclass(eq=False)
class _Node:
    """A value of a program, computed where it is used."""

    compute: Callable[[], Any] | None = None
    latent: dict[str, tuple[int, ...]] | None = None
    """The shapes of the latent sites on which it depends, None for data."""
    plate: str | None = None
    """The plate of which it has the rows."""
    source: Any = None
    """An array of the data that has all of its numbers."""
    columns: "Sequence[_Node]" = ()
    """What it was put together from."""
    added_to: "_Node | None" = None
    """The numbers to which something was added."""
    unwrapped: "_Node | None" = None

    @cached_property
    def value(self) -> Any:
        return cast(Any, self.compute)()

    @property
    def raw(self) -> "_Node":
        """The same before negative indices were made ones from the end."""
        return self.unwrapped or self


class _Walk:
    """The lookups of a program in their order.

    :param moved: which of them read another number at levels beyond their effects, ``(lookups,)``;
        None where nothing is computed.
    """

    def __init__(self, moved: Array | None = None) -> None:
        self.moved = moved
        self.levels: list[_Node] = []
        """The levels by which latent sites are indexed, as the model has them."""
        self.sites: list[tuple[str, int]] = []
        """The latent site that each of them indexes, and the number of its effects."""

    def results(self, program: Any, inputs: list[_Node]) -> list[_Node]:
        return follow(program, inputs, self._rule, lambda x: _Node(lambda: x, source=x))

    def _rule(self, eqn: Any, nodes: list[_Node]) -> list[_Node]:
        kind, made = eqn.primitive.name, None
        if kind in ("scan", "cond"):
            made = (self._of_scan if kind == "scan" else self._of_cond)(eqn, nodes)
        made = _results(eqn, nodes) if made is None else made
        if kind in ("gather", "dynamic_slice"):
            made = [self._of_lookup(eqn, nodes, made[0])]
        if self.moved is not None:  # in their order, because a chain may be long
            for node in made:
                _ = node.value
        return made

    def _of_lookup(self, eqn: Any, nodes: list[_Node], node: _Node) -> _Node:
        """What a lookup reads, other where it is moved."""
        sizes, params, shapes = eqn.invars[0].aval.shape, eqn.params, nodes[0].latent or {}
        axes, indices, shared, mode = range(len(sizes)), nodes[1:], (), None
        if eqn.primitive.name == "gather":
            dims, mode = params["dimension_numbers"], params["mode"]
            axes, shared = dims.start_index_map, dims.offset_dims
            indices = [_column(nodes[1], k) for k in range(len(axes))]
            # Under vmap a slice becomes a lookup with a mode that the model has not chosen.
            chosen = mode == GatherScatterMode.CLIP and dims.collapsed_slice_dims
            if chosen or params["fill_value"] not in (None, np.nan):
                return node
        site = next(
            (name for name, shape in shapes.items() if shape == sizes), next(iter(shapes), "")
        )
        for axis, index in zip(axes, indices, strict=True):
            if mode != GatherScatterMode.FILL_OR_DROP:
                _check_rows(sizes, axis, index.plate)
            level, size = index.raw, sizes[axis]
            if shapes and params["slice_sizes"][axis] == 1 and level.latent is None:
                self.sites.append((site, size))
                self.levels.append(level)
                if self.moved is not None:
                    now = self.moved[len(self.levels) - 1]
                    node = _Node(partial(_other, node, level, size, now, shared), node.latent)
        return node

    def _of_scan(self, eqn: Any, nodes: list[_Node]) -> list[_Node] | None:
        """The results of a scan with lookups in its body. Levels that follow from what is carried
        are not looked at."""
        params, body = eqn.params, getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        num_stacked, num_made = (
            sum(_is_stacked(x, y) for x, y in zip(outside, inside, strict=True))
            for outside, inside in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
        )
        first = len(nodes) - num_stacked
        begin, num_before = first - (len(eqn.outvars) - num_made), len(self.levels)

        def walk(values: Sequence[Any], moved: Array | None = None) -> tuple[_Walk, list[_Node]]:
            inner, inputs = _Walk(moved), []
            for k, (node, value) in enumerate(zip(nodes, values, strict=True)):
                latent = {} if begin <= k < first else node.latent
                inputs.append(_Node(lambda x=value: x, latent, node.plate, node.source))
            return inner, inner.results(params["jaxpr"], inputs)

        def level(k: int) -> Array:
            values = [None if x.latent is not None else x.value for x in nodes]

            def of_step(steps: list[Any]) -> Array:
                return walk([*values[:first], *steps])[0].levels[k].value

            return jax.vmap(of_step, axis_size=params["length"])(values[first:])

        def results() -> list[Array]:
            values = [x.value for x in nodes]
            own = slice(num_before, num_before + len(inner.levels))
            moved = None if self.moved is None else self.moved[own]

            def step(carry: list[Array], steps: list[Array]) -> tuple[list[Array], list[Array]]:
                results = [x.value for x in walk([*values[:begin], *carry, *steps], moved)[1]]
                return results[: len(carry)], results[len(carry) :]

            options = {name: params[name] for name in ("length", "reverse", "unroll")}
            carry, steps = lax.scan(step, values[begin:first], values[first:], **options)
            return [*carry, *steps]

        inner, made = walk([None] * len(nodes))
        if not inner.levels:
            return None
        self.sites += inner.sites
        self.levels += [
            _Node(partial(level, k), source=x.source) for k, x in enumerate(inner.levels)
        ]
        return _each(_Node(results), len(made), _latent(nodes))

    def _of_cond(self, eqn: Any, nodes: list[_Node]) -> list[_Node] | None:
        """The results of a choice among programs with lookups."""
        branches, before = eqn.params["branches"], len(self.levels)
        made = [self.results(branch, nodes[1:]) for branch in branches]
        if len(self.levels) == before:
            return None

        def chosen(of_branches: tuple[_Node, ...]) -> Array:
            return lax.select_n(nodes[0].value, *(x.value for x in of_branches))

        latent = _latent(nodes)
        return [_Node(partial(chosen, x), latent) for x in zip(*made, strict=True)]


def _is_stacked(outside: Any, inside: Any) -> bool:
    """Whether a variable of a scan has an axis of steps that it has not in the body."""
    return len(outside.aval.shape) > len(inside.aval.shape)


def _latent(nodes: list[_Node]) -> dict[str, tuple[int, ...]] | None:
    shapes = [x.latent for x in nodes if x.latent is not None]
    return {name: shape for x in shapes for name, shape in x.items()} if shapes else None


def _each(whole: _Node, num: int, latent: Any) -> list[_Node]:
    return [_Node(lambda k=k: whole.value[k], latent) for k in range(num)]


def _results(eqn: Any, nodes: list[_Node]) -> list[_Node]:
    kind, latent = eqn.primitive.name, _latent(nodes)
    node = _Node(partial(_bind, eqn, nodes), latent)
    if eqn.primitive.multiple_results:
        return _each(node, len(eqn.outvars), latent)
    shape = eqn.outvars[0].aval.shape
    if kind in _MOVED:
        node.plate, node.source, node.columns = nodes[0].plate, nodes[0].source, nodes[0].columns
    if kind == "name" and eqn.params["name"].startswith(_LATENT):
        node.latent = {eqn.params["name"].removeprefix(_LATENT): shape}
    elif kind == "name" and eqn.params["name"].startswith(_ROWS):
        node.plate = eqn.params["name"].removeprefix(_ROWS)
    elif kind == "gather" and nodes[0].latent is None:
        node.source = nodes[0].source
    elif kind == "concatenate" and len(nodes) == shape[-1]:
        node.columns = nodes
    elif kind == "add" and jnp.issubdtype(eqn.outvars[0].aval.dtype, np.integer):
        is_size = getattr(eqn.invars[1], "val", 0) > 0
        node.added_to = nodes[0] if is_size else None
    elif kind == "select_n" and nodes[-1].added_to is nodes[1]:
        node.unwrapped, node.plate = nodes[1], nodes[1].plate
    if kind in (*_MOVED, "concatenate") and any(x.unwrapped for x in nodes):
        node.unwrapped = _results(eqn, [x.raw for x in nodes])[0]
    return [node]


def _column(index: _Node, k: int) -> _Node:
    """The indices along one of the axes that a lookup indexes."""

    def of(whole: _Node) -> _Node:
        part = whole.columns[k] if whole.columns else whole
        return _Node(lambda: whole.value[..., k], whole.latent, part.plate, part.source)

    column = of(index)
    column.unwrapped = of(index.raw)
    return column


def _check_rows(shape: tuple[int, ...], axis: int, plate: str | None) -> None:
    """An error where the rows of a plate are not all in an array of this shape."""
    name, _, size = (plate or "").rpartition(" ")
    if size and shape[axis] < int(size):
        where = "rows" if axis == 0 else f"entries along axis {axis}"
        raise ValueError(
            f"the model takes the rows of the plate {name}, which has {size}, from an array of"
            f" shape {shape}, which has {shape[axis]} {where}; give it the size of the data."
        )


def _other(node: _Node, level: _Node, size: int, now: Array, shared: Sequence[int]) -> Array:
    """What a lookup reads, other at levels beyond its effects, of the same type."""
    outside = now & ((level.value < 0) | (level.value >= size))
    outside = jnp.expand_dims(outside, shared)
    x = node.value
    return x ^ outside if x.dtype == bool else x + outside.astype(x.dtype)


def _is_within(levels: Any, size: int) -> bool:
    if levels is None or is_traced(levels):
        return False
    numbers = np.asarray(levels)
    return not numbers.size or bool(np.min(numbers) >= 0 and np.max(numbers) < size)


def _bind(eqn: Any, nodes: Sequence[_Node]) -> Any:
    params: Any = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    return eqn.primitive.bind(*subfuns, *(x.value for x in nodes), **params)
