"""Draws of a fit, run through the model on all of its data, a block of draws at a time."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, trace, uncondition

from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._density import (
    density_of,
    is_data,
    is_latent,
    log_abs_det,
    log_density,
)
from numpyro_ext.diagnostics._fit import Fit

__all__ = ["Prototype", "default_block_size", "evaluate", "prototype"]

BLOCK = 10**6
"""Log densities in a block of draws, unless the user says otherwise: 4 MB in float32."""


class Prototype(NamedTuple):
    """One draw, run through the model: the shapes and distributions of all the others."""

    trace: Trace
    latents: list[str]
    density: str


def _guide_trace(fit: Fit, params: Params, key: Array) -> Trace:
    guide = seed(substitute(fit.guide, data=params), key)
    return trace(guide).get_trace(*fit.args, **fit.kwargs)


def _model_trace(fit: Fit, params: Params, latents: Sites, key: Array) -> Trace:
    def value_of(site: dict[str, Any]) -> Array | None:
        return latents.get(site["name"]) if is_latent(site) else None

    model = substitute(substitute(fit.model, data=params), substitute_fn=value_of)
    return trace(seed(model, key)).get_trace(*fit.args, **fit.kwargs)


def prototype(fit: Fit, rng_key: Array) -> Prototype:
    """Run one draw, and find what the draws lack."""
    key_guide, key_model = random.split(rng_key)
    params = fit.params[0]
    guide_trace = None
    if fit.draws:
        values = {name: x[0] for name, x in fit.draws[0].items()}
    else:
        guide_trace = _guide_trace(fit, params, key_guide)
        values = {name: site["value"] for name, site in guide_trace.items() if is_latent(site)}
    model_trace = _model_trace(fit, params, values, key_model)
    latents = [name for name, site in model_trace.items() if is_latent(site)]
    if not latents:
        raise ValueError(
            "the model has no latent sample site, so there are no draws to convert; give it at least"
            " one numpyro.sample without obs."
        )
    missing = [name for name in latents if name not in values]
    if missing:
        source = "the draws lack" if guide_trace is None else "the guide does not draw"
        raise ValueError(
            f"{source} latent site '{missing[0]}' of the model; every latent site is needed to compute"
            " the other quantities: collect it, or sum it out of the model."
        )
    density = "none" if guide_trace is None else density_of(guide_trace, model_trace)
    return Prototype(model_trace, latents, density)


def default_block_size(proto: Prototype) -> int:
    """So many draws that a block has at most ``BLOCK`` log densities."""
    sites = (site for site in proto.trace.values() if site["type"] == "sample")
    count = sum(int(np.prod(np.broadcast_shapes(*_batch_shapes(site)))) for site in sites)
    return max(1, BLOCK // max(1, count))


def _batch_shapes(site: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
    """Host arrays ``(chain, draw, *site)``: ``latent``, ``deterministic``, ``stats`` and what was asked for.

    Each draw has its own key, so ``block_size`` changes the memory and not the numbers.
    """

    def one(params: Params, draw: Sites | None, keys: Array) -> dict[str, Any]:
        key_guide, key_model, key_predict = keys
        log_q = None
        if draw is None:
            guide_trace = _guide_trace(fit, params, key_guide)
            draw = {name: guide_trace[name]["value"] for name in proto.latents}
            if proto.density != "none":
                log_q = log_density(guide_trace)
        draw = {name: draw[name] for name in proto.latents}
        sites = _model_trace(fit, params, draw, key_model)
        out: dict[str, Any] = {"latent": draw, "stats": {}}
        out["deterministic"] = {
            name: site["value"] for name, site in sites.items() if site["type"] == "deterministic"
        }
        if lp:
            log_p, jacobian = log_density(sites), log_abs_det(sites, proto.latents)
            out["stats"]["lp"] = log_p + jacobian
            if log_q is not None:
                out["stats"]["log_q"] = log_q + jacobian
                # Not lp - log_q: the Jacobian would only add its rounding error twice.
                out["stats"]["log_weight"] = log_p - log_q
        if log_likelihood:
            out["log_likelihood"] = {
                name: site["fn"].log_prob(site["value"])
                for name, site in sites.items()
                if is_data(site)
            }
        if posterior_predictive:
            free = fit._replace(model=uncondition(fit.model))
            replayed = _model_trace(free, params, draw, key_predict)
            out["posterior_predictive"] = {
                name: replayed[name]["value"] for name, site in sites.items() if is_data(site)
            }
        return out

    block = default_block_size(proto) if block_size is None else block_size

    @jax.jit
    def run(params: Params, draws: Sites | None, keys: Array) -> dict[str, Any]:
        fn = partial(one, params)
        if keys.shape[0] <= block:
            return jax.vmap(fn)(draws, keys)
        return lax.map(lambda x: fn(*x), (draws, keys), batch_size=block)

    parts = []
    for i, key in enumerate(random.split(rng_key, len(fit.params))):
        draws = {name: fit.draws[i][name] for name in proto.latents} if fit.draws else None
        size = num_samples if draws is None else next(iter(draws.values())).shape[0]
        out = jax.device_get(run(fit.params[i], draws, random.split(key, (size, 3))))
        shape = (fit.num_chains, size // fit.num_chains)
        parts.append(jax.tree.map(lambda x, shape=shape: x.reshape(shape + x.shape[1:]), out))
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
