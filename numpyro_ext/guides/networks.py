"""The networks inside guides: stax pairs that start at zero, and where their weights are kept."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
import math
from typing import Any

import jax
from jax import Array, random
from jax.example_libraries import stax
from jax.flatten_util import ravel_pytree
from jax.nn.initializers import zeros
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_ext._checks import check_count

Network = tuple[Callable[..., Any], Callable[..., Any]]
"""A pair ``(init_fn, apply_fn)`` as in ``jax.example_libraries.stax``."""


def mlp(hidden_dims: Sequence[int], out_dim: int) -> Network:
    r"""A multilayer perceptron that starts at zero: its last layer is zero, the others are not.

    The products of the last layer are divided by :math:`\sqrt{width}` of the last hidden layer. An
    optimiser such as Adam moves all its weights by the learning rate, and without the divisor the
    log-scales and shifts of all coordinates would move by :math:`width` times that, far too much
    in many dimensions. The biases are not divided: what all points have in common is learnt first.
    """
    layers: list[Any] = []
    for width in hidden_dims:
        layers += [stax.Dense(width), stax.Elu]
    return stax.serial(*layers, _last(stax.Dense(out_dim, W_init=zeros, b_init=zeros)))


def masked_mlp(dim: int, hidden_dims: Sequence[int], context_dim: int = 0) -> Network:
    """An :func:`mlp` to ``2 dim`` numbers, entry i of each half from inputs before i.

    The masks are those of MADE: unit u of a hidden layer may see the first ``degree[u]`` inputs.
    After the ``dim`` inputs come ``context_dim`` others, which every output may see.
    """
    first, last = (0, dim) if context_dim else (1, max(dim, 2))
    hidden = [np.arange(width) % (last - first) + first for width in hidden_dims]
    own = np.arange(1, dim + 1)
    degrees = [np.concatenate([own, np.zeros(context_dim, int)]), *hidden]
    layers: list[Any] = []
    for before, after in pairwise(degrees):
        layers += [_masked_dense(after >= before[:, None]), stax.Elu]
    outputs = np.tile(own, 2)
    last_layer = _masked_dense(outputs > degrees[-1][:, None], W_init=zeros, b_init=zeros)
    return stax.serial(*layers, _last(last_layer))


def _last(dense: Network) -> Network:
    """The layer with its products, but not its biases, divided by the root of its width."""
    init_fn, apply_fn = dense

    def apply(weights: Any, x: Array, **kwargs: Any) -> Array:
        return apply_fn(weights, x / math.sqrt(x.shape[-1]), **kwargs)

    return init_fn, apply


def _masked_dense(mask: Array | np.ndarray, **inits: Any) -> Network:
    """A dense layer whose weights are multiplied by ``mask``."""
    init_fn, apply_fn = stax.Dense(mask.shape[1], **inits)

    def apply(weights: Any, x: Array, **kwargs: Any) -> Array:
        return apply_fn((weights[0] * mask, weights[1]), x, **kwargs)

    return init_fn, apply


def random_param(name: str, init: Callable[[Array], Array]) -> Array:
    """``numpyro.param`` that starts at ``init(key)``.

    NumPyro takes such a function too, but its ``scan`` asks every site of a guide for its shape.
    """
    value: Any = numpyro.param(name)
    if value is None:
        key: Any = numpyro.prng_key()
        value = numpyro.param(name, init(key))
    return value


def flat_module(name: str, network: Network, input_shape: tuple[int, ...]) -> Callable[..., Any]:
    """``numpyro.module`` with all weights of the network in one vector.

    NumPyro's ``scan`` asks every site of a guide for its shape, which a tree of weights does not
    have.

    :param str name: name of the ``(num_weights,)`` parameter.
    :param network: a stax pair ``(init_fn, apply_fn)``.
    :param tuple input_shape: what ``init_fn`` takes.
    :return: ``apply_fn`` with the weights filled in.
    """
    init_fn, apply_fn = network

    def init(rng_key: Array) -> Any:
        return init_fn(rng_key, input_shape)[1]

    leaves, structure = jax.tree.flatten(jax.eval_shape(init, random.key(0)))
    flat = random_param(name, lambda key: ravel_pytree(init(key))[0])
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves], dtype=int)
    parts = zip(jnp.split(flat, ends[:-1]), leaves, strict=True)
    weights = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts]
    return partial(apply_fn, jax.tree.unflatten(structure, weights))


def check_network(network: Any, hidden_dims: Any, name: str = "network") -> None:
    """A stax pair or None, and widths of at least 1."""
    if network is not None and not (
        isinstance(network, tuple) and len(network) == 2 and all(map(callable, network))
    ):
        raise TypeError(
            f"{name} is {network!r}; it must be a pair (init_fn, apply_fn), such as"
            " jax.example_libraries.stax.serial returns, or None for an MLP of hidden_dims."
        )
    if not isinstance(hidden_dims, (tuple, list)):
        raise TypeError(
            f"hidden_dims is {hidden_dims!r}; it must be a tuple of layer widths, such as (32, 32)."
        )
    for width in hidden_dims:
        check_count("each of hidden_dims", width)


def bounded(log_scale: Array, bound: float = 5.0) -> Array:
    """A log-scale between ``-bound`` and ``bound``, near 0 the number itself."""
    return bound * jnp.tanh(log_scale / bound)


def conditional_mlp(hidden_dims: Sequence[int], in_dim: int, out_dim: int, slope: float) -> Network:
    r"""Mean and log-scale, ``2 out_dim`` numbers, of a normal given ``in_dim`` standard ones.

    A linear layer plus an :func:`mlp`. It starts at the mean :math:`c x_i` and the log-scale
    :math:`\tfrac12 \log(1 - c^2)`, c being ``slope``, so that the outcome is standard normal too,
    and its reverse is the same. Where ``out_dim`` is larger than ``in_dim``, the rest starts at the
    mean 0 and the scale 1.
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


def normal_of(out: Array) -> tuple[Array, Array]:
    """Mean and standard deviation from the mean and log-scale that a network gives."""
    mean, log_scale = jnp.split(out, 2, axis=-1)
    return mean, jnp.exp(bounded(log_scale))
