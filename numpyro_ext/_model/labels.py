"""What the numbers of sites are called: by the labels of their places, as ArviZ calls them."""

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import zip_longest
import re
from typing import Any, NamedTuple, Self

from jax import random
import numpy as np
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_sample

from numpyro_ext._model.arguments import without_handlers
from numpyro_ext._model.checks import valid_data
from numpyro_ext._model.read import (
    ModelInfo,
    Shapes,
    Site,
    elementwise,
    plate_sizes,
    shape_trace,
    slices_of,
)
from numpyro_ext._model.spheres import is_sphere
from numpyro_ext._typing import Model, Trace

Names = Mapping[str, Sequence[str]]
"""Dimension names by site."""
Coords = Mapping[str, Any]
"""Labels by dimension."""
_OF_DRAWS = "chain", "draw"


def in_tree(name: str) -> str:
    """The name in a ``DataTree``, in which a ``/`` is a path."""
    return name.replace("/", ":")


def number_name(site: str, shape: Sequence[int], k: int) -> str:
    """The name of number ``k`` of a site, as ``"w[3, 0]"``, or ``"w"`` of a single number."""
    place = ", ".join(str(i) for i in np.unravel_index(k, tuple(shape)))
    return f"{site}[{place}]" if place else site


def coordinate_name(shapes: Shapes, k: int) -> str:
    """The name of number ``k`` of the sites in one vector."""
    places = slices_of(shapes)
    name, shape = next((n, shape) for n, shape in shapes if places[n].start <= k < places[n].stop)
    return number_name(name, shape, k - places[name].start)


def coordinate_name_of(info: ModelInfo, k: int) -> str:
    """The name of coordinate ``k`` of a latent vector: the name of the number of the site that it
    alone decides, or a name of its own, as for probabilities, which have one coordinate less."""
    site, places = next((n, places) for n, places in info.slices.items() if k < places.stop)
    latent = info.latents[site]
    name = number_name(site, latent.unconstrained.shape, k - places.start)
    if elementwise(latent.support).event_dim == 0 or is_sphere(latent.support):
        return name
    place = name.removeprefix(site) or "[0]"
    return f"coordinate {place} of '{site}' in unconstrained space"


def dims_of(site: Site) -> list[str]:
    """A name for every axis of a site: plates, ``event_dims``, or ArviZ's default."""
    name, shape = site["name"], np.shape(site["value"])
    names = [f"{name}_dim_{i}" for i in range(len(shape))]
    frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
    if site["type"] == "sample":
        shape = np.broadcast_shapes(shape, site["fn"].shape())
        names = [f"{name}_dim_{i}" for i in range(len(shape))]
        num_batch = len(shape) - site["fn"].event_dim
        for frame in frames:
            names[num_batch + frame.dim] = frame.name
    elif shape[: len(frames)] == tuple(frame.size for frame in frames):
        names[: len(frames)] = [frame.name for frame in frames]
    event = list((site.get("infer") or {}).get("event_dims", ()))
    if event:
        names[len(names) - len(event) :] = event
    return names


