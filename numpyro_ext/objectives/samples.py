r"""The draws of a guide as vectors in unconstrained space, for losses that need samples alone.

A score or a density ratio is estimated from K vectors :math:`z_k \in R^d`. Here is how those
vectors are read off a guide, whatever its sites, and how
:math:`\log p^*(z) = \log p(x, T(z)) + \log |\det T'(z)|` is evaluated at vectors that a loss
chooses, T being the map from unconstrained space to the sites.
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
from numpyro_ext.objectives.blocks import Block, all_drawn, implicit_only, trajectory_of

__all__ = ["Samples", "Vectors"]

Vectors = tuple[Array, ...]
"""One array ``(*block.shape, block.dim)`` for each block; a leading axis of particles may come
first."""


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

    def __init__(self, draws: Draws, *, implicit: bool) -> None:
        self._draws = draws
        self.structure = implicit_only(draws) if implicit else all_drawn(draws)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.structure.blocks

    def of(self, particle: Particle) -> Vectors:
        """The vectors of a particle, differentiable in the parameters of the guide."""
        return self.of_trace(particle.guide_trace)

    def of_trace(self, trace: Trace) -> Vectors:
        """The vectors of any trace that has their sites."""
        return tuple(
            block.join(_transform(trace[s.name]).inv(trace[s.name]["value"]) for s in block.sites)
            for block in self.blocks
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
            jax.vmap(block.join)([states(trace[site.name]) for site in block.sites])
            for block in self.blocks
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
