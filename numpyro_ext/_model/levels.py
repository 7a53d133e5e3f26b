"""Levels that a factor does not have: JAX gives the last effect to one beyond them, and counts a
negative one from the end."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.lax import GatherScatterMode
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.operations import jit_on_data, quick_options

_MARK = "latent site "
_MOVED = ("broadcast_in_dim", "convert_element_type", "name", "reshape", "squeeze")


class marked_latents(Messenger):
    """Put a mark on the values of latent sites, by which :class:`Lookups` knows them."""

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            msg["value"] = checkpoint_name(msg["value"], f"{_MARK}{msg['name']}")


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


class _Node:
    """A value of the program, computed where it is used."""

    def __init__(
        self,
        compute: Callable[[], Any],
        latent: dict[str, tuple[int, ...]] | None = None,
        added_to: "_Node | None" = None,
        raw: "_Node | None" = None,
        source: Any = None,
        columns: "Sequence[_Node]" = (),
    ) -> None:
        self.compute, self.added_to = compute, added_to
        self.source, self.columns = source, columns
        """An array of the data that has all of its numbers; and what it was put together from."""
        self.latent = latent
        """The shapes of the latent sites on which it depends, None for data."""
        self.raw = self if raw is None else raw
        """The same before negative indices were made ones from the end."""

    @cached_property
    def value(self) -> Any:
        return self.compute()


class Lookups:
    """
    The places where a program indexes latent sites by numbers of its data.

    :param program: a closed jaxpr of a random key, of a model with :class:`marked_latents`.
    """

    def __init__(self, program: Any) -> None:
        self.program = program
        self.sites: list[tuple[str, int]] = []

    def beyond(self) -> list[Beyond]:
        """The lookups with levels that are not among their effects. A level from the end is none of
        these where the last effect has no other number, as in a ring."""
        levels, _ = self._walk(self.program.consts, None)
        if all(_is_within(x.source, size) for x, (_, size) in zip(levels, self.sites, strict=True)):
            return []  # without a program

        def look(consts: list[Any]) -> list[tuple[Array, Array]]:
            levels, _ = self._walk(consts, None)
            return [(jnp.max(x.value), jnp.min(x.value)) for x in levels]

        looked = [
            tuple(map(int, x)) for x in jit_on_data(look, quick_options())(self.program.consts)
        ]
        return [
            Beyond(k, site, size, most if most >= size else least)
            for k, ((site, size), (most, least)) in enumerate(zip(self.sites, looked, strict=True))
            if most >= size or least < -size or (least < 0 and most == size - 1)
        ]

    def changed(self, rng_key: Array, lookup: int) -> list[np.ndarray]:
        """Of each result of the program, the numbers that depend on what such levels of a lookup
        read."""
        moved = np.arange(len(self.sites)) == lookup
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
    ) -> tuple[list[_Node], list[_Node]]:
        """The levels of each lookup, as the model has them, and the results, where what levels
        beyond the effects read is another number in the lookups that are moved."""
        levels: list[_Node] = []
        self.sites = []

        def of_gather(eqn: Any, inputs: list[_Node], node: _Node) -> _Node:
            operand, dims = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"]
            fills = eqn.params["fill_value"] not in (None, np.nan)
            if eqn.params["mode"] == GatherScatterMode.CLIP or fills:
                return node
            shapes = inputs[0].latent or {}
            site = next((k for k, shape in shapes.items() if shape == operand), next(iter(shapes)))
            for k, axis in enumerate(dims.start_index_map):
                if eqn.params["slice_sizes"][axis] != 1:
                    continue
                size, index = operand[axis], inputs[1].raw
                source = index.columns[k].source if index.columns else index.source
                level = _Node(lambda k=k, index=index: index.value[..., k], source=source)
                self.sites.append((site, size))
                levels.append(level)
                if moved is not None:
                    now = moved[len(levels) - 1]
                    node = _Node(partial(_other, node, level, size, now, dims), node.latent)
            return node

        def run(jaxpr: Any, consts: Sequence[Any], inputs: list[_Node]) -> list[_Node]:
            known = dict(zip(jaxpr.invars, inputs, strict=True))
            known |= {v: _of_data(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}

            def node_of(v: Any) -> _Node:
                return _of_data(v.val) if hasattr(v, "val") else known[v]

            for eqn in jaxpr.eqns:
                kind, nodes = eqn.primitive.name, [node_of(v) for v in eqn.invars]
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                if kind in ("jit", "pjit", "closed_call", "custom_jvp_call") and inner is not None:
                    made = run(inner.jaxpr, inner.consts, nodes)
                else:
                    made = _results(eqn, nodes)
                    if kind == "gather" and nodes[0].latent and nodes[1].latent is None:
                        made = [of_gather(eqn, nodes, made[0])]
                    if moved is not None:  # in their order, because a chain may be long
                        for node in made:
                            _ = node.value
                known.update(zip(eqn.outvars, made, strict=True))
            return [node_of(v) for v in jaxpr.outvars]

        of_key = _Node(lambda: rng_key, {})
        return levels, run(self.program.jaxpr, consts, [of_key])


def _results(eqn: Any, nodes: list[_Node]) -> list[_Node]:
    kind = eqn.primitive.name
    latent = [x.latent for x in nodes if x.latent is not None]
    shapes = {name: shape for x in latent for name, shape in x.items()} if latent else None
    if kind == "name" and eqn.params["name"].startswith(_MARK):
        shapes = {eqn.params["name"].removeprefix(_MARK): eqn.outvars[0].aval.shape}

    def computed(nodes: list[_Node], **of_node: Any) -> _Node:
        moved = kind in _MOVED or (kind == "gather" and nodes[0].latent is None)
        source = nodes[0].source if moved else None
        single = kind == "concatenate" and len(nodes) == eqn.outvars[0].aval.shape[-1]
        columns = nodes if single else ()
        compute = partial(_bind, eqn, nodes)
        return _Node(compute, shapes, source=source, columns=columns, **of_node)

    if eqn.primitive.multiple_results:
        every = computed(nodes)
        return [_Node(lambda k=k: every.value[k], shapes) for k in range(len(eqn.outvars))]
    raw = None
    if kind == "select_n" and len(nodes) == 3 and nodes[2].added_to is nodes[1]:
        raw = nodes[1]
    elif kind in (*_MOVED, "concatenate") and any(x.raw is not x for x in nodes):
        raw = computed([x.raw for x in nodes])
    return [computed(nodes, added_to=nodes[0] if kind == "add" else None, raw=raw)]


def _other(node: _Node, level: _Node, size: int, now: Array, dims: Any) -> Array:
    """What a lookup reads, other at levels beyond its effects, of the same type."""
    outside = now & ((level.value < 0) | (level.value >= size))
    outside = jnp.expand_dims(outside, dims.offset_dims)
    x = node.value
    return x ^ outside if x.dtype == bool else x + outside.astype(x.dtype)


def _of_data(x: Any) -> _Node:
    return _Node(lambda: x, source=x)


def _is_within(levels: Any, size: int) -> bool:
    if levels is None or is_traced(levels):
        return False
    numbers = np.asarray(levels)
    return not numbers.size or bool(np.min(numbers) >= 0 and np.max(numbers) < size)


def _bind(eqn: Any, nodes: Sequence[_Node]) -> Any:
    params: Any = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = params if isinstance(params, tuple) else ((), params)
    return eqn.primitive.bind(*subfuns, *(x.value for x in nodes), **params)
