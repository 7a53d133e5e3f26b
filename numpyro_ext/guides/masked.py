"""The masked network of autoregressive flows.

Germain, Gregor, Murray, Larochelle, "MADE: masked autoencoder for distribution estimation" (ICML
2015).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jax import Array
from jax.example_libraries import stax
from jax.nn.initializers import zeros
import numpy as np

from numpyro_ext._networks import Pair
from numpyro_ext.guides.networks import scaled_by_width

__all__ = ["masked_mlp"]


def masked_mlp(dim: int, hidden_dims: Sequence[int], context_dim: int = 0) -> Pair:
    """An MLP to ``2 dim`` numbers, entry i of each half from inputs before i; it starts at zero.

    Unit u of a hidden layer sees the first ``degree[u]`` inputs. After the ``dim`` inputs come
    ``context_dim`` others, which every output may see.
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
    return stax.serial(*layers, scaled_by_width(last_layer))


def _masked_dense(mask: np.ndarray, **inits: Any) -> Pair:
    """A dense layer whose weights are multiplied by ``mask``."""
    init_fn, apply_fn = stax.Dense(mask.shape[1], **inits)

    def apply(weights: Any, x: Array, **kwargs: Any) -> Array:
        return apply_fn((weights[0] * mask, weights[1]), x, **kwargs)

    return init_fn, apply
