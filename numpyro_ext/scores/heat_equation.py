"""The bandwidth with which a density estimate follows the heat equation (Liu et al., 2019)."""

from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import InferenceWarning, check_count, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_points, matmul, squared_distances, strided
from numpyro_ext.scores.bandwidth import median_bandwidth


def he_bandwidth(
    x: ArrayLike,
    *,
    start: ArrayLike | None = None,
    num_steps: int = 20,
    ratio: float | Array = 1.1,
    clip: float | Array = 100.0,
    max_particles: int = 256,
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

    which has no units. It is :math:`d^2 / m` for :math:`l \to 0` and :math:`m d^2` for
    :math:`l \to \infty`. In between there is a useful minimum for d = 2 and 3 only. For d = 1 and
    d >= 5 the bandwidth shrinks until particles no longer repel each other, and an
    ``InferenceWarning`` says so.

    The search makes ``num_steps`` steps in :math:`b = 1 / l^2`, from the median rule's bandwidth
    :math:`l_m`. With :math:`G = dJ/db` at :math:`b_0`, a step tries
    :math:`b_1 = b_0 \cdot \text{ratio}` if G < 0 and :math:`b_0 / \text{ratio}` otherwise, and the
    vertex :math:`b_2` of the parabola through :math:`J(b_0), G, J(b_1)`; it takes the best of the
    three, clipped to :math:`[l_m / \text{clip},\; l_m \cdot \text{clip}]`. The published use is one
    step per iteration, from the last bandwidth: ``start=l, num_steps=1``. No gradient flows through
    it. O(m^2 d) for a step.

    :param x: ``(m, d)`` points.
    :param start: the bandwidth to start from instead of the median rule's.
    :param int num_steps: steps of the line search.
    :param ratio: above 1, of one step.
    :param clip: at least 1.
    :param int max_particles: with more points than this, that many evenly spaced rows are used.

    **Reference:** Liu et al., *Understanding and accelerating particle-based variational inference*
    (ICML 2019), section 5.

    >>> from numpyro_ext.scores import he_bandwidth
    >>> x = jnp.array([[0.0, 0.0], [1.0, 0.5], [-0.5, 2.0], [3.0, -1.0]])
    >>> print(f"{he_bandwidth(x) ** 2:.2f}")
    1.07
    """
    x = as_points("x", x)
    num_steps = check_count("num_steps", num_steps)
    check_positive("ratio", ratio)
    if not isinstance(ratio, Tracer) and ratio <= 1:
        raise ValueError(f"ratio is {ratio!r}; it must be above 1, such as 1.1.")
    if not isinstance(clip, Tracer) and not 1 <= clip < float("inf"):
        raise ValueError(f"clip is {clip!r}; it must be a finite number of at least 1.")
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
    median = median_bandwidth(x, max_particles=max_particles)
    start = median if start is None else jnp.asarray(start, x.dtype)
    numbers = (jnp.asarray(value, x.dtype) for value in (ratio, clip))
    return _search(strided(x, max_particles), start, median, *numbers, num_steps)


@partial(jax.jit, static_argnums=5)
def _search(
    x: Array, start: Array, median: Array, ratio: Array, clip: Array, num_steps: int
) -> Array:
    def step(_: Any, l: Array) -> Array:
        return jnp.clip(_step(x, l, ratio), median / clip, median * clip)

    return lax.fori_loop(0, num_steps, step, start)


@jax.jit  # so that an eager call compiles once per shape, not once per call
def _step(x: Array, l: Array, ratio: Array) -> Array:
    """The bandwidth after one step of the search from ``l``."""
    x, l = lax.stop_gradient((x, l))
    # Products such as x_i.s_j - x_j.s_j lose their digits far from the origin.
    u = (x - jnp.mean(x, axis=0)) / l
    s = squared_distances(u, u)
    # In units of the bandwidth b_0 is 1, and nothing overflows.
    value, slope = jax.value_and_grad(partial(_mismatch, u, s))(jnp.ones((), x.dtype))
    t1 = jnp.where(slope < 0, ratio, 1.0 / ratio)
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
