r"""The Gauss-Newton matrix :math:`\sum_n J_n^\top F_n J_n`, and a likelihood made linear."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import substitute

from numpyro_ext._model.factors import Factors
from numpyro_ext._model.operations import gradient, hessian, jacobian
from numpyro_ext._model.read import Site, frames, sample_sites
from numpyro_ext._typing import Params, Trace
from numpyro_ext.guides.likelihoods import predictor, whitened, with_predictor

_NUMBERS = 4_000_000
"""Numbers of a Jacobian that are in memory together."""
_COLUMNS = 64
"""Derivatives that are taken together."""


class Outputs(Factors):
    r"""The whitened parameters :math:`R_n(\theta_n)\,\theta_n` of the likelihood of each row,
    ``row(x, n)``, in which only the last factor has a derivative."""

    def with_params(self, params: Params, args: tuple, kwargs: dict[str, Any]) -> "Outputs":
        """The same with other parameters and arguments of the same shapes, which may be traced."""
        other = self.on(args, kwargs)
        other.program.model = substitute(self.program.model, data=params)
        return other

    def _log_lik(self, x: Array, idx: Array, local: Any) -> Array:
        trace = self._trace(x, idx, local)
        size, batch = trace[self.plate]["args"]
        share = size / (size if batch is None else batch)
        return jnp.concatenate([self._rows(site, share) for site in self.data_sites(trace)], axis=1)

    def data_sites(self, trace: Trace) -> list[Site]:
        sites = sample_sites(trace)
        return [site for site in sites if site["is_observed"] and self.plate in frames(site)]

    def _rows(self, site: Site, share: float) -> Array:
        """``(rows, k)``, with the square root of the scale that is not the plate's."""
        axis = len(site["fn"].batch_shape) + frames(site)[self.plate]
        theta = jnp.moveaxis(whitened(site), axis, 0)
        if site["scale"] is not None:
            scale = jnp.asarray(site["scale"]) / share
            if scale.ndim:
                raise ValueError(
                    f"the observed site '{site['name']}' has a scale of shape {scale.shape};"
                    " handlers.scale of one number is taken here."
                )
            theta = jnp.sqrt(scale) * theta
        return theta.reshape(len(theta), -1)

    def curvature(self, x: Array, coords: np.ndarray) -> Array:
        """The Gauss-Newton matrix of all rows in these coordinates of ``x``."""
        zeros = jnp.zeros((len(coords), len(coords)), x.dtype)
        return self._add_rows(zeros, lambda J: J.T @ J, x, coords)

    def diagonal_curvature(self, x: Array, coords: np.ndarray) -> Array:
        """The diagonal of :meth:`curvature`."""
        zeros = jnp.zeros(len(coords), x.dtype)
        return self._add_rows(zeros, lambda J: jnp.sum(J**2, axis=0), x, coords)

    def _add_rows(
        self, zeros: Array, term: Callable[[Array], Array], x: Array, coords: np.ndarray
    ) -> Array:
        """The sum of a term of the Jacobians of all rows, some rows at a time."""

        def row(v: Array, n: Array) -> Array:
            return self.row(x.at[coords].set(v), n)

        v, d = x[coords], len(coords)
        k = jax.eval_shape(row, v, jnp.zeros((), int)).shape[0]

        def term_of_rows(n: Array, counts: Array) -> Array:
            J = jax.vmap(lambda n: jacobian(lambda v: row(v, n))(v))(n)
            return term(jnp.where(counts[:, None, None], J, 0.0).reshape(-1, d))

        block = int(np.clip(_NUMBERS // max(1, k * d), 1, self.size))
        return _sum_of_blocks(term_of_rows, self.size, block, zeros)

    def _minus_log_prior(self, x: Array, coords: np.ndarray) -> Callable[[Array], Array]:
        """Minus the log of all other factors, in these coordinates."""

        def prior(v: Array) -> Array:
            terms = self.terms(x.at[coords].set(v))
            return -sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))

        return prior

    def prior_curvature(self, x: Array, coords: np.ndarray) -> Array:
        """The Hessian of minus the log of all other factors."""
        return hessian(self._minus_log_prior(x, coords))(x[coords])

    def diagonal_prior_curvature(self, x: Array, coords: np.ndarray) -> Array:
        """The diagonal of :meth:`prior_curvature`; by two products where that is diagonal."""
        v, slope = x[coords], gradient(self._minus_log_prior(x, coords))

        def product(u: Array) -> Array:
            return jax.jvp(slope, (v,), (u,))[1]

        # A diagonal Hessian keeps every random factor to its own coordinate.
        factors = random.uniform(random.key(0), v.shape, v.dtype, 1.0, 2.0)
        sums = product(jnp.ones_like(v))
        is_diagonal = jnp.allclose(sums, product(factors) / factors, rtol=1e-4, atol=1e-6)

        def each_alone(_: Array) -> Array:
            def entry(i: Array) -> Array:
                return product((jnp.arange(len(v)) == i).astype(v.dtype))[i]

            return lax.map(entry, jnp.arange(len(v)), batch_size=_COLUMNS)

        return lax.cond(is_diagonal, lambda sums: sums, each_alone, sums)


