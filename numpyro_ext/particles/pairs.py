"""Sums over pairs of particles, and linear systems with their kernel matrix."""

from functools import partial
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

from numpyro_ext._typing import Float
from numpyro_ext.scores import RadialKernel

__all__ = ["DIRECT_UP_TO", "kernel_sums", "matmul", "ridge_solve", "weighted_differences"]

# Accelerators would otherwise round the factors to fewer bits.
matmul = partial(jnp.matmul, precision="highest")

DIRECT_UP_TO = 4096
"""Up to this many particles a kernel matrix is factorised in one piece."""
_PANELS = 10


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
    r""":math:`(K + \eta\, k(0) I)^{-1} b` by Cholesky, with K in pieces for many particles.

    The diagonal also gets m times the machine epsilon, because rounding may make K indefinite.

    :param k: the matrix, if it is at hand.
    """
    m = x.shape[0]
    eta = jnp.asarray(eta, x.dtype) + m * jnp.finfo(x.dtype).eps
    if m > DIRECT_UP_TO:
        return _solve_by_panels(kernel, x, eta, b)
    if k is None:
        k = jnp.asarray(kernel(x, x))
    ridge = eta * jnp.mean(jnp.diagonal(k))
    lower = jnp.linalg.cholesky(k + ridge * jnp.eye(m, dtype=x.dtype), symmetrize_input=False)
    return cho_solve((lower, True), b)


def _solve_by_panels(kernel: Any, x: Array, eta: Array, b: Array) -> Array:
    """Left-looking Cholesky: only the lower triangle is ever in memory, m^2 / 2 numbers."""
    m = x.shape[0]
    size = -(-m // _PANELS)
    starts = range(0, m, size)
    ridge = eta * jnp.mean(jnp.diagonal(kernel(x[:1], x[:1])))
    panels: list[Array] = []
    for start in starts:
        own = slice(start, min(start + size, m))
        rest = kernel(x[start:], x[own])
        width = rest.shape[1]
        rest = rest.at[:width].add(ridge * jnp.eye(width, dtype=x.dtype))
        for other, before in zip(starts, panels, strict=False):
            before = before[start - other :]
            rest = rest - matmul(before, before[:width].T)
        lower = jnp.linalg.cholesky(rest[:width], symmetrize_input=False)
        below = solve_triangular(lower, rest[width:].T, lower=True).T
        panels.append(jnp.concatenate([lower, below]))
    pieces = [b[start : start + size] for start in starts]
    for i, panel in enumerate(panels):  # forward
        width = panel.shape[1]
        pieces[i] = solve_triangular(panel[:width], pieces[i], lower=True)
        for j in range(i + 1, len(panels)):
            at = starts[j] - starts[i]
            pieces[j] = pieces[j] - matmul(panel[at : at + len(pieces[j])], pieces[i])
    for i in reversed(range(len(panels))):  # backward
        panel = panels[i]
        width = panel.shape[1]
        for j in range(i + 1, len(panels)):
            at = starts[j] - starts[i]
            pieces[i] = pieces[i] - matmul(panel[at : at + len(pieces[j])].T, pieces[j])
        pieces[i] = solve_triangular(panel[:width], pieces[i], lower=True, trans=1)
    return jnp.concatenate(pieces)
