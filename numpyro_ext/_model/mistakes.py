"""Mistakes in programs and data that would otherwise give NaN or a wrong number."""

from math import prod
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import (
    Site,
    base_distribution,
    is_data,
    is_delta,
    latent_sites,
    layers,
)
from numpyro_ext._numpyro import mask_of
from numpyro_ext._typing import Model, Trace

__all__ = ["check_observed", "check_supports", "valid_data"]

# Supports of which most of the real numbers lie outside.
_CONSTRAINED: tuple[type, ...] = (
    constraints.greater_than,
    constraints.less_than,
    constraints.interval,
    *(
        type(one)
        for one in (
            constraints.corr_cholesky,
            constraints.corr_matrix,
            constraints.l1_ball,
            constraints.lower_cholesky,
            constraints.ordered_vector,
            constraints.positive_definite,
            constraints.positive_definite_circulant_vector,
            constraints.positive_ordered_vector,
            constraints.positive_semidefinite,
            constraints.simplex,
            constraints.sphere,
        )
    ),
)


def check_supports(model_trace: Trace, guide_trace: Trace) -> None:
    """An error if the guide draws a constrained site of the model from all real numbers.

    Only that certain case is refused: a narrower support in the guide, another constrained one and
    distributions without a density of their own all pass.
    """
    for site in latent_sites(model_trace):
        name, fn = site["name"], site["fn"]
        ours = guide_trace[name]
        support = _elementwise(getattr(fn, "support", None))
        if (
            isinstance(support, _CONSTRAINED)
            and ours["type"] == "sample"
            and _elementwise(getattr(ours["fn"], "support", None)) == constraints.real
            and not is_delta(ours)
            and has_density(ours["fn"])
            and not _is_masked(fn)
        ):
            drawn = type(base_distribution(ours["fn"])).__name__
            raise ValueError(
                f"site '{name}' has the support {_word(support)} in the model, but the guide draws"
                f" it from {drawn} with the support real; use a distribution with that support,"
                " such as dist.TransformedDistribution(dist.Normal(...),"
                " dist.biject_to(support)), or a guide that makes it, such as AutoNormal(model)."
            )


def _elementwise(support: Any) -> Any:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _word(support: Any) -> str:
    """The kind of a constraint, without its bounds, which may be traced."""
    name = type(support).__name__.lstrip("_")
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


def _is_masked(fn: Any) -> bool:
    return any(mask_of(layer) is not None for layer in layers(fn))


def check_observed(trace: Trace) -> None:
    """An error that names the observed site whose data are no array, do not fit, or hold NaN.

    Nothing can be said of NaN in traced data.
    """
    for name, site in trace.items():
        if is_data(site):
            _check_type(name, site["value"])
            _check_shape(name, site, trace)
            _check_nan(name, site)


class valid_data(Messenger):
    """:func:`check_observed` for each site as it is met, for a model that is run by others."""

    def __init__(self, fn: Model) -> None:
        super().__init__(fn)
        self.plates: Trace = {}

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            self.plates[msg["name"]] = msg
        elif msg["type"] == "sample":
            check_observed({**self.plates, msg["name"]: msg})


def _check_type(name: str, value: Any) -> None:
    kind = type(value)
    library = kind.__module__.split(".")[0]
    if isinstance(value, (list, tuple)) or library in ("pandas", "polars", "xarray"):
        what = kind.__name__ if library == "builtins" else f"{library} {kind.__name__}"
        remedy = "jnp.array(data)" if library == "builtins" else "data.to_numpy()"
        raise TypeError(
            f"the data of the observed site '{name}' are a {what}; obs must be an array: pass"
            f" {remedy} to the model."
        )


def _check_shape(name: str, site: Site, trace: Trace) -> None:
    """The batch of the value against the sizes of the plates around the site."""
    fn, shape = site["fn"], jnp.shape(site["value"])
    if len(shape) < fn.event_dim:
        return
    batch, own = shape[: len(shape) - fn.event_dim], tuple(fn.batch_shape)
    what = (
        f"the data of the observed site '{name}' have shape {shape}, but its distribution has shape"
        f" {own + tuple(fn.event_shape)}"
    )
    for frame in site["cond_indep_stack"]:
        rows = batch[frame.dim] if -frame.dim <= len(batch) else 1
        # A column is a row of its own for every plate that lies to the right.
        column = rows == 1 < frame.size and prod(batch) > 1 and len(batch) > len(own)
        if rows in (1, frame.size) and not column:
            continue
        plate = trace.get(frame.name)
        size = frame.size if plate is None else plate["args"][0]
        if column:
            remedy = "drop the axis of length 1, as by jnp.squeeze(data, -1)"
        elif rows == size:
            remedy = (
                f"take the rows of the minibatch, as by batch = numpyro.subsample(data, event_dim="
                f"{fn.event_dim}) or data[idx] with `as idx` of the plate"
            )
        else:
            remedy = "give the plate as many rows as the data have, or put each axis into its plate"
        taken = f"{frame.size} of {size}" if frame.size < size else f"{size}"
        raise ValueError(f"{what} in the plate '{frame.name}' of {taken} rows; {remedy}.")
    if any(1 != a != b != 1 for a, b in zip(batch[::-1], own[::-1], strict=False)):
        raise ValueError(f"{what}; give both the same number of rows.")


def _check_nan(name: str, site: Site) -> None:
    value = site["value"]
    if isinstance(value, Tracer) or _is_masked(site["fn"]) or not _is_stock(site["fn"]):
        return
    # NumPy, because while a loss is traced JAX would trace this too.
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return
    data = np.asarray(value)
    if not np.issubdtype(data.dtype, np.floating):
        return
    missing = int(np.isnan(data).sum())
    if missing:
        raise ValueError(
            f"the data of the observed site '{name}' have {missing} NaN among {data.size} numbers,"
            " so the log density is NaN; drop these rows, or leave them out by"
            " numpyro.handlers.mask(mask=~jnp.isnan(data))."
        )


def _is_stock(fn: Any) -> bool:
    """Whether every layer is NumPyro's own: a user's distribution may know what to do with NaN."""
    return all(type(layer).__module__.startswith("numpyro.") for layer in layers(fn))
