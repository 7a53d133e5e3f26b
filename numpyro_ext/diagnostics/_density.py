"""The density of a guide: what those of its sites add up to, and its log weights."""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoGuide,
    AutoGuideList,
    AutoNormal,
    AutoSemiDAIS,
)

from numpyro_ext._model.arguments import without_handlers
from numpyro_ext._model.density import log_prob, row_log_prob, scaled
from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import Site, is_delta, latent_sites, sample_sites
from numpyro_ext._model.units import Layout
from numpyro_ext._typing import Trace

Reference = tuple[dict[str, Array], dict[str, Array]]
"""Log probabilities of the sites of the model and of the guide at one draw, row by row."""


def density_of(guide: Any, guide_trace: Trace, model_trace: Trace) -> tuple[str, list[str]]:
    r"""``"exact"``, ``"bound"`` or ``"none"``: the sum of the log densities of a guide's sites is
    the density of its draws, that of the draws and of auxiliary variables, or neither. And the
    ``Delta`` sites of which nobody has said that they state their Jacobian.

    - An ``Implicit`` site has no density: ``"none"``.
    - Every latent site of the model is drawn from a distribution: ``"exact"``, or ``"bound"`` if
      the guide has auxiliary sites besides, because the sum is then the density of both.
    - Some are a ``Delta``, a function of auxiliary sites. NumPyro's guides, and their subclasses,
      state the Jacobian of that function in the ``log_density`` of the ``Delta``; other guides
      declare it by ``infer={"states_jacobian": True}`` at the site. Then it is ``"exact"`` if there
      are as many auxiliary coordinates as coordinates of the ``Delta`` sites and none that is
      discrete, and ``"bound"`` if there are more. Without a declaration it is ``"none"``.
    """
    latents = list(latent_sites(guide_trace))
    if not all(has_density(site["fn"]) for site in latents):
        return "none", []
    drawn = [site for site in latents if site["name"] not in model_trace and not is_delta(site)]
    points = [site for site in latents if site["name"] in model_trace and is_delta(site)]
    if not points:
        return ("bound" if drawn else "exact"), []
    continuous = [site for site in drawn if not site["fn"].support.is_discrete]
    free = sum(coordinates(site["fn"].support, site) for site in continuous)
    free -= sum(coordinates(model_trace[site["name"]]["fn"].support, site) for site in points)
    if free < 0:
        return "none", []
    guide = without_handlers(guide)
    undeclared = [site["name"] for site in points if not _states_jacobian(guide, site)]
    if undeclared:
        return "none", undeclared
    return ("bound" if free or len(continuous) < len(drawn) else "exact"), []


def _states_jacobian(guide: Any, site: Site) -> bool:
    if isinstance(guide, AutoGuideList):
        parts = [part for part in guide if isinstance(part, AutoGuide)]
        owner = [part for part in parts if site["name"] in (part.prototype_trace or ())]
        return any(_states_jacobian(part, site) for part in owner) or _declares(site)
    return isinstance(guide, AutoContinuous | AutoNormal | AutoSemiDAIS) or _declares(site)


def _declares(site: Site) -> bool:
    return bool(site["infer"].get("states_jacobian"))


def declare(undeclared: Sequence[str]) -> str:
    """What to do about these ``Delta`` sites, after another remedy; empty without any."""
    if not undeclared:
        return ""
    return (
        f"; or, if the log_density of the Delta '{undeclared[0]}' is minus the log Jacobian of the"
        ' map from the noise, say so by infer={"states_jacobian": True} at the site'
    )


def coordinates(support: Any, site: Site) -> int:
    """Unconstrained coordinates of a value."""
    return math.prod(biject_to(support).inverse_shape(jnp.shape(site["value"])))


def _sum(x: Array) -> Array:
    """The sum in blocks, whose rounding error does not grow with the number of terms."""
    size = math.isqrt(x.size)
    if size < 100:
        return jnp.sum(x)
    blocks = jnp.pad(jnp.ravel(x), (0, -x.size % size)).reshape(-1, size)
    # Without the barrier both sums may be compiled to one.
    return jnp.sum(lax.optimization_barrier(jnp.sum(blocks, 1)))


def reference_of(model_trace: Trace, guide_trace: Trace, units: Layout | None) -> Reference:
    """What :func:`log_weight` takes off every row, and :func:`total_of` adds again."""

    def at(trace: Trace) -> dict[str, Array]:
        each = {}
        for site in sample_sites(trace):
            x = log_prob(site) if units else scaled(site, row_log_prob(site))
            each[site["name"]] = jnp.where(jnp.isfinite(x), x, 0.0)
        return each

    return at(model_trace), at(guide_trace)


def log_weight(
    model_trace: Trace, guide_trace: Trace, units: Layout | None, reference: Reference
) -> Array:
    r""":math:`\log p - \log q` minus that of the reference, ``(*units)``: rows are compared before
    they are added up, of which single precision knows no more than 0.06 for half a million."""

    def part(trace: Trace, at: dict[str, Array]) -> Array:
        sites = list(sample_sites(trace))
        if units is not None:
            return units.sum_sites(
                sites, local=True, log_prob=lambda site: log_prob(site) - at[site["name"]]
            )
        rows = (scaled(site, row_log_prob(site)) - at[site["name"]] for site in sites)
        return sum(map(_sum, rows), jnp.zeros(()))

    of_model, of_guide = reference
    return part(model_trace, of_model) - part(guide_trace, of_guide)


def total_parts(
    model_trace: Trace, guide_trace: Trace, units: Layout | None, reference: Reference
) -> Reference:
    """The terms of the log weight of a reference, for :func:`total_of`."""
    if units is None:
        return reference

    def part(trace: Trace, at: dict[str, Array]) -> dict[str, Array]:
        sites = sample_sites(trace)
        return {"": units.sum_sites(sites, local=True, log_prob=lambda site: at[site["name"]])}

    return part(model_trace, reference[0]), part(guide_trace, reference[1])


def total_of(parts: Any, units: Layout | None) -> np.ndarray:
    """``(*units)`` log weights of the reference, in double precision."""

    def add(terms: dict[str, np.ndarray]) -> Any:
        wide = (np.asarray(x, np.float64) for x in terms.values())
        return sum(wide if units else map(np.sum, wide))

    return add(parts[0]) - add(parts[1])


def union(sources: Any) -> frozenset[str]:
    """All that any array of a tree depends on, by ``eval_provenance``."""
    leaves = jax.tree.leaves(sources, is_leaf=lambda x: isinstance(x, frozenset))
    return frozenset[str]().union(*leaves)
