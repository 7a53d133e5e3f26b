"""Bounds of the ELBO for semi-implicit guides (Yin and Zhou, 2018; Molchanov et al., 2019)."""

from typing import Any

import jax
from jax import Array, random
from jax.nn import logsumexp
import jax.numpy as jnp

from numpyro_ext._checks import check_count
from numpyro_ext._typing import Model, Params
from numpyro_ext.objectives.base import Draws, MapT, Objective, State
from numpyro_ext.objectives.samples import Samples


class SemiImplicitELBO(Objective):
    r"""Bounds of the ELBO of a semi-implicit guide, :math:`q(z) = E_\psi[q(z \mid \psi)]`.

    For K particles :math:`z_k \sim q(z \mid \psi_k^0)` and J = ``num_aux`` fresh draws
    :math:`\psi^1, \dots, \psi^J`, which all particles share,

    .. math::
        L_J &= E\Big[\log p^*(z) - \log \frac{1}{J + 1} \Big(q(z \mid \psi^0)
        + \sum_{j=1}^J q(z \mid \psi^j)\Big)\Big], \\
        U_J &= E\Big[\log p^*(z) - \log \frac{1}{J} \sum_{j=1}^J q(z \mid \psi^j)\Big],
        \qquad L_J \le \mathrm{ELBO} \le U_J,

    in nats, with :math:`p^*` the joint density in unconstrained space. Both approach the ELBO as J
    grows. The loss is :math:`-L_J`, with an unbiased gradient; :meth:`bounds` gives both.

    **Bias.** :math:`L_J` is the ELBO only for many :math:`\psi` or where :math:`q(z \mid \psi)` is
    about as wide as q itself. For small J the optimum has too narrow a spread of :math:`\psi`, and
    with ``num_aux=0`` it is the best single conditional: psi collapses to a point. Take J of 20 to
    100, and more in more dimensions. Where the conditionals are narrow the variance of U is huge.
    With a minibatch the bound is unbiased.

    :param int num_aux: number J of fresh draws.

    **References:** *Semi-implicit variational inference*, Yin and Zhou, ICML 2018 (eqs. 6-8 for L);
    *Doubly semi-implicit variational inference*, Molchanov et al., AISTATS 2019 (section 3, for U)

    >>> from numpyro_ext.guides import AutoSemiImplicit
    >>> guide = AutoSemiImplicit(model, init_from=None)
    >>> svi = SVI(model, guide, optax.adam(0.01), SemiImplicitELBO())
    >>> params = svi.run(jax.random.key(0), 2000, progress_bar=False).params
    >>> loss = SemiImplicitELBO(1000, 100)
    >>> bounds = jax.jit(lambda key: loss.bounds(key, params, model, guide))
    >>> lower, upper = bounds(jax.random.key(1))
    >>> bool(-0.4 < lower < 0.1), bool(upper > lower)  # the evidence is 0
    (True, True)
    """

    linear = True
    minus_elbo = True

    def __init__(
        self, num_particles: int = 8, num_aux: int = 20, *, vectorize_particles: bool | MapT = True
    ) -> None:
        self.num_aux = check_count("num_aux", num_aux, minimum=0)
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        log_p, log_q, state = self._log_densities(draws)
        return -self._lower(log_p, log_q), state

    def bounds(
        self, rng_key: Array, params: Params, model: Model, guide: Model, *args: Any, **kwargs: Any
    ) -> tuple[Array, Array]:
        """Estimates of both bounds, ``(L_J, U_J)``, on the same draws, called as ``loss`` is."""
        check_count("num_aux", self.num_aux)  # the upper bound needs a fresh draw
        draws = Draws(self, rng_key, params, model, guide, args, kwargs)
        log_p, log_q, _ = self._log_densities(draws)
        upper = jnp.mean(log_p - logsumexp(log_q[:, 1:], 1) + jnp.log(self.num_aux))
        return self._lower(log_p, log_q), upper

    def _lower(self, log_p: Array, log_q: Array) -> Array:
        return jnp.mean(log_p - logsumexp(log_q, 1) + jnp.log(self.num_aux + 1))

    def _log_densities(self, draws: Draws) -> tuple[Array, Array, State]:
        """``(K,)`` of log p*, ``(K, 1 + J)`` of log q, first at the particle's own psi."""
        guide = draws.guide_with(["sample_mixing", "conditional"], "AutoSemiImplicit(model)")
        params, (key_own, key_z, key_fresh) = draws.params, random.split(draws.extra_key, 3)
        own = guide.sample_mixing(key_own, params, self.num_particles)
        z = guide.conditional(params, own).rsample(key_z)
        fresh = [guide.sample_mixing(key_fresh, params, self.num_aux)] if self.num_aux else []
        samples = Samples(draws, implicit=False)
        shape = (*samples.group.shape, samples.group.dim)
        if z.shape != (self.num_particles, *shape) or len(shape) > 1:
            raise ValueError(
                f"conditional of the guide gives {z.shape[1:]} numbers for one psi, and its sites"
                f" have {shape}; it must be one vector of all latents, not all in one plate."
            )

        def densities(key: Array, z: Array, psi: Any) -> tuple[Array, Array, State]:
            particle = samples.particle(key, z)
            mixing = [jax.tree.map(lambda x: x[None], psi), *fresh]
            log_q = [guide.conditional(params, each).log_prob(z) for each in mixing]
            return samples.log_p_of(particle, z), jnp.concatenate(log_q), particle.state

        return draws.map(densities, draws.keys, z, own)
