"""A factor of a covariance with the structure of a hierarchy: a core, and leaves given the core."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np
import scipy.linalg

_MOST_RUNS = 16
"""Runs of places up to which numbers are taken by slices."""
_LOOKED_UP, _USUAL = 4, 0.5
"""The cost of a number that is looked up, in numbers of a product; and the share of the leaves that
depend on a coordinate from which all may."""


def take(x: Array, places: Any) -> Array:
    """``x[..., places]``; by slices where that is possible, since the gradient through a table of
    places is summed number by number."""
    if isinstance(places, Tracer):
        return x[..., places]
    places = np.asarray(places)
    flat = places.ravel()
    ends = np.flatnonzero(np.diff(flat) != 1) + 1
    if not flat.size or len(ends) >= _MOST_RUNS:
        return x[..., places]
    runs = [x[..., run[0] : run[-1] + 1] for run in np.split(flat, ends)]
    taken = jnp.concatenate(runs, -1) if len(runs) > 1 else runs[0]
    return taken.reshape(*x.shape[:-1], *places.shape)


def in_order(parts: Sequence[Array], places: Sequence[Any]) -> Array:
    """The vectors ``(..., n)`` that have these parts at these places, which are all places."""
    x, flat = jnp.concatenate(parts, -1), [y.ravel() for y in places]
    if any(isinstance(y, Tracer) for y in flat):
        return jnp.zeros_like(x).at[..., jnp.concatenate(flat)].set(x)
    return take(x, np.argsort(np.concatenate(flat)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Arrow:
    r"""
    The factor A of :math:`z = c + A \xi` in which the effects of one plate, the leaves, are
    independent of each other given all other coordinates, the core,

    .. math::
        y = R \xi_c, \qquad z_c = c_c + y, \qquad z_j = c_j + W_j y + B_j \xi_j ,

    which is any normal whose precision is an arrow. A leaf depends on s coordinates of
    the core on which all leaves depend, and on q of its own: with k coordinates in the core and L
    leaves of w each it takes :math:`k^2 + L w (s + q + w)` numbers, and as many products, in place
    of :math:`(k + L w)^2`.

    :param core: ``(k,)``, the places of the core in the flat order.
    :param leaves: ``(L, w)``, the places of the leaves.
    :param common: ``(s,)``, the numbers in the core of what all leaves depend on.
    :param columns: ``(L, q)``, the numbers in the core of what else a leaf depends on.
    :param root: R, ``(k, k)``, lower triangular.
    :param slope: W, ``(L, w, s + q)``.
    :param block: B, ``(L, w, w)``, lower triangular.
    """

    core: Any
    leaves: Any
    common: Any
    columns: Any
    root: Array
    slope: Array
    block: Array

    @property
    def size(self) -> int:
        """The number of coordinates, n."""
        return self.core.size + self.leaves.size

    def astype(self, dtype: Any) -> "Arrow":
        """The same in another precision."""
        parts = {name: jnp.asarray(getattr(self, name), dtype) for name in _NUMBERS}
        return replace(self, **parts)

    def times(self, scale: float) -> "Arrow":
        """The factor times a number."""
        return replace(self, root=scale * self.root, block=scale * self.block)

    def push(self, xi: Array) -> Array:
        r""":math:`A \xi`."""
        y = self.root @ take(xi, self.core)
        inner = jnp.einsum("lij,lj->li", self.block, take(xi, self.leaves))
        return self._flat(y, self._along(y) + inner)

    def pull(self, grad: Array) -> Array:
        r""":math:`A^\top g`."""
        of_core, g = take(grad, self.core), take(grad, self.leaves)
        on_common, on_own = self._slopes
        of_core = of_core.at[self.common].add(jnp.einsum("lik,li->k", on_common, g))
        if self.columns.size:
            of_core = of_core.at[self.columns].add(jnp.einsum("lik,li->lk", on_own, g))
        return self._flat(self.root.T @ of_core, jnp.einsum("lij,li->lj", self.block, g))

    def solve(self, moved: Array) -> Array:
        r""":math:`A^{-1} x`."""
        y = of_core = take(moved, self.core)
        if y.size:
            of_core = solve_triangular(self.root, y, lower=True)
        rest = take(moved, self.leaves) - self._along(y)
        of_leaves = solve_triangular(self.block, rest[..., None], lower=True)[..., 0]
        return self._flat(of_core, of_leaves)

    def log_diagonal(self) -> Array:
        """The logarithms of the diagonal of the factor, ``(n,)``, of which the sum is log det."""
        diagonal = jnp.diagonal(self.block, axis1=1, axis2=2)
        return jnp.log(self._flat(jnp.diagonal(self.root), diagonal))

    def sds(self) -> Array:
        """The standard deviation of each coordinate, ``(n,)``."""
        covariance, (on_common, on_own) = self.root @ self.root.T, self._slopes
        of_common = covariance[self.common]
        of_leaves = jnp.sum(self.block**2, -1)
        of_leaves += jnp.sum((on_common @ of_common[:, self.common]) * on_common, -1)
        if self.columns.size:
            between = of_common[:, self.columns].transpose(1, 0, 2)
            within = covariance[self.columns[:, :, None], self.columns[:, None]]
            of_leaves += jnp.sum((on_own @ within + 2 * (on_common @ between)) * on_own, -1)
        return jnp.sqrt(self._flat(jnp.diagonal(covariance), of_leaves))

    def conditional_sds(self) -> Array:
        """The standard deviation of each coordinate given all others, ``(n,)``."""
        k, w, s = self.core.size, self.leaves.shape[1], self.common.size
        inverse = jnp.eye(k, dtype=self.root.dtype)
        if k:
            inverse = solve_triangular(self.root, inverse, lower=True)
        unit = jnp.broadcast_to(jnp.eye(w, dtype=self.root.dtype), self.block.shape)
        of_blocks = solve_triangular(self.block, unit, lower=True)
        below = jnp.sum((of_blocks @ self.slope) ** 2, 1)
        of_core = jnp.sum(inverse**2, 0).at[self.common].add(jnp.sum(below[:, :s], 0))
        of_core = of_core.at[self.columns].add(below[:, s:])
        return 1 / jnp.sqrt(self._flat(of_core, jnp.sum(of_blocks**2, 1)))

    def dense(self) -> Array:
        """The factor as a matrix ``(n, n)``, which is not triangular in the flat order."""
        return jax.vmap(self.push)(jnp.eye(self.size, dtype=self.root.dtype)).T

    def _along(self, y: Array) -> Array:
        """What the leaves ``(L, w)`` have of the core's distance ``(k,)`` from its center."""
        on_common, on_own = self._slopes
        moved = on_common @ take(y, self.common)
        if self.columns.size:
            moved += jnp.einsum("lik,lk->li", on_own, y[self.columns])
        return moved

    @property
    def _slopes(self) -> tuple[Array, Array]:
        s = self.common.size
        return self.slope[:, :, :s], self.slope[:, :, s:]

    def _flat(self, of_core: Array, of_leaves: Array) -> Array:
        return in_order((of_core, of_leaves.ravel()), (self.core, self.leaves))


