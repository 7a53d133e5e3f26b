"""Checks for mistakes in programs and data that would give NaN or a wrong number."""

from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro import validation_enabled
from numpyro.distributions import constraints
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.primitives import Messenger

from numpyro_ext._model.handlers import every_row
from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import (
    ModelInfo,
    Site,
    base_distribution,
    is_data,
    is_delta,
    latent_sites,
    layers,
    read_model,
    trace_of,
)
from numpyro_ext._numpyro import mask_of
from numpyro_ext._typing import Model, Trace

__all__ = ["check_observed", "check_rows", "check_supports", "read_global", "valid_data"]

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

    NaN in traced data cannot be detected.
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
        raise ValueError(_nan_in(name, missing, data.size))


def _nan_in(name: str, missing: int, size: int) -> str:
    return (
        f"the data of the observed site '{name}' have {missing} NaN among {size} numbers, so the"
        " log density is NaN; drop these rows, or leave them out by"
        " numpyro.handlers.mask(mask=~jnp.isnan(data))."
    )


def read_global(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    because: str,
    init_strategy: Callable[..., Any] = init_to_uniform,
) -> ModelInfo:
    """Read a model whose latent sites must all be global; an error names one that is not.

    :param str because: why a latent site local to a subsampled plate cannot be taken.
    """
    info = read_model(valid_data(model), args, kwargs, init_strategy=init_strategy)
    for site, latent in info.latents.items():
        for plate in latent.plates:
            if plate in info.plates:
                raise ValueError(
                    f"latent site '{site}' is local to the subsampled plate '{plate}', and"
                    f" {because}; use a guide of numpyro_ext.guides whose network reads the rows,"
                    " or numpyro's AutoNormal, which has parameters per row, or drop"
                    " subsample_size."
                )
    return info


def check_rows(
    model: Model, args: tuple, kwargs: dict[str, Any], init_strategy: Callable[..., Any]
) -> None:
    """
    An error that names the site if NaN in the model's arguments reach its log density in any row.

    A minibatch holds NaN by chance only, and is traced. So where an argument has NaN, which is
    looked at first, the model is run once on all of its rows.
    """
    leaves = jax.tree.leaves((args, kwargs))
    with jax.ensure_compile_time_eval():
        if not any(_has_nan(x) for x in leaves):
            return
    counted: dict[str, tuple[int, int]] = {}

    def count() -> dict[str, tuple[Array, Array]]:
        found = {}
        with block():
            fn = seed(every_row(model), random.key(0))
            trace = trace_of(substitute(fn, substitute_fn=init_strategy), args, kwargs)
        for name, site in trace.items():
            if is_data(site):
                fn, value = site["fn"], jnp.asarray(site["value"], float)
                log_p, missing = fn.log_prob(site["value"]), jnp.isnan(value)
                events = tuple(range(value.ndim - fn.event_dim, value.ndim))
                # NumPyro may make -inf of what is out of the support, as NaN is.
                gone = jnp.any(missing, events) & ~jnp.isfinite(log_p)
                counted[name] = (log_p.size, value.size)
                found[name] = jnp.sum(jnp.isnan(log_p) | gone), jnp.sum(missing)
        return found

    is_traced = any(isinstance(x, Tracer) for x in leaves)
    with nullcontext() if is_traced else jax.ensure_compile_time_eval():
        with validation_enabled(False):  # it would blame a parameter of a distribution
            counts = jax.jit(count)()
    for name, (rows, missing) in counts.items():
        if isinstance(rows, Tracer):
            return
        num_rows, size = counted[name]
        if rows and missing:
            raise ValueError(_nan_in(name, int(missing), size))
        if rows:
            raise ValueError(
                f"the log density of the observed site '{name}' is NaN in {int(rows)} of {num_rows}"
                " rows, and the arguments of the model hold NaN; drop these rows, or leave them out"
                " by numpyro.handlers.mask(mask=~jnp.isnan(...))."
            )


def _has_nan(x: Any) -> bool:
    if not isinstance(x, (np.ndarray, jax.Array)) or isinstance(x, Tracer):
        return False
    if not jnp.issubdtype(x.dtype, jnp.floating) or not getattr(x, "is_fully_addressable", True):
        return False
    return bool(jnp.any(jnp.isnan(x)))


def _is_stock(fn: Any) -> bool:
    """Return whether every layer is NumPyro's own; another distribution may be defined at NaN."""
    return all(type(layer).__module__.startswith("numpyro.") for layer in layers(fn))
