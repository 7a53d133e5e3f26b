"""Checks for mistakes in programs and data that would give NaN or a wrong number."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro import validation_enabled
from numpyro.distributions import constraints
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.primitives import Messenger

from numpyro_ext._model.arguments import has_words, is_traced
from numpyro_ext._model.density import log_prob, seen
from numpyro_ext._model.handlers import every_row, on_first_rows
from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.lookups import (
    Beyond,
    Levels,
    marked_latents,
    marked_plates,
    shapes_on_plates,
)
from numpyro_ext._model.operations import jit_on_data, on_numbers
from numpyro_ext._model.read import (
    ModelInfo,
    Site,
    base_distribution,
    elementwise,
    frames,
    is_bounded,
    is_data,
    is_delta,
    latent_sites,
    layers,
    read_model,
    trace_of,
)
from numpyro_ext._numpyro import mask_of
from numpyro_ext._typing import Model, Trace
from numpyro_ext.data._rows import is_on_host

type _Given = tuple[tuple, dict[str, Any]]  # args and kwargs of a model


class DataError(ValueError):
    """Data that do not fit the model, with which no start of a fit would do."""


def check_supports(model_trace: Trace, guide_trace: Trace) -> None:
    """An error if the guide draws a constrained site of the model from all real numbers."""
    for site in latent_sites(model_trace):
        ours, support = guide_trace[site["name"]], elementwise(getattr(site["fn"], "support", None))
        if (
            is_bounded(site)
            and not isinstance(support, constraints.zero_sum)
            and ours["type"] == "sample"
            and elementwise(getattr(ours["fn"], "support", None)) == constraints.real
            and not is_delta(ours)
            and has_density(ours["fn"])
            and not _is_masked(site["fn"])
        ):
            drawn, kind = type(base_distribution(ours["fn"])).__name__, type(support).__name__
            raise ValueError(
                f"site '{site['name']}' has the support {kind.lstrip('_')} in the model, but the"
                f" guide draws it from {drawn}, of all real numbers; use"
                " dist.TransformedDistribution(dist.Normal(...), dist.biject_to(support)), or a"
                " guide such as AutoNormal(model)."
            )


def _is_masked(fn: Any) -> bool:
    return any(mask_of(layer) is not None for layer in layers(fn))


def check_observed(trace: Trace) -> None:
    """An error that names an observed site with data that do not fit or, if known, hold NaN."""
    for name, site in trace.items():
        if is_data(site):
            fn, data = site["fn"], site["value"]
            if has_words(data):
                raise ValueError(
                    f"the data of the observed site '{name}' are words or Python objects; code"
                    " words as numbers, as by np.unique(words, return_inverse=True)[1]."
                )
            if jnp.shape(data) != fn.shape():
                _check_shape(name, site, trace)
            if not _is_hidden(data) and not _is_masked(fn) and _is_stock(fn):
                data = np.asarray(data)  # because while a loss is traced JAX would trace this too
                is_nan = np.isnan(data) if np.issubdtype(data.dtype, np.floating) else np.array(0)
                if np.any(is_nan):
                    _refuse_nan(name, is_nan.sum(), data.size, _first_row(is_nan))


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


def _check_shape(name: str, site: Site, trace: Trace) -> None:
    """The shape of the value against its distribution's, and the plates around the site."""
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
        if rows in (1, frame.size):
            continue
        plate = trace.get(frame.name)
        size = frame.size if plate is None else plate["args"][0]
        remedy = (
            "give the plate as many rows as the data have (all rows, not one minibatch, where a fit"
            " is judged), or put each axis into its plate"
        )
        if rows == size:
            remedy = "take the rows of the minibatch, as by data[idx] with `as idx` of the plate"
        taken = f"{frame.size} of {size}" if frame.size < size else f"{size}"
        raise ValueError(f"{what} in the plate '{frame.name}' of {taken} rows; {remedy}.")
    _check_columns(what, site, batch)
    if any(1 != a != b != 1 for a, b in zip(batch[::-1], own[::-1], strict=False)):
        raise ValueError(f"{what}; give both the same number of rows.")


