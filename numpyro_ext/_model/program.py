"""A model on its arguments, and the one way in which it is run at given values on given rows."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import Array, random
from jax.ad_checkpoint import checkpoint_name
from jax.lax import GatherScatterMode
import jax.numpy as jnp
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import init_to_sample, init_to_uniform
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import potential_energy
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_ext._model import handlers
from numpyro_ext._model.arguments import indexed
from numpyro_ext._model.density import row_log_lik
from numpyro_ext._model.enumeration import summed_log_density
from numpyro_ext._model.handlers import first_rows, plain_errors, valid_plates
from numpyro_ext._model.read import ModelInfo, latent_sites, model_info
from numpyro_ext._numpyro import at_unconstrained
from numpyro_ext._typing import Model, Params, Sites, Trace

__all__ = [
    "Program",
    "call_and_trace",
    "depending_on",
    "drawn_names",
    "marked_plates",
    "read_model",
    "set_up",
    "shape_trace",
    "shapes_on_plates",
    "trace_of",
]

FILLED = "_of_masked_entries"
"""The end of the name of what a guide adds for losses of NumPyro alone."""


class Program:
    """A model on its arguments.

    :param model: Python callable containing NumPyro primitives.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param dict params: values of the model's ``param`` and ``mutable`` sites.
    :param dict plates: ``{plate: (size, subsample_size)}`` of the plates whose rows can be chosen.
    """

    def __init__(
        self,
        model: Model,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        params: Params | None = None,
        *,
        plates: dict[str, tuple[int, int]] | None = None,
    ) -> None:
        self.model = substitute(model, data=params) if params else model
        self.plates = plates or {}
        self.arguments: tuple[tuple, dict[str, Any]] = indexed(args), indexed(kwargs or {})

    def trace(
        self,
        z: Sites | None = None,
        rows: dict[str, Array] | None = None,
        *,
        values: Sites | Callable[[Any], Array | None] | None = None,
        rng_key: Array | None = None,
    ) -> Trace:
        """The trace of one run.

        :param dict z: unconstrained values of latent sites; each log Jacobian is a factor.
        :param dict rows: indices of any number for plates; None for those that the model has.
        :param values: values of sites as they are, a dict or a function of a site.
        :param rng_key: the key of all that is drawn, where the model has none.
        """
        fn = self._on(rows)
        if values:
            given: dict[str, Any] = {"substitute_fn" if callable(values) else "data": values}
            fn = substitute(fn, **given)
        fn = fn if z is None else at_unconstrained(fn, z)
        return trace_of(fn if rng_key is None else seed(fn, rng_key), *self.arguments)

    def potential(self, z: Sites, rows: dict[str, Array] | None = None) -> Array:
        """NumPyro's potential at unconstrained values of all latent sites."""
        with plain_errors(self.model, *self.arguments):
            U = potential_energy(self._on(rows), *self.arguments, z)
        return jnp.asarray(U)

    def summed_potential(self, z: Sites, rows: dict[str, Array], nesting: int) -> Array:
        """:meth:`potential`, summed over the values of the sites that are marked as ``parallel``.

        Where plates have all rows funsor sums as it does for ``NUTS``, over the values in loops
        too.

        :param int nesting: the number of axes that plates take.
        """
        from numpyro.contrib.funsor import enum, plate_to_enum_plate
        from numpyro.contrib.funsor import trace as packed_trace

        batches = {n: (N, len(rows[n])) for n, (N, _) in self.plates.items() if len(rows[n]) < N}
        fn, (args, kwargs) = enum(self._on(rows), -nesting - 1), self.arguments
        with plain_errors(self.model, args, kwargs):
            if not batches:
                return jnp.asarray(potential_energy(fn, args, kwargs, z, enum=True))
            with plate_to_enum_plate():
                sites = packed_trace(at_unconstrained(fn, z)).get_trace(*args, **kwargs)
        return -summed_log_density(sites, batches)

    def rows_log_lik(self, z: Sites, rows: dict[str, Array]) -> Array:
        """The log likelihood of each of these rows of one plate, without the plate's scale."""
        (plate,) = rows
        return row_log_lik(self.trace(z, rows), plate)

    def _on(self, rows: dict[str, Array] | None) -> Model:
        if rows is None:
            return self.model
        return handlers.rows(self.model, {n: jnp.asarray(i) for n, i in rows.items()}, self.plates)


