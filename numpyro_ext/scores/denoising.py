"""Score of an implicit distribution from a network that removes noise (Vincent, 2011)."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, random
from jax.example_libraries import stax
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import check_count, check_positive, summary
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_points


class DenoisingScore:
    r"""Score :math:`g(x) = (v(x) - x) / \sigma^2` of q, with a network v trained to remove noise.

    .. math:: \min_v\; E\, |v(x + \sigma \epsilon) - x|^2, \qquad x \sim q,\; \epsilon \sim N(0, I),

    which is :math:`\sigma^4 E\,|g(x + \sigma\epsilon) + \epsilon / \sigma|^2`. The network gives
    the residual :math:`v(x) - x`; a step of its training costs O(K).

    Its optimum is the score of q convolved with :math:`N(0, \sigma^2 I)`: too small for every
    :math:`\sigma > 0`; with small :math:`\sigma` the noise of the loss grows as
    :math:`1/\sigma^2`. The default network is for samples of a scale near 1 around 0:
    :func:`whiten` others, and divide the score by the scale.

    :param float sigma: :math:`\sigma`, positive, in the units of the samples.
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from
        ``(n, d)`` points to the ``(n, d)`` residual; None for :math:`\sigma` times a network of
        ``hidden_dims`` tanh units.

    **Reference:** *A connection between score matching and denoising autoencoders*, equation 9 and
    section 4.2, Vincent (Neural Computation 2011)

    >>> score = DenoisingScore(0.5, hidden_dims=(16,))
    >>> params, optim = score.init(jax.random.key(0), 1), optax.adam(0.02)
    >>> def step(carry, key):
    ...     params, state = carry
    ...     x = jax.random.normal(key, (200, 1))
    ...     grads = jax.grad(score.loss)(params, jax.random.fold_in(key, 1), x)
    ...     updates, state = optim.update(grads, state)
    ...     return (optax.apply_updates(params, updates), state), None
    >>> keys = jax.random.split(jax.random.key(1), 500)
    >>> (params, _), _ = jax.lax.scan(step, (params, optim.init(params)), keys)
    >>> abs(score.score(params, jnp.ones((1, 1)))[0, 0] - (-0.8)) < 0.2  # of N(0, 1 + 0.5^2)
    Array(True, dtype=bool)
    """

    def __init__(
        self,
        sigma: float | Array,
        network: Network | None = None,
        *,
        hidden_dims: tuple[int, ...] = (64, 64),
    ) -> None:
        check_positive("sigma", sigma)
        self.sigma = sigma
        self.network = as_pair(network, optional=True)
        self.hidden_dims = tuple(check_count("hidden_dims", width) for width in hidden_dims)

    def __repr__(self) -> str:
        return summary(self)

    def init(self, rng_key: Array, d: int) -> Any:
        """Parameters of the network for samples of ``d`` dimensions."""
        return self._pair(check_count("d", d))[0](rng_key, (-1, d))[1]

    def loss(self, params: Any, rng_key: Array, x: ArrayLike) -> Float[Array, ""]:
        r"""Mean of :math:`|v(x + \sigma\epsilon) - x|^2` over ``(K, d)`` samples."""
        x = as_points("x", x)
        noise = jnp.asarray(self.sigma, x.dtype) * random.normal(rng_key, x.shape, x.dtype)
        return jnp.mean(jnp.sum((self._residual(params, x + noise) + noise) ** 2, axis=1))

    def score(self, params: Any, x: ArrayLike) -> Float[Array, "k d"]:
        """The estimate at ``(K, d)`` points."""
        x = as_points("x", x)
        return self._residual(params, x) / jnp.asarray(self.sigma, x.dtype) ** 2

    def _residual(self, params: Any, x: Array) -> Array:
        residual = self._pair(x.shape[1])[1](params, x)
        if (shape := jax.tree.map(jnp.shape, residual)) != x.shape:
            raise ValueError(f"network maps points of shape {x.shape} to {shape}.")
        return residual

    def _pair(self, d: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # Built when it is needed, because the functions of stax cannot be pickled.
        if self.network is not None:
            init, apply = self.network
            return init, apply
        hidden = [layer for width in self.hidden_dims for layer in (stax.Dense(width), stax.Tanh)]
        init, apply = stax.serial(*hidden, stax.Dense(d))
        return init, lambda params, x: jnp.asarray(self.sigma, x.dtype) * apply(params, x)
