"""Positive-definite kernels of the distance between two points.

References: Liu and Wang, *Stein variational gradient descent* (NIPS 2016), section 5; Gorham and
Mackey, *Measuring sample quality with kernels* (ICML 2017), for the inverse multiquadric kernel.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp

from numpyro_ext._checks import check_positive
from numpyro_ext.scores.bandwidth import BANDWIDTH_RULES
from numpyro_ext.scores.base import RadialKernel

__all__ = ["IMQ", "RBF"]


@dataclass(frozen=True, eq=False)
class RBF(RadialKernel):
    r"""Gaussian kernel :math:`k(x, y) = \exp(-|x - y|^2 / (2 h^2))`.

    Its Stein discrepancy does not detect non-convergence for d >= 3 (it decays too fast): take
    :class:`IMQ` to judge samples, and this one to move them.

    :param bandwidth: the length :math:`h`: a positive number, one of the rules ``"median"`` and
        ``"median_distance"`` (see :func:`median_bandwidth`) and ``"he"`` (see
        :func:`he_bandwidth`), or a callable ``x -> h``.
    :param float factor: multiplies the bandwidth, also that of a rule.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.scores import RBF
        >>> x = jnp.array([[0.0, 0.0], [1.0, 1.0]])
        >>> print(f"{RBF(1.0)(x, x)[0, 1]:.4f}")
        0.3679
    """

    rules: ClassVar[tuple[str, ...]] = (*BANDWIDTH_RULES, "he")

    def phi(self, s: Array) -> Array:
        return jnp.exp(-s / (2.0 * self.length**2))

    def dphi(self, s: Array) -> Array:
        return -self.phi(s) / (2.0 * self.length**2)

    def d2phi(self, s: Array) -> Array:
        return self.phi(s) / (4.0 * self.length**4)


@dataclass(frozen=True, eq=False)
class IMQ(RadialKernel):
    r"""Inverse multiquadric kernel :math:`k(x, y) = (c^2 + |x - y|^2 / h^2)^\beta`.

    Its slow decay makes its Stein discrepancy detect a sample that does not converge to the target,
    in any dimension (Gorham and Mackey 2017, theorem 8), which :class:`RBF` fails to do for d >= 3.
    :math:`k(x, x) = c^{2\beta}`, which is 1 for c = 1 only.

    :param bandwidth: the length :math:`h`: a positive number, one of the rules ``"median"`` and
        ``"median_distance"`` (see :func:`median_bandwidth`), or a callable ``x -> h``.
    :param float c: the offset, positive.
    :param float beta: the power, in (-1, 0).
    :param float factor: multiplies the bandwidth, also that of a rule.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.scores import IMQ
        >>> x = jnp.array([[0.0], [2.0]])
        >>> print(f"{IMQ(1.0)(x, x)[0, 1]:.4f}")
        0.4472
    """

    c: float | Array = field(default=1.0, kw_only=True)
    beta: float | Array = field(default=-0.5, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("c", self.c)
        if not isinstance(self.beta, Tracer) and not -1.0 < self.beta < 0.0:
            raise ValueError(f"beta is {self.beta!r}; it must be in (-1, 0), such as -0.5.")

    def _base(self, s: Array) -> Array:
        return self.c**2 + s / self.length**2

    def phi(self, s: Array) -> Array:
        return self._base(s) ** self.beta

    def dphi(self, s: Array) -> Array:
        return self.beta * self._base(s) ** (self.beta - 1.0) / self.length**2

    def d2phi(self, s: Array) -> Array:
        curvature = self.beta * (self.beta - 1.0) / self.length**4
        return curvature * self._base(s) ** (self.beta - 2.0)
