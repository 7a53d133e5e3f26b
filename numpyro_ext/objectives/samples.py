r"""The draws of a guide as vectors in unconstrained space, for losses that need samples alone.

A score or a density ratio is estimated from K vectors :math:`z_k \in R^d`. :class:`Samples` reads
those vectors off a guide, whatever its sites, and evaluates
:math:`\log p^*(z) = \log p(x, T(z)) + \log |\det T'(z)|` at vectors that a loss chooses, where T is
the map from unconstrained space to the sites. The sites from which another one is computed are read
off one run of the guide on shapes alone.
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
from numpyro.distributions.constraints import Constraint
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.arguments import is_traced
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

Vectors = tuple[Array, ...]
"""One array ``(*group.shape, group.dim)`` for each group; a leading axis of particles may come
first."""
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
    support: Constraint | None
    """The support, or None if its bounds are known only while the guide runs."""

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

    * ``sites`` - the parts of the vector, in the order of the guide.
    * ``plates, shape`` - the names and minibatch sizes of the plates; empty for a single vector.
    * ``dim`` - the length d of a vector.
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

    * ``groups`` - the groups of sites, each of which makes a vector.
    * ``uncounted`` - the sites of the guide whose density does not enter log p*.
    * ``num_states`` - the length T of the trajectory that an ``Implicit`` site carries, or 1.
    * ``density`` - True if the density of the vectors under q can be evaluated.
    """

    groups: tuple[SiteGroup, ...]
    uncounted: frozenset[str]
    num_states: int
    density: bool


class Samples:
    r"""The vectors of the particles of one evaluation, and log p* as a function of vectors.

    The vectors are made of these sites of the guide:

    * ``implicit=True`` - the ``Implicit`` sites. Those in the same plates make one group, so that
      there is one vector for each element of the plates. Every other site keeps its density, which
      is subtracted from log p*. The auxiliary sites from which an ``Implicit`` site is computed are
      its noise, whose density is not counted. It is an error if there is no ``Implicit`` site, or
      if one depends on a latent site with a density or on the noise of another group.
    * ``implicit=False`` - all sites that the guide draws for the model, with a density or without.
      They make one group, with one vector for each unit of the layout, and no log q is subtracted
      from :math:`\log p^*`.

    A site that an automatic guide computes from its latent vector is a Delta whose density contains
    the Jacobian of T, and the vector is that latent vector. For a site that is drawn as it is, the
    vector is unconstrained by ``biject_to(support).inv``.
    """

    def __init__(self, draws: Draws, *, implicit: bool) -> None:
        self._draws = draws
        self.structure = _read(draws, _implicit_only if implicit else _all_drawn)

    @property
    def groups(self) -> tuple[SiteGroup, ...]:
        return self.structure.groups

    def vectors_of(self, particle: Particle) -> Vectors:
        """The vectors of a particle, differentiable in the parameters of the guide."""
        return self.of_trace(particle.guide_trace)

    def of_trace(self, trace: Trace) -> Vectors:
        """The vectors of any trace that has their sites."""
        return tuple(
            group.join(_transform(trace[s.name]).inv(trace[s.name]["value"]) for s in group.sites)
            for group in self.groups
        )

    def path_of(self, particle: Particle) -> Vectors | None:
        """The vectors of all states ``(num_states, ...)``, the last as in :meth:`vectors_of`; None
        if there is but one state."""
        if self.structure.num_states == 1:
            return None

        def states(site: Site) -> Array:
            path = _trajectory(site)
            shape = (self.structure.num_states, *jnp.shape(site["value"]))
            path = jnp.broadcast_to(site["value"] if path is None else path, shape)
            return jax.vmap(_transform(site).inv)(path)

        trace = particle.guide_trace
        return tuple(
            jax.vmap(group.join)([states(trace[site.name]) for site in group.sites])
            for group in self.groups
        )

    def log_p_of(self, particle: Particle, z: Vectors) -> Array:
        """``(*units)``, log p* of a particle with the vectors ``z``, minus log q of the sites that
        keep their density."""
        log_q: Sites = dict.fromkeys(self.structure.uncounted, jnp.zeros(()))
        for name, u in self._split(z).items():
            site = particle.guide_trace[name]
            log_det = _transform(site).log_abs_det_jacobian(u, site["value"])
            batch = jnp.ndim(site["value"]) - site["fn"].event_dim
            log_q[name] = -jnp.sum(log_det, tuple(range(batch, log_det.ndim)))

        def log_prob(site: Site) -> Array:
            return log_q[site["name"]] if site["name"] in log_q else self._draws.log_q(site)

        sites = list(sample_sites(particle.guide_trace))
        log_q_of = partial(self._draws.layout.sum_sites, sites, log_prob=log_prob)
        outside = particle.log_prior - log_q_of(local=False)
        return particle.log_lik - log_q_of(local=True) + outside

    def particle(self, key: Array, z: Vectors, params: Params | None = None) -> Particle:
        """The particle of this key with other vectors; the other sites are drawn as before."""
        sites = [site for group in self.groups for site in group.sites]
        supports = {site.name: site.support for site in sites}
        if None in supports.values():
            trace = self._draws.guide_trace(key, params)
            supports = {name: trace[name]["fn"].support for name in supports}
        values = {name: biject_to(supports[name])(u) for name, u in self._split(z).items()}
        return self._draws.particle(key, params=params, values=values)

    def log_p(self, key: Array, z: Vectors, params: Params | None = None) -> Array:
        """``(*units)``, log p* at the vectors ``z``, which may be any, on the shared minibatch.

        :param key: the key of a particle, with which the sites outside the vectors are drawn.
        :param dict params: the parameters, ``draws.params`` if None; with ``draws.stopped`` the
            gradient is that in ``z`` alone.
        """
        return self.log_p_of(self.particle(key, z, params), z)

    def _split(self, z: Vectors) -> dict[str, Array]:
        parts: dict[str, Array] = {}
        for group, vector in zip(self.groups, z, strict=True):
            parts.update(group.split(vector))
        return parts


