"""The ELBO of a guide without a density, by an estimated score (Li and Turner, 2018)."""

from collections.abc import Callable
from functools import partial

import jax
from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp

from numpyro_ext._checks import check_several
from numpyro_ext.objectives.base import Draws, MapT, Objective, State
from numpyro_ext.objectives.critic import critic_of
from numpyro_ext.objectives.samples import Samples
from numpyro_ext.scores import DenoisingScore, SteinScore


class ImplicitELBO(Objective):
    r"""ELBO for guides with ``Implicit`` sites, which can be sampled but have no density.

    The gradient of the ELBO needs the score of q and not its density. With the vectors
    :math:`z_k = z(\epsilon_k; \phi)` of K particles in :math:`R^d` (unconstrained, so that
    :math:`\log p^*` holds the Jacobian), and estimates :math:`g_k` of
    :math:`\nabla \log q(z_k)` from these K vectors,

    .. math::
        \nabla_\phi \mathrm{ELBO} &= E\Big[\Big(\frac{\partial z}{\partial \phi}\Big)^{\!\top}
        (\nabla \log p^*(z) - \nabla \log q(z))\Big], \\
        loss &= -\frac1K \sum_k \log p^*(z_k) + \frac1K \sum_k (g_k^\top z_k - \mathrm{sg}(\cdot)),

    where the estimates have no gradient and sg(.) is the value of the term before it. Parameters of
    the model get :math:`-\frac1K \sum_k \nabla_\theta \log p^*(z_k)`. Where the score is exact and
    q is the posterior, the gradient of :math:`\phi` is zero for every draw.

    **The value is the energy** :math:`-E \log p^*` in nats (plus E log q of the sites that have a
    density), and no bound: do not compare models by it and do not stop at its minimum.

    **Bias.** The ridge of :class:`SteinScore` shrinks the force of the entropy, so that q is
    slightly too narrow; the error grows with d and falls with K. In heavy tails q is too wide.

    **Plates.** The ``Implicit`` sites make one vector for each element of the plates around them
    (for each datum of a minibatch), with a score estimate of its own from K draws, and the terms
    are scaled by N/M. Sites with a density keep it. An ``Implicit`` site must not depend on a
    latent that has one; the other way is allowed.

    :param int num_particles: number of particles K, at least 2, better 50 to 200; the score takes
        :math:`O(K^3 + K^2 d)` per element of the plates.
    :param score: a score estimator of :mod:`numpyro_ext.scores`, or a function of ``(K, d)``
        vectors that gives ``(K, d)`` scores; defaults to ``SteinScore()``. With
        ``DenoisingScore(sigma)`` the guide is ``with_critic(guide, output_dim=d)``: its network is
        :math:`\sigma` times the score of q convolved with :math:`N(0, \sigma^2 I)`, and trained on
        the draws of each step, so that it lags behind a guide that moves fast.

    **References:** *Gradient estimators for implicit models*, Li and Turner, ICLR 2018 (sections 2
    and 3); *A connection between score matching and denoising autoencoders*, Vincent, Neural
    Computation 2011 (eq. 9)

    >>> from numpyro_ext.guides import Implicit
    >>> def guide(x):
    ...     loc, scale = numpyro.param("loc", 0.), numpyro.param("scale", 1.)
    ...     noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
    ...     numpyro.sample("z", Implicit(loc + scale * noise))
    >>> svi = SVI(normal_mean, guide, optax.adam(0.05), ImplicitELBO(100))
    >>> params = svi.run(jax.random.key(0), 500, jnp.array([1.5]), progress_bar=False).params
    >>> bool(abs(params["loc"] - 0.75) < 0.2)  # the posterior is N(0.75, 0.5)
    True
    """

    linear = True
    minus_elbo = True

    def __init__(
        self,
        num_particles: int = 64,
        score: Callable[[Array], Array] | DenoisingScore | None = None,
        *,
        vectorize_particles: bool | MapT = True,
    ) -> None:
        why = "the score of q is estimated from several draws"
        check_several(num_particles, why)
        if isinstance(score, DenoisingScore) and score.network is not None:
            raise ValueError(
                "score is a DenoisingScore with a network, and its parameters are not in the guide;"
                " give the network to with_critic, and DenoisingScore sigma alone."
            )
        self.score = SteinScore() if score is None else score
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        samples = Samples(draws, implicit=True)

        def vector_and_log_p(key: Array) -> tuple[Array, Array, State]:
            particle = draws.particle(key)
            path = samples.path_of(particle)
            if path is None:
                z = samples.vector_of(particle)
                return z, samples.log_p_of(particle, z), particle.state
            log_p = jax.vmap(partial(samples.log_p, key))(path)
            return path, jnp.mean(log_p, axis=0), particle.state

        z, log_p, state = draws.map(vector_and_log_p, draws.keys)
        loss = -draws.total(jnp.mean(log_p, axis=0))
        if isinstance(self.score, DenoisingScore):
            force, training = _denoised(self.score.sigma, draws, samples, stop_gradient(z))
            loss = loss + (training - stop_gradient(training))
        else:
            force = stop_gradient(_scores(self.score, z))
        num_states = self.num_particles * samples.structure.num_states
        entropy = samples.group.scale * jnp.sum(force * z) / num_states
        return loss + (entropy - stop_gradient(entropy)), state


def _scores(score: Callable[[Array], Array], z: Array) -> Array:
    """``(K, *elements, d)`` estimates, from the K draws of each element."""
    K, *elements, d = z.shape
    z = stop_gradient(z)
    if not elements:
        return score(z)
    return jax.vmap(score, 1, 1)(z.reshape(K, -1, d)).reshape(z.shape)


def _denoised(
    sigma: float | Array, draws: Draws, samples: Samples, z: Array
) -> tuple[Array, Array]:
    """The scores that the critic's network gives, and the loss that trains it."""
    sigma = jnp.asarray(sigma, z.dtype)
    critic = critic_of(draws, samples.group, "SteinScore()", field=True)
    noise = sigma * random.normal(draws.extra_key, z.shape, z.dtype)
    residual = sigma * critic(draws.params, z + noise) + noise
    return critic(draws.stopped, z) / sigma, jnp.sum(residual**2) / z.shape[0]
