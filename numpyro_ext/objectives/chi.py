"""The chi upper bound of the evidence, CUBO (Dieng et al., 2017)."""

from jax import Array
import jax.numpy as jnp

from numpyro_ext._checks import check_choice, check_several
from numpyro_ext.objectives.base import Draws, MapT, Objective, State, check_alpha, refuse_count
from numpyro_ext.objectives.renyi import dreg, standard


class ChiUpperBound(Objective):
    r"""Chi upper bound of order n, an upper bound of the evidence that is minimised.

    .. math::
        \mathrm{CUBO}_n = \frac{1}{n} \log E_q\Big[\Big(\frac{p(x, z)}{q(z)}\Big)^n\Big] \ge
        \log p(x), \qquad n \ge 1,

    in nats, estimated by :math:`\frac1n \log \frac1K \sum_k e^{n\, lw_k}`, which is the bound of
    :class:`VRELBO` of order :math:`\alpha = 1 - n`, with the same gradients and units. The loss is
    **plus** this estimate. The minimiser covers the posterior: its variance is too large.

    **Biased** downwards: only the limit of infinitely many particles is a bound, and minimising
    with few particles gains from that bias too. n = 1 is the evidence whatever the guide.

    **When it fails.** The variance is finite only if :math:`E_q[w^{2n}]` is: start from a guide
    that is wider than the posterior. With a narrow one no particle sees the tails.

    :param float order: n, a number of at least 1.
    :param int num_particles: number of particles K, at least 2.
    :param str gradient: ``"standard"``, or ``"dreg"``, doubly reparameterised.

    **Reference:** *Variational inference via chi upper bound minimization*, Dieng et al., NIPS 2017
    (eqs. 2-5).

    >>> from numpyro.infer.initialization import init_to_median
    >>> guide = AutoNormal(normal_mean, init_scale=1.5, init_loc_fn=init_to_median)  # it is wide
    >>> svi = SVI(normal_mean, guide, optax.adam(0.02), ChiUpperBound(2., 50))
    >>> result = svi.run(jax.random.key(0), 500, jnp.array([1.5]), progress_bar=False)
    >>> bool(abs(result.losses[-100:].mean() + 1.83) < 0.05)  # log p(x) is -1.83
    True
    """

    upper_bound = takes_powers = True

    def __init__(
        self,
        order: float = 2.0,
        num_particles: int = 10,
        *,
        vectorize_particles: bool | MapT = True,
        gradient: str = "standard",
    ) -> None:
        check_choice("gradient", gradient, ("standard", "dreg"))
        why = "with one the loss is the ELBO, which must not be minimised"
        check_several(num_particles, why)
        refuse_count(self, order, num_particles)
        self.order, self.gradient = float(order), gradient
        if not self.order >= 1:
            raise ValueError(
                f"order is {order}; it must be at least 1. For a lower bound use VRELBO(1 - order)."
            )
        check_alpha(1.0 - self.order, finite=gradient == "dreg")
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        estimator = standard if self.gradient == "standard" else dreg
        bounds, state = estimator(draws, 1.0 - self.order)
        # Where no particle has any density there is nothing to bound from above.
        return draws.total(jnp.where(jnp.isneginf(bounds), jnp.inf, bounds)), state
