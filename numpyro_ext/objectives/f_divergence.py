"""f-divergences, among them the tail-adaptive one (Wang, Liu and Liu, 2018)."""

from collections.abc import Callable
from dataclasses import dataclass
import math

import jax
from jax import Array
from jax.lax import stop_gradient
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro_ext._checks import check_choice
from numpyro_ext.objectives.base import Draws, MapT, Objective, Particle, State
from numpyro_ext.objectives.power_mean import power_mean, weighted_surrogate

# From s = log t to f(t) - f(1) and gamma_f(t).
_NAMED: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    "chi2": lambda s: (jnp.expm1(s) ** 2, 2 * jnp.exp(2 * s)),
    "hellinger": lambda s: (jnp.expm1(s / 2) ** 2, jnp.exp(s / 2) / 2),
    "kl_pq": lambda s: (jnp.exp(s) * jnp.where(jnp.exp(s) == 0, 0.0, s), jnp.exp(s)),
    "kl_qp": lambda s: (-s, jnp.ones_like(s)),
}


def _differentiate(f: Callable[[Array], Array], s: Array) -> tuple[Array, Array]:
    """For a callable: with ``h(s) = f(e^s)``, ``t^2 f''(t) = h'' - h'``."""

    def h(s: Array) -> Array:
        return f(jnp.exp(s))

    def value(s: Array) -> Array:
        return h(s) - h(jnp.zeros_like(s))

    def gamma(s: Array) -> Array:
        return jax.grad(jax.grad(h))(s) - jax.grad(h)(s)

    # exp(-80) is about the smallest ratio that float32 holds; f'' is evaluated where its t^-2 fits.
    flat = s.ravel()
    values = jax.vmap(value)(jnp.clip(flat, min=-80.0))
    gammas = jax.vmap(gamma)(jnp.clip(flat, min=-43.0))
    return values.reshape(s.shape), gammas.reshape(s.shape)


@dataclass(frozen=True)
class TailAdaptive:
    r"""Weights by rank, an argument of :class:`FDivergence`: ``FDivergence(TailAdaptive())``.

    Each particle gets the share :math:`\rho_k / \sum_j \rho_j` of the path gradient,

    .. math::
        \rho_k = \bar F(lw_k)^\beta, \qquad \bar F(lw_k) = \frac{1}{K} \#\{j : lw_j \ge lw_k\},

    which is bounded whatever the tails of the ratio p/q: for ``beta=-1`` the largest is K times the
    smallest. ``beta=0`` is VI with the gradient of sticking the landing. The divergence behind it
    changes with the guide: the loss is minus the ELBO, to be watched and not to be compared.

    :param float beta: exponent, a finite number that is not positive.

    **Reference:** *Variational inference with tail-adaptive f-divergence*, Wang et al., NeurIPS
    2018 (Algorithm 1).

    >>> print(11 * TailAdaptive().weights(jnp.array([0., 9., -5.])))  # ranks 2, 1, 3
    [3. 6. 2.]
    """

    beta: float = -1.0

    def __post_init__(self) -> None:
        if not -math.inf < self.beta <= 0:
            raise ValueError(
                f"beta is {self.beta}; it must be finite and at most 0, so that large weights count"
                " more: -1 is the paper's, 0 is VI."
            )

    def weights(self, lw: Array) -> Array:
        """Shares of the gradient, ``(K, *units)`` from log weights of that shape; they sum to 1."""
        count = jnp.sum(lw[:, None] >= lw, 0)
        rho = (count / lw.shape[0]) ** self.beta
        return rho / jnp.sum(rho, 0)


