"""Coordinates in which a set of particles has the identity as its (shrunk) covariance."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_ext._model.normal import Normal, Plain, correlation_root, mean_and_sd
from numpyro_ext._typing import Bool, Float
from numpyro_ext.scores._points import matmul

_APART = 100.0  # times the root of the dimension, in units of a group's spread


class _Scaled(NamedTuple):
    """The factor ``diag(scale) R`` with a root R of the correlations."""

    scale: Float[Array, " d"]
    root: Any

    def astype(self, dtype: Any) -> "_Scaled":
        return jax.tree.map(lambda x: x.astype(dtype), self)

    def push(self, xi: Array) -> Array:
        return self.scale * self.root.push(xi)

    def pull(self, grad: Array) -> Array:
        return self.root.pull(self.scale * grad)

    def solve(self, moved: Array) -> Array:
        return self.root.solve(moved / self.scale)


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
        return cls(W, jnp.linalg.cholesky(jnp.eye(m, dtype=u.dtype) + matmul(W, W.T)))

    @property
    def a(self) -> float:
        m, d = self.W.shape
        return (d / (m + d)) ** 0.5

    def pull(self, u: Array) -> Array:
        return self.a * (u + matmul(self._divided(matmul(u, self.W.T), trans=1), self.W))

    def push(self, u: Array) -> Array:
        return self.a * (u + matmul(self._divided(matmul(u, self.W.T), trans=0), self.W))

    def solve(self, u: Array) -> Array:
        v = solve_triangular(self.R, matmul(self.W, u.T), lower=True).T
        return (u - matmul(self._divided(v, trans=1), self.W)) / self.a

    def _divided(self, v: Array, trans: int) -> Array:
        """``v @ inv(I + R)``, or with ``trans=0`` ``v @ inv(I + R).T``."""
        R = jnp.eye(len(self.R), dtype=v.dtype) + self.R
        return solve_triangular(R, v.T, lower=True, trans=trans).T


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CovarianceWhitening(Normal):
    r"""The map :math:`y = (x - \bar x) L^{-\top}` of ``(m, d)`` particles with the L of
    :class:`ParticleField`, for d > m by a root in O(m^2 d); a coordinate in which all particles
    agree keeps its own unit."""

    @classmethod
    def from_particles(cls, x: Float[Array, "m d"], where: Any = None) -> "CovarianceWhitening":
        """The map that the particles define, or some of them: ``where``, ``(m,)``."""
        (m, d), (mean, sd) = x.shape, mean_and_sd(x, where)
        scale = jnp.where(sd > 0, sd, 1.0)
        # Correlations first: their root keeps its digits whatever the units are.
        u = (x - mean) / scale
        if where is not None:
            u, m = jnp.where(where[:, None], u, 0), jnp.sum(where)
        elif d > m:
            # A coordinate without spread has the shrunk variance lambda instead of 1.
            scale = jnp.where(sd > 0, scale, ((d + m) / d) ** 0.5)
            return cls(mean, _Scaled(scale, _LowRank.of(u)))
        return cls(mean, _Scaled(scale, Plain(correlation_root(u, m))))

    def at_most(self, widest: Array) -> "CovarianceWhitening":
        """The map in which no coordinate is wider than this."""
        scale = jnp.minimum(self.factor.scale, widest)
        return replace(self, factor=self.factor._replace(scale=scale))

    def points(self, x: Array) -> Float[Array, "m d"]:
        return jax.vmap(self.to_xi)(x)

    def gradients(self, g: Array) -> Float[Array, "m d"]:
        return jax.vmap(self.pull)(g)

    def velocities(self, v: Array) -> Float[Array, "m d"]:
        return jax.vmap(self.push)(v)

    def speed(self, v: Array) -> Float[Array, " m"]:
        """Root mean square over the coordinates of each velocity, in units of the spread."""
        return jnp.sqrt(jnp.mean(jax.vmap(self.factor.solve)(v) ** 2, axis=1))


class PerModeWhitening(NamedTuple):
    """The map of each particle that its own group defines, so that groups do not see each other;
    one of a group with fewer than ``least`` particles has no covariance, and rests."""

    groups: Bool[Array, "m K"]  # true where a particle belongs to a group
    rests: Bool[Array, "m 1"]
    shares: Float[Array, " K"]  # of all particles, 0 for a group that rests
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
        shares = jnp.where(few, 0, jnp.mean(groups, axis=0))
        return cls(defining, jnp.any(defining & few, axis=1, keepdims=True), shares, units)

    def at_most(self, scale: Array) -> "PerModeWhitening":
        """The maps in which no coordinate is wider than this."""
        return self._replace(units=tuple(units.at_most(scale) for units in self.units))

    def points(self, x: Array) -> Float[Array, "m d"]:
        return self._each(lambda units: units.points(x))

    def gradients(self, g: Array) -> Float[Array, "m d"]:
        return self._each(lambda units: units.gradients(g))

    def own_parts(self, x: Array) -> Float[Array, "m d"]:
        r"""The gradients of :math:`\log r_k(x)`, where k is the group of each particle and

        .. math:: r_k = w_k N(x; \bar x_k, C) / \sum_j w_j N(x; \bar x_j, C)

        with the shares w, and the mean C of the covariances of the groups: with one of its own, a
        group that has begun to fill another mode would claim more and more of it. The parts
        :math:`p\, r_k` of the posterior sum up to it, so that each group can keep its share."""
        means = jnp.stack([units.center for units in self.units])
        group = jnp.argmax(self.groups, axis=1)
        within = CovarianceWhitening.from_particles(x - means[group], ~self.rests[:, 0])

        def log_part(x: Array, k: Array) -> Array:
            away = jax.vmap(within.factor.solve)(x - means)
            logs = jnp.log(self.shares) - jnp.sum(away**2, axis=1) / 2
            return logs[k] - jax.nn.logsumexp(logs)

        return jnp.where(self.rests, 0, jax.vmap(jax.grad(log_part))(x, group))

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
