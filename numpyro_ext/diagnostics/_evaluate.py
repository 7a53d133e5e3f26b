"""Draws of a fit, run through the model on all of its data, a block of draws at a time."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, uncondition
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.density import log_abs_det, log_density, log_prob
from numpyro_ext._model.mistakes import check_observed
from numpyro_ext._model.read import Site, is_data, latent_sites, sample_sites, trace_of
from numpyro_ext._model.units import Layout, find_layout
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._density import density_of
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._memo import remember

__all__ = ["Prototype", "count_of", "default_block_size", "evaluate", "prototype"]

BLOCK = 10**6
"""Log densities in a block of draws, unless the user says otherwise: 4 MB in float32."""


class Prototype(NamedTuple):
    """What all draws have in common, read off one of them without arithmetic."""

    trace: Trace
    """Of the model; only names, kinds, shapes and types mean anything."""
    latents: list[str]
    """The latent sites that are drawn, in the order of the model."""
    density: str
    units: Layout | None
    """How the weight of a draw splits; None if it does not."""
    marginalized: list[str]
    """Latent sites that the run summed out."""
    left_out: list[str]
    """Other sites that cannot be computed without their values."""


def guide_trace_of(fit: Fit, params: Params, key: Array, values: Sites | None = None) -> Trace:
    guide = seed(substitute(fit.guide, data={**params, **(values or {})}), key)
    return trace_of(guide, fit.args, fit.kwargs)


def model_trace_of(fit: Fit, params: Params, latents: Sites, key: Array) -> Trace:
    def value_of(site: Site) -> Array | None:
        is_latent = site["type"] == "sample" and not site["is_observed"]
        return latents.get(site["name"]) if is_latent else None

    model = substitute(substitute(fit.model, data=params), substitute_fn=value_of)
    return trace_of(seed(model, key), fit.args, fit.kwargs)


def _predictive_trace(fit: Fit, params: Params, latents: Sites, key: Array) -> Trace:
    return model_trace_of(fit._replace(model=uncondition(fit.model)), params, latents, key)


def prototype(fit: Fit, rng_key: Array) -> Prototype:
    """Look at one draw, and find what the draws lack."""
    memo = {} if fit.memo is None else fit.memo
    return remember(memo, "prototype", lambda: _prototype(fit, rng_key))


def _prototype(fit: Fit, rng_key: Array) -> Prototype:
    key_guide, key_model = random.split(rng_key)
    params = fit.params[0]
    guide_trace: Trace = {}
    model_trace: Trace = {}

    def look() -> None:
        if fit.draws:
            values = {name: jnp.asarray(x[0]) for name, x in fit.draws[0].items()}
        else:
            guide_trace.update(guide_trace_of(fit, params, key_guide))
            values = {site["name"]: site["value"] for site in latent_sites(guide_trace)}
        model_trace.update(model_trace_of(fit, params, values, key_model))
        check_observed(model_trace)

    jax.eval_shape(look)
    latents = [site["name"] for site in latent_sites(model_trace)]
    if not latents:
        raise ValueError(
            "the model has no latent sample site, so there are no draws to convert; give it at"
            " least one numpyro.sample without obs."
        )
    drawn = fit.draws[0] if fit.draws else guide_trace
    missing = [model_trace[name] for name in latents if name not in drawn]
    for site in missing:
        summed = bool(fit.draws) or site["infer"].get("enumerate")
        if not (summed and site["fn"].has_enumerate_support):
            source = "the draws lack" if fit.draws else "the guide does not draw"
            raise ValueError(
                f"{source} latent site '{site['name']}' of the model; if it is data, pass it in"
                " model_args. Every latent site is needed to compute the other quantities: collect"
                " it, or sum it out of the model."
            )
    marginalized = [site["name"] for site in missing]
    density, units = "none", None
    if guide_trace and not missing:
        rerun = partial(guide_trace_of, fit, key=key_guide)
        density = density_of(
            lambda params, values: rerun(params, values=values), params, guide_trace, model_trace
        )
        layout = find_layout(model_trace, guide_trace, per_datum=False)
        units = layout if density == "exact" and layout.plates else None
    return Prototype(
        trace=model_trace,
        latents=[name for name in latents if name not in marginalized],
        density=density,
        units=units,
        marginalized=marginalized,
        left_out=_depending(fit, model_trace, marginalized, key_model) if missing else [],
    )


def _depending(fit: Fit, trace: Trace, hidden: list[str], key: Array) -> list[str]:
    """Deterministic and observed sites whose value or density depends on the ``hidden`` sites."""

    def outputs(hidden: Sites, others: Sites) -> dict[str, Any]:
        sites = model_trace_of(fit, fit.params[0], {**hidden, **others}, key)
        drawn = _predictive_trace(fit, fit.params[0], {**hidden, **others}, key)
        return {
            name: [log_prob(site), drawn[name]["value"]] if is_data(site) else site["value"]
            for name, site in sites.items()
            if site["type"] == "deterministic" or is_data(site)
        }

    values = {
        site["name"]: jax.ShapeDtypeStruct(jnp.shape(site["value"]), jnp.result_type(site["value"]))
        for site in latent_sites(trace)
    }
    found = eval_provenance(
        outputs,
        hidden={name: x for name, x in values.items() if name in hidden},
        others={name: x for name, x in values.items() if name not in hidden},
    )
    return [name for name in trace if name in found and "hidden" in _union(found[name])]


def _union(sources: Any) -> frozenset[str]:
    leaves = jax.tree.leaves(sources, is_leaf=lambda x: isinstance(x, frozenset))
    return frozenset[str]().union(*leaves)


def default_block_size(trace: Trace) -> int:
    """So many draws that a block has at most ``BLOCK`` log densities."""
    count = sum(count_of(site) for site in sample_sites(trace))
    return max(1, BLOCK // max(1, count))


def count_of(site: Site) -> int:
    """Number of log densities of a site."""
    return math.prod(np.broadcast_shapes(*_batch_shapes(site)))


def _batch_shapes(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    fn = site["fn"]
    shape = jnp.shape(site["value"])
    return shape[: len(shape) - fn.event_dim], fn.batch_shape


def evaluate(
    fit: Fit,
    proto: Prototype,
    rng_key: Array,
    num_samples: int,
    *,
    block_size: int | None = None,
    lp: bool = False,
    log_likelihood: bool = False,
    posterior_predictive: bool = False,
) -> dict[str, Any]:
    """Host arrays ``(chain, draw, *site)``: ``latent``, ``deterministic``, ``stats`` and what was
    asked for; ``outside``, whether a site is outside its support; and ``observed``, the data.

    Each draw has its own key, so ``block_size`` changes the memory and not the numbers.
    """

    block = default_block_size(proto.trace) if block_size is None else block_size
    parts = lp and not proto.marginalized, log_likelihood, posterior_predictive
    memo = {} if fit.memo is None else fit.memo
    run = remember(memo, (block, *parts), lambda: _compiled(fit, proto, block, *parts))
    pieces, observed = [], {}
    for i, key in enumerate(random.split(rng_key, len(fit.params))):
        draws = {name: fit.draws[i][name] for name in proto.latents} if fit.draws else None
        size = num_samples if draws is None else next(iter(draws.values())).shape[0]
        keys = random.split(key, (size, 3))
        out, observed = jax.device_get(run(fit.params[i], draws, keys))
        shape = (fit.num_chains, size // fit.num_chains)
        pieces.append(jax.tree.map(lambda x, shape=shape: x.reshape(shape + x.shape[1:]), out))
    whole = jax.tree.map(lambda *xs: np.concatenate(xs), *pieces)
    return {**whole, "observed": observed}


def _compiled(
    fit: Fit,
    proto: Prototype,
    block: int,
    lp: bool,
    log_likelihood: bool,
    posterior_predictive: bool,
) -> Callable[..., tuple[dict[str, Any], Sites]]:
    """The jitted evaluation of draws, which are made by the guide or given."""
    # It may be kept, so it must hold neither draws nor parameters.
    fit = fit._replace(params=[], draws=(), memo=None)

    def latents_of(params: Params, draw: Sites | None, key: Array) -> tuple[Trace, Sites]:
        trace = {} if draw is not None else guide_trace_of(fit, params, key)
        draw = {name: site["value"] for name, site in trace.items()} if draw is None else draw
        return trace, {name: draw[name] for name in proto.latents}

    def data_of(sites: Trace) -> dict[str, Site]:
        return {name: s for name, s in sites.items() if is_data(s) and name not in proto.left_out}

    def one(params: Params, draw: Sites | None, keys: Array) -> dict[str, Any]:
        key_guide, key_model, key_predict = keys
        guide_sites, draw = latents_of(params, draw, key_guide)
        sites = model_trace_of(fit, params, draw, key_model)
        out: dict[str, Any] = {"latent": draw, "stats": {}}
        out["deterministic"] = {
            name: site["value"]
            for name, site in sites.items()
            if site["type"] == "deterministic" and name not in proto.left_out
        }
        out["outside"] = {name: ~jnp.all(sites[name]["fn"].support(draw[name])) for name in draw}
        if lp:
            out["stats"] = _densities(sites, guide_sites, proto)
        if log_likelihood:
            out["log_likelihood"] = {name: log_prob(site) for name, site in data_of(sites).items()}
        if posterior_predictive:
            replayed = _predictive_trace(fit, params, draw, key_predict)
            out["posterior_predictive"] = {name: replayed[name]["value"] for name in data_of(sites)}
        return out

    @jax.jit
    def run(params: Params, draws: Sites | None, keys: Array) -> tuple[dict[str, Any], Sites]:
        fn = partial(one, params)
        if keys.shape[0] <= block:
            out = jax.vmap(fn)(draws, keys)
        else:
            out = lax.map(lambda x: fn(*x), (draws, keys), batch_size=block)
        first, (key_guide, key_model, _) = jax.tree.map(lambda x: x[0], draws), keys[0]
        sites = model_trace_of(fit, params, latents_of(params, first, key_guide)[1], key_model)
        observed = {
            name: jnp.broadcast_to(
                s["value"], jnp.broadcast_shapes(jnp.shape(s["value"]), s["fn"].shape())
            )
            for name, s in sites.items()
            if is_data(s)
        }
        return out, observed

    return run


def _densities(sites: Trace, guide_sites: Trace, proto: Prototype) -> dict[str, Array]:
    log_p, jacobian = log_density(sites), log_abs_det(sites, proto.latents)
    if proto.density == "none":
        return {"lp": log_p + jacobian}
    log_q = log_density(guide_sites)
    # Not lp - log_q: the Jacobian would only add its rounding error twice.
    weight = log_p - log_q
    if proto.units is not None:
        weight = proto.units.sum_sites(sample_sites(sites), local=True)
        weight = weight - proto.units.sum_sites(sample_sites(guide_sites), local=True)
    return {"lp": log_p + jacobian, "log_q": log_q + jacobian, "log_weight": weight}
