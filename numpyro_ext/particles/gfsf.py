"""Gradient flow with smoothed test functions.

Reference: Liu, Zhuo, Cheng, Zhang, Zhu and Carin, *Understanding and accelerating particle-based
variational inference* (ICML 2019), section 3.3.
"""

from dataclasses import dataclass
from typing import Any

from jax import Array

from numpyro_ext._checks import check_positive
from numpyro_ext.particles.base import ParticleField
from numpyro_ext.particles.pairs import stein_sums
from numpyro_ext.particles.ridge import DIRECT_UP_TO, ridge_solve
from numpyro_ext.scores import SteinScore

__all__ = ["GFSF"]


@dataclass(kw_only=True, eq=False, repr=False)
class GFSF(ParticleField):
    r"""Gradient flow of KL(q || p) in Wasserstein space, with smoothed test functions.

    .. math::

        V_i = g_i + \left[ (K + \eta\, k(0) I)^{-1} b \right]_i, \qquad
        b_i = \sum_j \nabla_{x_j} k(x_i, x_j), \qquad g_i = \nabla \log p(x_i),

    in unconstrained space, Jacobian included, with m particles :math:`x_i \in R^d`. The second term
    is minus the estimate :class:`~numpyro_ext.scores.SteinScore` of the score of q. For
    :math:`\eta \to \infty` nothing keeps the particles apart. One particle climbs to the mode.

    **Bias.** The ridge enters the estimate but not :math:`g`, so the spread depends on
    :math:`\eta`: it can be too small or too large. :class:`RegularizedSVGD`, which divides both by
    the same matrix, does not have this bias and is as fast.

    **Conventions.** The field has no factor 1/m, so its steps are 10 to 100 times smaller than
    those of :class:`SVGD`. The RBF is :math:`\exp(-|r|^2 / (2 l^2))`; the paper's h is :math:`l^2`.
    The ridge is a multiple of k(0), and enters the linear system only: implementations that cancel
    :math:`K^{-1} K` by hand depend on the choice of the origin.

    Cost of a step: m gradients of the model and O(m^3 + m^2 d). Above m = 4096 the
    system is solved by preconditioned conjugate gradients, in memory of O(m d) and at O(m^2 d) for
    each of at most 200 iterations, and a warning says where their relative residual is above 1e-3.

    :param kernel: a positive definite kernel; defaults to ``RBF("median_distance")``.
    :param float eta: :math:`\eta`, positive.

    **Reference:** Liu, Zhuo, Cheng, Zhang, Zhu and Carin, *Understanding and accelerating
    particle-based variational inference* (ICML 2019), section 3.3.

    .. doctest::

        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> from numpyro_ext.particles import AutoParticles, GFSF, particle_step
        >>> def model():
        ...     numpyro.sample("w", dist.Normal(3.0, 2.0))
        >>> guide = AutoParticles(model, 50, init_from=None)
        >>> svi = SVI(model, guide, particle_step(300), loss=GFSF(precondition="covariance"))
        >>> result = svi.run(jax.random.key(0), 300, progress_bar=False)
        >>> w = guide.particles(result.params)["w"]
        >>> bool(abs(w.mean() - 3.0) < 0.2), bool(abs(w.std() - 2.0) < 0.2)
        (True, True)
    """

    takes_every_kernel = False
    subtracts_score = True

    eta: float | Array = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("eta", self.eta)

    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        if len(x) <= DIRECT_UP_TO:
            return grad_log_p - SteinScore(self.eta, kernel)(x)
        b = self.by_rows(lambda xi: stein_sums(kernel, xi, x, 0.0 * x)[1], x)
        return grad_log_p + ridge_solve(kernel, x, None, self.eta, b)