class FDivergence(Objective):
    r"""f-divergence between posterior and guide, for a convex f.

    .. math::
        D_f(p \| q) &= E_q[f(t)] - f(1), \qquad t = \frac{p(z | x)}{q(z)}, \\
        \nabla_\phi D_f &= -E_q\Big[\gamma_f(t)\, \partial_z \log \frac{p}{q}\,
        \frac{\partial z}{\partial \phi}\Big], \quad \gamma_f(t) = t^2 f''(t),

    with the path derivative only: log q is evaluated with its parameters stopped. With K particles
    the ratio is self-normalised, :math:`\log t_k = lw_k - \log \frac{1}{K} \sum_j e^{lw_j}`, so
    :math:`t_k \le K`; the loss is :math:`\frac{1}{K} \sum_k f(t_k) - f(1)`, without a unit, and the
    weights of the gradient are :math:`\gamma_f(t_k) / K`.

    =============== ======================== ======================= =====================
    ``f``           :math:`f(t)`             :math:`\gamma_f(t)`     divergence
    =============== ======================== ======================= =====================
    ``"kl_qp"``     :math:`-\log t`          :math:`1`               VI's, KL[q, p]
    ``"kl_pq"``     :math:`t \log t`         :math:`t`               KL[p, q]
    ``"chi2"``      :math:`(t - 1)^2`        :math:`2 t^2`           Pearson's chi-square
    ``"hellinger"`` :math:`(\sqrt{t} - 1)^2` :math:`\sqrt{t} / 2`    squared Hellinger
    =============== ======================== ======================= =====================

    A callable ``f(t)`` of a scalar is differentiated twice, at arguments of at least ``exp(-43)``.
    :class:`TailAdaptive` weighs by rank. ``"kl_qp"`` has the guide's gradient of
    ``VRELBO(1., K, gradient="stl")``.

    Parameters of the model get the gradient of the evidence, :math:`-\sum_k \tilde w_k \nabla \log
    p(x, z_k)` with self-normalised weights, and not the weights of the path.

    **Biased.** The self-normalisation causes a bias of order 1/K; K = 1 is VI for every f. The loss
    of finitely many particles is too small, so it does not judge a fit.

    **When it fails.** ``"chi2"`` and ``"kl_pq"`` weigh by powers of t, and one particle takes all
    if the guide is far from the posterior: start wide, or use :class:`TailAdaptive`.

    Independent data, subsampling and their errors are as in :class:`VRELBO`. log q is evaluated at
    a given z, so the guide needs invertible transforms.

    :param f: ``"kl_qp"``, ``"kl_pq"``, ``"chi2"``, ``"hellinger"``, a convex callable, or
        :class:`TailAdaptive`.

    **Reference:** *Variational inference with tail-adaptive f-divergence*, Wang et al., NeurIPS
    2018 (Proposition 3.1 and Algorithm 1; its :math:`\gamma_f`).

    >>> svi = SVI(model, AutoNormal(model), optax.adam(0.02), FDivergence(TailAdaptive(), 50))
    >>> scale = svi.run(jax.random.key(0), 500, progress_bar=False).params["y_auto_scale"]
    >>> bool(scale > 0.35)  # VI has 0.3, the marginal is 1.04
    True
    """

    takes_powers = True
    without_log_q = 'VRELBO, or ThermodynamicELBO with gradient="pathwise"'

    def __init__(
        self,
        f: str | Callable[[Array], Array] | TailAdaptive = "kl_qp",
        num_particles: int = 10,
        *,
        vectorize_particles: bool | MapT = True,
    ) -> None:
        if isinstance(f, str):
            check_choice("f", f, _NAMED)
        self.f = f
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        def along_the_path(key: Array) -> tuple[Array, State]:
            particle = draws.path_particle(key, params=draws.stopped)
            return particle.log_weight, particle.state

        def at_fixed_values(particle: Particle) -> Array:
            return particle.with_model_at(stop_gradient(particle.values)).log_weight

        lw, state = draws.map(along_the_path, draws.keys)
        value, coef = self._value_and_weights(stop_gradient(lw))
        bound = weighted_surrogate(-value, coef, lw)
        if draws.layout.model_params:
            theta, _ = draws.each(at_fixed_values, guide_params=draws.stopped)
            weights = power_mean(lw, 1.0)[1]
            bound += weighted_surrogate(jnp.zeros_like(value), weights, theta)
        return -draws.total(bound), state

    def _value_and_weights(self, lw: Array) -> tuple[Array, Array]:
        """The divergence of each unit, and the weights of its path gradient."""
        log_evidence = logsumexp(lw, 0) - math.log(self.num_particles)
        nothing = jnp.isneginf(log_evidence)
        if isinstance(self.f, TailAdaptive):
            value, coef = -jnp.mean(lw, 0), self.f.weights(lw)
        else:
            s = lw - jnp.where(nothing, 0.0, log_evidence)
            f, gamma = _NAMED[self.f](s) if isinstance(self.f, str) else _differentiate(self.f, s)
            value, coef = jnp.mean(f, 0), gamma / self.num_particles
        return jnp.where(nothing, jnp.inf, value), jnp.where(nothing, 0.0, coef)
