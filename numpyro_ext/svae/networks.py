"""Networks that make potentials of data, and data of latent vectors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_ext._checks import check_choice, check_count
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential

Network = tuple[Callable[..., Any], Callable[..., Any]]
OUTPUT_SCALE = 1e-2


def recognition_network(
    latent_dim: int,
    *,
    num_components: int | None = None,
    hidden: Sequence[int] = (40, 40),
    residual: str | None = "orthogonal",
    init_scale: float = 1e-2,
) -> Network:
    r"""A network from data y to a potential of x, for :class:`SVAEGuide`.

    .. math::
        (j, h') = MLP(y), \qquad h = h' + y R + b_1, \qquad
        W = -\tfrac12 \operatorname{diag}(softplus(j) + softplus(b_2)),

    with tanh units, and a matrix R that lets the network start as a linear map. With
    ``num_components=C`` the network puts out C such pairs and C log weights.

    :param int num_components: C of a :class:`MixturePotential`; None: a :class:`GaussianPotential`.
    :param hidden: widths of the hidden layers.
    :param residual: where R starts: ``"orthogonal"``, ``"identity"``, or None for none.
    :param float init_scale: factor of the hidden layers' Glorot start; the output layer starts at
        normal weights of scale 0.01.
    :return: a pair ``(init_fn, apply_fn)``; ``apply_fn(params, y)`` has batch ``y.shape[:-1]``.

    References: Johnson et al. (NIPS 2016), section 5 and its code.

    >>> from numpyro_ext.svae import recognition_network
    >>> init, apply = recognition_network(2)
    >>> _, params = init(jax.random.key(0), (3,))
    >>> apply(params, jax.numpy.ones((5, 3))).h.shape
    (5, 2)
    """
    d = check_count("latent_dim", latent_dim)
    C = 1 if num_components is None else check_count("num_components", num_components)
    outputs = C * (2 * d + (num_components is not None))
    init = partial(_init, d, ("h", "precision"), [*hidden, outputs], residual, init_scale)
    return init, partial(_recognise, d, num_components)


def _recognise(
    d: int, num_components: int | None, params: Any, y: Array, **kwargs: Any
) -> GaussianPotential | MixturePotential:
    C = 1 if num_components is None else num_components
    out = _mlp(params["mlp"], y)
    pairs = out[..., : C * 2 * d].reshape(*out.shape[:-1], C, 2, d)
    shift = params["h"] + (y @ params["residual"] if "residual" in params else 0.0)
    h = pairs[..., 1, :] + jnp.broadcast_to(shift, (*out.shape[:-1], d))[..., None, :]
    precision = jax.nn.softplus(pairs[..., 0, :]) + jax.nn.softplus(params["precision"])
    factor = GaussianPotential.from_diagonal(h, precision)
    if num_components is None:
        return GaussianPotential(factor.h[..., 0, :], factor.W[..., 0, :, :])
    log_weights = jax.nn.log_softmax(out[..., C * 2 * d :], axis=-1)
    return MixturePotential(log_weights, factor.h, factor.W)


def decoder_network(
    obs_dim: int,
    *,
    hidden: Sequence[int] = (40, 40),
    residual: str | None = "orthogonal",
    init_scale: float = 1e-2,
) -> Network:
    r"""A network from a latent vector x to the mean and scale of independent normal data.

    .. math:: (m, s) = MLP(x), \qquad loc = m + x R + b_1, \qquad scale = \sqrt{softplus(s)},

    with tanh units.

    :param hidden: with the other arguments, as in :func:`recognition_network`.
    :return: a pair ``(init_fn, apply_fn)``; ``apply_fn(params, x)`` is ``(loc, scale)``.

    >>> from numpyro_ext.svae import decoder_network
    >>> init, apply = decoder_network(3)
    >>> _, params = init(jax.random.key(0), (2,))
    >>> loc, scale = apply(params, jax.numpy.ones((5, 2)))
    >>> loc.shape, bool((scale > 0).all())
    ((5, 3), True)
    """
    widths = [*hidden, 2 * obs_dim]
    return partial(_init, obs_dim, ("loc",), widths, residual, init_scale), _decode


def _decode(params: Any, x: Array, **kwargs: Any) -> tuple[Array, Array]:
    m, s = jnp.split(_mlp(params["mlp"], x), 2, axis=-1)
    linear = x @ params["residual"] if "residual" in params else 0.0
    return m + linear + params["loc"], jnp.sqrt(jax.nn.softplus(s))


def _init(
    size: int,
    shifts: tuple[str, ...],
    widths: list[int],
    residual: str | None,
    init_scale: float,
    rng_key: Array,
    input_shape: tuple[int, ...],
) -> tuple[Any, Any]:
    """Output shape and parameters of either network."""
    key_mlp, key_residual = random.split(rng_key)
    params: dict[str, Any] = {name: jnp.zeros(size) for name in shifts}
    params["mlp"] = _init_mlp(key_mlp, [input_shape[-1], *widths], init_scale)
    if residual is not None:
        params["residual"] = _init_residual(key_residual, residual, input_shape[-1], size)
    return (*input_shape[:-1], size), params


def _init_mlp(rng_key: Array, sizes: list[int], init_scale: float) -> list[tuple[Array, Array]]:
    layers = []
    for k, key in enumerate(random.split(rng_key, len(sizes) - 1)):
        shape = sizes[k], sizes[k + 1]
        glorot = init_scale * (2 / sum(shape)) ** 0.5
        scale = OUTPUT_SCALE if k == len(sizes) - 2 else glorot
        layers.append((scale * random.normal(key, shape), jnp.zeros(shape[1])))
    return layers


def _mlp(layers: list[tuple[Array, Array]], x: Array) -> Array:
    for weight, bias in layers[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def _init_residual(rng_key: Array, kind: str, rows: int, columns: int) -> Array:
    check_choice("residual", kind, ("orthogonal", "identity"))
    if kind == "identity":
        return jnp.eye(rows, columns)
    side = max(rows, columns)
    return jnp.linalg.qr(random.normal(rng_key, (side, side)))[0][:rows, :columns]
