r"""The draws of a guide as vectors in unconstrained space, for losses that need samples alone.

A score or a density ratio is estimated from K vectors :math:`z_k \in R^d`. Here is how those
vectors are read off a guide, whatever its sites, and how
:math:`\log p^*(z) = \log p(x, T(z)) + \log |\det T'(z)|` is evaluated at vectors that a loss
chooses, T being the map from unconstrained space to the sites.
"""

from collections.abc import Iterable
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

from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import (
    Site,
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

__all__ = ["Block", "Samples", "Vectors"]

Vectors = tuple[Array, ...]
"""One array ``(*block.shape, block.dim)`` for each block; a leading axis of particles may come
first."""


@dataclass(frozen=True)
class Coordinate:
    """A site of the guide as a part of a vector."""

    name: str
    shape: tuple[int, ...]
    """Of its unconstrained value."""
    axes: tuple[int, ...]
    """Where that shape has the plates of the block."""
    support: Constraint | None
    """None if its bounds are known only while the guide runs."""

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
class Block:
    """Sites that together make one vector, for each element of some plates.

    * ``sites`` - what the vector consists of, in the order of the guide.
    * ``plates, shape`` - names and minibatch sizes of the plates; empty for a single vector.
    * ``dim`` - length d of a vector.
    * ``scale`` - product of N/M over the plates.
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
        found, start = {}, 0
        for site in self.sites:
            stop = start + math.prod(site.shape) // math.prod(self.shape)
            found[site.name] = site.value(vector[..., start:stop])
            start = stop
        return found


class Samples:
    r"""The vectors of the particles of one evaluation, and log p* as a function of vectors.

    Which sites of the guide make the vectors:

    * ``implicit=True`` - the ``Implicit`` sites. Those in the same plates make one block, so that
      there is one vector for each element of the plates. Every other site keeps its density, which
      is subtracted from log p*. The auxiliary sites of which an ``Implicit`` site is made are its
      noise: their density counts nowhere. What cannot be written so is an error: an ``Implicit``
      site that depends on a latent with a density or on the noise of another block, and no
      ``Implicit`` site at all.
    * ``implicit=False`` - all that the guide draws for the model, with a density or without. There
      is one block: one vector for each unit of the layout, and :math:`\log p^*` has no log q of
      anything.

    A site that an automatic guide computes from its latent vector is a Delta whose density holds
    the Jacobian of T, and the vector is that latent vector. For a site that is drawn as it is, the
    vector is unconstrained by ``biject_to(support).inv``.

    :param Draws draws: the particles.
    :param bool implicit: see above.
    """

    blocks: tuple[Block, ...]

    def __init__(self, draws: Draws, *, implicit: bool) -> None:
        self._draws = draws
        trace, parents = _read(draws)
        if implicit:
            names, self._uncounted = _implicit_sites(trace, parents)
            self.blocks = _blocks_of_plates(trace, names, parents)
        else:
            names = _drawn_for_model(trace, parents)
            self._uncounted = {s["name"] for s in sample_sites(trace) if not is_delta(s)}
            layout = draws.layout
            sites = _coordinates(trace, names, layout.plates)
            self.blocks = (Block(sites, layout.plates, layout.shape, layout.scale),)

    def of(self, particle: Particle) -> Vectors:
        """The vectors of a particle, differentiable in the parameters of the guide."""
        trace = particle.guide_trace
        return tuple(
            block.join(_transform(trace[s.name]).inv(trace[s.name]["value"]) for s in block.sites)
            for block in self.blocks
        )

    def log_p_of(self, particle: Particle, z: Vectors) -> Array:
        """``(*units)``, log p* of a particle with the vectors ``z``, minus log q of the sites that
        keep their density."""
        log_q: Sites = dict.fromkeys(self._uncounted, jnp.zeros(()))
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
        """The particle of this key with other vectors; what is not in them is drawn as before."""
        sites = [site for block in self.blocks for site in block.sites]
        supports = {site.name: site.support for site in sites}
        if None in supports.values():
            trace = self._draws.guide_trace(key, params)
            supports = {name: trace[name]["fn"].support for name in supports}
        values = {name: biject_to(supports[name])(u) for name, u in self._split(z).items()}
        return self._draws.particle(key, params=params, values=values)

    def log_p(self, key: Array, z: Vectors, params: Params | None = None) -> Array:
        """``(*units)``, log p* at the vectors ``z``, which may be any, on the shared minibatch.

        :param key: the key of a particle, which makes what the vectors do not hold.
        :param dict params: the parameters, ``draws.params`` if None; with ``draws.stopped`` the
            gradient is that in ``z`` alone.
        """
        return self.log_p_of(self.particle(key, z, params), z)

    def _split(self, z: Vectors) -> dict[str, Array]:
        parts: dict[str, Array] = {}
        for block, vector in zip(self.blocks, z, strict=True):
            parts.update(block.split(vector))
        return parts


def _transform(site: Site) -> Any:
    return biject_to(site["fn"].support)


def _read(draws: Draws) -> tuple[Trace, dict[str, set[str]]]:
    """A trace of the guide, of use for names, shapes and supports, and ``{site: parents}``.

    The parents of a site are the drawn sites from which its distribution is computed.
    """
    key, trace = draws.keys[0], {}
    shapes = jax.eval_shape(draws.values, key)

    def distributions(**drawn: Array) -> dict[str, list[Array]]:
        values = {name.removeprefix("site "): x for name, x in drawn.items()}
        trace.update(draws.guide_trace(key, draws.stopped, values))
        return {
            site["name"]: [x for x in jax.tree.leaves(site["fn"]) if isinstance(x, jax.Array)]
            for site in sample_sites(trace)
        }

    # The prefix keeps a site called "fn" apart from the argument.
    origins = eval_provenance(distributions, **{f"site {name}": x for name, x in shapes.items()})
    parents = {
        name: {origin.removeprefix("site ") for one in leaves for origin in one}
        for name, leaves in origins.items()
    }
    return trace, parents


def _drawn_for_model(trace: Trace, parents: dict[str, set[str]]) -> list[str]:
    """The drawn sites that are latents of the model, or from which one of them is computed."""
    names: dict[str, None] = {}
    for site in latent_sites(trace):
        if not site["infer"].get("is_auxiliary", False):
            order = [name for name in trace if name in parents[site["name"]]]
            names.update(dict.fromkeys(order if is_delta(site) else [site["name"]]))
    return list(names)


def _ancestors(name: str, parents: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    new = set(parents[name])
    while new - found:
        found |= new
        new = set().union(*(parents[one] for one in new))
    return found


def _implicit_sites(trace: Trace, parents: dict[str, set[str]]) -> tuple[list[str], set[str]]:
    """The Implicit sites, and the sites whose density does not count: theirs and their noise's."""
    names = [site["name"] for site in latent_sites(trace) if not has_density(site["fn"])]
    if not names:
        raise ValueError(
            "the guide has no Implicit site, so every site has a density and nothing is to be"
            " estimated from samples; use numpyro.infer.Trace_ELBO, or AutoImplicit(model)."
        )
    noise = set().union(*(_ancestors(name, parents) for name in names)) - set(names)
    for latent in _drawn_for_model(trace, parents):
        if latent in noise:
            raise ValueError(
                f"an Implicit site of the guide depends on the latent site '{latent}', which has a"
                " density, so log q of neither can be counted; draw it from noise of its own, an"
                " auxiliary site, or make both sites Implicit."
            )
    for name in parents:
        shared = parents[name] & noise
        if shared and name not in noise and has_density(trace[name]["fn"]):
            raise ValueError(
                f"guide site '{name}' has a density that depends on '{min(shared)}', the noise of"
                " an Implicit site; give it noise of its own, or make it Implicit too."
            )
    return names, noise | set(names)


def _blocks_of_plates(
    trace: Trace, names: list[str], parents: dict[str, set[str]]
) -> tuple[Block, ...]:
    """One block for each set of plates around Implicit sites."""
    groups: dict[frozenset[str], list[str]] = {}
    for name in names:
        groups.setdefault(frozenset(frames(trace[name])), []).append(name)
    sizes, blocks, seen = plate_sizes(trace), [], {}
    for group in groups.values():
        dims = frames(trace[group[0]])
        plates = tuple(sorted(dims, key=lambda plate: dims[plate]))
        scale = math.prod(sizes[plate][0] / sizes[plate][1] for plate in plates)
        for name in group:
            _refuse_scaled(trace[name], scale)
            for one in {name} | _ancestors(name, parents):
                if seen.setdefault(one, group[0]) != group[0]:
                    raise ValueError(
                        f"the Implicit sites '{seen[one]}' and '{group[0]}' lie in different plates"
                        f" and both depend on '{one}', so their densities are not a product; give"
                        " each noise of its own, or put both into the same plates."
                    )
        shape = tuple(sizes[plate][1] for plate in plates)
        blocks.append(Block(_coordinates(trace, group, plates), plates, shape, scale))
    return tuple(blocks)


def _refuse_scaled(site: Site, plate_scale: float) -> None:
    scale = 1.0 if site["scale"] is None else site["scale"]
    traced = isinstance(scale, Tracer)
    same = not traced and jnp.ndim(scale) == 0 and math.isclose(scale, plate_scale, rel_tol=1e-5)
    masks = [mask_of(layer) for layer in layers(site["fn"])]
    masked = any(mask is not None and mask is not True for mask in masks)
    if masked or not same:
        how = "a mask" if masked else "numpyro.handlers.scale"
        raise ValueError(
            f"the Implicit site '{site['name']}' lies under {how}, but it has no log q that could"
            " be scaled; put the handler around sites of the model alone."
        )


def _coordinates(
    trace: Trace, names: Iterable[str], plates: tuple[str, ...]
) -> tuple[Coordinate, ...]:
    found = []
    for name in names:
        site = trace[name]
        support = site["fn"].support
        batch = jnp.ndim(site["value"]) - site["fn"].event_dim
        axes = tuple(batch + frames(site)[plate] for plate in plates)
        shape = unconstrained_shape(support, jnp.shape(site["value"]))
        alive = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(support))
        found.append(Coordinate(name, shape, axes, None if alive else support))
    return tuple(found)
