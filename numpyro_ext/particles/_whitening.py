"""Coordinates in which a set of particles has the identity as its (shrunk) covariance."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_ext._typing import Bool, Float
from numpyro_ext.scores._points import matmul

_APART = 100.0  # times the root of the dimension, in units of a group's spread


class _Identity(NamedTuple):
    def times(self, u: Array) -> Array:
        return u

    times_transposed = solve = times


class _Triangular(NamedTuple):
    root: Float[Array, "d d"]

    def times(self, u: Array) -> Array:
        return matmul(u, self.root)

    def times_transposed(self, u: Array) -> Array:
        return matmul(u, self.root.T)

    def solve(self, u: Array) -> Array:
        return solve_triangular(self.root, u.T, lower=True).T


class _LowRank(NamedTuple):
    r"""A root of :math:`\lambda (I + W^\top W)`, where :math:`\lambda = d / (m + d)`."""

    # Of I + W^T W it is I + W^T (I + R)^-1 W with the lower triangular R of R R^T = I + W W^T, and
    # the transpose of its inverse is I - W^T R^-T (I + R)^-1 W, as in Andrews' square-root filter.
    W: Float[Array, "m d"]
    R: Float[Array, "m m"]

    @classmethod
    def of(cls, u: Float[Array, "m d"]) -> "_LowRank":
        m, d = u.shape
        W = u / d**0.5  # so that lambda W^T W is u^T u / (m + d)
        one = jnp.eye(m, dtype=u.dtype)
        return cls(W, jnp.linalg.cholesky(one + matmul(W, W.T)))

    @property
    def a(self) -> float:
        m, d = self.W.shape
        return (d / (m + d)) ** 0.5

    def times(self, u: Array) -> Array:
        return self.a * (u + matmul(self._divided(matmul(u, self.W.T), trans=1), self.W))

    def times_transposed(self, u: Array) -> Array:
        return self.a * (u + matmul(self._divided(matmul(u, self.W.T), trans=0), self.W))

    def solve(self, u: Array) -> Array:
        v = solve_triangular(self.R, matmul(self.W, u.T), lower=True).T
        return (u - matmul(self._divided(v, trans=1), self.W)) / self.a

    def _divided(self, v: Array, trans: int) -> Array:
        """``v @ inv(I + R)``, or with ``trans=0`` ``v @ inv(I + R).T``."""
        one = jnp.eye(len(self.R), dtype=v.dtype)
        return solve_triangular(one + self.R, v.T, lower=True, trans=trans).T


class CovarianceWhitening(NamedTuple):
    r"""The map :math:`y = (x - \bar x) L^{-\top}` with the L of :class:`ParticleField`, for d > m
    by a root in O(m^2 d); a coordinate in which all particles agree keeps its own unit."""

    mean: Float[Array, " d"]
    scale: Float[Array, " d"]  # L is scale[:, None] * root with a root of the correlations
    root: _Identity | _Triangular | _LowRank

    @classmethod
    def from_particles(cls, x: Float[Array, "m d"], where: Any = None) -> "CovarianceWhitening":
        """The map that the particles define, or some of them: ``where``, ``(m,)``."""
        m, d = x.shape
        here = True if where is None else where[:, None]
        # From one of them, because the mean of equal numbers is not quite this number.
        first = x[0 if where is None else jnp.argmax(where)]
        mean, sd = jnp.mean(x - first, axis=0, where=here), jnp.std(x - first, axis=0, where=here)
        mean, scale = first + mean, jnp.where(sd > 0, sd, 1.0)
        # Correlations first: their root keeps its digits whatever the units are.
        u = (x - mean) / scale
        if where is not None:
            u, m = jnp.where(here, u, 0), jnp.sum(where)
        elif d > m:
            # A coordinate without spread has the shrunk variance lambda instead of 1.
            return cls(mean, jnp.where(sd > 0, scale, ((d + m) / d) ** 0.5), _LowRank.of(u))
        shrunk = jnp.fill_diagonal(matmul(u.T, u) / (m + d), 1.0, inplace=False)
        return cls(mean, scale, _Triangular(jnp.linalg.cholesky(shrunk)))

    @classmethod
    def from_normal(cls, center: Array, factor: Array) -> "CovarianceWhitening":
        """The map of a normal of the given mean and triangular root, or its diagonal ``(d,)``."""
        if factor.ndim == 1:
            return cls(center, factor, _Identity())
        return cls(center, jnp.ones_like(center), _Triangular(factor))

    def at_most(self, scale: Array) -> "CovarianceWhitening":
        """The map in which no coordinate is wider than this."""
        return self._replace(scale=jnp.minimum(self.scale, scale))

    def points(self, x: Array) -> Float[Array, "m d"]:
        return self.root.solve((x - self.mean) / self.scale)

    def gradients(self, g: Array) -> Float[Array, "m d"]:
        return self.root.times(g * self.scale)

    def velocities(self, v: Array) -> Float[Array, "m d"]:
        return self.root.times_transposed(v) * self.scale

    def speed(self, v: Array) -> Float[Array, " m"]:
        """Root mean square over the coordinates of each velocity, in units of the spread."""
        return jnp.sqrt(jnp.mean(self.root.solve(v / self.scale) ** 2, axis=1))


class PerModeWhitening(NamedTuple):
    """The map of each particle that its own group defines, so that groups do not see each other;
    one of a group with fewer than ``least`` particles has no covariance, and rests."""

    groups: Bool[Array, "m K"]  # true where a particle belongs to a group
    rests: Bool[Array, "m 1"]
    units: tuple[CovarianceWhitening, ...]

    @classmethod
    def from_particles(
        cls,
        x: Float[Array, "n d"],
        groups: Float[Array, "n K"],
        movers: Float[Array, "m K"] | None = None,
        *,
        least: int,
    ) -> "PerModeWhitening":
        """The maps that the particles of each group define, for the ``movers`` of these groups, the
        particles themselves by default; a row is largest at its group."""
        K = groups.shape[1]
        defining = jnp.argmax(groups, axis=1)[:, None] == jnp.arange(K)
        # For few particles the map of all stands in, which keeps unused numbers finite.
        few = jnp.sum(defining, axis=0) < least
        units = tuple(
            CovarianceWhitening.from_particles(x, group)
            for group in jnp.where(few, True, defining).T
        )
        if movers is not None:
            defining = jnp.argmax(movers, axis=1)[:, None] == jnp.arange(K)
        return cls(defining, jnp.any(defining & few, axis=1, keepdims=True), units)

    def at_most(self, scale: Array) -> "PerModeWhitening":
        """The maps in which no coordinate is wider than this."""
        return self._replace(units=tuple(units.at_most(scale) for units in self.units))

    def points(self, x: Array) -> Float[Array, "m d"]:
        return self._each(lambda units: units.points(x))

    def gradients(self, g: Array) -> Float[Array, "m d"]:
        return self._each(lambda units: units.gradients(g))

    def velocities(self, v: Array) -> Float[Array, "m d"]:
        return self._each(lambda units: units.velocities(jnp.where(self.rests, 0, v)))

    def slowed(self, v: Array) -> Float[Array, "m d"]:
        """At most 1 in units of the group, because a step is in units of the spread of all."""
        return v / jnp.maximum(1.0, jnp.sqrt(jnp.mean(v**2, axis=1, keepdims=True)))

    def apart(self, y: Array) -> Float[Array, "m d"]:
        """The particles in the new coordinates, with the groups apart."""
        place = jnp.argmax(self.groups, axis=1).astype(y.dtype)
        return y.at[:, 0].add(_APART * y.shape[1] ** 0.5 * place)

    def _each(self, fn: Callable[[CovarianceWhitening], Array]) -> Array:
        parts = [fn(units) for units in self.units]
        return jnp.select([here[:, None] for here in self.groups.T], parts)
