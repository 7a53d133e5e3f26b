"""Fisher divergence of a guide from the posterior (Yu and Zhang, 2023)."""

from dataclasses import replace
from typing import Any

import jax
from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp

from numpyro_ext._checks import check_choice
from numpyro_ext.objectives.base import Draws, MapT, Objective, State
from numpyro_ext.objectives.critic import critic_of
from numpyro_ext.objectives.samples import Samples
from numpyro_ext.objectives.stein_discrepancy import refuse_model_params


class FisherDivergence(Objective):
    r"""Fisher divergence: the mean squared distance of the scores of guide and posterior.

    .. math::
        D = E_q\,\big|\nabla \log q(z) - \nabla \log p^*(z)\big|^2,

    in unconstrained space :math:`R^d`, in units of 1/length squared, and 0 only where both agree on
    the support of q. It needs no evidence, so no normalisation of the posterior.

    * ``form="explicit"``: from K draws of a guide that has a density.
    * ``form="minimax"``: for a semi-implicit guide, :math:`q(z) = E_\psi\, q(z | \psi)`. Its score
      is not known; the score of :math:`q(z | \psi)` is. A critic f, a vector field, is trained
      beside the guide,

      .. math::
          D = \max_f E_{\psi, z}\Big[2 f(z)^\top \big(\nabla \log p^*(z) -
          \nabla_z \log q(z | \psi)\big) - |f(z)|^2\Big],

      with the optimum :math:`f = \nabla \log p^* - \nabla \log q`. The guide descends and the
      critic ascends, in one scalar loss with the paths separated. The guide is ``with_critic(guide,
      output_dim=d)`` of one that has ``sample_mixing`` and ``conditional``.

    A step takes second derivatives of the model.

    **Biased.** The explicit form is unbiased; the minimax form is too small while the critic is not
    optimal. With a subsampled likelihood and global latent sites the noise of the score enters
    squared, and the optimum moves to where the noise is small. If plates enclose every site, their
    elements are summed and scaled by N/M, without bias.

    **When it fails.** The divergence is blind to the weights of well separated modes, because
    scores are local. It is no bound on the evidence, and parameters of the *model*, over which its
    minimum would mean nothing, are an error.

    :param int num_particles: number of draws K.
    :param str form: ``"explicit"`` or ``"minimax"``.

    **References:** *Semi-implicit variational inference via score matching*, Yu and Zhang, ICLR
    2023 (equations 9 to 12); *Estimation of non-normalized statistical models by score matching*,
    Aapo Hyvarinen, JMLR 2005 (the divergence)

    >>> guide, x = AutoNormal(normal_mean), jnp.array([1.5])
    >>> svi = SVI(normal_mean, guide, optax.adam(0.05), FisherDivergence())
    >>> params = svi.run(jax.random.key(0), 500, x, progress_bar=False).params
    >>> loc, scale = params["z_auto_loc"], params["z_auto_scale"]
    >>> bool(abs(loc - 0.75) < 0.1), bool(abs(scale - 0.707) < 0.1)
    (True, True)
    """

    without_log_q = "SteinDiscrepancy, which needs draws alone"

    def __init__(
        self,
        num_particles: int = 16,
        form: str = "explicit",
        *,
        vectorize_particles: bool | MapT = True,
    ) -> None:
        check_choice("form", form, ("explicit", "minimax"))
        self.form = form
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        refuse_model_params(draws)
        samples = Samples(draws, implicit=False)
        return _explicit(draws, samples) if self.form == "explicit" else _minimax(draws, samples)


def _explicit(draws: Draws, samples: Samples) -> tuple[Array, State]:
    samples.refuse_auxiliary()

    def squared_distance(key: Array) -> tuple[Array, State]:
        particle = draws.particle(key)
        z = samples.vector_of(particle)
        # The Jacobians of log p* and of log q are the same, so they cancel.
        difference = jax.grad(lambda z: jnp.sum(samples.particle(key, z).log_weight))(z)
        return jnp.sum(difference**2, -1), particle.state

    squares, state = draws.map(squared_distance, draws.keys)  # (K, *units)
    return draws.total(jnp.mean(squares, 0)), state


def _minimax(draws: Draws, samples: Samples) -> tuple[Array, State]:
    instead = "AutoSemiImplicit(model), or form='explicit' for a guide with a density"
    guide = draws.guide_with(["sample_mixing", "conditional"], instead)
    group = samples.group
    # The conditional is one of the flat vector of all sites, whatever plates are around them.
    sites = tuple(replace(site, axes=()) for site in group.sites)
    flat = replace(group, sites=sites, plates=(), shape=(), scale=1.0)
    critic = critic_of(draws, flat, "SemiImplicitELBO", field=True)
    psi_key, z_key = random.split(draws.extra_key)
    psi = guide.sample_mixing(psi_key, draws.params, len(draws.keys))
    conditional = guide.conditional(draws.params, psi)
    z: Any = conditional.rsample(z_key)  # (K, d)
    score_q = jax.grad(lambda z: jnp.sum(conditional.log_prob(z)))(z)

    def score_p(key: Array, z: Array) -> tuple[Array, State]:
        def log_p(z: Array) -> tuple[Array, State]:
            vectors = group.join(flat.split(z).values())
            particle = samples.particle(key, vectors)
            return draws.total(samples.log_p_of(particle, vectors)), particle.state

        return jax.grad(log_p, has_aux=True)(z)

    score, state = draws.map(score_p, draws.keys, z)

    def value(f: Array, difference: Array) -> Array:
        return jnp.mean(jnp.sum(2 * f * difference - f**2, -1))

    difference = score - score_q
    gain = value(critic(draws.params, stop_gradient(z)), stop_gradient(difference))
    return value(critic(draws.stopped, z), difference) - (gain - stop_gradient(gain)), state
