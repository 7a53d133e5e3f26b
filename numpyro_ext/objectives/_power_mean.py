r"""The power mean of K weights in log space, and the weights of its gradient.

.. math::
    L(a) = \frac{1}{a} \log \frac{1}{K} \sum_k e^{a\, lw_k}, \qquad
    \hat w_k = \frac{e^{a\, lw_k}}{\sum_j e^{a\, lw_j}} = \frac{\partial L}{\partial lw_k},

with the limits mean (a = 0), max (a = inf) and min (a = -inf). The particle axis comes first.
``a`` may be traced (but not a traced infinity).
"""

from typing import Any

from jax import Array
from jax.lax import stop_gradient
from jax.nn import one_hot
import jax.numpy as jnp
from jax.scipy.special import logsumexp


def _is_static(a: Any, value: float) -> bool:
    return isinstance(a, (int, float)) and a == value


def power_mean(lw: Array, a: Any) -> Array:
    """``L(a)``, ``(K, *units) -> (*units)``; smooth through a = 0 also in float32."""
    mean = jnp.mean(lw, 0)
    if _is_static(a, 0.0):
        return mean
    if _is_static(a, jnp.inf):
        return jnp.max(lw, 0)
    if _is_static(a, -jnp.inf):
        return jnp.min(lw, 0)
    c = stop_gradient(jnp.where(jnp.isfinite(mean), mean, 0.0))
    t = a * (lw - c)
    # log1p(mean(expm1 t)) keeps the digits that logsumexp(t) - log K would cancel when t is small.
    near = stop_gradient(jnp.max(jnp.abs(t), 0)) < 0.5
    divisor = jnp.where(a == 0, 1.0, a)
    small = jnp.log1p(jnp.mean(jnp.expm1(jnp.where(near, t, 0.0)), 0))
    large = logsumexp(jnp.where(near, 0.0, t), 0) - jnp.log(lw.shape[0])
    return jnp.where(a == 0, mean, c + jnp.where(near, small, large) / divisor)


def power_weights(lw: Array, a: Any) -> Array:
    """The weights ``w^``, ``(K, *units)``: they sum to 1, or are 0 in a unit whose ``L`` is infinite."""
    num_particles = lw.shape[0]
    if _is_static(a, jnp.inf) or _is_static(a, -jnp.inf):
        best = jnp.argmax(lw, 0) if a > 0 else jnp.argmin(lw, 0)
        weights = one_hot(best, num_particles, dtype=lw.dtype, axis=0)
    elif _is_static(a, 0.0):
        weights = jnp.full_like(lw, 1 / num_particles)
    else:
        t = jnp.where(a == 0, 0.0, a * lw)
        top = jnp.max(t, 0)
        e = jnp.exp(t - jnp.where(jnp.isfinite(top), top, 0.0))
        total = jnp.sum(e, 0)
        weights = e / jnp.where(total == 0, 1.0, total)
    return jnp.where(jnp.isinf(power_mean(lw, a)), 0.0, weights)


def weighted_surrogate(value: Array, weights: Array, lw: Array) -> Array:
    """``value``, whose gradient is ``sum_k weights_k grad lw_k``; a weight 0 silences ``lw = -inf``."""
    s = jnp.sum(stop_gradient(weights) * jnp.where(jnp.isneginf(lw), 0.0, lw), 0)
    return stop_gradient(value - s) + s


def surrogate(lw: Array, a: Any) -> Array:
    """``L(a)`` with its own gradient, safe where weights are ``-inf``."""
    stopped = stop_gradient(lw)
    return weighted_surrogate(power_mean(stopped, a), power_weights(stopped, a), lw)
