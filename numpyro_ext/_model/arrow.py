"""A factor of a covariance with the structure of a hierarchy: a core, and leaves given the core."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np
import scipy.linalg


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["core", "leaves", "root", "slope", "block"],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class Arrow:
    r"""
    The factor A of :math:`z = c + A \xi` in which the effects of one plate, the leaves, are
    independent of each other given all other coordinates, the core,

    .. math::
        z_c = c_c + R \xi_c, \qquad z_j = c_j + W_j \xi_c + B_j \xi_j ,

    which is any normal whose precision is an arrow: with k coordinates in the core and L leaves of
    w each it takes :math:`k^2 + L w (k + w)` numbers, and as many products, in place of
    :math:`(k + L w)^2`.

    :param core: ``(k,)``, the places of the core in the flat order.
    :param leaves: ``(L, w)``, the places of the leaves.
    :param root: R, ``(k, k)``, lower triangular.
    :param slope: W, ``(L, w, k)``.
    :param block: B, ``(L, w, w)``, lower triangular.
    """

    core: Array
    leaves: Array
    root: Array
    slope: Array
    block: Array

    @property
    def size(self) -> int:
        """The number of coordinates, n."""
        return self.core.size + self.leaves.size

    def astype(self, dtype: Any) -> "Arrow":
        """The same in another precision."""
        parts = (jnp.asarray(x, dtype) for x in (self.root, self.slope, self.block))
        return Arrow(self.core, self.leaves, *parts)

    def times(self, scale: float) -> "Arrow":
        """The factor times a number."""
        parts = (scale * x for x in (self.root, self.slope, self.block))
        return Arrow(self.core, self.leaves, *parts)

    def push(self, xi: Array) -> Array:
        r""":math:`A \xi`."""
        of_core = xi[self.core]
        inner = jnp.einsum("lij,lj->li", self.block, xi[self.leaves])
        return self._flat(self.root @ of_core, self.slope @ of_core + inner)

    def pull(self, grad: Array) -> Array:
        r""":math:`A^\top g`."""
        g = grad[self.leaves]
        of_core = self.root.T @ grad[self.core] + jnp.einsum("lik,li->k", self.slope, g)
        return self._flat(of_core, jnp.einsum("lij,li->lj", self.block, g))

    def solve(self, moved: Array) -> Array:
        r""":math:`A^{-1} x`."""
        of_core = moved[self.core]
        if of_core.size:
            of_core = solve_triangular(self.root, of_core, lower=True)
        rest = moved[self.leaves] - self.slope @ of_core
        of_leaves = solve_triangular(self.block, rest[..., None], lower=True)[..., 0]
        return self._flat(of_core, of_leaves)

    def log_diagonal(self) -> Array:
        """The logarithms of the diagonal of the factor, ``(n,)``, of which the sum is log det."""
        diagonal = jnp.diagonal(self.block, axis1=1, axis2=2)
        return jnp.log(self._flat(jnp.diagonal(self.root), diagonal))

    def sds(self) -> Array:
        """The standard deviation of each coordinate, ``(n,)``."""
        of_leaves = jnp.sum(self.slope**2, -1) + jnp.sum(self.block**2, -1)
        return jnp.sqrt(self._flat(jnp.sum(self.root**2, -1), of_leaves))

    def conditional_sds(self) -> Array:
        """The standard deviation of each coordinate given all others, ``(n,)``."""
        k, w = self.core.size, self.leaves.shape[1]
        inverse = jnp.eye(k, dtype=self.root.dtype)
        if k:
            inverse = solve_triangular(self.root, inverse, lower=True)
        unit = jnp.broadcast_to(jnp.eye(w, dtype=self.root.dtype), self.block.shape)
        of_blocks = solve_triangular(self.block, unit, lower=True)
        below = jnp.einsum("lij,ljk->lik", of_blocks, self.slope) @ inverse
        of_core = jnp.sum(inverse**2, 0) + jnp.sum(below**2, (0, 1))
        return 1 / jnp.sqrt(self._flat(of_core, jnp.sum(of_blocks**2, 1)))

    def dense(self) -> Array:
        """The factor as a matrix ``(n, n)``, which is not triangular in the flat order."""
        return jax.vmap(self.push)(jnp.eye(self.size, dtype=self.root.dtype)).T

    def _flat(self, of_core: Array, of_leaves: Array) -> Array:
        out = jnp.zeros(self.size, of_core.dtype).at[self.core].set(of_core)
        return out.at[self.leaves].set(of_leaves)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["core", "leaves", "between", "across", "within"],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class ArrowPrecision:
    """A curvature of this structure: ``between`` coordinates of the core ``(k, k)``, ``across``
    from leaves to the core ``(L, w, k)``, and ``within`` leaves ``(L, w, w)``."""

    core: Any
    leaves: Any
    between: Any
    across: Any
    within: Any

    @property
    def is_finite(self) -> bool:
        """Whether all of its numbers are finite."""
        parts = self.between, self.across, self.within
        return all(bool(np.all(np.isfinite(x))) for x in parts)

    def factor(self) -> tuple[Arrow, int]:
        """The factor of its inverse, found in double precision, and the number of negative
        directions, which are turned positive."""
        L, w = self.leaves.shape
        k = len(self.core)
        block, turned = self.leaf_roots()
        beyond = np.einsum("lji,ljk->lik", block, self.across)
        flat = beyond.reshape(L * w, k)
        root, negative = lower_root(self.between - flat.T @ flat)
        slope = -(block @ beyond).reshape(L * w, k) @ root
        parts = (jnp.asarray(x, float) for x in (root, slope.reshape(L, w, k), block))
        return Arrow(jnp.asarray(self.core), jnp.asarray(self.leaves), *parts), turned + negative

    def leaf_roots(self) -> tuple[np.ndarray, int]:
        """Lower roots ``(L, w, w)`` of the inverse of ``within``, and how many directions are
        negative."""
        of_leaves, turned = _positive_blocks(self.within)
        block = np.linalg.inv(np.linalg.cholesky(of_leaves[:, ::-1, ::-1]))
        return block.transpose(0, 2, 1)[:, ::-1, ::-1], turned

    def quadratic(self, v: Array) -> Array:
        """The form :math:`v^\\top H v` of a vector ``(n,)``."""
        of_core, of_leaves = v[self.core], v[self.leaves]
        product = partial(jnp.einsum, precision="highest")
        between = product("i,ij,j", of_core, self.between, of_core)
        across = product("li,lik,k", of_leaves, self.across, of_core)
        return between + 2 * across + product("li,lij,lj", of_leaves, self.within, of_leaves)

    def plus(self, other: "ArrowPrecision") -> "ArrowPrecision":
        """The sum of two curvatures of one layout."""
        between, across = self.between + other.between, self.across + other.across
        return replace(self, between=between, across=across, within=self.within + other.within)

    def towards(self, other: "ArrowPrecision", share: float) -> "ArrowPrecision":
        """The mean of two curvatures of one layout, with this share of the other."""
        parts = {
            name: (1 - share) * getattr(self, name) + share * getattr(other, name)
            for name in ("between", "across", "within")
        }
        return replace(self, **parts)

    def negative(self, dtype: Any) -> "ArrowPrecision":
        """Its negative, as arrays of this type."""
        parts = (jnp.asarray(-x, dtype) for x in (self.between, self.across, self.within))
        return ArrowPrecision(jnp.asarray(self.core), jnp.asarray(self.leaves), *parts)


def _positive_blocks(blocks: np.ndarray) -> tuple[np.ndarray, int]:
    w, Q = np.linalg.eigh(blocks)
    most = np.max(np.abs(w), axis=1, keepdims=True)
    turned = np.maximum(np.abs(w), 1e-6 * np.maximum(most, 1e-30))
    fine = np.all(w > 0, axis=1)
    fixed = np.einsum("lij,lj,lkj->lik", Q, turned, Q)
    return np.where(fine[:, None, None], blocks, fixed), int(np.sum(w < 0))


def lower_root(precision: np.ndarray) -> tuple[np.ndarray, int]:
    """The lower triangular root of the inverse of a symmetric matrix, and the number of its
    negative directions, which are turned positive."""
    if not len(precision):
        return precision, 0
    unit = 1 / np.sqrt(np.maximum(np.abs(np.diagonal(precision)), 1e-300))
    scaled, negative = unit[:, None] * (precision + precision.T) / 2 * unit, 0
    try:
        C = np.linalg.cholesky(scaled[::-1, ::-1])
    except np.linalg.LinAlgError:
        w, Q = np.linalg.eigh(scaled)
        negative = int(np.sum(w < 0))
        scaled = (Q * np.maximum(np.abs(w), 1e-5)) @ Q.T
        C = np.linalg.cholesky(scaled[::-1, ::-1])
    inverse = scipy.linalg.solve_triangular(C, np.eye(len(C)), lower=True)
    # With the order reversed twice, the inverse's upper root is a lower one.
    return unit[:, None] * inverse.T[::-1, ::-1], negative
