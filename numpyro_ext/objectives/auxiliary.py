"""The bound for guides with auxiliary variables and a reverse model (Ranganath et al., 2016)."""

from jax import Array

from numpyro_ext._model.read import sample_sites, split_auxiliary
from numpyro_ext.objectives.base import Draws, MapT, Objective, Particle, State
from numpyro_ext.objectives.power_mean import surrogate


class AuxiliaryELBO(Objective):
    r"""Bound of a guide :math:`q(z) = \int q(z \mid a)\, q(a)\, da` with a reverse model
    :math:`r(a \mid z)`.

    .. math::
        L &= E[lw], \qquad
        lw = \log p(x, z) + \log r(a \mid z) - \log q(a) - \log q(z \mid a), \\
        L &= \mathrm{ELBO}(q) - E_{q(z)}\, \mathrm{KL}(q(a \mid z) \,\|\, r(a \mid z)),

    in nats, estimated by the mean over K particles. With ``importance_weighted=True`` it is
    :math:`E \log \frac1K \sum_k e^{lw_k}`, which is not lower and still a lower bound of the
    evidence. The loss is minus that.

    Guides of this package with a reverse model contain :math:`-\log r` as factors, so that
    ``Trace_ELBO(K)`` is the same bound and ``IWELBO(K)`` the weighted one. It also takes a guide
    without factors that has a method ``reverse_log_prob(params, aux, latents, *args, **kwargs)``.

    **Bias.** The gap is the KL above; where the reverse model is the density :math:`q(a)`, it is
    the mutual information of a and z. The optimum over the guide is therefore not the ELBO's.

    :param bool importance_weighted: True for the mean of the weights in place of their logarithms.

    **References:** *Hierarchical variational models*, Ranganath et al., ICML 2016 (eq. 5); *An
    auxiliary variational method*, Agakov and Barber, ICONIP 2004 (eq. 7)

    >>> from numpyro_ext.guides import AutoAuxiliary
    >>> guide = AutoAuxiliary(model, init_from=None)
    >>> svi = SVI(model, guide, optax.adam(0.01), AuxiliaryELBO(8))
    >>> losses = svi.run(jax.random.key(0), 2000, progress_bar=False).losses
    >>> bool(-0.1 < losses[-500:].mean() < 0.5)  # at best 0; for AutoNormal 1.2
    True
    """

    def __init__(
        self,
        num_particles: int = 1,
        importance_weighted: bool = False,
        *,
        vectorize_particles: bool | MapT = True,
    ) -> None:
        self.importance_weighted = importance_weighted
        self.linear = self.minus_elbo = not importance_weighted
        self.takes_powers = importance_weighted
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        instead = "AutoAuxiliary(model), AutoHVI(model), or with_reverse(guide, reverse)"
        guide = draws.guide_with(["reverse_log_prob"], instead)

        def log_weight(particle: Particle) -> Array:
            if any(site["is_observed"] for site in sample_sites(particle.guide_trace)):
                return particle.log_weight  # the factors of the guide are -log r
            aux, latents = split_auxiliary(particle.guide_trace)
            log_r = guide.reverse_log_prob(draws.params, aux, latents, *draws.args, **draws.kwargs)
            return particle.log_weight + log_r

        lw, state = draws.each(log_weight)
        return -draws.total(surrogate(lw, 1.0 if self.importance_weighted else 0.0)), state
