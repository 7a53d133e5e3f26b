"""Variational inference for Monte Carlo objectives (Mnih and Rezende, 2016), of any order."""

from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_several
from numpyro_ext.objectives.base import Draws, MapT, OfOrder, Order, Particle, State
from numpyro_ext.objectives.power_mean import power_mean, weighted_surrogate


class VIMCO(OfOrder):
    r"""Renyi bound for a guide with discrete sites, or others that are not reparameterised.

    The value is :class:`VRELBO`'s, :math:`\hat L_{\alpha, K}` of the log weights
    :math:`lw_k`, in nats, and the loss :math:`-\hat L`. The gradient has a score term with a
    baseline of its own for each particle,

    .. math::
        \nabla E[\hat L_{\alpha, K}] = E\Big[\sum_j \Delta_{-j} \nabla \log q_s(z_j)
        + \sum_k \hat w_k \nabla lw_k\Big], \qquad \Delta_{-j} = \hat L_{\alpha, K} - \hat L_{-j},

    where :math:`q_s` is the density of the sites that are not reparameterised (the others keep
    their pathwise gradient) and :math:`\hat L_{-j}` does not depend on particle j:

    .. math::
        \text{arithmetic:}\quad & \hat L_{-j} = \frac{1}{1 - \alpha} \log \frac{1}{K - 1}
        \sum_{k \ne j} e^{(1 - \alpha)\, lw_k} \\
        \text{geometric:}\quad & \hat L_{-j} = \hat L_{\alpha, K} \text{ with } lw_j
        \text{ replaced by }
        \frac{1}{K - 1} \sum_{k \ne j} lw_k.

    Both are unbiased for the gradient of the bound of K particles. If every site is reparameterised
    the loss is ``VRELBO(alpha, K)`` with its standard gradient. Minibatches are as in
    :class:`VRELBO`.

    **When it fails.** The score term is noisy, the more so the more discrete sites share one bound.
    If plates enclose every site of model and guide, each of their elements has a bound and a
    baseline of its own, which removes most of the noise; so use plates in the guide too.

    **Which order.** ``alpha`` is Renyi's order as in :class:`VRELBO`: 0 is the paper's bound, 1 the
    ELBO. Near the posterior the bound of order 0 is K times flatter than the ELBO: its gradient
    falls as :math:`1/K`, and the noise of it as :math:`1/\sqrt K`. So if a posterior is what you
    want, take ``alpha=1``. Order 0 is for the parameters of a model, because its bound is tighter.

    :param alpha: order, a finite number, a traced scalar, or a callable of the step (with
        :func:`count_steps` around the guide).
    :param int num_particles: number of particles K, at least 2.
    :param str baseline: ``"arithmetic"`` or ``"geometric"``.

    **References:** *Variational inference for Monte Carlo objectives*, Mnih and Rezende, ICML 2016
    (eqs. 7-10; its baseline is the geometric one); *Renyi divergence variational inference*, Li and
    Turner, NIPS 2016

    >>> def model(x):
    ...     z = numpyro.sample("z", dist.Bernoulli(0.5))
    ...     numpyro.sample("x", dist.Normal(z, 1.), obs=x)
    >>> def guide(x):
    ...     logit = numpyro.param("logit", 0.)
    ...     numpyro.sample("z", dist.Bernoulli(logits=logit))
    >>> svi = SVI(model, guide, optax.adam(0.05), VIMCO(1., 10))
    >>> logit = svi.run(jax.random.key(0), 500, 1.5, progress_bar=False).params["logit"]
    >>> bool(abs(jax.nn.sigmoid(logit) - 0.73) < 0.1)  # the posterior is 0.73
    True
    """

    can_infer_discrete = True

    def __init__(
        self,
        alpha: Order = 0.0,
        num_particles: int = 10,
        *,
        vectorize_particles: bool | MapT = True,
        baseline: str = "arithmetic",
    ) -> None:
        check_choice("baseline", baseline, ("arithmetic", "geometric"))
        why = "the baseline of a particle is made of the others"
        check_several(num_particles, why)
        self.baseline = baseline
        super().__init__(alpha, num_particles, finite=True, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        alpha = self.order_at(draws.step)
        scored = draws.layout.not_reparameterized

        def densities(particle: Particle) -> tuple[Array, Array]:
            return particle.log_weight, particle.log_q_of(scored)

        (lw, log_q_score), state = draws.each(densities)
        value, weights = power_mean(lw, 1 - alpha)
        bound = weighted_surrogate(value, weights, lw)
        if scored:
            without_j = _without_each(lw, 1 - alpha, self.baseline)
            # Without a finite bound from the others any constant is a baseline.
            without_j = jnp.where(jnp.isinf(without_j), 0.0, without_j)
            delta = jnp.where(jnp.isinf(value), 0.0, value - without_j)
            bound = bound + weighted_surrogate(jnp.zeros_like(value), delta, log_q_score)
        return -draws.total(bound), state


def _without_each(lw: Array, a: Any, baseline: str) -> Array:
    """``(K, *units)``, the bounds without particle j."""
    K = lw.shape[0]
    # (K - 1, K, *units): the weights k != j in column j.
    others = lw[(np.arange(K) + np.arange(1, K)[:, None]) % K]
    if baseline == "geometric":
        others = jnp.concatenate([others, jnp.mean(others, 0, keepdims=True)])
    return power_mean(others, a)[0]
