"""Sums of a kernel's gradients over samples, ridges and solves, for the score estimators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jax.typing import ArrayLike

from numpyro_ext._typing import Float
from numpyro_ext.scores._points import (
    as_point_pair,
    matmul,
    squared_distances,
    weighted_differences,
)
from numpyro_ext.scores._pytree import is_pytree, pytree
from numpyro_ext.scores.kernels import BaseKernel, RadialKernel


def resolved(kernel: BaseKernel, x: Array) -> BaseKernel:
    """The kernel with its bandwidth on ``x``, its numbers in the precision of ``x``."""
    return _resolved(kernel, x) if is_pytree(kernel) else kernel.resolve(x)


@jax.jit  # a rule's bandwidth on samples that are not finite is NaN, not an error in the bandwidth
def _resolved(kernel: BaseKernel, x: Array) -> BaseKernel:
    return jax.tree.map(lambda value: jnp.asarray(value, x.dtype), kernel.resolve(x))


def as_queries(x: Array, y: ArrayLike) -> Float[Array, "n d"]:
    """The points ``y`` of an estimate from the samples ``x``, in the precision of ``x``."""
    return as_point_pair(x, y)[1].astype(x.dtype)


def kernel_sums(
    kernel: BaseKernel, x: Array, y: Array
) -> tuple[
    Float[Array, "k n"],
    Callable[[Float[Array, "k n"]], Float[Array, "n d"]],
    Callable[[], Float[Array, "n d"]],
]:
    r"""The matrix :math:`k(x^k, y^n)` of a resolved kernel and two sums, from one set of distances:

    .. math::
        a \mapsto \sum_k a_{kn} \nabla_{y} k(x^k, y^n), \qquad
        \sum_k \nabla_{x^k} k(y^n, x^k) \;\text{(gradient in the second argument)}.
    """
    if not isinstance(kernel, RadialKernel):
        return (
            kernel(x, y),
            lambda a: jnp.einsum("kn,knd->nd", a, kernel.grad_y(x, y), precision="highest"),
            lambda: kernel.repulsion(y, x),
        )
    s = squared_distances(x, y)
    slope = -2.0 * kernel.dphi(s)

    def weighted(a: Array) -> Array:
        return -weighted_differences((a * slope).T, y, x)

    return kernel.phi(s), weighted, lambda: weighted_differences(slope.T, y, x)


def at_itself(kernel: BaseKernel, y: Array) -> tuple[Float[Array, " n"], Float[Array, "n d"]]:
    """``k(y, y)`` of every point with itself, and its gradient in the second argument."""
    if isinstance(kernel, RadialKernel):
        return kernel.phi(jnp.zeros(len(y), y.dtype)), jnp.zeros_like(y)
    value = jax.vmap(lambda p: kernel(p[None], p[None])[0, 0])
    gradient = jax.vmap(lambda p: kernel.grad_y(p[None], p[None])[0, 0])
    return value(y), gradient(y)


def add_ridge(matrix: Array, ridge: Array) -> Array:
    return matrix + ridge * jnp.eye(len(matrix), dtype=matrix.dtype)


def solve(factor: Array, b: Array) -> Array:
    """By a lower Cholesky factor."""
    return cho_solve((factor, True), b)


def basis_weights(kernel: Any, s: Array) -> Array:
    r"""P, such that :math:`\nabla_y k(x^i, y^j) = P_{ij} (x^i - y^j) / h^2`, at distances s."""
    return -2.0 * kernel.dphi(s) * kernel.length**2


def gram_of_gradients(x: Array, p: Array, middle: Array | None = None) -> Float[Array, "k k"]:
    r"""With :math:`r_{kn} = x^k - x^n` and M (the identity if None), the matrix

    .. math::
        \Lambda_{kl} = \sum_{nm} P_{kn} M_{nm} P_{ml}\, r_{kn}^\top r_{lm}
        = \bigl(X \circ (P M P) + P (M \circ X) P - ((P M) \circ X) P - P ((M P) \circ X)
        \bigr)_{kl}

    in elementwise products with the Gram matrix X of centred x, for symmetric P and M.
    """
    x = x - jnp.mean(x, axis=0)
    gram = matmul(x, x.T)
    if middle is None:
        mixed = matmul(p * gram, p)
        return gram * matmul(p, p) + matmul(p * jnp.diagonal(gram), p) - mixed - mixed.T
    half = matmul(p, middle)
    mixed = matmul(half * gram, p)
    return gram * matmul(half, p) + matmul(p, matmul(middle * gram, p)) - mixed - mixed.T


@pytree
@dataclass(frozen=True, eq=False)
class KernelField:
    r"""The fitted score :math:`g(y) = \sum_k a_k \nabla_y k(x^k, y)`, of a resolved kernel."""

    x: Float[Array, "k d"]
    coefficients: Float[Array, " k"]
    kernel: BaseKernel

    def __call__(self, y: ArrayLike) -> Float[Array, "n d"]:
        y = as_queries(self.x, y)
        k_y, weighted, _ = kernel_sums(self.kernel, self.x, y)
        return weighted(jnp.broadcast_to(self.coefficients[:, None], k_y.shape))
