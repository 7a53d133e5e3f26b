"""A likelihood whose linear predictor is linear in the latent sites: its moments and draws."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_ext._model.read import Site
from numpyro_ext.guides.likelihoods import like, predictor, with_predictor

__all__ = ["Linearised", "LinearisedPredictive"]

_COLUMNS = 64
"""Derivatives of the predictor that are taken together."""


class LinearisedPredictive(NamedTuple):
    """The linear predictor of an observed site under the linearised network.

    * ``mean`` - its value at the mode, in the shape of the site (and a last axis of categories).
    * ``variance`` - the diagonal of :math:`J S J^\\top`, in that shape.
    """

    mean: Array
    variance: Array


class Linearised:
    """An observed site, with its linear predictor expanded around ``v``.

    :param site: the site as a function of the latent vector.
    :param v: the point of the expansion, ``(d,)``.
    """

    def __init__(self, site: Callable[[Array], Site], v: Array) -> None:
        self.site, self.v = site, v
        self.shape = jax.eval_shape(lambda v: predictor(site(v)), v).shape

    def eta(self, v: Array) -> Array:
        """The linear predictor, raveled."""
        return jnp.ravel(predictor(self.site(v)))

    def moments(self, root: Array) -> LinearisedPredictive:
        """Those under a normal whose covariance has the root ``(d, d)``, or a diagonal ``(d,)``."""

        def both(v: Array, root: Array) -> tuple[Array, Array]:
            return self.eta(v), _variances(self.eta, v, root)

        mean, variance = jax.jit(both)(self.v, root)
        return LinearisedPredictive(mean.reshape(self.shape), variance.reshape(self.shape))

    def at(self, move: Array) -> Site:
        """The site where the latent vector has moved by ``(d,)``."""
        here = self.site(self.v)
        start, change = jax.jvp(self.eta, (self.v,), (move.astype(self.v.dtype),))
        return {**here, "fn": like(here, (start + change).reshape(self.shape))}

    def draws(self, rng_key: Array, moves: Array) -> Array:
        """One draw of the site for each of the ``(S, d)`` moves of the latent vector."""

        def run(v: Array, moves: Array, keys: Array) -> Array:
            start, push = jax.linearize(self.eta, v)
            here = self.site(v)

            def draw(move: Array, rng_key: Array) -> Array:
                eta = (start + push(move)).reshape(self.shape)
                value: Array = with_predictor(here, eta).sample(rng_key)
                return value

            return lax.map(lambda both: draw(*both), (moves, keys))

        return jax.jit(run)(self.v, moves, random.split(rng_key, len(moves)))


def _variances(fn: Callable[[Array], Array], v: Array, root: Array) -> Array:
    """The diagonal of ``J S J^T``, from the columns of ``J root`` or, where the outputs are fewer,
    from the rows of J."""
    d, size = len(v), jax.eval_shape(fn, v).size

    def times_root(rows: Array) -> Array:
        return rows * root if root.ndim == 1 else rows @ root

    if size < d:
        _, pull = jax.vjp(fn, v)
        units = jnp.arange(size)

        def one(i: Array) -> Array:
            return jnp.sum(times_root(pull((units == i).astype(v.dtype))[0]) ** 2)

        return lax.map(one, units, batch_size=_COLUMNS)
    _, push = jax.linearize(fn, v)
    num_blocks = -(-d // _COLUMNS)

    def add(total: Array, i: Array) -> tuple[Array, None]:
        # A column past the last one is a zero.
        unit = (jnp.arange(d) == i[:, None]).astype(v.dtype)
        columns = unit * root if root.ndim == 1 else unit @ root.T
        return total + jnp.sum(jax.vmap(push)(columns) ** 2, axis=0), None

    index = jnp.arange(num_blocks * _COLUMNS).reshape(num_blocks, _COLUMNS)
    return lax.scan(add, jnp.zeros(size, v.dtype), index)[0]
