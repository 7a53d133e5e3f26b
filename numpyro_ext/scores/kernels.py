"""The base of kernels between points, differentiated by JAX, and kernels of the distance.

References: Liu and Wang, *Stein variational gradient descent* (NIPS 2016), section 5; Gorham and
Mackey, *Measuring sample quality with kernels* (ICML 2017), for the inverse multiquadric kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp

from numpyro_ext._checks import check_choice, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.scores._points import (
    as_point_pair,
    matmul,
    squared_distances,
    weighted_differences,
)
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.bandwidth import BANDWIDTH_RULES, median_bandwidth
from numpyro_ext.scores.heat_equation import he_bandwidth


class BaseKernel(ABC):
    """Base of kernels: a subclass writes ``__call__``, and ``jax.grad`` differentiates it.

    ``kernel(x, y)`` maps ``(n, d)`` and ``(m, d)`` points to the ``(n, m)`` matrix of their kernel.
    """

    @abstractmethod
    def __call__(self, x: Array, y: Array) -> Float[Array, "n m"]: ...

    def resolve(self, x: Array, state: Any = None) -> "BaseKernel":
        """The kernel with a numeric bandwidth, where it has a rule; itself otherwise."""
        return self

    def _one_pair(self, a: Array, b: Array) -> Array:
        return self(a[None], b[None])[0, 0]

    def _pairwise(self, fn: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
        x, y = as_point_pair(x, y)
        return jax.vmap(lambda a: jax.vmap(lambda b: fn(a, b))(y))(x)

    def grad_x(self, x: Array, y: Array) -> Float[Array, "n m d"]:
        """Gradient in the first argument."""
        return self._pairwise(jax.grad(self.resolve(x)._one_pair, argnums=0), x, y)

    def grad_y(self, x: Array, y: Array) -> Float[Array, "n m d"]:
        """Gradient in the second argument."""
        return self._pairwise(jax.grad(self.resolve(x)._one_pair, argnums=1), x, y)

    def cross_trace(self, x: Array, y: Array) -> Float[Array, "n m"]:
        r"""Trace of :math:`\partial^2 k / \partial x \, \partial y^\top`."""
        mixed = jax.jacfwd(jax.grad(self.resolve(x)._one_pair, argnums=0), argnums=1)
        return self._pairwise(lambda a, b: jnp.trace(mixed(a, b)), x, y)

    def repulsion(self, x: Array, y: Array) -> Float[Array, "n d"]:
        r"""The sums :math:`\sum_j \nabla_{y_j} k(x_i, y_j)` that keep particles apart."""
        return self.grad_y(x, y).sum(1)

    def value_and_repulsion(self, x: Array, y: Array) -> tuple[Array, Array]:
        """The matrix of the kernel, and :meth:`repulsion`."""
        return self(x, y), self.repulsion(x, y)

    def to_velocity(self, v: Array) -> Float[Array, "n d"]:
        """A sum over particles times the constant matrix of a matrix-valued kernel."""
        return v

    def stein(self, x: Array, y: Array, a: Array, b: Array) -> Float[Array, "n m"]:
        r"""The Stein kernel, for vectors ``a`` at the points ``x`` and ``b`` at ``y``:

        .. math::
            k\, a^\top b + a^\top \nabla_y k + b^\top \nabla_x k
            + \mathrm{tr}\, \partial_x\partial_y k.
        """
        first = jnp.einsum("id,ijd->ij", a, self.grad_y(x, y))
        second = jnp.einsum("jd,ijd->ij", b, self.grad_x(x, y))
        return self(x, y) * matmul(a, b.T) + first + second + self.cross_trace(x, y)


@dataclass(frozen=True, eq=False)
class RadialKernel(BaseKernel):
    r"""A kernel :math:`k(x, y) = \phi(s)` of :math:`s = |x - y|^2`.

    Subclasses are frozen dataclasses that write :math:`\phi` at a resolved bandwidth; then

    .. math::
        \nabla_y k = -2\phi'(s)(x - y), \quad \nabla_x k = 2\phi'(s)(x - y), \quad
        \mathrm{tr}\,\partial_x\partial_y k = -2 d\,\phi'(s) - 4 s\,\phi''(s).

    :param bandwidth: the length :math:`h`: a positive number, one of the rules ``"median"`` and
        ``"median_distance"`` (see :func:`median_bandwidth`), or a callable ``x -> h``.
    :param float factor: multiplies the bandwidth, also a rule's.
    """

    rules: ClassVar[tuple[str, ...]] = BANDWIDTH_RULES

    bandwidth: float | Array | str | Callable[[Array], Any] = "median"
    factor: float | Array = field(default=1.0, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pytree(cls)

    def __post_init__(self) -> None:
        if isinstance(self.bandwidth, str):
            self._check_rule(self.bandwidth)
        elif not callable(self.bandwidth):
            check_positive("bandwidth", self.bandwidth)
        check_positive("factor", self.factor)

    def _check_rule(self, rule: str) -> None:
        if rule == "he" and "he" not in self.rules:
            raise ValueError(
                f"bandwidth is 'he', but {type(self).__name__} is no Gaussian density estimate;"
                " use RBF('he') or 'median_distance'."
            )
        check_choice("bandwidth", rule, self.rules)

    def resolve(self, x: Array, state: Any = None) -> "RadialKernel":
        """The kernel with the bandwidth that its rule gives on ``x``; itself where it is a number.

        No gradient flows through a rule. An unresolved kernel resolves itself on its first
        argument. The rule ``"he"`` makes one step of its search from ``state``, its last
        ``length``, instead of 20 from the median.
        """
        if isinstance(self.bandwidth, str) and self.bandwidth == "he":
            warm = {} if state is None else {"start": state / self.factor, "num_steps": 1}
            h = he_bandwidth(x, **warm)
        elif isinstance(self.bandwidth, str):
            h = median_bandwidth(x, rule=self.bandwidth)
        elif callable(self.bandwidth):
            h = lax.stop_gradient(self.bandwidth(x))
        else:
            return self
        return replace(self, bandwidth=h * self.factor, factor=1.0)

    @property
    def length(self) -> Any:
        """The bandwidth h in the formulas, ``factor`` included, of a resolved kernel."""
        return self.bandwidth * self.factor  # type: ignore[operator]

    @abstractmethod
    def phi(self, s: Array) -> Array:
        r""":math:`\phi` at squared distances ``s``."""

    def dphi(self, s: Array) -> Array:
        r""":math:`\phi'`, at most 0."""
        return jax.jvp(self.phi, (s,), (jnp.ones_like(s),))[1]

    def d2phi(self, s: Array) -> Array:
        r""":math:`\phi''`."""
        return jax.jvp(self.dphi, (s,), (jnp.ones_like(s),))[1]

    def __call__(self, x: Array, y: Array) -> Float[Array, "n m"]:
        x, y = as_point_pair(x, y)
        return self.resolve(x).phi(squared_distances(x, y))

    def value_and_weight(self, x: Array, y: Array) -> tuple[Array, Array]:
        r"""``(K, W)`` from one distance matrix; :math:`\nabla_y k(x_i, y_j) = W_{ij} (x_i-y_j)`."""
        x, y = as_point_pair(x, y)
        kernel, s = self.resolve(x), squared_distances(x, y)
        return kernel.phi(s), -2.0 * kernel.dphi(s)

    def value_and_repulsion(self, x: Array, y: Array) -> tuple[Array, Array]:
        k, w = self.value_and_weight(x, y)
        return k, weighted_differences(w, x, y)

    def repulsion(self, x: Array, y: Array) -> Float[Array, "n d"]:
        return self.value_and_repulsion(x, y)[1]

    def cross_trace(self, x: Array, y: Array) -> Float[Array, "n m"]:
        x, y = as_point_pair(x, y)
        return self.resolve(x)._cross_trace(squared_distances(x, y), x.shape[1])

    def _cross_trace(self, s: Array, d: int) -> Array:
        return -2.0 * d * self.dphi(s) - 4.0 * s * self.d2phi(s)

    def stein(self, x: Array, y: Array, a: Array, b: Array) -> Float[Array, "n m"]:
        """The Stein kernel from one matrix of distances, without an (n, m, d) array."""
        x, y = as_point_pair(x, y)
        kernel, s = self.resolve(x), squared_distances(x, y)
        # a.grad_y + b.grad_x, as differences of vectors times differences of points.
        dot = jnp.sum((a[:, None] - b[None]) * (x[:, None] - y[None]), axis=-1)
        first = kernel.phi(s) * matmul(a, b.T) - 2.0 * kernel.dphi(s) * dot
        return first + kernel._cross_trace(s, x.shape[1])


@dataclass(frozen=True, eq=False)
class RBF(RadialKernel):
    r"""Gaussian kernel :math:`k(x, y) = \exp(-|x - y|^2 / (2 h^2))`.

    Its Stein discrepancy does not detect non-convergence for d >= 3 (it decays too fast): take
    :class:`IMQ` to judge samples, and this one to move them.

    :param bandwidth: as in :class:`RadialKernel`, or the rule ``"he"``, :func:`he_bandwidth`.

    >>> x = jnp.array([[0.0, 0.0], [1.0, 1.0]])
    >>> print(f"{RBF(1.0)(x, x)[0, 1]:.4f}")
    0.3679
    """

    rules: ClassVar[tuple[str, ...]] = (*BANDWIDTH_RULES, "he")

    def phi(self, s: Array) -> Array:
        return jnp.exp(-s / (2.0 * self.length**2))


@dataclass(frozen=True, eq=False)
class IMQ(RadialKernel):
    r"""Inverse multiquadric kernel :math:`k(x, y) = (1 + |x - y|^2 / h^2)^\beta`.

    Its slow decay makes its Stein discrepancy detect a sample that does not converge to the target,
    in any dimension (Gorham and Mackey 2017, theorem 8; their offset c is a bandwidth c h).

    :param float beta: the power, in (-1, 0).

    >>> x = jnp.array([[0.0], [2.0]])
    >>> print(f"{IMQ(1.0)(x, x)[0, 1]:.4f}")
    0.4472
    """

    beta: float | Array = field(default=-0.5, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.beta, Tracer) and not -1.0 < self.beta < 0.0:
            raise ValueError(f"beta is {self.beta!r}; it must be in (-1, 0), such as -0.5.")

    def phi(self, s: Array) -> Array:
        return (1.0 + s / self.length**2) ** self.beta


@dataclass(frozen=True, eq=False)
class Cauchy(RadialKernel):
    r"""Cauchy kernel :math:`k(x, y) = 1 / (1 + |x - y|^2 / (2 h^2))`.

    It is the limit of an :class:`IMQ` with :math:`\beta \to -1` and the bandwidth :math:`\sqrt 2
    h`, and has closed forms of score matching and of the parametric Stein estimator.

    >>> x = jnp.array([[0.0], [2.0]])
    >>> print(f"{Cauchy(1.0)(x, x)[0, 1]:.4f}")
    0.3333
    """

    def phi(self, s: Array) -> Array:
        return 1.0 / (1.0 + s / (2.0 * self.length**2))


@dataclass(frozen=True, eq=False)
class Epanechnikov(RadialKernel):
    r"""Epanechnikov kernel without its cut, :math:`k(x, y) = 1 - |x - y|^2 / h^2`.

    Its Gram matrix is **not positive definite**: a Stein estimate with it needs an :math:`\eta`
    above the size of the most negative eigenvalue, and :class:`KDEScore` does not take it. Score
    matching makes an isotropic Gaussian of it.

    :param bandwidth: None for :math:`h = \sqrt d`, or as in :class:`RadialKernel`.

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


class _FunctionKernel(BaseKernel):
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, x: Array, y: Array) -> Float[Array, "n m"]:
        return self.fn(x, y)


def as_kernel(kernel: Any) -> BaseKernel:
    """The kernel itself, or a function of two sets of points as a kernel with gradients.

    :param kernel: a :class:`BaseKernel`, or any callable ``(n, d), (m, d) -> (n, m)``.

    >>> x = jnp.array([[1.0], [2.0]])
    >>> print(as_kernel(lambda x, y: x @ y.T).cross_trace(x, x))
    [[1. 1.]
     [1. 1.]]
    """
    if isinstance(kernel, BaseKernel):
        return kernel
    if isinstance(kernel, type) or not callable(kernel):
        raise TypeError(
            f"kernel is {kernel!r}; it must be a kernel such as RBF() or IMQ(), or a function that"
            " maps (n, d) and (m, d) points to an (n, m) matrix."
        )
    return _FunctionKernel(kernel)
