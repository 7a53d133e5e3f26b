"""Data drawn from a model's prior, and the model conditioned on such data."""

from collections.abc import Collection
from contextlib import suppress
import inspect
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import condition, seed
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.arguments import without_handlers
from numpyro_ext._model.checks import check_observed
from numpyro_ext._model.handlers import every_row, unobserved, valid_plates
from numpyro_ext._model.read import is_data, latent_sites, sample_sites, shape_trace, trace_of
from numpyro_ext._typing import Model, Sites, Trace


class _observed(condition):
    """Condition on data of all rows, of which a plate takes the rows of its minibatch."""

    def __init__(self, fn: Model, data: Sites) -> None:
        values: Any = data
        super().__init__(fn, data=values)
        self.rows: dict[str, tuple[int, Array]] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        super().process_message(msg)  # type: ignore[arg-type] - a message is a dict
        assert self.data is not None
        if msg["type"] != "sample" or msg["name"] not in self.data:
            return
        if msg.get("_control_flow_done", False):
            return
        value: Any = msg["value"]
        for frame in msg["cond_indep_stack"]:
            size, idx = self.rows.get(frame.name, (0, None))
            axis = frame.dim - msg["fn"].event_dim
            if idx is not None and jnp.ndim(value) >= -axis and jnp.shape(value)[axis] == size:
                value = jnp.take(value, idx, axis)
        msg["value"] = value

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            self.rows[msg["name"]] = msg["args"][0], msg["value"]


class SimulatedModel:
    """A model whose first argument is a dict of the data of its observed sites, for all rows.

    * ``stale`` - the names of arguments that still hold the data given at first.
    """

    def __init__(self, model: Model, stale: tuple[str, ...]) -> None:
        self.model, self.stale = model, stale
        self.__name__ = getattr(model, "__name__", type(model).__name__)

    def __call__(self, data: Sites, *args: Any, **kwargs: Any) -> Any:
        return _observed(self.model, data)(*args, **kwargs)


class Simulated(NamedTuple):
    """One draw of the joint distribution."""

    latents: Sites
    data: Sites


