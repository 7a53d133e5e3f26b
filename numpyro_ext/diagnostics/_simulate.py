"""Data drawn from a model's prior, and the model conditioned on such data."""

from collections.abc import Collection
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.handlers import condition, seed

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
    """A model whose first argument is a dict of the data of its observed sites, for all rows."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.__name__ = getattr(model, "__name__", type(model).__name__)

    def __call__(self, data: Sites, *args: Any, **kwargs: Any) -> Any:
        return _observed(self.model, data)(*args, **kwargs)


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
        self._given = {name for name in self.data if trace[name]["is_observed"]}
        self.model = SimulatedModel(model)

    def draw(self, rng_key: Array) -> tuple[Sites, Sites]:
        """Latent sites and data, which may be traced; NaN stays where the data have it."""
        trace = trace_of(seed(unobserved(self._whole), rng_key), self._args, self._kwargs)
        data = {name: trace[name]["value"] for name in self.data}
        for name in self._given:
            observed = jnp.asarray(trace[name]["infer"]["obs"])
            if observed.dtype.kind == data[name].dtype.kind == "f":
                data[name] = jnp.where(jnp.isnan(observed), jnp.nan, data[name])
        return {name: trace[name]["value"] for name in self.latents}, data


def _refuse(trace: Trace) -> None:
    """An error for what has no prior from which it could be drawn."""
    for name, site in trace.items():
        if site["type"] == "param" and jax.tree.leaves(site["value"]):
            raise ValueError(
                f"the param site '{name}' of the model has no prior; give it one by numpyro.sample,"
                " or fix it by numpyro.handlers.substitute."
            )
        if site["type"] == "sample" and site["is_observed"] and not is_data(site):
            raise ValueError(
                f"draws from the prior do not follow the factor '{name}' of the model; write it as"
                " a distribution of numpyro.sample."
            )


def _data_sites(trace: Trace, given: Collection[str] | None) -> list[str]:
    """The names of the sites that are data, in the order of the model."""
    sites = {site["name"]: site["is_observed"] for site in sample_sites(trace)}
    observed = [name for name, is_observed in sites.items() if is_observed]
    names = [name for name in sites if name in (observed if given is None else given)]
    if given is not None and (len(names) < len(given) or set(observed) - set(given)):
        raise ValueError(
            f"observed_sites is {list(given)}; it must hold sample sites of the model,"
            f" {list(sites)}, and among them those that are observed, {observed}."
        )
    if not names:
        raise ValueError(
            "the model observes no site on these arguments; pass its data, or observed_sites=."
        )
    return names
