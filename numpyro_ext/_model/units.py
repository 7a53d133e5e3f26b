"""Which plates split a bound into units, and the sums over everything else.

A *unit* is what has a log weight of its own: one datum if every site lies in the data plate, one
minibatch and all its latents otherwise. Frames are compared by plate name and each site's own frame
says where its axis is, so that the guide may place a plate elsewhere than the model.
"""

from dataclasses import dataclass
from functools import reduce
import math

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.density import scaled
from numpyro_ext._model.handlers import subsampled_plates
from numpyro_ext._model.read import (
    Site,
    frames,
    is_data,
    is_delta,
    latent_sites,
    not_reparameterized,
    plate_sizes,
    sample_sites,
)
from numpyro_ext._typing import Trace

__all__ = ["Layout", "find_layout"]


@dataclass(frozen=True)
class Layout:
    """The unit plates, left to right, and what the sites are with respect to them.

    * ``plates, shape`` - names and minibatch sizes of the unit plates; empty for a single unit.
    * ``size, scale`` - products of N and of N/M over the unit plates.
    * ``not_reparameterized`` - guide sites without a pathwise gradient.
    * ``drawn`` - ``{site: in the unit plates?}`` of the guide's latent sites, Delta sites left out.
    * ``model_params`` - names of the model's ``param`` sites.
    * ``subsampled`` - ``(plate, N, M)`` of every plate that takes a minibatch.
    * ``subsampled_latents`` - ``(site, plate)`` of latents in a subsampled plate that is no unit plate.
    """

    plates: tuple[str, ...]
    shape: tuple[int, ...]
    size: int
    scale: float
    not_reparameterized: tuple[str, ...]
    drawn: dict[str, bool]
    model_params: tuple[str, ...]
    subsampled: tuple[tuple[str, int, int], ...]
    subsampled_latents: tuple[tuple[str, str], ...]

    def is_local(self, site: Site) -> bool:
        return set(self.plates) <= set(frames(site))

    def sum_sites(self, sites: list[tuple[Site, Array]], *, local: bool) -> Array:
        """Sum of log probabilities, ``shape`` for local sites and a scalar for the others.

        Every scale is applied except that of the unit plates, which multiplies outside the log.
        """
        chosen = [
            self._per_unit(site, log_prob) if local else jnp.sum(scaled(site, log_prob))
            for site, log_prob in sites
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

    def along(self, site: Site, x: Array) -> Array:
        """``x`` of shape ``shape``, with its axes where the value of ``site`` has the unit plates."""
        ndim = jnp.ndim(site["value"])
        dims = frames(site)
        axes = [ndim - site["fn"].event_dim + dims[name] for name in self.plates]
        shape = [1] * ndim
        for axis, size in zip(axes, self.shape, strict=True):
            shape[axis] = size
        return jnp.reshape(jnp.transpose(x, tuple(np.argsort(axes))), shape)


def find_layout(model_trace: Trace, guide_trace: Trace, per_datum: bool) -> Layout:
    """The units: the plates around every site, or (``per_datum``) around every observed site."""
    sizes = plate_sizes(guide_trace, model_trace)
    if per_datum:
        around = _data_plates(model_trace, guide_trace)
    else:
        both = [*sample_sites(model_trace), *sample_sites(guide_trace)]
        around = set.intersection(*(set(frames(site)) for site in both))
    dims = {name: dim for site in sample_sites(model_trace) for name, dim in frames(site).items()}
    plates = tuple(sorted(around, key=lambda name: dims[name]))
    subsampled = {**subsampled_plates(guide_trace), **subsampled_plates(model_trace)}
    subsampled_latents = tuple(
        (site["name"], name)
        for site in [*latent_sites(model_trace), *latent_sites(guide_trace)]
        for name in frames(site)
        if name in subsampled and name not in around
    )
    return Layout(
        plates=plates,
        shape=tuple(sizes[name][1] for name in plates),
        size=math.prod(sizes[name][0] for name in plates),
        scale=math.prod(sizes[name][0] / sizes[name][1] for name in plates),
        not_reparameterized=not_reparameterized(guide_trace),
        drawn={
            site["name"]: around <= set(frames(site))
            for site in latent_sites(guide_trace)
            if not is_delta(site)
        },
        model_params=tuple(n for n, site in model_trace.items() if site["type"] == "param"),
        subsampled=tuple((name, *size) for name, size in subsampled.items()),
        subsampled_latents=subsampled_latents,
    )


def _data_plates(model_trace: Trace, guide_trace: Trace) -> set[str]:
    observed = [site for site in sample_sites(model_trace) if site["is_observed"]]
    # A factor outside the data plate is a prior, not a datum, unless there are only factors.
    data = [site for site in observed if is_data(site)]
    stacks = [set(frames(site)) for site in data or observed]
    plates = set.intersection(*stacks) if stacks else set()
    if not plates:
        names = [site["name"] for site in data or observed]
        raise ValueError(
            f"no plate encloses all observed sites {names}, so the terms of one datum are unknown; put"
            " the data into one numpyro.plate, or use VRELBO."
        )
    for site in [*sample_sites(model_trace), *sample_sites(guide_trace)]:
        inside = plates & set(frames(site))
        if inside and inside != plates:
            raise ValueError(
                f"the observed sites lie in the plates {sorted(plates)} but site '{site['name']}' only"
                f" in {sorted(inside)}, so what one datum is is ambiguous; declare the dimensions that"
                " belong to one datum with .to_event(), or use VRELBO."
            )
    return plates