def drawn_names(model: Model, args: tuple, kwargs: dict[str, Any]) -> set[str]:
    """Names of the sites that the model draws on these arguments; no site is refused."""
    trace = shape_trace(seed(first_rows(model), random.key(0)), args, kwargs)
    return {site["name"] for site in latent_sites(trace)}


def trace_of(fn: Model, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Trace:
    """The trace of one run."""
    args, named = indexed(args), indexed(kwargs or {})
    with plain_errors(fn, args, named):
        sites = trace(fn).get_trace(*args, **named)
    return {name: site for name, site in sites.items() if not name.endswith(FILLED)}


def depending_on(
    model: Model, args: tuple, kwargs: dict[str, Any], summed: Collection[str]
) -> frozenset[str]:
    """The deterministic sites of a model whose values depend on sites that are summed out."""

    def values(summed: Sites, names: Callable[[Trace], Collection[str]]) -> Sites:
        fn = seed(first_rows(substitute(model, data=summed)), random.key(0))
        trace = trace_of(substitute(fn, substitute_fn=init_to_sample), args, kwargs)
        return {name: trace[name]["value"] for name in names(trace)}

    def deterministic(trace: Trace) -> list[str]:
        return [name for name, site in trace.items() if site["type"] == "deterministic"]

    drawn = jax.eval_shape(lambda: values({}, lambda _: summed))
    sources = eval_provenance(lambda summed: values(summed, deterministic), summed=drawn)
    return frozenset(name for name, names in sources.items() if names)


def call_and_trace(fn: Model, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Trace]:
    """The result of ``fn`` and the trace of that run, whose sites outer handlers see too."""
    with trace() as recorded:
        result = fn(*args, **kwargs)
    return result, recorded


def shape_trace(fn: Model, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Trace:
    """The trace of a run without arithmetic, in which values have only a shape and a type."""
    box: Trace = {}

    def run() -> None:
        with block():  # a guide that reads its model is traced itself
            box.update(trace_of(marked_plates(fn), args, kwargs))

    shapes_on_plates(run)
    return box


def set_up(guide: Model, args: tuple = (), kwargs: dict[str, Any] | None = None) -> None:
    """Call an auto guide that was never called, so that it does not read its model in a trace."""
    if isinstance(guide, type):
        name = guide.__name__
        raise TypeError(
            f"the guide is the class {name}; give SVI an instance: SVI(model, {name}(model), ...)."
        )
    while not isinstance(guide, AutoGuide):
        if not hasattr(guide, "fn"):  # of a handler, or of another wrapper
            return
        guide = guide.fn  # type: ignore[attr-defined] - looked at just above
    if guide.prototype_trace is None:
        with block(), jax.ensure_compile_time_eval():
            seed(getattr(guide, "set_up", guide), 0)(*args, **(kwargs or {}))


def read_model(
    model: Model,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    init_strategy: Callable[..., Any] = init_to_uniform,
    sums: bool = False,
) -> ModelInfo:
    """Run the model once on shapes alone; an error names a site that no method here can handle.

    :param sums: whether discrete latent sites of few values are summed out.
    """
    seeded = valid_plates(first_rows(seed(model, random.key(0))))
    trace = shape_trace(substitute(seeded, substitute_fn=init_strategy), args, kwargs)
    return model_info(trace, sums=sums)


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
                _check_length(inputs[0].aval.shape, axes[k], *plate.rsplit(" ", 1))
        elif inner is not None and len(inner.invars) == len(inputs):
            before = zip(inner.invars, map(mark, inputs), strict=True)
            result = _follow(inner, dict(before))
        marks.update(zip(eqn.outvars, result, strict=False))
    return [mark(x) for x in jaxpr.outvars]


def _check_length(shape: tuple[int, ...], axis: int, name: str, size: str) -> None:
    if shape[axis] < int(size):
        where = "rows" if axis == 0 else f"entries along axis {axis}"
        raise ValueError(
            f"the model takes the rows of the plate {name}, which has {size}, from an array of"
            f" shape {shape}, which has only {shape[axis]} {where}, so that JAX would repeat the"
            " last one; pass as many rows as the plate has, or give it the size of the data, as by"
            " len(x)."
        )
