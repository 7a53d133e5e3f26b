"""The base of all kernels between points, whose derivatives JAX takes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_point_pair, matmul


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


class _FunctionKernel(BaseKernel):
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, x: Array, y: Array) -> Float[Array, "n m"]:
        return self.fn(x, y)


def as_kernel(kernel: Any) -> BaseKernel:
    """The kernel itself, or a function of two sets of points as a kernel with gradients.

    :param kernel: a :class:`BaseKernel`, or any callable ``(n, d), (m, d) -> (n, m)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.scores import as_kernel
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
