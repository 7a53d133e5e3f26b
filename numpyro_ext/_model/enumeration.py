"""Discrete latent sites: the sum of the density over their values, and their draws elsewhere."""

import math
from typing import Any

from jax import Array, random
import jax.numpy as jnp
from numpyro.handlers import block, seed

from numpyro_ext._model.density import log_prob
from numpyro_ext._model.read import Site, frames, is_same_scale, own_scale, sample_sites
from numpyro_ext._typing import Model, Trace


def parallel(site: dict[str, Any]) -> dict[str, Any]:
    """The mark of a site that is summed out, without which NumPyro warns."""
    return {"enumerate": "parallel"} if site["fn"].has_enumerate_support else {}


def summed_log_density(trace: Trace, batches: dict[str, tuple[int, int]]) -> Array:
    """The log density of a trace of funsor's, summed over the values of its discrete latent sites.

    In the plates of ``batches``, ``{plate: (size, rows)}``, each row is summed by itself and scaled
    by N/M. So it is by a ``handlers.scale`` around all sites of the row, which means copies of it;
    one around observed sites alone is inside of the sum. ``NUTS`` has every scale inside.
    """
    import funsor  # an extra of the package
    from funsor.optimizer import apply_optimizer

    scales = {name: size / rows for name, (size, rows) in batches.items()}
    plates = {name for site in sample_sites(trace) for name in frames(site)}
    # Summed sites, what depends on them, and the sites themselves.
    groups: list[tuple[set[str], list[Any], list[Site]]] = []
    for site in sample_sites(trace):
        log_p, names = log_prob(site), site["infer"]["dim_to_name"]
        if any(name.startswith("_time") for name in names.values()):
            raise ValueError(
                f"site '{site['name']}' is in a scan with discrete latent sites, which are summed"
                " out without minibatches and scales alone; drop subsample_size and handlers.scale."
            )
        factor = funsor.to_funsor(log_p if names else jnp.squeeze(log_p), funsor.Real, names)
        summed = set(factor.inputs) - plates
        joined = [group for group in groups if summed & group[0]]
        groups = [group for group in groups if not any(group is other for other in joined)]
        parts = [factor, *(part for group in joined for part in group[1])]
        sites = [site, *(x for group in joined for x in group[2])]
        groups.append((summed.union(*(group[0] for group in joined)), parts, sites))
    total = jnp.zeros(())
    for summed, parts, sites in groups:
        copies = _copies(sites, batches)
        if copies is None:
            parts = [
                part * _as_funsor(own_scale(x, batches), x)
                for part, x in zip(parts, sites, strict=True)
            ]
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
        optimised: Any = apply_optimizer(lazy)
        if copies is not None:
            optimised = optimised * _as_funsor(copies, sites[0])
        each = optimised.reduce(funsor.ops.add)
        total = total + math.prod(scales.get(name, 1.0) for name in shared) * each.data
    return total


def _copies(sites: list[Site], batches: dict[str, tuple[int, int]]) -> Any:
    """The scale of all of these sites; None where observed ones alone have one, or another."""
    scales = [own_scale(site, batches) for site in sites]
    if all(is_same_scale(scales[0], scale) for scale in scales):
        return scales[0]
    for site, scale in zip(sites, scales, strict=True):
        if not site["is_observed"] and not is_same_scale(scale, 1.0):
            raise ValueError(
                f"the latent site '{site['name']}' is under a numpyro.handlers.scale that not every"
                " site which is summed out with it has, so it does not mean copies of the rows; put"
                " the same scale around all of them, or around the observed sites alone."
            )
    return None


def _as_funsor(scale: Any, site: Site) -> Any:
    import funsor

    scale = jnp.asarray(scale, jnp.result_type(float))
    names = site["infer"]["dim_to_name"]
    return funsor.to_funsor(scale if names else jnp.squeeze(scale), funsor.Real, names)


def without_summed(model: Model) -> Model:
    """The model with draws of the sites that are summed out, which no handler around it sees."""

    def is_summed(site: Site) -> bool:
        latent = site["type"] == "sample" and not site["is_observed"]
        return latent and site["fn"].support.is_discrete

    return block(seed(model, random.key(0)), hide_fn=is_summed)
