"""The Blob method: the density is smoothed inside the functional."""

from dataclasses import dataclass
from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_ext.particles.base import ParticleField
from numpyro_ext.scores._points import weighted_differences


@dataclass(kw_only=True, eq=False, repr=False)
class Blob(ParticleField):
    r"""Gradient flow of KL(q || p), with the density smoothed inside the logarithm.

    .. math::
        V_i = g_i - \sum_j \left(\frac{1}{\rho_i} + \frac{1}{\rho_j}\right)
              \nabla_{x_i} k(x_i, x_j), \qquad \rho_i = \sum_j k(x_i, x_j), \qquad
        g_i = \nabla \log p(x_i),

    in unconstrained space, Jacobian included, with m particles :math:`x_i \in R^d`. At a given
    bandwidth it is minus the gradient of :math:`F(x) = -\sum_i \log p(x_i) + \sum_i \log \rho_i`,
    so that small steps go downhill. One particle climbs to the mode.

    **Bias.** As for :class:`GFSD`: the particles are too close together. Use it for d up to about
    5, and :class:`RegularizedSVGD` otherwise. Steps are as for :class:`GFSD`.

    Cost of a step: m gradients of the model and O(m^2 d).

    :param kernel: ``RBF`` or ``IMQ``, or another :class:`~numpyro_ext.scores.RadialKernel`;
        defaults to ``RBF("median")``.

    **Reference:** Chen, Zhang, Wang, Li and Chen, *A unified particle-optimization framework for
    scalable Bayesian sampling* (UAI 2018), section 3.

    >>> x = 3.0 * jax.random.normal(jax.random.key(0), (100, 1))
    >>> v = Blob().velocity(x, -x)  # of N(0, 1), for which x are too far out
    >>> bool((v * x).mean() < 0)
    True
    """

    default_bandwidth = "median"
    takes_every_kernel = False
    subtracts_score = True

    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        if self.rows_at_a_time(len(x)) == len(x):
            k, w = kernel.value_and_weight(x, x)
            return grad_log_p + _repulsion(w, jnp.sum(k, axis=1), jnp.sum(k, axis=1), x, x)
        rho = self.by_rows(lambda xi: jnp.sum(kernel(xi, x), axis=1), x)

        def repulsion(xi: Array, rho_i: Array) -> Array:
            return _repulsion(kernel.value_and_weight(xi, x)[1], rho_i, rho, xi, x)

        return grad_log_p + self.by_rows(repulsion, x, rho)


def _repulsion(w: Array, rho_i: Array, rho_j: Array, xi: Array, x: Array) -> Array:
    """``w`` are the weights of the gradients, which are ``-w_ij (x_i - x_j)``."""
    return weighted_differences(w * (1.0 / rho_i[:, None] + 1.0 / rho_j), xi, x)
