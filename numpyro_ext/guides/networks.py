"""The networks inside guides: stax pairs that start at zero, each with its weights in a vector."""

from collections.abc import Callable, Sequence
from functools import partial
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
from numpyro_ext._networks import ModulePair, Network, Pair

__all__ = [
    "check_widths",
    "flat_module",
    "mlp",
    "random_param",
    "scaled_by_width",
]


def mlp(hidden_dims: Sequence[int], out_dim: int) -> Pair:
    """A multilayer perceptron (ELU) that starts at zero: its last layer is zero, the others not."""
    layers: list[Any] = []
    for width in hidden_dims:
        layers += [stax.Dense(width), stax.Elu]
    return stax.serial(*layers, scaled_by_width(stax.Dense(out_dim, W_init=zeros, b_init=zeros)))


def scaled_by_width(dense: Pair) -> Pair:
    r"""A last layer whose products, but not its biases, are divided by :math:`\sqrt{width}`.

    An optimiser such as Adam moves all weights by the learning rate. Without the divisor the
    log-scales and shifts of all coordinates would move by :math:`width` times that, far too much in
    many dimensions. With undivided biases, what all points have in common is learnt first.
    """
    init_fn, apply_fn = dense

    def apply(weights: Any, x: Array, **kwargs: Any) -> Array:
        return apply_fn(weights, x / math.sqrt(x.shape[-1]), **kwargs)

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


def flat_module(
    name: str, network: Network, row_shape: tuple[int, ...], dtype: Any = float
) -> Callable[..., Any]:
    """``numpyro.module`` with all weights of the network in one vector.

    NumPyro's ``scan`` asks every site of a guide for its shape, which a tree of weights does not
    have.

    :param str name: name of the ``(num_weights,)`` parameter.
    :param network: a stax pair ``(init_fn, apply_fn)``, or :func:`as_pair` of a module.
    :param tuple row_shape: the shape of one row; ``init_fn`` takes it behind a batch axis.
    :param dtype: the type of the inputs with which a module starts.
    :return: ``apply_fn`` with the weights filled in.
    """
    pair: Any = network
    if isinstance(pair, ModulePair):
        pair, kwargs = pair.of_rows(len(row_shape)), {"dtype": dtype}
    else:
        kwargs = {}
    init_fn, apply_fn = pair

    def init(rng_key: Array) -> Any:
        return init_fn(rng_key, (1, *row_shape), **kwargs)[1]

    shapes = jax.eval_shape(init, random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    flat = random_param(name, lambda key: ravel_pytree(init(key))[0])
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves], dtype=int)
    parts = zip(jnp.split(flat, ends)[:-1], leaves, strict=True)
    weights = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in parts]
    return partial(apply_fn, jax.tree.unflatten(structure, weights))


def check_widths(hidden_dims: Any) -> tuple[int, ...]:
    """Widths of hidden layers, each at least 1, as a tuple."""
    return tuple(check_count("each of hidden_dims", width) for width in hidden_dims)