def _transform(site: Site) -> Any:
    return biject_to(site["fn"].support)


def _implicit_only(draws: Draws, trace: Trace, parents: Parents) -> Structure:
    """One group of ``Implicit`` sites for each set of plates; other sites keep their density."""
    names, uncounted = _implicit_sites(trace, parents)
    groups = _groups_by_plates(trace, names, parents)
    return Structure(groups, frozenset(uncounted), _num_states(trace), False)


def _all_drawn(draws: Draws, trace: Trace, parents: Parents) -> Structure:
    """One group of all sites that the guide draws for the model, one vector for each unit."""
    names = _drawn_for_model(trace, parents)
    for site in latent_sites(trace):
        name = site["name"]
        if is_delta(site) and not parents[name]:
            raise ValueError(
                f"the guide gives the latent site '{name}' as a point, for which"
                f" {type(draws.objective).__name__} has no gradient; use ImplicitELBO, or"
                " substitute the point in the model."
            )
    layout = draws.layout
    sites = _coordinates(trace, names, layout.plates)
    groups = (SiteGroup(sites, layout.plates, layout.shape, layout.scale),)
    counted = {site["name"] for site in latent_sites(trace) if is_delta(site)}
    uncounted = {site["name"] for site in sample_sites(trace)} - counted
    density = uncounted == set(names) and all(has_density(trace[name]["fn"]) for name in names)
    return Structure(groups, frozenset(uncounted), _num_states(trace), density)


def _trajectory(site: Site) -> Array | None:
    """The states on the way to the value of an ``Implicit`` site."""
    return getattr(base_distribution(site["fn"]), "trajectory", None)


