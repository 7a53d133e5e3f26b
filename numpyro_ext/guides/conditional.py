"""The networks of conditional normal distributions, as in reverse models."""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax import Array
from jax.example_libraries import stax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._networks import Pair
from numpyro_ext.guides.networks import mlp

__all__ = ["bounded", "conditional_mlp", "mean_and_scale"]


def bounded(log_scale: Array, bound: float = 5.0) -> Array:
    """A log-scale between ``-bound`` and ``bound``, near 0 the number itself."""
    return bound * jnp.tanh(log_scale / bound)


def mean_and_scale(out: Any, dim: int, what: str) -> tuple[Array, Array]:
    """Mean and standard deviation of ``dim`` numbers from the outputs of a network, one array or a
    pair; ``what`` is for the error if it gives another number of them."""
    pair: Any = out if isinstance(out, tuple | list) else ()
    if len(pair) == 2 and all(jnp.shape(one)[-1:] == (dim,) for one in pair):
        return pair[0], jnp.exp(bounded(jnp.log(pair[1])))
    shape: Any = jax.tree.map(jnp.shape, out)
    if pair or shape[-1:] != (2 * dim,):
        raise ValueError(
            f"the {what} gives an output of shape {shape}; its last axis must have length"
            f" {2 * dim}: {dim} means and {dim} log-scales; or give a pair of arrays, {dim} means"
            f" and {dim} standard deviations."
        )
    mean, log_scale = jnp.split(jnp.asarray(out), 2, axis=-1)
    return mean, jnp.exp(bounded(log_scale))


def conditional_mlp(hidden_dims: Sequence[int], in_dim: int, out_dim: int, slope: float) -> Pair:
    r"""Mean and log-scale, ``2 out_dim`` numbers, of a normal given ``in_dim`` standard ones.

    A linear layer plus an :func:`mlp`. It starts at the mean :math:`c x_i` and the log-scale
    :math:`\tfrac12 \log(1 - c^2)`, c being ``slope``, so that the outcome is standard normal too,
    and its reverse is the same. If ``out_dim`` is larger than ``in_dim``, the other outcomes start
    at the mean 0 and the scale 1.
    """
    start = np.zeros((in_dim, 2 * out_dim))
    np.fill_diagonal(start, slope)
    start[:, out_dim:] = 0.0
    log_scale = np.where(np.arange(out_dim) < in_dim, 0.5 * math.log1p(-(slope**2)), 0.0)
    bias = np.concatenate([np.zeros(out_dim), log_scale])
    linear = stax.Dense(
        2 * out_dim,
        W_init=lambda *_, **__: jnp.asarray(start, jnp.result_type(float)),
        b_init=lambda *_, **__: jnp.asarray(bias, jnp.result_type(float)),
    )
    both = stax.parallel(linear, mlp(hidden_dims, 2 * out_dim))
    return stax.serial(stax.FanOut(2), both, stax.FanInSum)
