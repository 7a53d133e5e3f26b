"""The density of a guide, as the sum over its sites, and its log weights."""

from collections.abc import Sequence
import math
from typing import Any

from jax import Array, lax
import jax.numpy as jnp
import numpy as np
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
from numpyro_ext._model.read import (
    Site,
    is_delta,
    latent_sites,
    sample_sites,
    unconstrained_shape,
)
from numpyro_ext._model.units import Layout
from numpyro_ext._typing import Trace

Reference = tuple[dict[str, Array], dict[str, Array]]
"""Log probabilities of the sites of the model and of the guide at one draw, row by row."""


def density_of(guide: Any, guide_trace: Trace, model_trace: Trace) -> tuple[str, list[str]]:
    """``"exact"``, ``"bound"`` or ``"none"``: the sum of the log densities of a guide's sites is
    the density of its draws, of draws and auxiliary variables, or neither. Besides, the ``Delta``
    sites of which nobody has said that they state their Jacobian.

    A ``Delta`` is a function of auxiliary sites. NumPyro's guides state its Jacobian in its
    ``log_density``, and others declare it by ``infer={"states_jacobian": True}``. With as many
    auxiliary coordinates, none of them discrete, it is ``"exact"``, and with more ``"bound"``.
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
    """What to do about these ``Delta`` sites."""
    if not undeclared:
        return ""
    return (
        f"; or, if the log_density of the Delta '{undeclared[0]}' is minus the log Jacobian of the"
        ' map from the noise, say so by infer={"states_jacobian": True} at the site'
    )


def coordinates(support: Any, site: Site) -> int:
    """The number of unconstrained coordinates of a value."""
    return math.prod(unconstrained_shape(support, jnp.shape(site["value"])))


def _sum(x: Array) -> Array:
    """The sum in blocks, so that its rounding error does not grow with the number of terms."""
    size = math.isqrt(x.size)
    if size < 100:
        return jnp.sum(x)
    blocks = jnp.pad(jnp.ravel(x), (0, -x.size % size)).reshape(-1, size)
    # Without the barrier both sums may be compiled to one.
    return jnp.sum(lax.optimization_barrier(jnp.sum(blocks, 1)))


def _log_probs(trace: Trace, units: Layout | None) -> dict[str, Array]:
    """The log probabilities of the sites, row by row where there are no units."""
    sites = sample_sites(trace)
    return {x["name"]: log_prob(x) if units else scaled(x, row_log_prob(x)) for x in sites}


def _add(trace: Trace, units: Layout | None, terms: dict[str, Array]) -> Array:
    """``(*units)`` sums of the terms of all sites."""
    if units is None:
        return sum(map(_sum, terms.values()), jnp.zeros(()))
    sites = list(sample_sites(trace))
    return units.sum_sites(sites, local=True, log_prob=lambda site: terms[site["name"]])


def reference_of(model_trace: Trace, guide_trace: Trace, units: Layout | None) -> Reference:
    """The terms that :func:`log_weight` takes off every row, and :func:`total_of` adds again."""
    each = (_log_probs(trace, units) for trace in (model_trace, guide_trace))
    finite = [{n: jnp.where(jnp.isfinite(x), x, 0.0) for n, x in terms.items()} for terms in each]
    return finite[0], finite[1]


def log_weight(
    model_trace: Trace, guide_trace: Trace, units: Layout | None, reference: Reference
) -> Array:
    """``log p - log q`` minus the same of the reference, ``(*units)``: compared row by row, because
    single precision rounds the sum of half a million of them to 0.06."""

    def part(trace: Trace, before: dict[str, Array]) -> Array:
        terms = {name: x - before[name] for name, x in _log_probs(trace, units).items()}
        return _add(trace, units, terms)

    return part(model_trace, reference[0]) - part(guide_trace, reference[1])


def total_parts(
    model_trace: Trace, guide_trace: Trace, units: Layout | None, reference: Reference
) -> Reference:
    """The terms of the log weight of a reference, for :func:`total_of`."""
    if units is None:
        return reference
    traces = model_trace, guide_trace
    parts = [{"": _add(t, units, terms)} for t, terms in zip(traces, reference, strict=True)]
    return parts[0], parts[1]


def total_of(parts: Any, units: Layout | None) -> np.ndarray:
    """``(*units)`` log weights of the reference, in double precision."""

    def add(terms: dict[str, np.ndarray]) -> Any:
        wide = (np.asarray(x, np.float64) for x in terms.values())
        return sum(wide if units else map(np.sum, wide))

    return add(parts[0]) - add(parts[1])
