"""Linear systems of a kernel matrix that is too large for the memory, and Stein estimates by them.

Reference: Frangella, Tropp and Udell, *Randomized Nystrom preconditioning* (SIAM J. Matrix Anal.
Appl. 2023), equation 1.3, here with evenly spaced samples for the sketch.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_ext._typing import Float
from numpyro_ext.scores._points import by_rows, matmul, squared_distances, strided
from numpyro_ext.scores.kernels import Epanechnikov, RadialKernel

ROWS_AT_A_TIME, RANK = 512, 256
TOLERANCE, MAX_ITERATIONS = 1e-6, 200


def takes_conjugate_gradients(kernel: Any) -> bool:
    """A kernel is taken if it depends on the distance alone and is positive definite."""
    return isinstance(kernel, RadialKernel) and not isinstance(kernel, Epanechnikov)


def stein_score_by_cg(
    kernel: RadialKernel, x: Array, ridge: Array
) -> tuple[Float[Array, "k d"], Float[Array, ""]]:
    """:math:`-(K + ridge I)^{-1} B` by conjugate gradients, and its relative residual."""
    x = x - jnp.mean(x, axis=0)

    def push(rows: Array) -> Array:
        w = kernel.value_and_weight(rows, x)[1]
        return w.sum(1, keepdims=True) * rows - matmul(w, x)

    g, residual = solve_by_cg(kernel, x, ridge, _by_rows(push, x))
    return -g, residual


def solve_by_cg(
    kernel: RadialKernel, x: Array, ridge: Array, b: Array
) -> tuple[Float[Array, "k d"], Float[Array, ""]]:
    """:math:`(K + ridge I)^{-1} b` by conjugate gradients, and its relative residual."""
    x = x - jnp.mean(x, axis=0)

    def product(v: Array) -> Array:
        k_v = _by_rows(lambda rows: matmul(kernel.phi(squared_distances(rows, x)), v), x)
        return k_v + ridge * v

    precondition = _nystrom(kernel, *lax.stop_gradient((x, ridge)))

    def solve(matvec: Callable[[Array], Array], b: Array) -> Array:
        return _conjugate_gradients(matvec, b, precondition)

    # The derivative is another solve, and not one of every iteration.
    g = lax.custom_linear_solve(product, b, solve, symmetric=True)
    residual = jnp.linalg.norm(lax.stop_gradient(product(g) - b))
    return g, residual / jnp.maximum(jnp.linalg.norm(b), jnp.finfo(b.dtype).tiny)


def _by_rows(fn: Callable[[Array], Array], x: Array) -> Array:
    # The checkpoint keeps the memory that of a few rows under ``grad`` too.
    return by_rows(jax.checkpoint(fn), ROWS_AT_A_TIME, x)


def _nystrom(kernel: RadialKernel, x: Array, ridge: Array) -> Callable[[Array], Array]:
    r"""An approximate inverse of :math:`K + \rho I`, from the columns of ``RANK`` samples:

    .. math:: v - Q Q^\top v + (\lambda_r + \rho)\, Q (\Lambda + \rho)^{-1} Q^\top v.
    """
    z = strided(x, RANK)
    within = kernel.phi(squared_distances(z, z))
    jitter = len(z) * jnp.finfo(x.dtype).eps * jnp.mean(jnp.diagonal(within))
    root = jnp.linalg.cholesky(within + jitter * jnp.eye(len(z), dtype=x.dtype))
    across = kernel.phi(squared_distances(z, x))
    q, r = jnp.linalg.qr(solve_triangular(root, across, lower=True).T)
    values, vectors = jnp.linalg.eigh(matmul(r, r.T))
    q, values = matmul(q, vectors), jnp.maximum(values, 0.0)
    weights = (values[0] + ridge) / (values + ridge)

    def precondition(v: Array) -> Array:
        return v + matmul(q, (weights - 1.0)[:, None] * matmul(q.T, v))

    return precondition


def _conjugate_gradients(
    matvec: Callable[[Array], Array], b: Array, precondition: Callable[[Array], Array]
) -> Array:
    """Columns side by side, each with its own steps, until all have converged."""
    goal = TOLERANCE * jnp.linalg.norm(b, axis=0)

    def go_on(state: tuple[Any, ...]) -> Array:
        i, _, r, _, _ = state
        return (i < MAX_ITERATIONS) & jnp.any(jnp.linalg.norm(r, axis=0) > goal)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, g, r, p, rho = state
        moved = matvec(p)
        curvature = jnp.sum(p * moved, 0)
        # A column that is solved exactly has no direction left.
        alpha = jnp.where(curvature > 0, rho / jnp.where(curvature > 0, curvature, 1.0), 0.0)
        g, r = g + alpha * p, r - alpha * moved
        y = precondition(r)
        rho_new = jnp.sum(r * y, 0)
        p = y + jnp.where(rho > 0, rho_new / jnp.where(rho > 0, rho, 1.0), 0.0) * p
        return i + 1, g, r, p, rho_new

    y = precondition(b)
    state = (jnp.zeros((), int), jnp.zeros_like(b), b, y, jnp.sum(b * y, 0))
    return lax.while_loop(go_on, step, state)[1]
