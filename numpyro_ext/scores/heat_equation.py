"""The bandwidth with which a density estimate follows the heat equation (Liu et al., 2019)."""

from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import InferenceWarning, check_count, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_points, matmul, squared_distances, strided
from numpyro_ext.scores.bandwidth import MAX_POINTS, median_bandwidth

RATIO, CLIP = 1.1, 100.0


def he_bandwidth(
    x: ArrayLike, *, start: ArrayLike | None = None, num_steps: int = 20
) -> Float[Array, ""]:
    r"""Bandwidth (a length) with which a Gaussian density estimate follows the heat equation.

    Points that move with the velocity :math:`-\nabla \log q` make q follow
    :math:`\partial_t q = \Delta q`. For the estimate :math:`\tilde q` of m points with variance
    :math:`h = l^2`, both sides of it are known at each point; their difference there is
    :math:`\lambda_i`. With :math:`K_{ij} = \exp(-|r_{ij}|^2 / (2h))`, :math:`r_{ij} = x_i - x_j`
    and :math:`\rho = K 1`, the bandwidth minimises

    .. math::
        J &= \sum_i a_i^2 = (2\pi)^d h^{d+2} \sum_i \lambda_i^2, \\
        a_i &= \frac1m \sum_j K_{ij} \bigl(|r_{ij}|^2 / h - r_{ij}^\top s_j / h - d\bigr), \quad
        s_j = x_j - (K x)_j / \rho_j,

    which has no units, and a useful minimum for d = 2 and 3 only. For d = 1 and d >= 5 the
    bandwidth shrinks until particles no longer repel each other, and a warning says so.

    The search makes ``num_steps`` steps in :math:`b = 1 / l^2`, from the median rule's bandwidth
    :math:`l_m`. With :math:`G = dJ/db` at :math:`b_0`, a step tries :math:`b_1 = 1.1\, b_0` if G <
    0 and :math:`b_0 / 1.1` otherwise, and the vertex :math:`b_2` of the parabola through
    :math:`J(b_0), G, J(b_1)`; it takes the best of the three, clipped to :math:`[l_m / 100,\; 100\,
    l_m]`. The published use is one step per iteration, from the last bandwidth: ``start=l,
    num_steps=1``. O(m^2 d) for a step; of more than 256 points that many evenly spaced rows.

    :param x: ``(m, d)`` points.
    :param start: the bandwidth to start from instead of the median rule's.
    :param int num_steps: steps of the line search.

    **Reference:** Liu et al., *Understanding and accelerating particle-based variational inference*
    (ICML 2019), section 5.

    >>> x = jnp.array([[0.0, 0.0], [1.0, 0.5], [-0.5, 2.0], [3.0, -1.0]])
    >>> print(f"{he_bandwidth(x) ** 2:.2f}")
    1.07
    """
    x = as_points("x", x)
    num_steps = check_count("num_steps", num_steps)
    if start is not None:
        check_positive("start", start)
    d = x.shape[1]
    if d == 1 or d >= 5:
        warnings.warn(
            f"the bandwidth rule 'he' has no useful minimum for d = {d}: the bandwidth shrinks"
            " until particles no longer repel each other; use 'median_distance'.",
            InferenceWarning,
            stacklevel=2,
        )
    median = median_bandwidth(x)
    start = median if start is None else jnp.asarray(start, x.dtype)
    return _search(strided(x, MAX_POINTS), start, median, num_steps)


@partial(jax.jit, static_argnums=3)
def _search(x: Array, start: Array, median: Array, num_steps: int) -> Array:
    def step(_: Any, l: Array) -> Array:
        return jnp.clip(_step(x, l), median / CLIP, median * CLIP)

    return lax.fori_loop(0, num_steps, step, start)


def _step(x: Array, l: Array) -> Array:
    """The bandwidth after one step of the search from ``l``."""
    x, l = lax.stop_gradient((x, l))
    # Products such as x_i.s_j - x_j.s_j lose their digits far from the origin.
    u = (x - jnp.mean(x, axis=0)) / l
    s = squared_distances(u, u)
    # In units of the bandwidth b_0 is 1, and nothing overflows.
    value, slope = jax.value_and_grad(partial(_mismatch, u, s))(jnp.ones((), x.dtype))
    t1 = jnp.where(slope < 0, RATIO, 1.0 / RATIO)
    value1 = _mismatch(u, s, t1)
    secant = (value1 - value) / (t1 - 1.0)
    vertex = (secant - 0.5 * slope * (t1 + 1.0)) / (secant - slope)
    usable = jnp.isfinite(vertex) & (vertex > 0)
    t2 = jnp.where(usable, vertex, 1.0)
    value2 = jnp.where(usable, _mismatch(u, s, t2), jnp.inf)
    # The first of equals: on a plateau the bandwidth stays.
    best = jnp.argmin(jnp.stack([value, value1, value2]))
    return l / jnp.sqrt(jnp.stack([jnp.ones_like(t1), t1, t2])[best])


def _mismatch(u: Array, s: Array, t: Array) -> Array:
    """J at the inverse variance t, from centred points and their squared distances."""
    k = jnp.exp(-0.5 * t * s)
    shift = u - matmul(k, u) / k.sum(1)[:, None]
    dot = jnp.sum(u * matmul(k, shift), 1) - matmul(k, jnp.sum(u * shift, 1))
    a = t * (jnp.sum(k * s, 1) - dot) - u.shape[1] * k.sum(1)
    return jnp.sum((a / len(u)) ** 2)