_NUMBERS = "root", "slope", "block"


@jax.tree_util.register_dataclass
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
        common, columns, slope = _without_zeros(-(block @ beyond))
        places = (jnp.asarray(x) for x in (self.core, self.leaves, common, columns))
        parts = (jnp.asarray(x, float) for x in (root, slope, block))
        return Arrow(*places, *parts), turned + negative

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


def _without_zeros(slope: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``common``, ``columns`` and ``slope`` of an :class:`Arrow` of these slopes ``(L, w, k)``, of
    which most may be 0, as of a customer in all regions but its own."""
    L, _, k = slope.shape
    seen = np.any(slope != 0, axis=1)
    usual = np.mean(seen, axis=0) > _USUAL
    seen[:, usual] = False
    q = int(np.max(np.sum(seen, axis=1), initial=0))
    if np.sum(usual) + _LOOKED_UP * q >= k:
        return np.arange(k), np.zeros((L, 0), int), slope
    columns = np.argsort(~seen, axis=1, kind="stable")[:, :q]
    on_own = np.where(
        np.take_along_axis(seen, columns, axis=1)[:, None],
        np.take_along_axis(slope, columns[:, None], axis=2),
        0,
    )
    return np.flatnonzero(usual), columns, np.concatenate([slope[:, :, usual], on_own], axis=2)


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
