"""Gradient flow with smoothed test functions."""

from dataclasses import dataclass
from typing import Any

from jax import Array

from numpyro_ext._checks import check_positive
from numpyro_ext.particles.base import ParticleField
from numpyro_ext.scores import SteinScore


@dataclass(kw_only=True, eq=False, repr=False)
class GFSF(ParticleField):
    r"""Gradient flow of KL(q || p) in Wasserstein space, with smoothed test functions.

    .. math::
        V_i = g_i + \left[ (K + \eta\, k(0) I)^{-1} b \right]_i, \qquad
        b_i = \sum_j \nabla_{x_j} k(x_i, x_j), \qquad g_i = \nabla \log p(x_i),

    in unconstrained space, Jacobian included, with m particles :math:`x_i \in R^d`. The second term
    is minus the estimate :class:`~numpyro_ext.scores.SteinScore` of the score of q. For :math:`\eta
    \to \infty` nothing keeps the particles apart. One particle climbs to the mode.

    **Bias.** The ridge enters the estimate but not :math:`g`, so the spread depends on
    :math:`\eta`: it can be too small or too large. :class:`RegularizedSVGD`, which divides both by
    the same matrix, does not have this bias and is as fast.

    **Conventions.** Steps and the paper's h are as for :class:`GFSD`. The ridge is a multiple of
    k(0), and enters the linear system only.

    Cost of a step: as for :class:`RegularizedSVGD`.

    :param kernel: a positive definite kernel; defaults to ``RBF("median_distance")``.
    :param float eta: :math:`\eta`, positive.

    **Reference:** Liu, Zhuo, Cheng, Zhang, Zhu and Carin, *Understanding and accelerating
    particle-based variational inference* (ICML 2019), section 3.3.

    >>> x = 3.0 * jax.random.normal(jax.random.key(0), (100, 1))
    >>> v = GFSF().velocity(x, -x)  # of N(0, 1), for which x are too far out
    >>> bool((v * x).mean() < 0)
    True
    """

    takes_every_kernel = False
    subtracts_score = True

    eta: float | Array = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("eta", self.eta)

    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        return grad_log_p - SteinScore(self.eta, kernel)(x)
