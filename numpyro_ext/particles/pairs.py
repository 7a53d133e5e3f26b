"""Sums over pairs of particles, and linear systems with their kernel matrix."""

from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._typing import Float
from numpyro_ext.scores import RadialKernel
from numpyro_ext.scores._blocks import has_blocks, solve_in_blocks

__all__ = ["DIRECT_UP_TO", "kernel_sums", "matmul", "ridge_solve", "weighted_differences"]

# Accelerators would otherwise round the factors to fewer bits.
matmul = partial(jnp.matmul, precision="highest")

DIRECT_UP_TO = 4096
"""Up to this many particles a kernel matrix is factorised in one piece."""
_RESIDUAL = 1e-3


def weighted_differences(
    w: Float[Array, "n m"], rows: Float[Array, "n d"], x: Float[Array, "m d"]
) -> Float[Array, "n d"]:
    """``sum_j w_ij (rows_i - x_j)`` without an (n, m, d) array."""
    # Two products whose difference keeps its digits only if the points are near the origin.
    centre = jnp.mean(x, axis=0)
    return jnp.sum(w, axis=1, keepdims=True) * (rows - centre) - matmul(w, x - centre)


def kernel_sums(
    kernel: Any, rows: Float[Array, "n d"], x: Float[Array, "m d"], g: Float[Array, "m d"]
) -> tuple[Float[Array, "n m"], Float[Array, "n d"]]:
    r"""The matrix :math:`k(x_i, x_j)`, and :math:`\sum_j [k(x_i, x_j) g_j + \nabla_{x_j} k]`.

    :param kernel: a kernel whose bandwidth is a number.
    """
    if not isinstance(kernel, RadialKernel):
        k = kernel(rows, x)
        return k, matmul(k, g) + kernel.repulsion(rows, x)
    k, w = kernel.value_and_weight(rows, x)
    return k, matmul(k, g) + weighted_differences(w, rows, x)


def ridge_solve(
    kernel: Any, x: Float[Array, "m d"], k: Array | None, eta: Any, b: Float[Array, "m d"]
) -> Float[Array, "m d"]:
    r""":math:`(K + \eta\, k(0) I)^{-1} b`, by Cholesky for few particles.

    Above ``DIRECT_UP_TO`` particles a radial kernel has it by the conjugate gradients of
    :class:`~numpyro_ext.scores.SteinScore`, in memory of O(m d), with a warning where their
    relative residual is above 1e-3. The diagonal also gets m times the machine epsilon, because
    rounding may make K indefinite.

    :param k: the matrix, if it is at hand.
    """
    m = x.shape[0]
    eta = jnp.asarray(eta, x.dtype) + m * jnp.finfo(x.dtype).eps
    if m > DIRECT_UP_TO and has_blocks(kernel):
        ridge = eta * kernel.phi(jnp.zeros((), x.dtype))
        solution, residual = solve_in_blocks(kernel, x, ridge, b)
        _warn_of_residual(residual)
        return solution
    if k is None:
        k = jnp.asarray(kernel(x, x))
    ridge = eta * jnp.mean(jnp.diagonal(k))
    lower = jnp.linalg.cholesky(k + ridge * jnp.eye(m, dtype=x.dtype), symmetrize_input=False)
    return cho_solve((lower, True), b)


def _warn_of_residual(residual: Array) -> None:
    def warn(found: Any) -> None:
        warnings.warn(
            f"the linear system of the kernel matrix was solved to a relative residual of"
            f" {float(found):.1e} only; give a larger eta, or fewer particles.",
            InferenceWarning,
            stacklevel=2,
        )

    lax.cond(residual <= _RESIDUAL, lambda _: None, partial(jax.debug.callback, warn), residual)
