"""The sum over the values of discrete latent sites, which funsor computes as it does for NUTS."""

from collections.abc import Collection
import math
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_sample
from numpyro.infer.util import potential_energy
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.density import log_prob
from numpyro_ext._model.handlers import first_rows
from numpyro_ext._model.program import trace_of
from numpyro_ext._model.read import Site, frames, sample_sites
from numpyro_ext._numpyro import at_unconstrained
from numpyro_ext._typing import Model, Sites, Trace

__all__ = ["depending_on", "parallel", "summed_potential", "without_summed"]


def parallel(site: Site) -> dict[str, Any]:
    """The mark of a site that is summed out, without which NumPyro warns."""
    return {"enumerate": "parallel"} if site["fn"].has_enumerate_support else {}


def without_summed(model: Model) -> Model:
    """The model with draws of the sites that are summed out, which no handler around it sees."""

    def is_summed(site: Site) -> bool:
        latent = site["type"] == "sample" and not site["is_observed"]
        return latent and site["fn"].support.is_discrete

    return block(seed(model, random.key(0)), hide_fn=is_summed)


def summed_potential(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    z: Sites,
    nesting: int,
    batches: dict[str, tuple[int, int]],
) -> Array:
    """
    NumPyro's potential at values of the continuous sites, summed over all values of the others,
    which have the mark of :func:`parallel`.

    In plates with a minibatch the sum is that of each row, and its logarithm is scaled.

    :param int nesting: the number of axes that plates take.
    :param dict batches: ``{plate: (size, rows)}`` of the plates that have fewer rows here.
    """
    from numpyro.contrib.funsor import enum

    fn = enum(model, -nesting - 1)
    if not batches:
        return jnp.asarray(potential_energy(fn, args, kwargs, z, enum=True))
    return -_log_density(at_unconstrained(fn, z), args, kwargs, batches)


def _log_density(fn: Model, args: tuple, kwargs: dict[str, Any], batches: Any) -> Array:
    import funsor  # pyright: ignore[reportMissingImports] - an extra of the package
    from numpyro.contrib.funsor import plate_to_enum_plate
    from numpyro.contrib.funsor import trace as packed_trace

    with plate_to_enum_plate():
        trace: Trace = packed_trace(fn).get_trace(*args, **kwargs)
    scales = {name: size / rows for name, (size, rows) in batches.items()}
    plates = {name for site in sample_sites(trace) for name in frames(site)}
    groups: list[tuple[set[str], list[Any]]] = []  # summed sites, and what depends on them
    for site in sample_sites(trace):
        log_p, names = log_prob(site), site["infer"]["dim_to_name"]
        if site["scale"] is not None:  # that of minibatches is outside of the sum
            log_p = log_p * (site["scale"] / math.prod(scales.get(n, 1.0) for n in frames(site)))
        if any(name.startswith("_time") for name in names.values()):
            raise ValueError(
                f"site '{site['name']}' is in a scan over time with discrete latent sites, which"
                " are summed out without minibatches alone; drop subsample_size."
            )
        factor = funsor.to_funsor(log_p if names else jnp.squeeze(log_p), funsor.Real, names)
        summed = set(factor.inputs) - plates
        joined = [group for group in groups if summed & group[0]]
        groups = [group for group in groups if not any(group is one for one in joined)]
        parts = [factor, *(part for group in joined for part in group[1])]
        groups.append((summed.union(*(group[0] for group in joined)), parts))
    total = jnp.zeros(())
    for summed, parts in groups:
        inside = [set(part.inputs) & plates for part in parts]
        shared, everywhere = set.intersection(*inside), set.union(*inside)
        for plate in (everywhere - shared) & set(scales):
            raise ValueError(
                f"the discrete latent sites {sorted(summed)} are summed out over all rows together"
                f" of the plate '{plate}', whose minibatches have no unbiased estimate of that sum;"
                " drop subsample_size, or put these sites into the plate."
            )
        with funsor.interpretations.lazy:
            lazy = funsor.sum_product.sum_product(
                funsor.ops.logaddexp,
                funsor.ops.add,
                parts,
                eliminate=frozenset(summed | (everywhere - shared)),
                plates=frozenset(everywhere),
            )
        each = funsor.optimizer.apply_optimizer(lazy).reduce(funsor.ops.add)
        total = total + math.prod(scales.get(name, 1.0) for name in shared) * each.data
    return total


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
