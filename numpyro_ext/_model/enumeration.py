"""What discrete latent sites, over whose values a potential sums, are where no density is taken."""

from collections.abc import Collection
from typing import Any

import jax
from jax import random
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_sample
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.handlers import first_rows
from numpyro_ext._model.program import trace_of
from numpyro_ext._model.read import Site
from numpyro_ext._typing import Model, Sites

__all__ = ["depending_on", "without_summed"]


def without_summed(model: Model) -> Model:
    """The model with draws of the sites that are summed out, which no handler around it sees."""

    def is_summed(site: Site) -> bool:
        latent = site["type"] == "sample" and not site["is_observed"]
        return latent and site["fn"].support.is_discrete

    return block(seed(model, random.key(0)), hide_fn=is_summed)


def depending_on(
    model: Model, args: tuple, kwargs: dict[str, Any], summed: Collection[str]
) -> frozenset[str]:
    """The deterministic sites of a model whose values depend on sites that are summed out."""

    def run(summed: Sites) -> Sites:
        fn = seed(first_rows(substitute(model, data=summed)), random.key(0))
        trace = trace_of(substitute(fn, substitute_fn=init_to_sample), args, kwargs)
        return {n: site["value"] for n, site in trace.items() if site["type"] == "deterministic"}

    def values() -> Sites:
        fn = seed(first_rows(model), random.key(0))
        trace = trace_of(substitute(fn, substitute_fn=init_to_sample), args, kwargs)
        return {name: trace[name]["value"] for name in summed}

    found = eval_provenance(run, summed=jax.eval_shape(values))
    return frozenset(name for name, sources in found.items() if sources)
