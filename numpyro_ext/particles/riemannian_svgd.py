"""SVGD on a Riemannian manifold, in global coordinates."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext.particles.base import ParticleField


@dataclass(eq=False, repr=False)
class _WithMetric:
    # The fields of the last base come first, so that the metric is the first argument.
    metric_fn: Callable[[Array], Array]


@dataclass(kw_only=True, eq=False, repr=False)
class RiemannianSVGD(ParticleField, _WithMetric):
    r"""SVGD by vector fields that are gradients with respect to a metric that varies in space.

    With the metric G(x), its inverse :math:`(g^{ab})` and p the density of the unconstrained
    coordinates, Jacobian included,

    .. math::
        V(y) = G^{-1}(y)\, \nabla f(y), \qquad
        f(y) = \frac1m \sum_j \left[ \left(g^{ab}\, \partial_a \log p + \partial_a g^{ab}\right)
               \partial_b k(x_j, y) + g^{ab}\, \partial_a \partial_b k(x_j, y) \right],

    where all derivatives are taken in :math:`x_j`, repeated indices are summed, and everything but
    y is at :math:`x_j`. The metric is meant to be the Fisher information or the like. With the
    identity as the metric this is not :class:`SVGD`, because the vector fields are gradients.

    **Bias.** As for :class:`SVGD`, the spread is too small where d is not small against m. The
    bandwidth is a length in the coordinates, not in the metric.

    Cost of a step: m gradients of the model, m metrics and their derivatives, and O(m^2 d^2).

    :param metric_fn: a function of one ``(d,)`` particle that gives the ``(d, d)`` metric,
        symmetric and positive definite.
    :param kernel: a :class:`~numpyro_ext.scores.RadialKernel`; defaults to
        ``RBF("median_distance")``.

    **Reference:** Liu and Zhu, *Riemannian Stein variational gradient descent for Bayesian
    inference* (AAAI 2018), eq. 6 and 7.

    >>> metric = lambda x: jnp.diag(jnp.exp(x))
    >>> field = RiemannianSVGD(metric)
    >>> x = jax.random.normal(jax.random.key(0), (10, 2))
    >>> jax.jit(field.velocity)(x, -x).shape
    (10, 2)
    """

    takes_every_kernel = False

    # A metric in the units of the parameters, which no preconditioning may change.
    precondition: None = field(default=None, init=False)

    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        inverse = lambda x: jnp.linalg.inv(self.metric_fn(x))  # noqa: E731
        g_inv = jax.vmap(inverse)(x)
        divergence = jnp.einsum("jaba->jb", jax.vmap(jax.jacfwd(inverse))(x))
        drift = jnp.einsum("jab,ja->jb", g_inv, grad_log_p) + divergence
        trace = jnp.trace(g_inv, axis1=1, axis2=2)

        def f(y: Array) -> Array:
            r = x - y
            s = jnp.sum(r**2, axis=1)
            first = 2.0 * kernel.dphi(s) * (jnp.sum(drift * r, axis=1) + trace)
            return jnp.mean(first + 4.0 * kernel.d2phi(s) * jnp.einsum("ja,jab,jb->j", r, g_inv, r))

        slopes = self.by_rows(jax.vmap(jax.grad(f)), x)
        return jnp.einsum("iab,ib->ia", g_inv, slopes)
