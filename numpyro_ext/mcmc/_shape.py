"""How far a posterior is from its normal approximation, and how stiff it is where that has its
mass."""

from typing import NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.potential import Potential
from numpyro_ext.mcmc._mode import Mode, Surface
from numpyro_ext.mcmc.whitening import Whitening

__all__ = ["NORMAL_FIT", "NORMAL_MODE", "Shape", "measure_shape"]

NORMAL_MODE, NORMAL_FIT = 0.3, 0.1
"""Departures up to which a mode, and a variational fit in its place, are taken without a warning;
a fit has come as near as a normal can, so what it leaves is of another kind."""
_POINTS, _POWERS = 64, 10
_QUANTILE, _STIFFEST = 0.95, 1e4


class Shape(NamedTuple):
    r"""
    What was seen at points :math:`z = c + A \xi` of the normal approximation:

     - **departure** - median of :math:`|A^\top \nabla U(z) - \xi|^2 / n`: 0 for a normal posterior,
       1 where the approximation is off by as much as the gradients are large.
     - **stiffness** - the largest curvature, in whitened coordinates, in all but a twentieth of
       the points, and at least 1, which is that of a normal posterior.
    """

    departure: float
    stiffness: float


def measure_shape(rng_key: Array, potential: Potential, mode: Mode) -> Shape:
    """
    Gradients and curvatures at 64 points, on at most 10,000 rows.

    :param mode: center and factor of the approximation; the gradient of the rows is corrected by
        that of all rows at the center.
    """
    surface = Surface(potential)
    whitening = Whitening(mode.x, mode.factor)

    @jax.jit
    def measure(rng_key: Array) -> tuple[Array, Array]:
        idx = surface.some_rows()
        shift = surface.full(mode.x)[1] - surface.value_and_grad(mode.x, idx)[1]

        def grad(xi: Array) -> Array:
            return whitening.pull(surface.value_and_grad(whitening.to_z(xi), idx)[1] + shift)

        def at(points: Array) -> tuple[Array, Array]:
            xi, v = points
            g, slope = jax.linearize(grad, xi)

            def power(_: int, v: Array) -> Array:
                return slope(v / jnp.linalg.norm(v))

            return jnp.mean((g - xi) ** 2), jnp.linalg.norm(lax.fori_loop(0, _POWERS, power, v))

        points = random.normal(rng_key, (_POINTS, 2, *mode.x.shape), mode.x.dtype)
        return lax.map(at, points)

    found = (np.asarray(x, float) for x in measure(rng_key))
    departures, curvatures = (np.where(np.isfinite(x), x, np.inf) for x in found)
    stiffness = np.sort(curvatures)[int(_QUANTILE * _POINTS)]
    return Shape(float(np.median(departures)), float(np.clip(stiffness, 1.0, _STIFFEST)))