def _check_columns(what: str, site: Site, batch: tuple[int, ...]) -> None:
    """An error where each datum would meet the distribution of every row, as a column and a vector
    of n rows make an (n, n) density."""
    fn, in_plates = site["fn"], frames(site).values()
    event = jnp.shape(site["value"])[len(batch) :]
    data, own = batch + event, tuple(fn.batch_shape) + tuple(fn.event_shape)
    axes = range(-max(len(data), len(own)), 0)
    size = {axis: [x[axis] if -axis <= len(x) else 1 for x in (data, own)] for axis in axes}
    repeated = [axis for axis, (n, m) in size.items() if n == 1 < m]
    extended = [axis for axis, (n, m) in size.items() if m == 1 < n]
    outside = {axis for axis in axes if axis + len(event) not in in_plates}
    for axis in repeated:
        many = axis >= -len(event) or extended or (in_plates and axis in outside)
        # The datum of a plate's row may be one for all, but then no other axis has the rows.
        column = axis not in outside and any(size[x][0] > 1 for x in outside if x < axis)
        if many or column:
            n = size[axis][1]
            raise ValueError(
                f"{what}, so that each datum would count {n} times, along axis {axis} of the"
                f" distribution; drop the axis of length 1 of every argument of shape ({n}, 1), as"
                f" by jnp.squeeze(data, -1), or put axis {axis} into a numpyro.plate of its own."
            )


def _refuse_nan(name: str, missing: Any, size: int, row: Any) -> None:
    raise DataError(
        f"the data of the observed site '{name}' have {missing} NaN among {size} numbers, the first"
        f" in row {row}, so the log density is NaN; drop these rows, or leave them out by"
        " numpyro.handlers.mask(mask=~jnp.isnan(data))."
    )


def _first_row(there: Any) -> Any:
    """The first place along the first axis at which an array has a true entry."""
    return there.any(tuple(range(1, there.ndim))).argmax()


def read_global(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    because: str,
    init_strategy: Callable[..., Any] = init_to_uniform,
    sums: bool = False,
) -> ModelInfo:
    """Read a model in which all latent sites must be global, ``because`` of what the caller does;
    an error names one that is not."""
    info = read_model(valid_data(model), args, kwargs, init_strategy=init_strategy, sums=sums)
    for site, latent in info.latents.items():
        for plate in latent.plates:
            if plate in info.plates:
                raise ValueError(
                    f"latent site '{site}' is local to the subsampled plate '{plate}', and"
                    f" {because}; use AutoNormal or a network's guide, or drop subsample_size."
                )
    return info


def check_rows(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    init_strategy: Callable[..., Any],
    *,
    bounded: bool = True,
) -> None:
    """An error that names an observed site with data that are NaN, in any row, or beyond bounds of
    its support that do not depend on latent sites, or levels that a latent site does not have; it
    runs the model once on all rows."""
    arguments = args, kwargs
    on_rows = partial(_run_on_rows, model, arguments)
    with on_numbers():
        has_nan = any(map(_has_nan, jax.tree.leaves(arguments)))
    at_start = partial(on_rows, init_strategy)
    counted = _values_of(at_start(_count_nan), arguments) if has_nan else {}
    for name, (rows, num_rows, row, missing, size, of_data) in counted.items():
        if rows and missing:
            _refuse_nan(name, missing, size, of_data)
        if rows:
            raise DataError(
                f"the log density of the observed site '{name}' is NaN in {rows} of {num_rows}"
                f" rows, the first of them row {row}, and the arguments of the model hold NaN; drop"
                " these rows, or mask them."
            )
    here = _values_of(at_start(_count_beyond), arguments) if bounded else {}
    beyond = {name: looked for name, looked in here.items() if looked[0]}
    there = _values_of(on_rows(init_to_uniform, _count_beyond), arguments, 1) if beyond else {}
    for name, (number, size, example, *bounds) in beyond.items():
        # Bounds that differ between two points depend on latent sites.
        if all(map(np.array_equal, bounds, there[name][3:])):
            raise DataError(
                f"the observed site '{name}' has no density at {number} of its {size} values, such"
                f" as {example}, which is outside of its support; drop these rows, or mask them."
            )
    _check_levels(at_start, arguments)


def _values_of(
    run: Callable[[Array], dict[str, Any]], arguments: _Given, key: int = 0
) -> dict[str, Any]:
    """What :func:`_run_on_rows` gives; empty where data are traced, or elsewhere."""
    # On numbers, also the key, while a loss is traced; NumPyro would blame a parameter of a
    # distribution.
    with on_numbers(), validation_enabled(False):
        rng_key = random.key(key)
        if not shapes_on_plates(run, rng_key) or _is_hidden(arguments):
            return {}
        looked = jit_on_data(run)(rng_key)
        return {} if _is_hidden(looked) else jax.device_get(looked)  # the model may hold tracers


def _run_on_rows(
    model: Model,
    arguments: _Given,
    init_strategy: Callable[..., Any],
    look: Callable[[Site], Any],
    of: Callable[[Site], bool] = is_data,
) -> Callable[[Array], dict[str, Any]]:
    """A function of a key: ``{site: look(site)}`` of the sites ``of`` where it is not None, on all
    rows, or on as many as a minibatch has where they are on the host."""
    on = on_first_rows if is_on_host(arguments) else every_row

    def run(rng_key: Array) -> dict[str, Any]:
        with block():
            fn = seed(marked_plates(marked_latents(on(model))), rng_key)
            trace = trace_of(substitute(fn, substitute_fn=init_strategy), *arguments)
        looked = {name: look(site) for name, site in trace.items() if of(site)}
        return {name: x for name, x in looked.items() if x is not None}

    return run


