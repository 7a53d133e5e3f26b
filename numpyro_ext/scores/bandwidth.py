"""Rules that choose the bandwidth of a kernel from the points themselves."""

import math
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_ext._checks import check_choice
from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_points, squared_distances, strided

BANDWIDTH_RULES = ("median", "median_distance")
MAX_POINTS = 256


def median_bandwidth(x: ArrayLike, *, rule: str = "median") -> Float[Array, ""]:
    r"""Bandwidth :math:`h` (a length, in the units of ``x``) from the median pairwise distance.

    With :math:`\mathrm{med}_2` the median of :math:`|x_i - x_j|^2` over the :math:`K(K-1)/2` pairs
    :math:`i < j` (the mean of the two middle values where their number is even),

    .. math::
        h^2 = \tfrac12 \mathrm{med}_2 / \log(K+1) \;\text{("median")}, \qquad
        h^2 = \mathrm{med}_2 \;\text{("median\_distance")}.

    The first makes the RBF kernel :math:`\exp(-s \log(K+1)/\mathrm{med}_2)`, the rule of particle
    inference (Liu and Wang, NIPS 2016, section 5; their h is :math:`2 h^2` with :math:`\log K`).
    The second is wider, and better for discrepancies. If more than half of the pairs coincide, the
    mean takes the median's place; if all coincide, or K = 1, the answer is 1. Of more than 256
    points that many evenly spaced rows give the median. It has no gradient.

    :param x: ``(K, d)`` points.
    :param str rule: ``"median"`` or ``"median_distance"``.

    >>> float(median_bandwidth(jnp.array([[0.0], [1.0], [3.0]]), rule="median_distance"))
    2.0
    """
    check_choice("rule", rule, BANDWIDTH_RULES)
    x = lax.stop_gradient(as_points("x", x))
    num = x.shape[0]
    if num == 1:
        return jnp.ones((), x.dtype)
    x = strided(x, MAX_POINTS)
    # i < j only: the zeros of the diagonal would drag the median down.
    pairs = squared_distances(x, x)[np.triu_indices(x.shape[0], k=1)]
    typical = _median(pairs)
    typical = jnp.where(typical == 0, jnp.mean(pairs), typical)
    squared = typical if rule == "median_distance" else 0.5 * typical / math.log(num + 1)
    return jnp.where(typical == 0, jnp.ones((), x.dtype), jnp.sqrt(squared))


@jax.jit  # so that an eager call compiles once per shape, not once per call
def _median(values: Float[Array, " n"]) -> Float[Array, ""]:
    """Median of non-negative numbers by bisection over their bits, which are ordered likewise."""
    bits = jnp.finfo(values.dtype).bits
    codes = lax.bitcast_convert_type(values, jnp.dtype(f"int{bits}"))
    rank = (values.size + 1) // 2

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) // 2
        enough = jnp.sum(codes <= middle) >= rank
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    lower = lax.fori_loop(0, bits, halve, (jnp.min(codes), jnp.max(codes)))[1]
    above = jnp.min(jnp.where(codes > lower, codes, jnp.iinfo(codes.dtype).max))
    tied = jnp.sum(codes <= lower) > rank
    upper = jnp.where((values.size % 2 == 1) | tied, lower, above)
    low, high = (lax.bitcast_convert_type(c, values.dtype) for c in (lower, upper))
    return jnp.where(jnp.any(jnp.isnan(values)), jnp.nan, low + 0.5 * (high - low))
