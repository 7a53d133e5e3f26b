r"""The power mean of K weights in log space, and the weights of its gradient.

.. math::
    L(a) = \frac{1}{a} \log \frac{1}{K} \sum_k e^{a\, lw_k}, \qquad
    \hat w_k = \frac{e^{a\, lw_k}}{\sum_j e^{a\, lw_j}} = \frac{\partial L}{\partial lw_k},

with the mean (a = 0), the largest (a = inf) and the smallest (a = -inf) of the log weights as its
limits; for K = 1 it is the log weight itself. The axis of particles comes first. ``a`` may be a
traced number, which must be finite. Only :func:`surrogate` and :func:`weighted_surrogate` have a
gradient.
"""

from typing import Any

from jax import Array
from jax.lax import stop_gradient
from jax.nn import one_hot
import jax.numpy as jnp


def _is_static(a: Any, value: float) -> bool:
    return isinstance(a, (int, float)) and a == value


def power_mean(lw: Array, a: Any) -> tuple[Array, Array]:
    """``L(a)`` of shape ``(*units)`` and ``w^`` of shape ``(K, *units)``, from ``lw`` of that
    shape; the weights sum to 1, or are 0 in a unit with an infinite ``L``."""
    lw = stop_gradient(lw)
    num_particles = lw.shape[0]
    mean = jnp.mean(lw, 0)
    if _is_static(a, jnp.inf):
        value, weights = jnp.max(lw, 0), one_hot(jnp.argmax(lw, 0), num_particles, axis=0)
    elif _is_static(a, -jnp.inf):
        value, weights = jnp.min(lw, 0), one_hot(jnp.argmin(lw, 0), num_particles, axis=0)
    elif _is_static(a, 0.0) or num_particles == 1:
        value, weights = mean, jnp.full_like(lw, 1 / num_particles)
    else:
        c = jnp.where(jnp.isfinite(mean), mean, 0.0)
        t = a * (lw - c)
        top = jnp.max(t, 0)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        e = jnp.exp(t - top)
        total = jnp.sum(e, 0)
        # log1p(mean(expm1 t)) keeps the digits that logsumexp(t) - log K cancels for a small t.
        near = jnp.max(jnp.abs(t), 0) < 0.5
        small = jnp.log1p(jnp.mean(jnp.expm1(jnp.where(near, t, 0.0)), 0))
        log_mean = jnp.where(near, small, top + jnp.log(total) - jnp.log(num_particles))
        value = jnp.where(a == 0, mean, c + log_mean / jnp.where(a == 0, 1.0, a))
        weights = e / jnp.where(total == 0, 1.0, total)
    return value, jnp.where(jnp.isinf(value), 0.0, weights)


def weighted_surrogate(value: Array, weights: Array, lw: Array) -> Array:
    """``value`` with the gradient ``sum_k weights_k grad lw_k``; a ``lw`` of ``-inf`` has none."""
    s = jnp.sum(stop_gradient(weights) * jnp.where(jnp.isneginf(lw), 0.0, lw), 0)
    return stop_gradient(value - s) + s


def surrogate(lw: Array, a: Any) -> Array:
    """``L(a)`` with its own gradient, safe where weights are ``-inf``."""
    value, weights = power_mean(lw, a)
    return weighted_surrogate(value, weights, lw)
