"""Coordinates in which a set of particles has the identity as its (shrunk) covariance."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_ext._typing import Float
from numpyro_ext.scores._points import matmul

__all__ = ["UnitSpread"]


class UnitSpread(NamedTuple):
    r"""The map :math:`y = (x - \bar x) L^{-\top}`, for points, gradients and velocities.

    :math:`L L^\top = (1 - \lambda)\, C + \lambda\, \mathrm{diag}\, C` with the covariance C of the
    m particles (divided by m) and :math:`\lambda = d / (d + m)`: the correlations are shrunk, the
    variances are not. A coordinate in which all particles agree keeps its own unit. L is the lower
    Cholesky factor for d <= m; beyond, a root in O(m^2 d), which differs from it by a rotation.
    """

    mean: Float[Array, " d"]
    scale: Float[Array, " d"]
    """Standard deviations; L is ``scale[:, None] * root`` with a root of the correlations."""
    times_root: Callable[[Array], Array]
    """``u @ root``, for rows u."""
    times_root_transposed: Callable[[Array], Array]
    """``u @ root.T``."""
    solve_root: Callable[[Array], Array]
    """``u @ inv(root).T``."""

    @classmethod
    def of(cls, x: Float[Array, "m d"]) -> "UnitSpread":
        """The map that the particles themselves define."""
        m, d = x.shape
        mean, sd = jnp.mean(x, axis=0), jnp.std(x, axis=0)
        scale = jnp.where(sd > 0, sd, 1.0)
        # Correlations first: their root keeps its digits whatever the units are.
        u = (x - mean) / scale
        if d > m:
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
        """The particles in the new coordinates."""
        return self.solve_root((x - self.mean) / self.scale)

    def gradients(self, g: Array) -> Float[Array, "m d"]:
        """Gradients with respect to the new coordinates."""
        return self.times_root(g * self.scale)

    def velocities(self, v: Array) -> Float[Array, "m d"]:
        """Velocities of the new coordinates as velocities of the old ones."""
        return self.times_root_transposed(v) * self.scale

    def speed(self, v: Array) -> Float[Array, " m"]:
        """Root mean square over the coordinates of each velocity, in units of the spread."""
        return jnp.sqrt(jnp.mean(self.solve_root(v / self.scale) ** 2, axis=1))


def _low_rank_root(
    u: Float[Array, "m d"],
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    r"""The symmetric root of :math:`\lambda I + u^\top u / (m + d)`, and its inverse, on rows.

    With the eigenvalues e of :math:`u u^\top / (m + d)`, :math:`a = \sqrt\lambda` and
    :math:`b = \sqrt{\lambda + e}`, the root is :math:`a I + u^\top f(u u^\top) u` with
    :math:`f = (b - a) / e = 1 / (a + b)`, and its inverse has :math:`-1 / (a b (a + b))`.
    """
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