def _check_levels(at_start: Callable[..., Any], arguments: _Given) -> None:
    """An error where a density depends on a level that a latent site does not have, or a density of
    data on a level from the end that has a number of its own too."""
    observed: set[str] = set()

    def of(site: Site) -> bool:
        if is_data(site):
            observed.add(site["name"])
        return site["type"] == "sample" and has_density(site["fn"])

    def density(site: Site) -> Array | None:
        try:
            log_p = log_prob(site)
            return log_p if site["scale"] is None else jnp.where(site["scale"] == 0, 0.0, log_p)
        except (NotImplementedError, TypeError, ValueError):
            return None  # a simulator has none, and on wrong shapes others have a sentence

    if _is_hidden(arguments):
        return
    run = at_start(density, of)
    with validation_enabled(False):
        # Not on numbers, which would leave no negative level in the program.
        program, names = jax.make_jaxpr(run, return_shape=True)(random.key(0))
    if _is_hidden(program.consts):
        return
    with on_numbers():
        rng_key, levels = random.key(0), Levels(program)
        for x in sorted(levels.beyond(), key=lambda x: x.is_negative):
            for name, changed in zip(names, levels.changed(rng_key, x.lookup), strict=True):
                if np.any(changed) and (name in observed or not x.is_negative):
                    _refuse_level(name, changed, x)


def _refuse_level(name: str, changed: np.ndarray, beyond: Beyond) -> None:
    why = "JAX takes the nearest; give the site a number for each level, or"
    if beyond.is_negative:
        why = (
            "JAX counts from the end, while pandas gives -1 to a missing category; take it"
            f" modulo {beyond.size} if the end is meant, or"
        )
    raise DataError(
        f"{np.sum(changed)} of {changed.size} densities of the site '{name}' take number"
        f" {beyond.example} of '{beyond.site}', which has the numbers 0 to {beyond.size - 1}: {why}"
        " leave these rows out, or mask them."
    )


def _count_nan(site: Site) -> tuple[Any, ...]:
    """The rows with a log density that is NaN, all rows, the first of them, the NaN among the
    data, all numbers, and the first row with one."""
    fn, value = site["fn"], jnp.asarray(site["value"], float)
    log_p, missing = fn.log_prob(site["value"]), jnp.isnan(value)
    # NumPyro may make -inf of what is out of the support, as NaN is.
    gone = jnp.any(missing, tuple(range(-fn.event_dim, 0))) & ~jnp.isfinite(log_p)
    lost = jnp.isnan(log_p) | gone
    of_data = jnp.sum(missing), value.size, _first_row(missing)
    return jnp.sum(lost), log_p.size, _first_row(lost), *of_data


def _count_beyond(site: Site) -> tuple[Any, ...] | None:
    """How many numbers are beyond their bounds, of how many, one of them, and the bounds."""
    support = elementwise(getattr(site["fn"], "support", None))
    if not is_bounded(site) or support.event_dim or not _is_stock(site["fn"]):
        return None
    low, high = getattr(support, "lower_bound", -np.inf), getattr(support, "upper_bound", np.inf)
    if support is constraints.boolean:
        low, high = 0, 1
    value = jnp.asarray(site["value"])
    beyond = seen(site) & ((value < low) | (value > high))
    example = jnp.ravel(jnp.broadcast_to(value, beyond.shape))[jnp.argmax(beyond)]
    return jnp.sum(beyond), beyond.size, example, jnp.asarray(low), jnp.asarray(high)


def _is_hidden(tree: Any) -> bool:
    """Return whether there is an array with numbers that cannot be looked at."""
    leaves = jax.tree.leaves(tree)
    return is_traced(leaves) or not all(getattr(x, "is_fully_addressable", True) for x in leaves)


def _has_nan(x: Any) -> bool:
    real = isinstance(x, np.ndarray | Array) and jnp.issubdtype(x.dtype, jnp.floating)
    if not real or not x.size or _is_hidden(x):
        return False
    # The least of numbers is NaN if one is. On the CPU NumPy reads an array where it is.
    on_device = isinstance(x, Array) and jax.default_backend() != "cpu"
    with np.errstate(invalid="ignore"):
        return bool(np.isnan(jnp.min(x) if on_device else np.min(np.asarray(x))))


def _is_stock(fn: Any) -> bool:
    """Return whether every layer is NumPyro's own; another distribution may be defined at NaN."""
    return all(type(layer).__module__.startswith("numpyro.") for layer in layers(fn))
