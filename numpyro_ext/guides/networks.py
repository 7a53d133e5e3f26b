"""The networks inside guides: stax pairs that start at zero, each with its weights in a vector."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
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
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.operations import jit_on_data, quick_options, settings
from numpyro_ext._model.same import is_of_libraries
from numpyro_ext._networks import ModulePair, Network, Pair


@lru_cache
def mlp(hidden_dims: Sequence[int], out_dim: int) -> Pair:
    """A multilayer perceptron (ELU) that starts at zero: its last layer is zero, the others not."""
    layers: list[Any] = []
    for width in hidden_dims:
        layers += [stax.Dense(width), stax.Elu]
    return stax.serial(*layers, scaled_by_width(stax.Dense(out_dim, W_init=zeros, b_init=zeros)))


def scaled_by_width(dense: Pair) -> Pair:
    r"""A last layer with its products, but not its biases, divided by :math:`\sqrt{width}`, as Adam
    moves all weights by the learning rate."""
    init_fn, apply_fn = dense

    def apply(weights: Any, x: Array, **kwargs: Any) -> Array:
        return apply_fn(weights, x / math.sqrt(x.shape[-1]), **kwargs)

    return init_fn, apply


@lru_cache
def masked_mlp(dim: int, hidden_dims: Sequence[int]) -> Pair:
    """An MLP to ``2 dim`` numbers, entry i of each half from inputs before i; it starts at zero."""
    own = np.arange(1, dim + 1)
    degrees = [own, *(np.arange(width) % max(dim - 1, 1) + 1 for width in hidden_dims)]
    layers: list[Any] = []
    for before, after in pairwise(degrees):
        layers += [_masked_dense(after >= before[:, None]), stax.Elu]
    outputs = np.tile(own, 2)
    last_layer = _masked_dense(outputs > degrees[-1][:, None], W_init=zeros, b_init=zeros)
    return stax.serial(*layers, scaled_by_width(last_layer))


def _masked_dense(mask: np.ndarray, **inits: Any) -> Pair:
    """A dense layer with its weights times ``mask``."""
    init_fn, apply_fn = stax.Dense(mask.shape[1], **inits)

    def apply(weights: Any, x: Array, **kwargs: Any) -> Array:
        return apply_fn((weights[0] * mask, weights[1]), x, **kwargs)

    return init_fn, apply


@lru_cache
def conditional_mlp(hidden_dims: Sequence[int], in_dim: int, out_dim: int, slope: float) -> Pair:
    r"""Mean and log-scale of ``out_dim`` numbers given ``in_dim``, a linear layer plus an
    :func:`mlp`, which starts at the mean :math:`c x_i` and the scale :math:`\sqrt{1 - c^2}`, c
    being ``slope``, and at 0 and 1 where there is no :math:`x_i`."""
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


def bounded(log_scale: Array, bound: float = 5.0) -> Array:
    """A log-scale between ``-bound`` and ``bound``, near 0 the number itself."""
    return bound * jnp.tanh(log_scale / bound)


def mean_and_scale(out: Any, dim: int, what: str) -> tuple[Array, Array]:
    """Mean and standard deviation of ``dim`` numbers from a network, called ``what`` in errors."""
    pair: Any = out if isinstance(out, tuple | list) else ()
    if len(pair) == 2 and all(jnp.shape(array)[-1:] == (dim,) for array in pair):
        return pair[0], jnp.exp(bounded(jnp.log(pair[1])))
    shape: Any = jax.tree.map(jnp.shape, out)
    if pair or shape[-1:] != (2 * dim,):
        raise ValueError(
            f"the {what} gives an output of shape {shape}; its last axis must have length"
            f" {2 * dim}: {dim} means and {dim} log-scales; or a pair of means and deviations."
        )
    mean, log_scale = jnp.split(jnp.asarray(out), 2, axis=-1)
    return mean, jnp.exp(bounded(log_scale))


def random_param(name: str, init: Callable[[Array], Array]) -> Array:
    """``numpyro.param`` that starts at ``init(key)``, also in NumPyro's ``scan``."""
    value: Any = numpyro.param(name)
    if value is None:
        key: Any = numpyro.prng_key()
        value = numpyro.param(name, init(key))
    return value


def flat_module(
    name: str, network: Network, row_shape: tuple[int, ...], dtype: Any = float
) -> Callable[..., Any]:
    """``numpyro.module`` with all weights in one vector, the parameter ``name``, because NumPyro's
    ``scan`` asks every site for its shape; ``init_fn`` takes ``row_shape`` behind a batch axis."""
    pair: Any = network
    if isinstance(pair, ModulePair):
        pair, kwargs = pair.of_rows(len(row_shape)), {"dtype": dtype}
    else:
        kwargs = {}
    init_fn, apply_fn = pair

    # What a user's function reads from outside may be another the next time.
    is_known = isinstance(init_fn, Hashable) and is_of_libraries(init_fn)
    start_of = _start_of if is_known else _start_of.__wrapped__
    shapes, draw = start_of(init_fn, (1, *row_shape), settings(), *kwargs.items())
    leaves, structure = jax.tree.flatten(shapes)
    flat = random_param(name, draw)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves], dtype=int)
    # Of numbers NumPy's, which compiles nothing.
    parts = jnp.split(flat, ends) if is_traced(flat) else np.split(np.asarray(flat), ends)
    pairs = zip(parts[:-1], leaves, strict=True)
    weights = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in pairs]
    return partial(apply_fn, jax.tree.unflatten(structure, weights))


@lru_cache
def _start_of(
    init_fn: Callable[..., Any],
    shape: tuple[int, ...],
    settings: tuple,
    *options: tuple[str, Any],
) -> tuple[Any, Callable[[Array], Array]]:
    """The shapes of a network's weights under these settings of JAX, and a function of a key that
    draws them in one vector, by one program for all networks alike."""

    def init(rng_key: Array) -> Any:
        return init_fn(rng_key, shape, **dict(options))[1]

    def draw(rng_key: Array) -> Array:
        return ravel_pytree(init(rng_key))[0]

    program = jit_on_data(draw, quick_options())
    shapes = jax.eval_shape(init, random.key(0))
    return shapes, lambda rng_key: (draw if is_traced(rng_key) else program)(rng_key)


def check_widths(hidden_dims: Any) -> tuple[int, ...]:
    """Widths of hidden layers, each at least 1, as a tuple."""
    return tuple(check_count("each of hidden_dims", width) for width in hidden_dims)
