"""Sums over pairs of particles."""

from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_ext._typing import Float
from numpyro_ext.scores import RadialKernel
from numpyro_ext.scores._points import matmul

__all__ = ["stein_sums", "weighted_differences"]


def stein_sums(
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


def weighted_differences(
    w: Float[Array, "n m"], rows: Float[Array, "n d"], x: Float[Array, "m d"]
) -> Float[Array, "n d"]:
    """``sum_j w_ij (rows_i - x_j)`` without an (n, m, d) array."""
    # Two products whose difference keeps its digits only if the points are near the origin.
    centre = jnp.mean(x, axis=0)
    return jnp.sum(w, axis=1, keepdims=True) * (rows - centre) - matmul(w, x - centre)
