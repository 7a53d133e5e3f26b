"""Kernels of the distance between two points.

References: Liu and Wang, *Stein variational gradient descent* (NIPS 2016), section 5; Gorham and
Mackey, *Measuring sample quality with kernels* (ICML 2017), for the inverse multiquadric kernel.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp

from numpyro_ext._checks import check_positive
from numpyro_ext.scores.bandwidth import BANDWIDTH_RULES
from numpyro_ext.scores.base import RadialKernel

__all__ = ["Cauchy", "Epanechnikov", "IMQ", "RBF"]


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


@dataclass(frozen=True, eq=False)
class Cauchy(RadialKernel):
    r"""Cauchy kernel :math:`k(x, y) = 1 / (1 + |x - y|^2 / (2 h^2))`.

    It is the limit of an :class:`IMQ` with :math:`\beta \to -1` and a bandwidth of
    :math:`\sqrt 2 h`: near a point it is an :class:`RBF` with the same h, far away it decays like
    the inverse square of the distance. It has the closed forms of score matching and of the
    parametric Stein estimator that an :class:`IMQ` does not have.

    :param bandwidth: the length :math:`h`: a positive number, one of the rules ``"median"`` and
        ``"median_distance"`` (see :func:`median_bandwidth`), or a callable ``x -> h``.
    :param float factor: multiplies the bandwidth, also that of a rule.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.scores import Cauchy
        >>> x = jnp.array([[0.0], [2.0]])
        >>> print(f"{Cauchy(1.0)(x, x)[0, 1]:.4f}")
        0.3333
    """

    def phi(self, s: Array) -> Array:
        return 1.0 / (1.0 + s / (2.0 * self.length**2))

    def dphi(self, s: Array) -> Array:
        return -(self.phi(s) ** 2) / (2.0 * self.length**2)

    def d2phi(self, s: Array) -> Array:
        return self.phi(s) ** 3 / (2.0 * self.length**4)


@dataclass(frozen=True, eq=False)
class Epanechnikov(RadialKernel):
    r"""Epanechnikov kernel without its cut, :math:`k(x, y) = 1 - |x - y|^2 / h^2`.

    It goes below 0 at distances above h and its Gram matrix is **not positive definite** (points 0,
    0.5, 1 with h = 1 have an eigenvalue of -0.06): a Stein estimate with it needs an
    :math:`\eta` above the size of the most negative eigenvalue, and :class:`KDEScore` does not
    take it. What score matching makes of it is the score of an isotropic Gaussian.

    :param bandwidth: the length :math:`h`: None for :math:`h = \sqrt d`, a positive number, one of
        the rules ``"median"`` and ``"median_distance"``, or a callable ``x -> h``.
    :param float factor: multiplies the bandwidth, also that of a rule.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.scores import Epanechnikov
        >>> x = jnp.array([[0.0, 0.0], [0.5, 0.5]])
        >>> print(f"{Epanechnikov()(x, x)[0, 1]:.4f}")
        0.7500
    """

    bandwidth: Any = None

    def __post_init__(self) -> None:
        if self.bandwidth is not None:
            return super().__post_init__()
        check_positive("factor", self.factor)

    def resolve(self, x: Array, state: Any = None) -> RadialKernel:
        """The kernel with a number for its bandwidth, the square root of d where it is None."""
        if self.bandwidth is not None:
            return super().resolve(x, state)
        h = jnp.sqrt(jnp.asarray(x.shape[1], x.dtype))
        return replace(self, bandwidth=h * self.factor, factor=1.0)

    def phi(self, s: Array) -> Array:
        return 1.0 - s / self.length**2

    def dphi(self, s: Array) -> Array:
        return jnp.full_like(s, -1.0) / self.length**2

    def d2phi(self, s: Array) -> Array:
        return jnp.zeros_like(s)
