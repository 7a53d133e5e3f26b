"""Linear systems of a kernel matrix that is too large for the memory, and Stein estimates by them.

Reference: Frangella, Tropp and Udell, *Randomized Nystrom preconditioning* (SIAM J. Matrix Anal.
Appl. 2023), equation 1.3, here with evenly spaced samples for the sketch.
"""

from collections.abc import Callable

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.sparse.linalg import cg

from numpyro_ext._typing import Float
from numpyro_ext.scores._points import by_rows, matmul, squared_distances, strided
from numpyro_ext.scores.kernels import RadialKernel

ROWS_AT_A_TIME, RANK = 512, 256
TOLERANCE, MAX_ITERATIONS = 1e-6, 200


def stein_score_by_cg(
    kernel: RadialKernel, x: Array, ridge: Array
) -> tuple[Float[Array, "k d"], Float[Array, ""]]:
    """:math:`-(K + ridge I)^{-1} B` by conjugate gradients, and its relative residual."""
    x = x - jnp.mean(x, axis=0)
    b = _by_rows(lambda rows: kernel.repulsion(rows, x), x)

    def product(v: Array) -> Array:
        k_v = _by_rows(lambda rows: matmul(kernel.phi(squared_distances(rows, x)), v), x)
        return k_v + ridge * v

    precondition = _nystrom(kernel, *lax.stop_gradient((x, ridge)))

    def solve(b: Array) -> Array:
        return cg(product, b, tol=TOLERANCE, maxiter=MAX_ITERATIONS, M=precondition)[0]

    g = jax.vmap(solve, 1, 1)(b)  # side by side, until all columns have converged
    residual = jnp.linalg.norm(lax.stop_gradient(product(g) - b))
    return -g, residual / jnp.maximum(jnp.linalg.norm(b), jnp.finfo(b.dtype).tiny)


def _by_rows(fn: Callable[[Array], Array], x: Array) -> Array:
    # The checkpoint keeps the memory at a few rows under ``grad`` too.
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
        return v + matmul(q, (weights - 1.0) * matmul(q.T, v))

    return precondition