class Labels(NamedTuple):
    """The axes of the sites of a model, and labels of the places on them."""

    dims: dict[str, list[str]]
    """A name for every axis of each site."""
    sizes: dict[str, tuple[int, ...]]
    """Their lengths, of a plate the number of all rows."""
    coords: dict[str, np.ndarray] = {}  # noqa: RUF012
    """Labels by dimension, under their names in a tree."""

    @classmethod
    def of_trace(cls, trace: Trace) -> Self:
        sites = {n: s for n, s in trace.items() if s["type"] in ("sample", "deterministic")}
        dims = {name: dims_of(site) for name, site in sites.items()}
        rows = {name: num for name, (num, _) in plate_sizes(trace).items()}
        sizes = {}
        for name, site in sites.items():
            shape = np.shape(site["value"])
            if site["type"] == "sample":
                shape = np.broadcast_shapes(shape, site["fn"].shape())
            sizes[name] = tuple(rows.get(d, n) for d, n in zip(dims[name], shape, strict=True))
        return cls(dims, sizes)

    def named(self, coords: Coords | None, dims: Names | None) -> Self:
        """The same with the names that a user gives, which may be the names in a tree."""
        new = {in_tree(name): name for name in self.dims}
        all_dims = dict(self.dims)
        for site, names in (dims or {}).items():
            if (name := new.get(in_tree(site))) is None:
                raise ValueError(
                    f"dims names the site '{site}'; the sites of the model are {list(self.dims)}."
                )
            if isinstance(names, str) or len(names) > len(self.dims[name]):
                raise ValueError(
                    f"dims has {names!r} for '{site}', which has the shape {self.sizes[name]}; give"
                    " a list of at most one name for each axis, without chain and draw."
                )
            own = [new or old for new, old in zip_longest(names, self.dims[name])]
            if wrong := [dim for dim in own if dim in _OF_DRAWS or own.count(dim) > 1]:
                raise ValueError(
                    f"dims has {names!r} for '{site}', in which '{wrong[0]}' is the name of another"
                    " axis; give each axis a name of its own, without chain and draw."
                )
            all_dims[name] = own
        axes = [
            (in_tree(dim), size)
            for name in all_dims
            for dim, size in zip(all_dims[name], self.sizes[name], strict=True)
        ]
        lengths: dict[str, Any] = {}
        for dim, size in axes:
            if lengths.setdefault(dim, size) != size and dims:
                raise ValueError(
                    f"dims gives the name '{dim}' to axes of {lengths[dim]} and of {size} numbers."
                )
        labels = {in_tree(dim): np.asarray(x) for dim, x in (coords or {}).items()}
        for dim, x in labels.items():
            if dim in _OF_DRAWS:
                continue
            if x.ndim != 1 or any(len(x) != n for d, n in axes if d == dim) or dim not in lengths:
                given = f"{len(x)} labels" if x.ndim == 1 else "no list of labels"
                raise ValueError(
                    f"coords has {given} for '{dim}', but the dimensions of the sites are"
                    f" {lengths}."
                )
        return self._replace(dims=all_dims, coords={**self.coords, **labels})

    def __call__(self, text: str) -> str:
        """A sentence with labels in place of the numbers of places: ``z[P-17]`` for ``z[3]``."""

        def label(match: re.Match) -> str:
            site, place = match[1], [int(i) for i in match[2].split(", ")]
            dims, sizes = map(in_tree, self.dims[site]), self.sizes[site]
            if len(place) != len(sizes) or any(i >= n for i, n in zip(place, sizes, strict=True)):
                return match[0]  # in unconstrained space, where a site has another shape
            found = (self.coords.get(d, {}) for d in dims)
            shown = (str(x[i] if len(x) else i) for x, i in zip(found, place, strict=True))
            return f"{site}[{', '.join(shown)}]"

        if not self.coords:
            return text
        sites = "|".join(re.escape(name) for name in sorted(self.dims, key=len, reverse=True))
        return re.sub(rf"(?<![\w/.:])({sites})\[(\d+(?:, \d+)*)\]", label, text)


def labels_of(
    model: Model, args: tuple, kwargs: dict[str, Any], coords: Coords | None, dims: Names | None
) -> Labels:
    """The labels of a model on these arguments, read without computing anything."""
    seeded = substitute(seed(valid_data(model), random.key(0)), substitute_fn=init_to_sample)
    return Labels.of_trace(shape_trace(seeded, args, kwargs)).named(coords, dims)


def split_names(
    model: Model, kwargs: dict[str, Any], coords: Coords | None, dims: Names | None
) -> tuple[dict[str, Any], Coords | None, Names | None]:
    """The keyword arguments of a model, and the names; a model that takes an argument of the same
    name gets it."""
    try:
        takes = signature(without_handlers(model)).parameters
    except ValueError:  # a callable without a signature
        takes = {}
    if "coords" in takes and coords is not None:
        kwargs, coords = {**kwargs, "coords": coords}, None
    if "dims" in takes and dims is not None:
        kwargs, dims = {**kwargs, "dims": dims}, None
    return kwargs, coords, dims
