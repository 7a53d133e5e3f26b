"""A model that takes the whole of rows on the host, on some of the rows at a time."""

from contextlib import suppress
from dataclasses import dataclass
import math
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_uniform

from numpyro_ext._model.density import log_prob, scaled
from numpyro_ext._model.handlers import at_rows, given_rows
from numpyro_ext._model.read import Site, frames, latent_sites, sample_sites, shape_trace, trace_of
from numpyro_ext._typing import Model, Trace
from numpyro_ext.data._rows import NotInMemory, is_rows, is_stream, rows_among

PLATE = "rows on the host"
_BATCH = 256
_TRIED = 16
"""Rows of a trial whether the log density is a sum over them."""
_TOLERANCE = 1e-3


class _rows_of(given_rows):
    """Take plates that have the rows of the arguments as plates of all rows, with the scale N / B
    where a plate is B long because the arguments are."""

    def __init__(self, fn: Model, plates: dict[str, bool], scale: float) -> None:
        super().__init__(fn, plates)
        self.short, self.scale = {name for name, is_short in plates.items() if is_short}, scale

    def process_message(self, msg: dict[str, Any]) -> None:
        super().process_message(msg)
        if msg["type"] == "sample" and self.short & frames(msg).keys():
            msg["scale"] = self.scale if msg["scale"] is None else msg["scale"] * self.scale


def _taken(size: int, index: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, Any]:
    """The arguments, with the rows of an index where they have all ``size`` rows on the host."""

    def take(x: Any) -> Any:
        return x[index] if is_rows(x) and len(x) == size else x

    return jax.tree.map(take, (args, kwargs), is_leaf=is_rows)


@dataclass(frozen=True)
class _OnSomeRows:
    """The model with rows of a plate among its arguments, in place of all rows on the host."""

    model: Model
    size: int
    plates: dict[str, bool]
    """Whether the size of a plate is the number of rows that are given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with numpyro.plate(PLATE, self.size, subsample_size=min(_BATCH, self.size)) as i:
            pass
        args, kwargs = _taken(self.size, i, args, kwargs)
        return _rows_of(self.model, self.plates, self.size / len(i))(*args, **kwargs)


def on_some_rows(model: Model, args: tuple, kwargs: dict[str, Any]) -> Model:
    """The model itself, if it takes rows on the host by an index; otherwise one with a plate of
    these rows, if the log density is a sum over the rows of a plate: else an error."""
    hosted = rows_among((args, kwargs))
    if not hosted or is_stream((args, kwargs)):
        return model
    with suppress(NotInMemory):
        shape_trace(_seeded(model), args, kwargs)
        return model
    size = max(map(len, hosted))
    few, more = (_trace_of(model, size, args, kwargs, num) for num in (5, 7))
    plates = {}
    for name, site in few.items():
        if site["type"] == "plate":
            (whole, batch), (more_whole, more_batch) = site["args"], more[name]["args"]
            if (batch or whole, more_batch or more_whole) == (5, 7):
                plates[name] = whole == 5
    for site in sample_sites(few):
        follows = _size_of(site) != _size_of(more[site["name"]])
        if follows and not plates.keys() & frames(site).keys():
            raise ValueError(
                f"{_WHOLE}, and site '{site['name']}', which has a row for each, lies in no plate"
                " that has their number; put it into one, and take x[i]."
            )
    for site in latent_sites(few):
        if plates.keys() & frames(site).keys():
            raise ValueError(f"{_WHOLE}, and latent site '{site['name']}' has a value for each.")
    by_rows = _OnSomeRows(model, size, plates)
    _check_sum(by_rows, args, kwargs)
    return by_rows


_WHOLE = "the model takes all rows of a HostArray at once, and not x[i]"


def _size_of(site: Site) -> int:
    return max(math.prod(jnp.shape(site["value"])), math.prod(site["fn"].shape()))


def _seeded(model: Model) -> Any:
    return substitute(seed(model, random.key(0)), substitute_fn=init_to_uniform)


def _trace_of(model: Model, size: int, args: tuple, kwargs: dict[str, Any], num_rows: int) -> Trace:
    """The trace on so many rows, of shapes alone."""
    some = _taken(size, np.zeros(num_rows, int), args, kwargs)
    try:
        return shape_trace(_seeded(model), *some)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{_WHOLE}, so it is read on some of them at a time, and on {num_rows} rows it says:"
            f" {error}"
        ) from error


def _check_sum(model: _OnSomeRows, args: tuple, kwargs: dict[str, Any]) -> None:
    """An error unless the log density on rows is the mean over both halves, as for a sum."""
    index = jnp.asarray(np.linspace(0, model.size - 1, _TRIED).astype(int))

    @jax.jit
    def log_density(index: Array, rng_key: Array) -> Array:
        fn = at_rows(seed(model, rng_key), {PLATE: index}, {PLATE: (model.size, len(index))})
        trace = trace_of(substitute(fn, substitute_fn=init_to_uniform), args, kwargs)
        terms = [jnp.ravel(scaled(site, log_prob(site))) for site in sample_sites(trace)]
        return jnp.stack([sum(map(of, terms)) for of in (jnp.sum, lambda x: jnp.sum(abs(x)))])

    for key in random.split(random.key(1), 2):
        whole, *halves = (log_density(i, key) for i in (index, index[::2], index[1::2]))
        difference = whole[0] - (halves[0][0] + halves[1][0]) / 2
        if abs(difference) > _TOLERANCE * whole[1]:
            raise ValueError(
                f"{_WHOLE}, and its log density is not a sum over rows. Take x[i] by the index of"
                " the plate, and compute what needs all rows, such as their mean, before."
            )
