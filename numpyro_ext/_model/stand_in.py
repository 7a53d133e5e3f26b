"""A model that stands in for one of all rows: some of the rows, and the expansion of the others."""

from typing import Any

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.handlers import block, seed, trace

from numpyro_ext._model.handlers import rows
from numpyro_ext._model.read import Site, frames, trace_of
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext._numpyro import at_unconstrained
from numpyro_ext._typing import Model, Sites, Trace

__all__ = ["on_rows", "rows_for", "stand_in"]

ROWS = 2000
"""Rows that stand in for more; one of them costs as much as several without the expansion."""


def rows_for(proxy: TaylorProxy) -> int:
    """How many rows stand in for all."""
    return min(proxy.size, ROWS)


def on_rows(model: Model, proxy: TaylorProxy) -> Model:
    """The model on so many rows, the same random ones in every run."""
    chosen = np.random.default_rng(0).choice(proxy.size, rows_for(proxy), replace=False)
    known = {proxy.plate: (proxy.size, proxy.batch)}
    return rows(model, {proxy.plate: jnp.asarray(np.sort(chosen))}, known)


def stand_in(model: Model, proxy: TaylorProxy) -> Model:
    """The model with the log likelihood of its rows by a proxy and :data:`ROWS` of them. Its latent
    sites are those of the model, and its arguments too.

    The rows are the same in every run, so it is a density of its own, whose logarithm differs from
    that of all rows by a function of the latent sites.
    """
    some = on_rows(model, proxy)

    def of_rows(site: Site) -> bool:
        observed = site["type"] == "sample" and site["is_observed"]
        return site["name"] == proxy.plate or (observed and proxy.plate in frames(site))

    def with_proxy(*args: Any, **kwargs: Any) -> None:
        with block(hide_fn=of_rows), trace() as found:
            some(*args, **kwargs)

        def run(z: Sites) -> Trace:
            with block():
                return trace_of(seed(at_unconstrained(some, z), random.key(0)), args, kwargs)

        # Two sites, because float32 would round the change to the digits of the sum.
        numpyro.factor(f"{proxy.plate}, change from the center", proxy.log_lik(found, run)[0])
        numpyro.factor(f"{proxy.plate}, at the center", jnp.asarray(proxy.value, float))

    return with_proxy