class Simulator:
    """Draws of latent sites and data from the prior of a model, on all of its rows.

    :param observed: names of the sites that are data; None for those that are observed.
    """

    def __init__(
        self, model: Model, args: tuple, kwargs: dict[str, Any], observed: Collection[str] | None
    ) -> None:
        self._whole = every_row(valid_plates(model))
        self._args, self._kwargs = args, kwargs
        trace = shape_trace(seed(self._whole, 0), args, kwargs)
        check_observed(trace)
        _refuse(trace)
        self.data = _data_sites(trace, observed)
        latents = [site for site in latent_sites(trace) if site["name"] not in self.data]
        self.latents = [site["name"] for site in latents]
        self.discrete = [s["name"] for s in latents if s["fn"].support.is_discrete]
        self._given = {name: trace[name]["is_observed"] for name in self.data}
        leaves, self._structure = jax.tree.flatten((args, kwargs))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]]
        self._leaves, self._paths = leaves, [_shown(path, _parameters(model)) for path in paths]
        self._places, stale = self._find_data()
        self.model = SimulatedModel(model, stale)

    def draw(self, rng_key: Array) -> Simulated:
        """One draw, which may be traced; NaN stays where the data have it."""
        trace = self._trace(rng_key, self._args, self._kwargs)
        data = {}
        for name in self.data:
            site = trace[name]
            data[name] = site["value"]
            if self._given[name] and jnp.issubdtype(jnp.result_type(site["value"]), jnp.floating):
                observed = jnp.asarray(site["infer"]["obs"])
                missing = jnp.isnan(observed) if observed.dtype.kind == "f" else False
                data[name] = jnp.where(missing, jnp.nan, site["value"])
        return Simulated({name: trace[name]["value"] for name in self.latents}, data)

    def arguments(self, data: Sites) -> tuple[tuple, dict[str, Any]]:
        """The data, and the model's own arguments with the data in their place."""
        leaves = [
            data[self._places[i]] if i in self._places else x for i, x in enumerate(self._leaves)
        ]
        args, kwargs = self._structure.unflatten(leaves)
        return (data, *args), kwargs

    def _trace(self, rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> Trace:
        return trace_of(seed(unobserved(self._whole), rng_key), args, kwargs)

    def _find_data(self) -> tuple[dict[int, str], tuple[str, ...]]:
        """The arguments that are the data of a site, and the names of those that are made into
        data; an error if one of them is used elsewhere."""
        arrays = np.ndarray | np.generic | Array

        def look(**data: Any) -> Any:
            leaves = [data.get(f"{i}", x) for i, x in enumerate(self._leaves)]
            args, kwargs = self._structure.unflatten(leaves)
            trace = self._trace(jax.random.key(0), args, kwargs)
            drawn = {site["name"]: site["value"] for site in sample_sites(trace)}
            return drawn, {n: trace[n]["infer"]["obs"] for n, given in self._given.items() if given}

        sources_of = None
        for kinds in (arrays | float, arrays):  # a number may be an option of the model
            named = {f"{i}": x for i, x in enumerate(self._leaves) if isinstance(x, kinds)}
            with suppress(jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                sources_of = eval_provenance(look, **named)
                break
        if sources_of is None:  # the model looks at the numbers themselves
            return {}, tuple(self._paths[int(i)] for i in named)
        drawn, observed = sources_of
        sources = {int(i) for arguments in observed.values() for i in arguments}
        for name in [*self.latents, *self.data]:
            for i in sources & {int(i) for i in drawn[name]}:
                # A loop depends on all that goes into it, also on data that no draw has seen.
                if not _changes(look, named, i, name):
                    continue
                which = "the data" if name in self.data else "latent site"
                raise ValueError(
                    f"the {self._paths[i]} holds data of the model, and the distribution of {which}"
                    f" '{name}' depends on it too, so that simulated data would be judged with the"
                    " given ones; use the data as obs= alone, and pass what else is read from them"
                    " as another argument."
                )
        _, values = jax.device_get(look(**named)) if sources else ({}, {})
        places: dict[int, str] = {}
        for name, arguments in observed.items():
            if len(arguments) == 1:
                i = int(next(iter(arguments)))
                is_whole = sum(i in map(int, other) for other in observed.values()) == 1
                y = np.asarray(values[name])
                x = np.asarray(self._leaves[i]).astype(y.dtype)  # NumPy's own are double
                if is_whole and x.shape == y.shape and np.array_equal(x, y, equal_nan=_float(x)):
                    places[i] = name
        return places, tuple(self._paths[i] for i in sorted(sources - set(places)))


def _changes(look: Any, named: dict[str, Any], i: int, name: str) -> bool:
    """Return whether the draw of a site is another one where argument i has other numbers."""
    x = np.asarray(named[f"{i}"])
    other = ~x if x.dtype == bool else (x + np.arange(1, x.size + 1).reshape(x.shape))
    draws = [look(**{**named, f"{i}": jnp.asarray(y, x.dtype)})[0][name] for y in (x, other)]
    first, second = (np.asarray(jax.device_get(y)) for y in draws)
    return not np.array_equal(first, second, equal_nan=_float(first))


def _float(x: np.ndarray) -> bool:
    return bool(np.issubdtype(x.dtype, np.floating))


def _parameters(model: Model) -> list[str]:
    """The names of the positional arguments of a model, as far as they are known."""
    try:
        return list(inspect.signature(without_handlers(model)).parameters)
    except (TypeError, ValueError):
        return []


def _shown(path: tuple, names: list[str]) -> str:
    """``argument 'y'``, with what follows inside it."""
    kind, first, *rest = (getattr(key, "idx", getattr(key, "key", key)) for key in path)
    if kind == 0 and first < len(names):
        first = names[first]
    return f"argument {first!r}{''.join(f'[{key!r}]' for key in rest)}"


def _refuse(trace: Trace) -> None:
    """An error for what has no prior from which it could be drawn."""
    for name, site in trace.items():
        if site["type"] == "param" and jax.tree.leaves(site["value"]):
            raise ValueError(
                f"the model has the param site '{name}', which has no prior to draw it from; give"
                " it one by numpyro.sample, or fix it by numpyro.handlers.substitute."
            )
        if site["type"] == "sample" and site["is_observed"] and not is_data(site):
            raise ValueError(
                f"the model has the factor '{name}', which draws from the prior do not follow;"
                " write it as a distribution of numpyro.sample."
            )


def _data_sites(trace: Trace, given: Collection[str] | None) -> list[str]:
    """The names of the sites that are data, in the order of the model."""
    sites = {site["name"]: site["is_observed"] for site in sample_sites(trace)}
    observed = [name for name, is_observed in sites.items() if is_observed]
    if isinstance(given, str):
        given = [given]
    for name in given or ():
        if name not in sites:
            raise ValueError(
                f"observed_sites has {name!r}, which is no sample site of the model; its sites are"
                f" {', '.join(map(repr, sites))}."
            )
    left = [name for name in observed if given is not None and name not in given]
    if left:
        raise ValueError(
            f"site '{left[0]}' is observed and not among observed_sites {list(given or ())}: the"
            " fits would see data that are not simulated; name it too, or leave it out."
        )
    names = [name for name in sites if name in (observed if given is None else given)]
    if not names:
        raise ValueError(
            "the model observes no site on these arguments; pass its data, or name the sites that"
            " are data by observed_sites=."
        )
    return names
