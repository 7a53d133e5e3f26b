"""Momentum for particles, with noise that fades (Chen et al., 2018)."""

from typing import Any, NamedTuple

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import optax

from numpyro_ext._checks import check_nonnegative, check_positive, check_share


class HeavyBallState(NamedTuple):
    """State of :func:`po`."""

    count: Array
    """Number of steps so far, k."""
    momentum: Any
    """D_k, the last step; a tree like the parameters."""


def po(
    learning_rate: optax.ScalarOrSchedule,
    *,
    decay: float = 0.7,
    noise: float = 0.0,
    noise_decay: float = 0.7,
    rng_key: Array | None = None,
) -> optax.GradientTransformation:
    r"""Particle optimisation: momentum (the heavy ball), with noise that fades.

    With v the descent direction (minus the update that optax passes in, the velocity of the
    particles), :math:`\epsilon` the learning rate and :math:`\xi` standard normal, step k = 1, 2,
    ... is

    .. math::
        D_k = \text{decay}\; D_{k-1} + \epsilon\, (v + \text{noise}\; k^{-\text{noise\_decay}} \xi),
        \qquad x_k = x_{k-1} + D_k, \qquad D_0 = 0,

    in the shape and the unit of the parameters.

    **When it fails.** At rest a step is 1 / (1 - decay) times the plain one, so learning rates that
    suit plain descent are that much too large.

    :param learning_rate: :math:`\epsilon`, positive, or a schedule of the step k - 1.
    :param float decay: share of the last step that is kept, in [0, 1).
    :param float noise: standard deviation of the noise in the first step, in the unit of v.
    :param float noise_decay: exponent by which the noise falls, non-negative.
    :param rng_key: random key of the noise; required where ``noise`` is positive.

    **References:** Chen et al., *A unified particle-optimization framework for scalable Bayesian
    sampling* (UAI 2018); Liu et al., *Understanding and accelerating particle-based variational
    inference* (ICML 2019), section 5.

    >>> from numpyro_ext.optim import po
    >>> optim = po(0.1, decay=0.5)
    >>> params, state = jnp.array(4.0), optim.init(jnp.array(4.0))
    >>> for _ in range(3):
    ...     updates, state = optim.update(2 * (params - 1), state)
    ...     params = optax.apply_updates(params, updates)
    ...     print(f"{params:.2f}")
    3.40
    2.62
    1.91
    """
    check_learning_rate(learning_rate)
    check_share("decay", decay)
    check_nonnegative("noise", noise)
    check_nonnegative("noise_decay", noise_decay)
    noisy = isinstance(noise, Tracer) or noise > 0
    if noisy and rng_key is None:
        raise ValueError(f"noise is {noise!r} and rng_key is None; give a random key.")

    def init(params: Any) -> HeavyBallState:
        return HeavyBallState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, HeavyBallState]:
        k = state.count + 1
        eps = rate_at(learning_rate, state.count)
        v = jax.tree.map(jnp.negative, updates)
        if noisy and rng_key is not None:
            leaves, tree = jax.tree.flatten(v)
            keys = random.split(random.fold_in(rng_key, k), max(len(leaves), 1))
            size = noise * jnp.asarray(k, float) ** -noise_decay
            pairs = zip(keys, leaves, strict=False)
            xi = [random.normal(key, a.shape, a.dtype) for key, a in pairs]
            v = combine((1.0, v), (size, jax.tree.unflatten(tree, xi)))
        momentum = combine((decay, state.momentum), (eps, v))
        return momentum, HeavyBallState(k, momentum)

    return optax.GradientTransformation(init, update)


def combine(*terms: tuple[Any, Any]) -> Any:
    """Sum of number times tree over ``(number, tree)``, in the types of the leaves."""
    numbers, trees = zip(*terms, strict=True)

    def total(*leaves: Array) -> Array:
        pairs = zip(numbers, leaves, strict=True)
        return sum(jnp.asarray(c, leaves[0].dtype) * leaf for c, leaf in pairs)  # type: ignore

    return jax.tree.map(total, *trees)


def rate_at(learning_rate: optax.ScalarOrSchedule, count: Array) -> Array:
    eps: Any = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(eps, float)


def check_learning_rate(learning_rate: Any) -> None:
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
