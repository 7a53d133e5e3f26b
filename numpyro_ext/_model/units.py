"""The plates that split a bound into units, sums over the units, and whether model and guide fit.

A *unit* has a log weight of its own: it is one datum if every site lies in the data plate, and one
minibatch with all its latents otherwise. A guide may have the axis of a plate elsewhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
import math

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.tree_util import register_static
import numpy as np
from numpyro.util import check_model_guide_match

from numpyro_ext._model.checks import check_observed, check_supports
from numpyro_ext._model.density import log_prob, num_seen, scaled
from numpyro_ext._model.handlers import subsampled_plates
from numpyro_ext._model.losses import change_cotangents
from numpyro_ext._model.read import (
    Site,
    frames,
    has_array_mask,
    is_bounded,
    is_data,
    is_delta,
    is_same_scale,
    latent_sites,
    not_reparameterized,
    own_scale,
    plate_sizes,
    sample_sites,
    scaled_latents,
    values_of,
)
from numpyro_ext._numpyro import validate_model
from numpyro_ext._typing import Sites, Trace


@register_static
@dataclass(frozen=True)
class Layout:
    """The unit plates, left to right, and the sites inside and outside them.

    * ``plates, shape`` - names and minibatch sizes of the unit plates; empty for a single unit.
    * ``size, scale`` - products of N and of N/M over the unit plates.
    * ``not_reparameterized`` - guide sites without a pathwise gradient.
    * ``drawn_global, drawn_local`` - the guide's latent sites outside and inside the unit plates;
      Delta sites, which are computed from the others, are left out.
    * ``guide_params, model_params, mutable`` - names of these sites.
    * ``subsampled`` - ``(plate, N, M)`` of every plate that takes a minibatch.
    * ``subsampled_latents`` - ``(site, plate)`` of latents in a subsampled plate that is no unit
      plate.
    * ``masked, bounded`` - as in :class:`ModelInfo`.
    * ``copied`` - a site with the ``handlers.scale`` that all sites of a unit have, as if the unit
      were there so many times; empty without such a scale, or if it stays inside the unit.

    It holds no array, so that a function which is traced for its shapes alone can return it.
    """

    plates: tuple[str, ...]
    shape: tuple[int, ...]
    size: int
    scale: float
    not_reparameterized: tuple[str, ...]
    drawn_global: tuple[str, ...]
    drawn_local: tuple[str, ...]
    guide_params: tuple[str, ...]
    model_params: tuple[str, ...]
    mutable: tuple[str, ...]
    subsampled: tuple[tuple[str, int, int], ...]
    subsampled_latents: tuple[tuple[str, str], ...]
    masked: bool
    bounded: bool
    copied: str = ""

    def is_local(self, site: Site) -> bool:
        return set(self.plates) <= set(frames(site))

    def sum_sites(
        self, sites: Iterable[Site], *, local: bool, log_prob: Callable[[Site], Array] = log_prob
    ) -> Array:
        """Sum of log probabilities, ``shape`` for local sites and a scalar for the others, with
        every scale except the one of the unit plates."""
        chosen = [
            self._per_unit(site, log_prob(site)) if local else jnp.sum(scaled(site, log_prob(site)))
            for site in sites
            if self.is_local(site) is local
        ]
        return reduce(jnp.add, chosen) if chosen else jnp.zeros(self.shape if local else ())

    def _per_unit(self, site: Site, log_prob: Array) -> Array:
        log_prob = jnp.asarray(scaled(site, log_prob, self.scale))
        dims = frames(site)
        missing = max((-dims[name] for name in self.plates), default=0) - log_prob.ndim
        log_prob = jnp.reshape(log_prob, (1,) * missing + log_prob.shape)
        axes = [log_prob.ndim + dims[name] for name in self.plates]
        log_prob = jnp.sum(log_prob, tuple(i for i in range(log_prob.ndim) if i not in axes))
        log_prob = jnp.transpose(log_prob, [sorted(axes).index(axis) for axis in axes])
        return jnp.broadcast_to(log_prob, self.shape)

    def copies(self, trace: Trace) -> Array:
        """How often each unit counts, ``shape``, by the scale of the site ``copied``."""
        site = trace[self.copied]
        own = jnp.asarray(own_scale(site, {n: (N, M) for n, N, M in self.subsampled}))
        return self._per_unit({**site, "scale": self.scale}, own)

    def without_copies(self, site: Site) -> Site:
        """The site of a copied unit with the scale of its plates alone."""
        if not self.is_local(site):
            return site
        batches = {name: N / M for name, N, M in self.subsampled}
        return {**site, "scale": math.prod(batches.get(name, 1.0) for name in frames(site))}

    def observed(self, trace: Trace) -> Array:
        """Whether a unit has an observed number that no mask leaves out, ``shape``."""
        sites = [site for site in sample_sites(trace) if site["is_observed"]]
        return self.sum_sites(sites, local=True, log_prob=num_seen) != 0

    def along(self, site: Site, x: Array) -> Array:
        """``x`` of shape ``shape``, its axes where the value of ``site`` has the unit plates."""
        ndim, dims = jnp.ndim(site["value"]), frames(site)
        axes = [ndim - site["fn"].event_dim + dims[name] for name in self.plates]
        others = [axis for axis in range(ndim) if axis not in axes]
        return jnp.expand_dims(jnp.transpose(x, tuple(np.argsort(axes))), others)


def with_copies(name: str, layout: Layout, model_trace: Trace, guide_trace: Trace) -> Layout:
    """The layout for a loss that takes powers of the weights of units. A ``handlers.scale`` around
    all sites of a unit means copies of the unit, as a plate does, and one around observed sites
    alone copies of these data; an error names a site with another scale."""
    sizes = {n: (N, M) for n, N, M in layout.subsampled}
    both = [*sample_sites(model_trace), *sample_sites(guide_trace)]
    local = [site for site in both if layout.is_local(site)]
    scales = [own_scale(site, sizes) for site in local]
    dims = [frames(local[0])[plate] for plate in layout.plates] if local else []
    apart = [-i for i, n in enumerate(jnp.shape(scales[0])[::-1], 1) if n > 1] if local else []
    if local and set(apart) <= set(dims) and all(is_same_scale(scales[0], x) for x in scales):
        if not is_same_scale(scales[0], 1.0):
            layout = replace(layout, copied=local[0]["name"])
    elif local and all(isinstance(x, Tracer) for x in scales):
        raise ValueError(
            f"{name}: the sites {[site['name'] for site in local]} of a row are under scales that"
            " may be different arrays; put one numpyro.handlers.scale of a number around all of"
            " them, or give the rows as often as they count."
        )
    in_guide = (x for x in latent_sites(guide_trace) if not is_same_scale(own_scale(x, sizes), 1.0))
    for site in [*(model_trace[n] for n in scaled_latents(model_trace)), *in_guide]:
        if layout.copied and is_same_scale(own_scale(site, sizes), scales[0]):
            continue
        raise ValueError(
            f"{name}: the latent site '{site['name']}' is under a numpyro.handlers.scale that not"
            " every site of its rows has in model and guide, so it does not mean copies of the"
            " rows; put the same scale around all of them in both, or around the observed sites"
            " alone, or use VRELBO(1.)."
        )
    return layout


def weightless_dropped(guide_trace: Trace, layout: Layout) -> tuple[Trace, Array, Array]:
    """A guide's trace for the model to see, in which a draw of weight zero has no gradient, which
    may be infinite. The weights are the cotangents of two zeros, to be added to the log densities
    outside the unit plates, ``()``, and inside, ``(*units)``."""
    sites = {
        site["name"]: site
        for site in latent_sites(guide_trace)
        if jnp.issubdtype(jnp.result_type(site["value"]), jnp.floating)
        and jnp.shape(site["value"]) == site["fn"].shape()  # drawn, not substituted
    }

    def drop(cotangents: tuple[Sites, Array, Array]) -> tuple[Sites, Array, Array]:
        of_values, outside, of_units = cotangents
        without_any = jnp.all(of_units == 0) & (outside == 0)
        for name, ct in of_values.items():
            is_local = layout.is_local(sites[name])
            weightless = layout.along(sites[name], of_units == 0) if is_local else without_any
            of_values[name] = jnp.where(weightless & ~jnp.isfinite(ct), 0.0, ct)
        return of_values, outside, of_units

    values = {name: jnp.asarray(site["value"]) for name, site in sites.items()}
    zeros = jnp.zeros(()), jnp.zeros(layout.shape)
    values, outside, of_units = change_cotangents((values, *zeros), drop)
    seen = {name: {**sites[name], "value": value} for name, value in values.items()}
    return {**guide_trace, **seen}, outside, of_units


def drawn_sites(guide_trace: Trace) -> Trace:
    """The latent sites of the guide without the Delta sites, which are computed from others."""
    return {site["name"]: site for site in latent_sites(guide_trace) if not is_delta(site)}


def find_layout(
    model_trace: Trace, guide_trace: Trace, per_datum: bool, instead: str = ""
) -> Layout:
    """The units: the plates around every site, or (``per_datum``) around every observed site;
    ``instead`` is the end of an error."""
    sizes = plate_sizes(guide_trace, model_trace)
    if per_datum:
        around = _data_plates(model_trace, guide_trace, instead)
    else:
        both = [*sample_sites(model_trace), *sample_sites(guide_trace)]
        around = set.intersection(*(set(frames(site)) for site in both))
    dims = {name: dim for site in sample_sites(model_trace) for name, dim in frames(site).items()}
    plates = tuple(sorted(around, key=lambda name: dims[name]))
    subsampled = {**subsampled_plates(guide_trace), **subsampled_plates(model_trace)}
    drawn = drawn_sites(guide_trace)
    return Layout(
        plates=plates,
        shape=tuple(sizes[name][1] for name in plates),
        size=math.prod(sizes[name][0] for name in plates),
        scale=math.prod(sizes[name][0] / sizes[name][1] for name in plates),
        not_reparameterized=not_reparameterized(guide_trace),
        drawn_global=tuple(n for n, site in drawn.items() if not around <= set(frames(site))),
        drawn_local=tuple(n for n, site in drawn.items() if around <= set(frames(site))),
        guide_params=tuple(values_of(guide_trace, "param")),
        model_params=tuple(values_of(model_trace, "param")),
        mutable=(*values_of(guide_trace, "mutable"), *values_of(model_trace, "mutable")),
        subsampled=tuple((name, *size) for name, size in subsampled.items()),
        subsampled_latents=tuple(
            (site["name"], name)
            for site in [*latent_sites(model_trace), *latent_sites(guide_trace)]
            for name in frames(site)
            if name in subsampled and name not in around
        ),
        masked=any(has_array_mask(site["fn"]) for site in latent_sites(model_trace)),
        bounded=any(is_bounded(site) for site in model_trace.values() if is_data(site)),
    )


def _data_plates(model_trace: Trace, guide_trace: Trace, instead: str) -> set[str]:
    observed = [site for site in sample_sites(model_trace) if site["is_observed"]]
    # A factor outside the data plate is a prior, not a datum, unless there are only factors.
    data = [site for site in observed if is_data(site)]
    stacks = [set(frames(site)) for site in data or observed]
    plates = set.intersection(*stacks) if stacks else set()
    if not plates:
        names = [site["name"] for site in data or observed]
        raise ValueError(
            f"no plate encloses all observed sites {names}, so the terms of one datum are unknown;"
            f" put the data into one numpyro.plate{instead}."
        )
    for site in [*sample_sites(model_trace), *sample_sites(guide_trace)]:
        inside = plates & set(frames(site))
        if inside and inside != plates:
            raise ValueError(
                f"the observed sites lie in the plates {sorted(plates)} but site '{site['name']}'"
                f" only in {sorted(inside)}, so what one datum is is ambiguous; declare the"
                f" dimensions that belong to one datum with .to_event(){instead}."
            )
    return plates


def check_traces(model_trace: Trace, guide_trace: Trace, per_datum: bool, instead: str) -> None:
    """An error unless the guide covers the model, in plates of the same sizes, and the data fit."""
    if not any(sample_sites(model_trace)):
        raise ValueError(
            "the model has no sample site, so there is no log density; give it at least one"
            " numpyro.sample or numpyro.factor."
        )
    latents = {site["name"]: site for site in latent_sites(model_trace)}
    for name in latents:
        if name not in guide_trace:
            raise ValueError(
                f"latent site '{name}' of the model is missing in the guide; sample it in the"
                " guide, or sum it out of the model."
            )
    check_model_guide_match(model_trace, guide_trace)
    check_supports(model_trace, guide_trace)
    check_observed(model_trace)
    validate_model(model_trace, plate_warning="loose")
    # AutoSemiDAIS draws inside the plate, and gives its Delta site outside a density in full scale.
    drawn = drawn_sites(guide_trace).values()
    scale_their_own = {plate for site in drawn for plate in frames(site)}
    sizes = plate_sizes(guide_trace, model_trace)
    for name, site in latents.items():
        for plate in set(frames(site)) - set(frames(guide_trace[name])):
            full, batch = sizes[plate]
            own = is_delta(guide_trace[name]) and plate in scale_their_own
            if batch < full and (per_datum or not own):
                why = f"belongs to no datum{instead}"
                if not own:
                    why = "would not be scaled; put it into that plate"
                raise ValueError(
                    f"latent site '{name}' lies in the subsampled plate '{plate}' in the model but"
                    f" not in the guide, so its log q {why}."
                )
