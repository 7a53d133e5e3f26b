"""Moments of a factor times its cavity by the No-U-Turn sampler."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from numpyro.infer.hmc import hmc

from numpyro_ext._checks import check_count
from numpyro_ext.ep.projections import (
    LogFactor,
    Projected,
    Projection,
    from_moments,
    in_factor,
    inverse,
    root,
    smallest,
    weighted_moments,
)
from numpyro_ext.expfam.linalg import matvec


@dataclass(eq=False)
class NUTSProjection(Projection):
    r"""Moments by NUTS on the tilted distribution, for parts of many data or coordinates.

    .. math:: \hat S^{-1} = \frac{S - r - 2}{S - 1}\, \widehat{\operatorname{Cov}}^{-1}

    from S draws, where the covariance is divided by S - 1: for independent draws of a normal
    distribution, the mean of this precision is the true one. Draws of a chain are not independent,
    and S should be many times r. The sampler starts at the mean of the cavity, in coordinates in
    which the cavity is standard normal.

    The site is noise plus the difference to the precision of the cavity, so the factor should be a
    part of the data that says something, not one datum; and sites do not settle below their noise.
    There is no log evidence, and no exclusive form for power 0.

    :param int num_warmup: steps of each chain that adapt the sampler.
    :param int num_samples: draws of each chain.
    :param int num_chains: number of chains, which run together.

    **Reference:** *Expectation propagation as a way of life*, Andrew Gelman et al., JMLR 2020
    (section 4.3).

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_ext.ep import NUTSProjection
        >>> factor = lambda u: -3 * (u[0] - 1)**2 / 2                   # a precision of 3
        >>> found = NUTSProjection(num_warmup=100, num_samples=2000).project(
        ...     factor, jnp.zeros(1), jnp.eye(1), 1.0, jax.random.key(0))
        >>> bool(abs(found.site_precision[0, 0] - 3) < 1)
        True
    """

    num_warmup: int = 200
    num_samples: int = 400
    num_chains: int = 1

    needs_key = True
    has_normaliser = False
    takes_local = True
    exclusive = False

    def __post_init__(self) -> None:
        check_count("num_warmup", self.num_warmup)
        check_count("num_samples", self.num_samples, 2)
        check_count("num_chains", self.num_chains)

    def project(
        self,
        log_factor: LogFactor,
        mean: Array,
        cov: Array,
        power: float,
        rng_key: Array | None = None,
        index: Array | None = None,
        local: int = 0,
    ) -> Projected:
        if rng_key is None:
            raise ValueError("NUTSProjection draws samples; give it a random key, rng_key=.")
        r, S = mean.shape[0], self.num_samples * self.num_chains
        if S <= r + 2:
            raise ValueError(
                f"NUTSProjection takes {S} draws of {r} coordinates; it needs more than {r + 2}"
                " (num_samples times num_chains) for a precision."
            )
        L = root(cov)

        def log_density(w: Array) -> Array:
            e, z = w[:r], ([w[r:]] if local else [])
            return power * log_factor(mean + matvec(L, e), *z) - jnp.sum(e**2) / 2

        start = jnp.zeros(r + local, mean.dtype)
        chain = partial(self._chain, log_density, start, self.num_samples)
        draws = jax.vmap(chain)(random.split(rng_key, self.num_chains)).reshape(S, -1)[:, :r]
        m, C = weighted_moments(jnp.zeros(S), draws)
        precision = inverse(C * S / (S - 1)) * (S - r - 2) / (S - 1)
        v, T = in_factor(*from_moments(m, precision, power), mean, L)
        ok = jnp.all(jnp.isfinite(v)) & jnp.all(jnp.isfinite(T)) & (smallest(C) > 0)
        return Projected(v, T, jnp.array(jnp.nan), ok, jnp.array(False), jnp.array(False))

    def draw(
        self, log_density: Callable[[Array], Array], size: int, rng_key: Array
    ) -> tuple[Array, Array]:
        """The last state of a chain of its own."""
        chain = self._chain(log_density, jnp.zeros(size), 1, rng_key)
        return chain[-1], jnp.array(jnp.nan)

    def _chain(
        self,
        log_density: Callable[[Array], Array],
        start: Array,
        num_samples: int,
        rng_key: Array,
    ) -> Array:
        """``(num_samples, size)`` draws after the warmup."""
        init, step = hmc(lambda w: -log_density(w), algo="NUTS")

        def draw(state: Any, _: None) -> tuple[Any, Array]:
            state = step(state)
            return state, state.z

        state = init(start, self.num_warmup, rng_key=rng_key)
        state = lax.fori_loop(0, self.num_warmup, lambda _, state: step(state), state)
        return lax.scan(draw, state, length=num_samples)[1]
