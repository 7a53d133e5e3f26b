"""Recognition networks for data with missing entries (Little and Rubin, 1987)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

from numpyro_ext._networks import Network, as_pair
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential


class MissingNetwork(NamedTuple):
    """A recognition network that takes NaN, from :func:`allow_missing`."""

    init: Callable[..., Any]
    apply: Callable[..., Any]


def allow_missing(recognition: Network) -> MissingNetwork:
    r"""The recognition network for data in which NaN stands for a missing entry.

    With :math:`m_{nj} = 1` where entry j of row n is missing and 0 elsewhere, the potential is

    .. math::
        \psi(x; y_n) = \begin{cases}
        1, & m_{nj} = 1 \text{ for all } j, \\
        \text{network}\big((1 - m_n) \odot y_n,\; m_n\big), & \text{otherwise},
        \end{cases}

    so that a network for p columns has 2p inputs, and a row without any entry has the prior as its
    q; in a sequence this holds for each step. The model leaves missing entries out too:

    .. code-block:: python

        seen = ~jnp.isnan(y)
        noise = dist.Normal(*decode(x)).mask(seen).to_event(1)  # a mask of single entries
        numpyro.sample("y", noise, obs=jnp.nan_to_num(y))

    **Bias.** Entries must be missing at random: whether one is missing may depend on what was seen,
    not on the value itself. If large values are missing more often, means are too small, however
    many data there are; a model of ``seen`` given y is needed then.

    :param recognition: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, that
        returns a potential of batch shape ``y.shape[:-1]``, such as :func:`recognition_network`.

    References: Little and Rubin, *Statistical Analysis with Missing Data* (Wiley, 1987), chapter 5.

    >>> from numpyro_ext.svae import allow_missing, recognition_network
    >>> init, apply = allow_missing(recognition_network(2))
    >>> _, params = init(jax.random.key(0), (3,))
    >>> y = jnp.array([[1.0, jnp.nan, -2.0], [jnp.nan, jnp.nan, jnp.nan]])
    >>> h = apply(params, y).h
    >>> bool(jnp.isfinite(h).all()), h[1].tolist()
    (True, [0.0, 0.0])
    """
    init, apply = as_pair(recognition, "recognition")
    return MissingNetwork(partial(_init, init), partial(_apply, apply))  # closures do not pickle


def _init(init: Callable[..., Any], rng_key: Array, input_shape: tuple[int, ...]) -> Any:
    return init(rng_key, (*input_shape[:-1], 2 * input_shape[-1]))


def _apply(
    apply: Callable[..., Any], params: Any, y: Array, **kwargs: Any
) -> GaussianPotential | MixturePotential:
    y = jnp.asarray(y)
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        y = y.astype(float)
    missing = jnp.isnan(y)
    # NaN must not enter the network even where its output is replaced: its gradient would be NaN.
    inputs = jnp.concatenate([jnp.where(missing, 0.0, y), missing.astype(y.dtype)], axis=-1)
    factor = apply(params, inputs, **kwargs)
    mixture = isinstance(factor, MixturePotential)
    # A factor stands for nothing where every entry that it is made of is missing.
    nothing = jnp.all(missing, axis=tuple(range(factor.h.ndim - 1 - mixture, missing.ndim)))
    masked = replace(factor, h=_zero(nothing, factor.h), W=_zero(nothing, factor.W))
    if isinstance(masked, GaussianPotential):
        return masked
    even = -jnp.log(masked.log_weights.shape[-1])
    return replace(masked, log_weights=jnp.where(nothing[..., None], even, masked.log_weights))


def _zero(nothing: Array, x: Array) -> Array:
    return jnp.where(nothing.reshape(*nothing.shape, *(1,) * (x.ndim - nothing.ndim)), 0.0, x)
