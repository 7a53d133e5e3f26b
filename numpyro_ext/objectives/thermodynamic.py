"""The thermodynamic variational objective (Masrani, Le and Wood, 2019)."""

from collections.abc import Sequence

import jax
from jax import Array
from jax.lax import stop_gradient
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_count, check_positive, check_several
from numpyro_ext.objectives.base import Draws, MapT, Objective, State
from numpyro_ext.objectives.power_mean import power_mean, weighted_surrogate


class ThermodynamicELBO(Objective):
    r"""Riemann sum of thermodynamic integration, from the guide (b = 0) to the posterior (b = 1).

    .. math::
        \log p(x) = \int_0^1 E_{\pi_b}[\log w]\, db, \qquad \pi_b \propto q(z)^{1-b}\, p(x, z)^b,
        \quad \log w = \log p(x, z) - \log q(z),

    in nats. The integrand does not decrease, so on :math:`0 = b_0 < \ldots < b_B = 1` the left sum

    .. math::
        \mathrm{TVO} = \sum_{i=0}^{B-1} (b_{i+1} - b_i)\, E_{\pi_{b_i}}[\log w]

    is a lower bound of the evidence (``bound="lower"``) and the right sum, with
    :math:`\pi_{b_{i+1}}`, an upper one. B = 1 on the left is the ELBO. The K particles are draws of
    q; :math:`E_{\pi_b}` weighs them by :math:`w^{(b)} = \mathrm{softmax}_k(b\, lw_k)`.

    The loss is -TVO, and +TVO for ``bound="upper"``, which refuses parameters of the model.

    **Gradients.** With :math:`m_b = \sum_k w^{(b)}_k lw_k`,

    * ``"covariance"``: no pathwise derivative, so that guide sites may be **discrete**,

      .. math::
          \sum_k w^{(b)}_k \nabla lw_k + \frac{K}{K - 1} \sum_k w^{(b)}_k (lw_k - m_b)\,
          \nabla \{b \log p(x, z_k) + (1 - b) \log q(z_k)\},

      with :math:`z_k` fixed. Its factor K/(K-1) makes it exact in expectation at b = 0. The guide
      needs invertible transforms.
    * ``"pathwise"``: the derivative of :math:`m_b` for reparameterised sites, weights included.

    **Biased.** The self-normalised weights bias value and gradient by O(1/K), so with finite K
    neither sum is quite a bound. Near b = 1 the weights degenerate if the guide is far from the
    posterior. Independent data and subsampling are as in :class:`VRELBO` of order 0.

    :param int num_partitions: number of intervals B. The points are 0, and B points from
        ``beta_min`` to 1 at equal distances in the logarithm; for B = 1 they are 0 and 1.
    :param int num_particles: number of particles K; at least 2 for ``"covariance"``.
    :param float beta_min: the first point after 0, between 0 and 1.
    :param betas: the points themselves, increasing from 0 to 1, instead of the two above.
    :param str bound: ``"lower"`` or ``"upper"``.
    :param str gradient: ``"covariance"`` or ``"pathwise"``.

    **Reference:** *The thermodynamic variational objective*, Masrani et al., NeurIPS 2019 (eqs.
    7-9; its covariance gradient estimator, Section 4).

    >>> def guide(x):
    ...     numpyro.sample("z", dist.Normal(0., 1.))
    >>> x = jnp.array([1.5])  # log p(x) is -1.83
    >>> lower = ThermodynamicELBO(10, 2000)
    >>> upper = ThermodynamicELBO(10, 2000, bound="upper")
    >>> both = jax.jit(lambda *args: (-lower.loss(*args, normal_mean, guide, x),
    ...                               upper.loss(*args, normal_mean, guide, x)))
    >>> below, above = both(jax.random.key(0), {})
    >>> bool(-2.1 < below < -1.83), bool(-1.83 < above < -1.5)
    (True, True)
    """

    without_log_q = 'gradient="pathwise"'

    def __init__(
        self,
        num_partitions: int = 5,
        num_particles: int = 10,
        *,
        beta_min: float = 0.025,
        betas: Sequence[float] | Array | None = None,
        bound: str = "lower",
        vectorize_particles: bool | MapT = True,
        gradient: str = "covariance",
    ) -> None:
        check_choice("bound", bound, ("lower", "upper"))
        check_choice("gradient", gradient, ("covariance", "pathwise"))
        if gradient == "covariance":
            why = 'one has no covariance; gradient="pathwise" takes it'
            check_several(num_particles, why)
        check_positive("beta_min", beta_min)
        self.betas = _partition(num_partitions, beta_min) if betas is None else np.asarray(betas)
        is_path = self.betas.ndim == 1 and self.betas.size > 1 and np.all(np.diff(self.betas) > 0)
        if not (is_path and self.betas[0] == 0 and self.betas[-1] == 1):
            raise ValueError(f"the betas are {self.betas}; they must increase from 0 to 1.")
        self.num_partitions = len(self.betas) - 1
        self.bound = bound
        self.gradient = gradient
        self.upper_bound = bound == "upper"
        self.takes_powers = self.upper_bound or self.num_partitions > 1
        self.can_infer_discrete = gradient == "covariance"
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        covariance, upper = self.gradient == "covariance", self.bound == "upper"
        drawn = draws.layout.drawn_global + draws.layout.drawn_local if covariance else ()

        def densities(key: Array) -> tuple[Array, Array, State]:
            values = stop_gradient(draws.values(key)) if covariance else None
            particle = draws.particle(key, values=values)
            return particle.log_weight, particle.log_q_of(drawn), particle.state

        lw, log_q_score, state = draws.map(densities, draws.keys)
        b = jnp.asarray(self.betas[1:] if upper else self.betas[:-1], lw.dtype)
        value, weights, deviation = jax.vmap(_temper, (None, 0))(stop_gradient(lw), b)

        # Over k the coefficients of grad lw_k and of grad log q(z_k), summed over the partition:
        # b log p + (1 - b) log q = b lw + log q.
        step = jnp.asarray(np.diff(self.betas), lw.dtype)
        factor = self.num_particles / (self.num_particles - 1) if covariance else 1.0
        score = factor * weights * deviation
        b = jnp.reshape(b, (-1,) + (1,) * lw.ndim)
        total = jnp.tensordot(step, value, 1)
        tvo = weighted_surrogate(total, jnp.tensordot(step, weights + b * score, 1), lw)
        if covariance:
            coef = jnp.tensordot(step, score, 1)
            tvo += weighted_surrogate(jnp.zeros_like(total), coef, log_q_score)
        # Where no particle has any density the loss is infinite, for the upper bound too.
        losses = jnp.where(jnp.isneginf(tvo), jnp.inf, tvo) if upper else -tvo
        return draws.total(losses), state


def _temper(lw: Array, b: Array) -> tuple[Array, Array, Array]:
    """The mean of ``lw`` under ``softmax(b lw)``, these weights, and the deviations from the mean;
    0 where the mean is infinite or a weight is 0."""
    bound, weights = power_mean(lw, b)
    counted = jnp.where(weights == 0, 0.0, lw)
    mean = jnp.sum(weights * counted, 0)
    deviation = jnp.where(weights == 0, 0.0, counted - mean)
    return jnp.where(jnp.isinf(bound), bound, mean), weights, deviation


def _partition(num_partitions: int, beta_min: float) -> np.ndarray:
    num_partitions = check_count("num_partitions", num_partitions)
    if num_partitions == 1:
        return np.array([0.0, 1.0])
    return np.concatenate([[0.0], np.geomspace(beta_min, 1.0, num_partitions)])
