r"""The likelihood's parameters row by row, and their curvature :math:`\sum_n J_n^\top F_n J_n`."""

import copy
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import substitute

from numpyro_ext._model.factors import Factors
from numpyro_ext._model.read import Site, frames, sample_sites
from numpyro_ext._typing import Params
from numpyro_ext.guides.likelihoods import predictor, whitened

__all__ = ["Outputs"]

_NUMBERS = 4_000_000
"""Numbers of a Jacobian that are in memory together."""
_ROWS = 32
"""Rows that tell a linear predictor from another one."""


class Outputs(Factors):
    r"""The whitened parameters of the likelihood of each row, in place of its log density.

    ``row(x, n)`` is the vector :math:`R_n(\theta_n)\,\theta_n` of
    :mod:`numpyro_ext.guides.likelihoods`, in which only the last factor has a derivative.
    """

    _of_site = staticmethod(whitened)

    def with_params(self, params: Params, args: tuple, kwargs: dict[str, Any]) -> "Outputs":
        """The same with other values of the model's ``param`` sites and of its arguments, of the
        same shapes, which may be traced."""
        other = self.on(args, kwargs)
        other.program.model = substitute(self.program.model, data=params)
        return other

    def predictors(self) -> "Outputs":
        """The same with linear predictors as the rows."""
        other = copy.copy(self)
        other._of_site = predictor
        other._way = getattr(other, self._way.__name__)
        return other

    def _log_lik(self, x: Array, idx: Array, local: Any) -> Array:
        trace = self._trace(x, idx, local)
        size, batch = trace[self.plate]["args"]
        share = size / (size if batch is None else batch)
        found = [self._rows(site, share) for site in sample_sites(trace) if self._is_data(site)]
        return jnp.concatenate(found, axis=1)

    def _is_data(self, site: Site) -> bool:
        return site["is_observed"] and self.plate in frames(site)

    def _rows(self, site: Site, share: float) -> Array:
        """``(rows, k)``, with the square root of the scale that is not the plate's."""
        found = self._of_site(site)
        axis = len(site["fn"].batch_shape) + frames(site)[self.plate]
        found = jnp.moveaxis(found, axis, 0)
        if site["scale"] is not None:
            scale = jnp.asarray(site["scale"]) / share
            if scale.ndim:
                raise ValueError(
                    f"the observed site '{site['name']}' has a scale of shape {scale.shape};"
                    " handlers.scale of one number is taken here."
                )
            found = jnp.sqrt(scale) * found
        return found.reshape(len(found), -1)

    def curvature(self, x: Array, coords: np.ndarray, *, diagonal: bool) -> Array:
        """The Gauss-Newton matrix of all rows in these coordinates of ``x``, or its diagonal.

        One Jacobian for each row, some rows at a time.
        """

        def row(v: Array, n: Array) -> Array:
            return self.row(x.at[coords].set(v), n)

        v, d = x[coords], len(coords)
        k = jax.eval_shape(row, v, jnp.zeros((), int)).shape[0]
        block = int(np.clip(_NUMBERS // max(1, k * d), 1, self.size))
        num_blocks = -(-self.size // block)
        index = jnp.arange(num_blocks * block).reshape(num_blocks, block)

        def add(total: Array, n: Array) -> tuple[Array, None]:
            at = jnp.minimum(n, self.size - 1)
            J = jax.vmap(jax.jacrev(row), (None, 0))(v, at)
            J = jnp.where((n < self.size)[:, None, None], J, 0.0).reshape(-1, d)
            return total + (jnp.sum(J**2, axis=0) if diagonal else J.T @ J), None

        zeros = jnp.zeros(d if diagonal else (d, d), x.dtype)
        return lax.scan(add, zeros, index)[0]

    def prior_curvature(self, x: Array, coords: np.ndarray, *, diagonal: bool) -> Array:
        """The Hessian of minus the log of all other factors, or its diagonal."""

        def prior(v: Array) -> Array:
            terms = self.terms(x.at[coords].set(v))
            return -sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))

        v = x[coords]
        if not diagonal:
            return jax.hessian(prior)(v)

        def product(u: Array) -> Array:
            return jax.jvp(jax.grad(prior), (v,), (u,))[1]

        # A diagonal Hessian keeps every random factor to its own coordinate.
        factors = random.uniform(random.key(0), v.shape, v.dtype, 1.0, 2.0)
        sums = product(jnp.ones_like(v))
        is_diagonal = jnp.allclose(sums, product(factors) / factors, rtol=1e-4, atol=1e-6)

        def one_by_one(_: Array) -> Array:
            unit = jnp.arange(len(v))
            each = lambda i: product((unit == i).astype(v.dtype))[i]  # noqa: E731
            return lax.map(each, unit, batch_size=64)

        return lax.cond(is_diagonal, lambda sums: sums, one_by_one, sums)

    def linear_sites(self, x: Array) -> list[str]:
        """The latent sites in which the linear predictors are affine, all of them together."""
        fn, info = self.predictors(), self.info
        n = jnp.arange(min(self.size, _ROWS))
        keys = random.split(random.key(0), 2)
        start = x + 0.5 * random.normal(keys[0], x.shape, x.dtype)
        step = random.normal(keys[1], x.shape, x.dtype)

        @jax.jit
        def bends(mask: Array) -> tuple[Array, Array]:
            at = jax.vmap(fn.row, (None, 0))
            a, b, c = (at(start + t * mask * step, n) for t in (0.0, 1.0, 2.0))
            change = jnp.max(jnp.abs(b - a)) + jnp.max(jnp.abs(c - b))
            return change > 0, jnp.max(jnp.abs(c - 2 * b + a)) > 1e-3 * change

        def is_affine(names: list[str]) -> bool:
            mask = np.zeros(info.size)
            for name in names:
                mask[info.slices[name]] = 1.0
            moves, bent = bends(jnp.asarray(mask, x.dtype))
            return bool(moves) and not bool(bent)

        found = [name for name in info.latents if is_affine([name])]
        return found if is_affine(found) else []
