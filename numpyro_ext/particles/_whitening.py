"""Coordinates in which a set of particles has the identity as its (shrunk) covariance."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_ext._typing import Bool, Float
from numpyro_ext.scores._points import matmul

_APART = 100.0  # times the root of the dimension, in units of a group's spread


class CovarianceWhitening(NamedTuple):
    r"""The map :math:`y = (x - \bar x) L^{-\top}` with the L of :class:`ParticleField`, for d > m
    by a root in O(m^2 d); a coordinate in which all particles agree keeps its own unit."""

    mean: Float[Array, " d"]
    scale: Float[Array, " d"]  # L is scale[:, None] * root with a root of the correlations
    times_root: Callable[[Array], Array]  # u @ root, for rows u
    times_root_transposed: Callable[[Array], Array]  # u @ root.T
    solve_root: Callable[[Array], Array]  # u @ inv(root).T

    @classmethod
    def from_particles(cls, x: Float[Array, "m d"], where: Any = None) -> "CovarianceWhitening":
        """The map that the particles define, or more than d of them: ``where``, ``(m,)``."""
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
            scale = jnp.where(sd > 0, scale, ((d + m) / d) ** 0.5)
            times, solve = _low_rank_root(u)
            return cls(mean, scale, times, times, solve)
        shrunk = jnp.fill_diagonal(matmul(u.T, u) / (m + d), 1.0, inplace=False)
        root = jnp.linalg.cholesky(shrunk)
        return cls(
            mean,
            scale,
            lambda u: matmul(u, root),
            lambda u: matmul(u, root.T),
            lambda u: solve_triangular(root, u.T, lower=True).T,
        )

    def points(self, x: Array) -> Float[Array, "m d"]:
        return self.solve_root((x - self.mean) / self.scale)

    def gradients(self, g: Array) -> Float[Array, "m d"]:
        return self.times_root(g * self.scale)

    def velocities(self, v: Array) -> Float[Array, "m d"]:
        return self.times_root_transposed(v) * self.scale

    def speed(self, v: Array) -> Float[Array, " m"]:
        """Root mean square over the coordinates of each velocity, in units of the spread."""
        return jnp.sqrt(jnp.mean(self.solve_root(v / self.scale) ** 2, axis=1))


class PerModeWhitening(NamedTuple):
    """The map of each particle that its own group defines, so that groups do not see each other;
    one of at most d particles, which has no covariance, rests."""

    groups: Bool[Array, "m K"]  # true where a particle belongs to a group
    units: tuple[CovarianceWhitening, ...]

    @classmethod
    def from_particles(
        cls, x: Float[Array, "m d"], groups: Float[Array, "m K"]
    ) -> "PerModeWhitening":
        """The maps that the particles of each group define, which is where a row is largest."""
        groups = jnp.argmax(groups, axis=1)[:, None] == jnp.arange(groups.shape[1])
        # For few particles the map of all stands in, which keeps unused numbers finite.
        few = jnp.sum(groups, axis=0) <= x.shape[1]
        return cls(
            groups,
            tuple(CovarianceWhitening.from_particles(x, g) for g in jnp.where(few, True, groups).T),
        )

    def points(self, x: Array) -> Float[Array, "m d"]:
        return self._each(lambda units: units.points(x))

    def gradients(self, g: Array) -> Float[Array, "m d"]:
        return self._each(lambda units: units.gradients(g))

    def velocities(self, v: Array) -> Float[Array, "m d"]:
        # At most 1 in units of the group, because a step is in units of the spread of all.
        speed = jnp.sqrt(jnp.mean(v**2, axis=1, keepdims=True))
        few = jnp.sum(self.groups, axis=0) <= v.shape[1]
        rests = jnp.any(self.groups & few, axis=1, keepdims=True)
        v = jnp.where(rests, 0, v / jnp.maximum(1.0, speed))
        return self._each(lambda units: units.velocities(v))

    def apart(self, y: Array) -> Float[Array, "m d"]:
        """The particles in the new coordinates, with the groups apart."""
        place = jnp.argmax(self.groups, axis=1).astype(y.dtype)
        return y.at[:, 0].add(_APART * y.shape[1] ** 0.5 * place)

    def _each(self, fn: Callable[[CovarianceWhitening], Array]) -> Array:
        parts = [fn(units) for units in self.units]
        return jnp.select([here[:, None] for here in self.groups.T], parts)


def _low_rank_root(
    u: Float[Array, "m d"],
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    r"""The symmetric root of :math:`\lambda I + u^\top u / (m + d)`, and its inverse, on rows."""
    # a I + u^T f(u u^T) u, with f = (b - a) / e = 1 / (a + b) of the eigenvalues e, and for the
    # inverse -1 / (a b (a + b)), where a^2 = lambda and b^2 = lambda + e.
    m, d = u.shape
    u = u / (m + d) ** 0.5
    e, vectors = jnp.linalg.eigh(matmul(u, u.T))
    a = (d / (m + d)) ** 0.5
    b = jnp.sqrt(a**2 + jnp.maximum(e, 0.0))
    more = matmul(vectors / (a + b), vectors.T)
    less = matmul(vectors / (a * b * (a + b)), vectors.T)
    return (
        lambda rows: a * rows + matmul(matmul(matmul(rows, u.T), more), u),
        lambda rows: rows / a - matmul(matmul(matmul(rows, u.T), less), u),
    )
