"""Symmetric matrices through their Cholesky factors; a matrix that is not positive gives NaN."""

from jax import Array, lax
import jax.numpy as jnp


def matmul(A: Array, B: Array) -> Array:
    """A B, without the shorter factors that accelerators take by default."""
    return jnp.matmul(A, B, precision="highest")


def transpose(M: Array) -> Array:
    """M^T, of each matrix of a batch."""
    return jnp.swapaxes(M, -1, -2)


def symmetric(M: Array) -> Array:
    """(M + M^T) / 2, of each matrix of a batch."""
    return (M + transpose(M)) / 2


def cholesky(J: Array) -> Array:
    """The lower factor of a symmetric matrix, NaN throughout where it is not positive definite."""
    return lax.linalg.cholesky(J, symmetrize_input=False)


def solve_lower(L: Array, b: Array, *, transpose: bool = False) -> Array:
    """L^{-1} b, or L^{-T} b, for matrices ``b`` of the batch shape of L."""
    return lax.linalg.triangular_solve(L, b, left_side=True, lower=True, transpose_a=transpose)


def solve(L: Array, b: Array) -> Array:
    """J^{-1} b, for J = L L^T and vectors or matrices ``b`` of the batch shape of L."""
    if b.ndim == L.ndim - 1:
        return solve(L, b[..., None])[..., 0]
    return solve_lower(L, solve_lower(L, b), transpose=True)


def inverse(L: Array) -> Array:
    """J^{-1}, for J = L L^T."""
    root = inverse_root(L)
    return matmul(root, transpose(root))


def inverse_root(L: Array) -> Array:
    """L^{-T}, a root of the inverse of J = L L^T."""
    eye = jnp.broadcast_to(jnp.eye(L.shape[-1], dtype=L.dtype), L.shape)
    return transpose(solve_lower(L, eye))


def half_logdet(L: Array) -> Array:
    """log |J| / 2, for J = L L^T."""
    return jnp.sum(jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)


def matvec(M: Array, x: Array) -> Array:
    """M x, with broadcasting of the batch."""
    return matmul(M, x[..., None])[..., 0]


def outer(x: Array, y: Array) -> Array:
    """x y^T, with broadcasting of the batch."""
    return x[..., :, None] * y[..., None, :]


def positive(S: Array, size: Array) -> Array:
    """Return whether a difference ``S`` of two matrices is positive definite beyond rounding, where
    ``size`` is the ``(*batch, d)`` diagonal of the larger one."""
    pivots = jnp.square(jnp.diagonal(cholesky(S), axis1=-2, axis2=-1))
    noise = 4 * S.shape[-1] * jnp.finfo(S.dtype).eps * jnp.abs(size)
    return jnp.all(pivots > noise, axis=-1)
