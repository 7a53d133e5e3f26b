r"""The draws of a guide as vectors in unconstrained space, for losses that need samples alone.

A score or a density ratio is estimated from K vectors :math:`z_k \in R^d`. :class:`Samples` reads
those vectors off a guide, whatever its sites, and evaluates
:math:`\log p^*(z) = \log p(x, T(z)) + \log |\det T'(z)|` at vectors that a loss chooses, where T is
the map from unconstrained space to the sites.
"""

from functools import partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.distributions import biject_to

from numpyro_ext._model.read import Site, sample_sites
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.objectives.base import Draws, Particle
from numpyro_ext.objectives.site_groups import SiteGroup, all_drawn, implicit_only, trajectory_of

Vectors = tuple[Array, ...]
"""One array ``(*group.shape, group.dim)`` for each group; a leading axis of particles may come
first."""


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
        self.structure = implicit_only(draws) if implicit else all_drawn(draws)

    @property
    def groups(self) -> tuple[SiteGroup, ...]:
        return self.structure.groups

    def of(self, particle: Particle) -> Vectors:
        """The vectors of a particle, differentiable in the parameters of the guide."""
        return self.of_trace(particle.guide_trace)

    def of_trace(self, trace: Trace) -> Vectors:
        """The vectors of any trace that has their sites."""
        return tuple(
            group.join(_transform(trace[s.name]).inv(trace[s.name]["value"]) for s in group.sites)
            for group in self.groups
        )

    def path_of(self, particle: Particle) -> Vectors | None:
        """The vectors of all states ``(num_states, ...)``, the last as in :meth:`of`; None if there
        is but one state."""
        if self.structure.num_states == 1:
            return None

        def states(site: Site) -> Array:
            path = trajectory_of(site)
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
