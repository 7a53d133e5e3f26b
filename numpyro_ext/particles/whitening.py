"""Coordinates in which a set of particles has the identity as its (shrunk) covariance."""

from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_ext._typing import Float
from numpyro_ext.particles.pairs import matmul

__all__ = ["Whitening"]


class Whitening(NamedTuple):
    r"""The map :math:`y = (x - \bar x) L^{-\top}` and what it does to gradients and velocities.

    :math:`L L^\top = (1 - \lambda)\, C + \lambda\, \mathrm{diag}\, C` with the covariance C of the
    m particles (divided by m) and :math:`\lambda = d / (d + m)`: the correlations are shrunk, the
    variances are not. A coordinate in which all particles agree keeps its own unit.
    """

    mean: Float[Array, " d"]
    scale: Float[Array, " d"]
    root: Float[Array, "d d"]
    """Lower factor of the shrunk correlations: L is ``scale[:, None] * root``."""

    @classmethod
    def of(cls, x: Float[Array, "m d"]) -> "Whitening":
        """The map that the particles themselves define."""
        m, d = x.shape
        mean = jnp.mean(x, axis=0)
        sd = jnp.std(x, axis=0)
        scale = jnp.where(sd > 0, sd, 1.0)
        # Correlations first: their Cholesky factor keeps its digits whatever the units are.
        u = (x - mean) / scale
        shrunk = (m / (m + d)) * matmul(u.T, u) / m
        root = jnp.linalg.cholesky(jnp.fill_diagonal(shrunk, 1.0, inplace=False))
        return cls(mean, scale, root)

    def points(self, x: Array) -> Float[Array, "m d"]:
        """The particles in the new coordinates."""
        return self._solve((x - self.mean) / self.scale)

    def gradients(self, g: Array) -> Float[Array, "m d"]:
        """Gradients with respect to the new coordinates."""
        return matmul(g * self.scale, self.root)

    def velocities(self, v: Array) -> Float[Array, "m d"]:
        """Velocities of the new coordinates as velocities of the old ones."""
        return matmul(v, self.root.T) * self.scale

    def speed(self, v: Array) -> Float[Array, " m"]:
        """Root mean square over the coordinates of each velocity, in units of the spread."""
        return jnp.sqrt(jnp.mean(self._solve(v / self.scale) ** 2, axis=1))

    def _solve(self, u: Array) -> Array:
        return solve_triangular(self.root, u.T, lower=True).T
