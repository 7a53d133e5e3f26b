r"""The draws of a guide as vectors in unconstrained space, for losses that need samples alone.

A score or a density ratio is estimated from K vectors :math:`z_k \in R^d`. :class:`Samples` reads
them off a guide, and evaluates
:math:`\log p^*(z) = \log p(x, T(z)) + \log |\det T'(z)|` at vectors that a loss chooses, where T is
the map from unconstrained space to the sites.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
import math
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from numpyro.distributions import biject_to
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.circles import is_circle
from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import (
    Site,
    base_distribution,
    frames,
    is_delta,
    latent_sites,
    layers,
    plate_sizes,
    sample_sites,
    unconstrained_shape,
)
from numpyro_ext._numpyro import mask_of
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.objectives.base import Draws, Particle

Parents = dict[str, set[str]]
"""For each site the drawn sites from which its distribution is computed."""


@dataclass(frozen=True)
class Coordinate:
    """A site of the guide as a part of a vector."""

    name: str
    shape: tuple[int, ...]
    """The shape of its unconstrained value."""
    axes: tuple[int, ...]
    """The axes of that shape that belong to the plates of the group."""

    def vector(self, u: Array) -> Array:
        """The unconstrained value as ``(*plates, size)``."""
        front = jnp.moveaxis(u, self.axes, range(len(self.axes)))
        return front.reshape(*front.shape[: len(self.axes)], -1)

    def value(self, vector: Array) -> Array:
        """The inverse of :meth:`vector`."""
        rest = [n for axis, n in enumerate(self.shape) if axis not in self.axes]
        front = vector.reshape(*vector.shape[:-1], *rest)
        return jnp.moveaxis(front, range(len(self.axes)), self.axes)


@dataclass(frozen=True)
class SiteGroup:
    """Sites that together make one vector for each element of some plates.

    * ``sites`` - the parts of the vector, of length ``dim``, in the order of the guide.
    * ``plates, shape`` - the names and minibatch sizes of the plates; empty for a single vector.
    * ``scale`` - the product of N/M over the plates, times any ``numpyro.handlers.scale``.
    """

    sites: tuple[Coordinate, ...]
    plates: tuple[str, ...]
    shape: tuple[int, ...]
    scale: float

    @property
    def dim(self) -> int:
        return sum(math.prod(site.shape) for site in self.sites) // math.prod(self.shape)

    def join(self, parts: Iterable[Array]) -> Array:
        return jnp.concatenate(
            [site.vector(u) for site, u in zip(self.sites, parts, strict=True)], axis=-1
        )

    def split(self, vector: Array) -> dict[str, Array]:
        """``{site: unconstrained value}``."""
        values, start = {}, 0
        for site in self.sites:
            stop = start + math.prod(site.shape) // math.prod(self.shape)
            values[site.name] = site.value(vector[..., start:stop])
            start = stop
        return values


@dataclass(frozen=True)
class Structure:
    """The properties of the vectors of a guide that no draw changes.

    * ``group`` - the sites of which the vectors are made.
    * ``uncounted`` - the sites of the guide with a density that does not enter log p*.
    * ``num_states`` - the length T of the trajectory that an ``Implicit`` site carries, or 1.
    """

    group: SiteGroup
    uncounted: frozenset[str]
    num_states: int


class Samples:
    r"""The vectors ``(*group.shape, group.dim)`` of the particles, and log p* at any vectors.

    The vectors are made of these sites of the guide:

    * ``implicit=True`` - the ``Implicit`` sites, all in the same plates, with one vector for each
      element of the plates. Every other site keeps its density, which is subtracted from log p*.
      The auxiliary sites from which an ``Implicit`` site is computed are its noise, not counted.
    * ``implicit=False`` - all sites that the guide draws for the model, with a density or without,
      with one vector for each unit of the layout. No log q is subtracted from :math:`\log p^*`.

    A site that is drawn itself is unconstrained by ``biject_to(support).inv``; if an automatic
    guide computes sites from its latent vector, the vector is that one.
    """

    def __init__(self, draws: Draws, *, implicit: bool) -> None:
        self._draws = draws
        self.structure = _read(draws, _implicit_only if implicit else _all_drawn)
        self.group = self.structure.group

    def vector_of(self, particle: Particle) -> Array:
        """The vector of a particle, differentiable in the parameters of the guide."""
        return self.of_trace(particle.guide_trace)

    def of_trace(self, trace: Trace) -> Array:
        """The vector of any trace that has its sites."""
        sites = [trace[site.name] for site in self.group.sites]
        return self.group.join(_transform(site).inv(site["value"]) for site in sites)

    def path_of(self, particle: Particle) -> Array | None:
        """The vectors of all states ``(num_states, ...)``; None if there is but one state."""
        if self.structure.num_states == 1:
            return None

        def states(site: Site) -> Array:
            path = _trajectory(site)
            shape = (self.structure.num_states, *jnp.shape(site["value"]))
            path = jnp.broadcast_to(site["value"] if path is None else path, shape)
            return jax.vmap(_transform(site).inv)(path)

        sites = [particle.guide_trace[site.name] for site in self.group.sites]
        return jax.vmap(self.group.join)([states(site) for site in sites])

    def log_p_of(self, particle: Particle, z: Array) -> Array:
        """``(*units)``, log p* of a particle with vectors ``z``, minus log q where it is kept."""
        log_q: Sites = dict.fromkeys(self.structure.uncounted, jnp.zeros(()))
        parts = self.group.split(z)
        transforms = self._transforms(particle.guide_trace, parts)
        for name, u in parts.items():
            site = particle.guide_trace[name]
            log_det = transforms[name].log_abs_det_jacobian(u, site["value"])
            batch = jnp.ndim(site["value"]) - site["fn"].event_dim
            log_q[name] = -jnp.sum(log_det, tuple(range(batch, log_det.ndim)))

        def log_prob(site: Site) -> Array:
            return log_q[site["name"]] if site["name"] in log_q else self._draws.log_q(site)

        sites = list(sample_sites(particle.guide_trace))
        log_q_of = partial(self._draws.layout.sum_sites, sites, log_prob=log_prob)
        outside = particle.log_prior - log_q_of(local=False)
        return particle.log_lik - log_q_of(local=True) + outside

    def particle(self, key: Array, z: Array, params: Params | None = None) -> Particle:
        """The particle of this key with other vectors; the other sites are drawn as before."""
        trace = self._draws.guide_trace(key, params)  # the bounds of a support may be drawn
        parts = self.group.split(z)
        transforms = self._transforms(trace, parts)
        values = {name: transforms[name](u) for name, u in parts.items()}
        return self._draws.particle(key, params=params, values=values)

    def _transforms(self, trace: Trace, parts: Sites) -> dict[str, Any]:
        """The maps of the sites, with bounds at ``parts``, the unconstrained values of these sites,
        where they are sites of the model and bounds depend on them."""
        draws, supports = self._draws, {name: trace[name]["fn"].support for name in parts}
        supports_at = getattr(draws.guide, "supports_at", None)
        if supports_at is not None and set(parts) == set(getattr(draws.guide, "latent_sites", ())):
            moved = supports_at(parts, draws.args, draws.kwargs)
            # Where a circle is cut is a parameter, which is in the trace.
            supports = {n: x if is_circle(x) else moved[n] for n, x in supports.items()}
        return {name: biject_to(supports[name]) for name in parts}

    def refuse_auxiliary(self) -> None:
        """An error for a guide with auxiliary sites, of which log q of the latents is not known."""
        trace, draws = self._draws.guide_trace(self._draws.keys[0]), self._draws
        if not all(has_density(site["fn"]) for site in latent_sites(trace)):
            return  # log q of an Implicit site is an error of its own
        names = {site.name for site in self.group.sites}
        for site in latent_sites(trace):
            if site["name"] not in names and not is_delta(site):
                raise ValueError(
                    f"{type(draws.objective).__name__}: the guide draws the auxiliary site"
                    f" '{site['name']}' too, so that log q of the latents alone is not known; use"
                    f" {draws.objective.without_log_q}."
                )

    def log_p(self, key: Array, z: Array, params: Params | None = None) -> Array:
        """``(*units)``, log p* at any vectors ``z``, with the parameters ``draws.params`` if None;
        the sites outside the vectors are drawn with the key of a particle."""
        return self.log_p_of(self.particle(key, z, params), z)


def _transform(site: Site) -> Any:
    return biject_to(site["fn"].support)


def _implicit_only(draws: Draws, trace: Trace, parents: Parents) -> Structure:
    """All ``Implicit`` sites; other sites keep their density."""
    names, uncounted = _implicit_sites(trace, parents)
    return Structure(_implicit_group(trace, names), frozenset(uncounted), _num_states(trace))


def _all_drawn(draws: Draws, trace: Trace, parents: Parents) -> Structure:
    """All sites that the guide draws for the model, one vector for each unit."""
    names = _drawn_for_model(trace, parents)
    for site in latent_sites(trace):
        if is_delta(site) and not parents[site["name"]]:
            raise ValueError(
                f"the guide gives the latent site '{site['name']}' as a point, for which"
                f" {type(draws.objective).__name__} has no gradient; use ImplicitELBO, or"
                " substitute the point in the model."
            )
    layout = draws.layout
    sites = _coordinates(trace, names, layout.plates)
    group = SiteGroup(sites, layout.plates, layout.shape, layout.scale)
    counted = {site["name"] for site in latent_sites(trace) if is_delta(site)}
    uncounted = {site["name"] for site in sample_sites(trace)} - counted
    return Structure(group, frozenset(uncounted), _num_states(trace))


def _trajectory(site: Site) -> Array | None:
    """The states on the way to the value of an ``Implicit`` site."""
    return getattr(base_distribution(site["fn"]), "trajectory", None)


def _read(draws: Draws, find: Callable[[Draws, Trace, Parents], Structure]) -> Structure:
    """The structure, from a run of the guide on shapes alone and the parents of its sites."""
    key = draws.keys[0]
    shapes = jax.eval_shape(draws.values, key)

    def distributions(**drawn: Array) -> dict[str, list[Array]]:
        return {
            site["name"]: [x for x in jax.tree.leaves(site["fn"]) if isinstance(x, jax.Array)]
            for site in sample_sites(draws.guide_trace(key, draws.stopped, drawn))
        }

    origins = eval_provenance(distributions, **shapes)
    parents = {name: set().union(*leaves) for name, leaves in origins.items()}
    structure = []

    def read(drawn: Sites) -> None:  # within the trace, so that no tracer outlives it
        structure.append(find(draws, draws.guide_trace(key, draws.stopped, drawn), parents))

    jax.eval_shape(read, shapes)
    return structure[0]


def _num_states(trace: Trace) -> int:
    paths = [_trajectory(site) for site in sample_sites(trace)]
    lengths = {path.shape[0] for path in paths if path is not None}
    if len(lengths) > 1:
        raise ValueError(
            f"the Implicit sites have trajectories of {sorted(lengths)} states; give all the same."
        )
    return lengths.pop() if lengths else 1


def _drawn_for_model(trace: Trace, parents: Parents) -> list[str]:
    """The drawn sites that are latents of the model, or from which one of them is computed."""
    names: dict[str, None] = {}
    for site in latent_sites(trace):
        if not site["infer"].get("is_auxiliary", False):
            order = [name for name in trace if name in parents[site["name"]]]
            names.update(dict.fromkeys(order if is_delta(site) else [site["name"]]))
    return list(names)


def _ancestors(name: str, parents: Parents) -> set[str]:
    ancestors: set[str] = set()
    new = set(parents[name])
    while new - ancestors:
        ancestors |= new
        new = set().union(*(parents[parent] for parent in new))
    return ancestors


def _implicit_sites(trace: Trace, parents: Parents) -> tuple[list[str], set[str]]:
    """The Implicit sites, and the sites without a density that counts: they and their noise."""
    names = [site["name"] for site in latent_sites(trace) if not has_density(site["fn"])]
    if not names:
        raise ValueError(
            "the guide has no Implicit site, so every site has a density; use Trace_ELBO, or the"
            " guide AutoImplicit(model)."
        )
    noise = set().union(*(_ancestors(name, parents) for name in names)) - set(names)
    for latent in _drawn_for_model(trace, parents):
        if latent in noise:
            raise ValueError(
                f"an Implicit site of the guide depends on the latent site '{latent}', which has a"
                " density; draw it from an auxiliary site of its own, or make both Implicit."
            )
    for name in parents:
        shared = parents[name] & noise
        if shared and name not in noise and has_density(trace[name]["fn"]):
            raise ValueError(
                f"guide site '{name}' has a density that depends on '{min(shared)}', the noise of"
                " an Implicit site; give it noise of its own, or make it Implicit too."
            )
    return names, noise | set(names)


def _implicit_group(trace: Trace, names: list[str]) -> SiteGroup:
    dims, scale = frames(trace[names[0]]), _scale_of(trace[names[0]])
    for name in names:
        if set(frames(trace[name])) != set(dims) or _scale_of(trace[name]) != scale:
            raise ValueError(
                f"the Implicit sites '{names[0]}' and '{name}' lie in different plates or under"
                " different handlers.scale, but make one vector; give one of them a density."
            )
    plates, sizes = tuple(sorted(dims, key=lambda plate: dims[plate])), plate_sizes(trace)
    shape = tuple(sizes[plate][1] for plate in plates)
    return SiteGroup(_coordinates(trace, names, plates), plates, shape, scale)


def _scale_of(site: Site) -> float:
    """The scale of an ``Implicit`` site, which includes the one of its plates."""
    scale = 1.0 if site["scale"] is None else site["scale"]
    masks = [mask_of(layer) for layer in layers(site["fn"])]
    masked = any(mask is not None and mask is not True for mask in masks)
    if masked or isinstance(scale, Tracer) or jnp.ndim(scale):
        raise ValueError(
            f"the Implicit site '{site['name']}' lies under a mask or a numpyro.handlers.scale that"
            " is no fixed number, but has no log q to change; put the handler around the model."
        )
    return float(scale)


def _coordinates(
    trace: Trace, names: Iterable[str], plates: tuple[str, ...]
) -> tuple[Coordinate, ...]:
    coordinates = []
    for name in names:
        site = trace[name]
        batch = jnp.ndim(site["value"]) - site["fn"].event_dim
        axes = tuple(batch + frames(site)[plate] for plate in plates)
        shape = unconstrained_shape(site["fn"].support, jnp.shape(site["value"]))
        coordinates.append(Coordinate(name, shape, axes))
    return tuple(coordinates)
