"""Rules that choose the bandwidth of a kernel from the points themselves.

Reference: Liu and Wang, *Stein variational gradient descent* (NIPS 2016), section 5.
"""

import math

from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_points, squared_distances
from numpyro_ext.util import check_choice, check_count

__all__ = ["BANDWIDTH_RULES", "median_bandwidth"]

BANDWIDTH_RULES = ("median", "median_distance")


def median_bandwidth(
    x: ArrayLike, *, rule: str = "median", max_particles: int = 256
) -> Float[Array, ""]:
    r"""Bandwidth :math:`h` (a length, in the units of ``x``) from the median pairwise distance.

    With :math:`\mathrm{med}_2` the median of :math:`|x_i - x_j|^2` over the :math:`K(K-1)/2` pairs
    :math:`i < j` (the mean of the two middle values where their number is even),

    .. math::

        h^2 = \tfrac12 \mathrm{med}_2 / \log(K+1) \;\text{("median")}, \qquad
        h^2 = \mathrm{med}_2 \;\text{("median\_distance")}.

    The first makes the RBF kernel :math:`\exp(-s \log(K+1)/\mathrm{med}_2)`, the rule of particle
    inference. Liu and Wang write :math:`\exp(-s/h)` with their h equal to :math:`2 h^2` here, and
    :math:`\log K` for :math:`\log(K+1)`. The second is wider, and the better one for discrepancies.

    If more than half of the pairs coincide, the mean squared distance takes the median's place; if all
    coincide, or K = 1, the answer is 1. No gradient flows through it.

    :param x: ``(K, d)`` points.
    :param str rule: ``"median"`` or ``"median_distance"``.
    :param int max_particles: with more points than this, that many evenly spaced rows give the
        median (sorting all pairs costs more than a kernel matrix); ``log(K+1)`` stays that of all.
    :return: the scalar h.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.scores import median_bandwidth
        >>> float(median_bandwidth(jnp.array([[0.0], [1.0], [3.0]]), rule="median_distance"))
        2.0
    """
    check_choice("rule", rule, BANDWIDTH_RULES)
    check_count("max_particles", max_particles, minimum=2)
    x = lax.stop_gradient(as_points("x", x))
    num = x.shape[0]
    if num == 1:
        return jnp.ones((), x.dtype)
    if num > max_particles:
        x = x[np.rint(np.arange(max_particles) * (num / max_particles)).astype(int)]
    # i < j only: the zeros of the diagonal would drag the median down.
    pairs = squared_distances(x, x)[np.triu_indices(x.shape[0], k=1)]
    typical = jnp.median(pairs)
    typical = jnp.where(typical == 0, jnp.mean(pairs), typical)
    squared = typical if rule == "median_distance" else 0.5 * typical / math.log(num + 1)
    return jnp.where(typical == 0, jnp.ones((), x.dtype), jnp.sqrt(squared))