def _read(draws: Draws, find: Callable[[Draws, Trace, Parents], Structure]) -> Structure:
    """What :func:`_implicit_only` or :func:`_all_drawn` make of a trace of the guide on
    shapes alone and of the parents of sites."""
    key = draws.keys[0]
    shapes = {f"site {name}": x for name, x in jax.eval_shape(draws.values, key).items()}

    # The prefix keeps a site called "fn" apart from an argument.
    def trace_at(drawn: dict[str, Array]) -> Trace:
        values = {name.removeprefix("site "): x for name, x in drawn.items()}
        return draws.guide_trace(key, draws.stopped, values)

    def distributions(**drawn: Array) -> dict[str, list[Array]]:
        return {
            site["name"]: [x for x in jax.tree.leaves(site["fn"]) if isinstance(x, jax.Array)]
            for site in sample_sites(trace_at(drawn))
        }

    origins = eval_provenance(distributions, **shapes)
    parents = {
        name: {origin.removeprefix("site ") for leaf in leaves for origin in leaf}
        for name, leaves in origins.items()
    }
    structure = []
    # Within the trace, so that no tracer outlives it.
    jax.eval_shape(lambda drawn: structure.append(find(draws, trace_at(drawn), parents)), shapes)
    return structure[0]


def _num_states(trace: Trace) -> int:
    paths = [_trajectory(site) for site in sample_sites(trace)]
    lengths = {path.shape[0] for path in paths if path is not None}
    if len(lengths) > 1:
        raise ValueError(
            f"the Implicit sites of the guide have trajectories of {sorted(lengths)} states; give"
            " them the same number."
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
    """The Implicit sites, and the sites whose density does not count: theirs and their noise's."""
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


def _groups_by_plates(trace: Trace, names: list[str], parents: Parents) -> tuple[SiteGroup, ...]:
    """One group for each set of plates around Implicit sites."""
    together: dict[frozenset[str], list[str]] = {}
    for name in names:
        together.setdefault(frozenset(frames(trace[name])), []).append(name)
    sizes, groups, seen = plate_sizes(trace), [], {}
    for first, *others in together.values():
        dims = frames(trace[first])
        plates = tuple(sorted(dims, key=lambda plate: dims[plate]))
        scale = _scale_of(trace[first])
        for name in (first, *others):
            if _scale_of(trace[name]) != scale:
                raise ValueError(
                    f"the Implicit sites '{first}' and '{name}' make one vector, but one of them"
                    " lies under handlers.scale; put both under it, or neither."
                )
            for origin in sorted({name} | _ancestors(name, parents)):
                if seen.setdefault(origin, first) != first:
                    raise ValueError(
                        f"the Implicit sites '{seen[origin]}' and '{first}' lie in different"
                        f" plates and both depend on '{origin}'; give each noise of its own, or"
                        " put both into the same plates."
                    )
        shape = tuple(sizes[plate][1] for plate in plates)
        members = _coordinates(trace, (first, *others), plates)
        groups.append(SiteGroup(members, plates, shape, scale))
    return tuple(groups)


def _scale_of(site: Site) -> float:
    """The scale of an ``Implicit`` site, which includes the one of its plates."""
    scale = 1.0 if site["scale"] is None else site["scale"]
    masks = [mask_of(layer) for layer in layers(site["fn"])]
    masked = any(mask is not None and mask is not True for mask in masks)
    if masked or isinstance(scale, Tracer) or jnp.ndim(scale):
        how = "a mask" if masked else "a numpyro.handlers.scale that is no fixed number"
        raise ValueError(
            f"the Implicit site '{site['name']}' lies under {how}, but has no log q to change; put"
            " the handler around sites of the model alone."
        )
    return float(scale)


def _coordinates(
    trace: Trace, names: Iterable[str], plates: tuple[str, ...]
) -> tuple[Coordinate, ...]:
    coordinates = []
    for name in names:
        site = trace[name]
        support = site["fn"].support
        batch = jnp.ndim(site["value"]) - site["fn"].event_dim
        axes = tuple(batch + frames(site)[plate] for plate in plates)
        shape = unconstrained_shape(support, jnp.shape(site["value"]))
        coordinates.append(Coordinate(name, shape, axes, None if is_traced(support) else support))
    return tuple(coordinates)
