"""A model on its arguments, and the one way in which it is run at given values on given rows."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import init_to_sample, init_to_uniform
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import potential_energy
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model import handlers
from numpyro_ext._model.arguments import indexed
from numpyro_ext._model.density import row_log_lik
from numpyro_ext._model.enumeration import summed_log_density
from numpyro_ext._model.handlers import first_rows, plain_errors, valid_plates
from numpyro_ext._model.lengths import marked_plates, shapes_on_plates
from numpyro_ext._model.read import ModelInfo, latent_sites, model_info
from numpyro_ext._numpyro import at_unconstrained
from numpyro_ext._typing import Model, Params, Sites, Trace

__all__ = [
    "Program",
    "call_and_trace",
    "depending_on",
    "drawn_names",
    "read_model",
    "set_up",
    "shape_trace",
    "trace_of",
]

FILLED = "_of_masked_entries"
"""The end of the name of what a guide adds for losses of NumPyro alone."""


class Program:
    """A model on its arguments.

    * ``model`` - the model with its parameters in place.
    * ``arguments`` - positional and keyword arguments.
    * ``plates`` - ``{plate: (size, subsample_size)}`` of the plates whose rows can be chosen.

    :param model: Python callable containing NumPyro primitives.
    :param args: arguments of the model.
    :param kwargs: keyword arguments of the model.
    :param dict params: values of the model's ``param`` and ``mutable`` sites.
    :param dict plates: as the model was read.
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

    def run(summed: Sites) -> Sites:
        fn = seed(first_rows(substitute(model, data=summed)), random.key(0))
        trace = trace_of(substitute(fn, substitute_fn=init_to_sample), args, kwargs)
        return {n: site["value"] for n, site in trace.items() if site["type"] == "deterministic"}

    def values() -> Sites:
        fn = seed(first_rows(model), random.key(0))
        trace = trace_of(substitute(fn, substitute_fn=init_to_sample), args, kwargs)
        return {name: trace[name]["value"] for name in summed}

    sources = eval_provenance(run, summed=jax.eval_shape(values))
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