class LinearisedPredictive(NamedTuple):
    """The linear predictor of an observed site: its value at the mode, in the shape of the site
    (and a last axis of categories), and the diagonal of :math:`J S J^\\top`."""

    mean: Array
    variance: Array


class Linearised:
    """An observed site, with its linear predictor expanded around the latent vector ``v``."""

    def __init__(self, site: Callable[[Array], Site], v: Array) -> None:
        self.site, self.v = site, v
        self.shape = jax.eval_shape(lambda v: predictor(site(v)), v).shape

    def eta(self, v: Array) -> Array:
        """The linear predictor, raveled."""
        return jnp.ravel(predictor(self.site(v)))

    def moments(self, root: Array) -> LinearisedPredictive:
        """The moments under a normal, from a root ``(d, d)`` of its covariance, or ``(d,)``."""

        @jax.jit
        def both(v: Array, root: Array) -> tuple[Array, Array]:
            return self.eta(v), _variances(self.eta, v, root)

        mean, variance = both(self.v, root)
        return LinearisedPredictive(mean.reshape(self.shape), variance.reshape(self.shape))

    def moved(self, move: Array) -> Site:
        """The site where the latent vector has moved by ``(d,)``."""
        here = self.site(self.v)
        start, change = jax.jvp(self.eta, (self.v,), (move.astype(self.v.dtype),))
        return {**here, "fn": with_predictor(here, (start + change).reshape(self.shape))}

    def draws(self, rng_key: Array, moves: Array) -> Array:
        """One draw of the site for each of the ``(S, d)`` moves of the latent vector."""

        def draw(move_and_key: tuple[Array, Array]) -> Array:
            move, rng_key = move_and_key
            value: Array = self.moved(move)["fn"].sample(rng_key)
            return value

        keys = random.split(rng_key, len(moves))
        return jax.jit(lambda *pairs: lax.map(draw, pairs))(moves, keys)


def _variances(fn: Callable[[Array], Array], v: Array, root: Array) -> Array:
    """The diagonal of ``J S J^T``, from the columns of ``J root`` or from the rows of J."""
    d, size = len(v), jax.eval_shape(fn, v).size
    if size < d:
        _, pull = jax.vjp(fn, v)

        def variance(i: Array) -> Array:
            row = pull((jnp.arange(size) == i).astype(v.dtype))[0]
            return jnp.sum((row * root if root.ndim == 1 else row @ root) ** 2)

        return lax.map(variance, jnp.arange(size), batch_size=_COLUMNS)
    _, push = jax.linearize(fn, v)

    def squares_of_columns(i: Array, counts: Array) -> Array:
        unit = ((jnp.arange(d) == i[:, None]) & counts[:, None]).astype(v.dtype)
        columns = unit * root if root.ndim == 1 else unit @ root.T
        return jnp.sum(jax.vmap(push)(columns) ** 2, axis=0)

    return _sum_of_blocks(squares_of_columns, d, _COLUMNS, jnp.zeros(size, v.dtype))


def _sum_of_blocks(
    term: Callable[[Array, Array], Array], size: int, block: int, zeros: Array
) -> Array:
    """The sum of ``term(indices, counts)`` over blocks; indices that only fill up do not count."""

    def add(total: Array, i: Array) -> tuple[Array, None]:
        return total + term(jnp.minimum(i, size - 1), i < size), None

    return lax.scan(add, zeros, jnp.arange(-(-size // block) * block).reshape(-1, block))[0]
