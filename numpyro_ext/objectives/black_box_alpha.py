"""Black-box alpha-divergence minimisation (Hernandez-Lobato et al., 2016)."""

from jax import Array
import jax.numpy as jnp

from numpyro_ext.objectives.base import Draws, MapT, OfOrder, Order, Particle, State
from numpyro_ext.objectives.power_mean import surrogate


class BBAlphaELBO(OfOrder):
    r"""Black-box alpha energy with tied factors, as a quantity to be maximised.

    .. math::
        L = \frac{1}{\alpha} \sum_{n=1}^{N} \log E_{q(\theta)}\Big[\Big( p(x_n | \theta)
        \Big(\frac{p_0(\theta)}{q(\theta)}\Big)^{1/N} \Big)^{\alpha}\Big],

    in nats. With K particles and a minibatch of M rows

    .. math::
        \hat L = \frac{N}{M} \sum_{m} \frac{1}{\alpha} \log \frac{1}{K} \sum_k \exp \alpha \Big(
        \ell_{k,m} + \frac{1}{N}\big(\log p_0(\theta_k) - \log q(\theta_k)\big) \Big),

    where :math:`\ell_{k,m}` is the log likelihood of one datum; latents of a datum add :math:`\log
    p(z_m|\theta) - \log q(z_m)` to it. The loss :math:`-\hat L` is unbiased in the minibatch, for
    global and local latents alike. A row with a mask over all its observed sites does not count in
    N; under ``numpyro.handlers.scale`` a row is there so many times.

    ``approximate_kl=True`` (Li and Gal) takes the tied factor out of the power,

    .. math::
        \hat L = \frac{1}{K} \sum_k \log \frac{p_0(\theta_k)}{q(\theta_k)} + \frac{N}{M} \sum_m
        \frac{1}{\alpha} \log \frac{1}{K} \sum_k e^{\alpha \ell_{k,m}}.

    **Local latents with a recognition network** stand inside the energy, as in power EP: with a
    site :math:`z_n` in the data plate, the factor of a datum is

    .. math::
        E_{q(\theta)\, q(z_n | x_n, \theta)} \Big[\Big( \frac{p(x_n, z_n | \theta)}{q(z_n | x_n,
        \theta)} \Big(\frac{p_0(\theta)}{q(\theta)}\Big)^{1/N} \Big)^{\alpha}\Big].

    For alpha up to 1 this L is at most the one with :math:`p(x_n | \theta)`, where :math:`z_n` is
    integrated out, so that it trains the network; they are equal if the network gives :math:`p(z_n
    | x_n, \theta)`. The reverse, with the power of the local latents inside VI, is
    :class:`NestedVRELBO`. With a factor for each part of the data, in place of one tied factor,
    this is distributed black-box alpha: ``DAEP(model, partition, power=alpha, mean="moments")`` of
    :mod:`numpyro_ext.ep`.

    **Convention.** ``alpha`` is the order of power EP: ``alpha`` -> 0 is the ELBO (0 itself is
    allowed, negative values too) and 1 is EP-like. :class:`VRELBO` counts the other way: ``alpha_VR
    = 1 - alpha_BB`` for a single datum, ``1 - alpha_BB / N`` for a factor tied over N data. K = 1
    is the ELBO for every alpha, and finite K pulls towards it.

    **Biased.** It is not a bound: it can exceed the evidence. Even if the posterior lies in the
    guide's family it is not recovered, unless the factors of the data agree. It fails (infinite
    variance) where a datum's likelihood to the power alpha outweighs the guide's tails.

    The *data plate* encloses all observed sites of the model; every other site is in it or outside.

    :param alpha: order, a finite number, a traced scalar, or a callable of the step (with
        :func:`count_steps` around the guide).
    :param bool approximate_kl: True for the second form; the same without a global latent site.

    **References:** *Black-box alpha divergence minimization*, Hernandez-Lobato et al., ICML 2016
    (eqs. 8-10; its energy is :math:`-L`); *Dropout inference in Bayesian neural networks with
    alpha-divergences*, Li and Gal, ICML 2017 (eq. 5); *Approximate inference: new visions*,
    Yingzhen Li, PhD thesis, 2018, appendix B (eqs. B.8 and B.15)

    >>> guide = AutoNormal(normal_mean)
    >>> svi = SVI(normal_mean, guide, optax.adam(0.02), BBAlphaELBO(0.5, 100))
    >>> result = svi.run(jax.random.key(0), 500, jnp.array([-1., 1.]), progress_bar=False)
    >>> print(f"{result.params['z_auto_scale'] ** -2:.0f}")  # precision, 3 for Trace_ELBO
    2
    """

    per_datum = True
    elbo = 0.0

    def __init__(
        self,
        alpha: Order = 0.5,
        num_particles: int = 10,
        *,
        vectorize_particles: bool | MapT = True,
        approximate_kl: bool = False,
    ) -> None:
        super().__init__(alpha, num_particles, finite=True, vectorize_particles=vectorize_particles)
        self.approximate_kl = approximate_kl
        self.linear = approximate_kl or not self.takes_powers

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        def densities(particle: Particle) -> tuple[Array, Array]:
            per_datum = particle.log_lik - particle.log_q_local
            shared = particle.log_prior - particle.log_q_global
            if self.approximate_kl:
                return per_datum, shared
            observed = draws.layout.observed(particle.model_trace)
            # If the whole minibatch is masked, its rows have the prior alone.
            observed = jnp.where(jnp.any(observed), observed, True)
            tied = jnp.where(observed, shared / draws.total(observed), 0.0)
            return per_datum + tied, jnp.zeros(())

        (per_datum, shared), state = draws.each(densities)
        bounds = draws.total(surrogate(per_datum, self.order_at(draws.step)))
        return -jnp.mean(shared) - bounds, state
