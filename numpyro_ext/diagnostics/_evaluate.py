"""Draws of a fit, run through the model on all of its data; and the kind of their density."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, uncondition
from numpyro.infer import init_to_sample
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.checks import check_observed
from numpyro_ext._model.density import log_abs_det, log_density, num_seen
from numpyro_ext._model.exact import exact_draws, exact_log_prob
from numpyro_ext._model.operations import jit_on_data, map_blocks
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import (
    Site,
    is_data,
    latent_sites,
    moving_supports,
    sample_sites,
    trace_of,
)
from numpyro_ext._model.units import Layout, find_layout
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._density import (
    density_of,
    log_weight,
    reference_of,
    total_of,
    total_parts,
)
from numpyro_ext.diagnostics._fit import Fit, split_chains

BLOCK = 10**6
"""Log densities in a block of draws: 4 MB in float32."""


class Prototype(NamedTuple):
    """The common structure of all draws, read off one of them without arithmetic."""

    trace: Trace
    """A trace of the model, in which only names, kinds, shapes and types mean anything."""
    latents: list[str]
    """The latent sites that are drawn, in the order of the model."""
    density: str
    """``"exact"``, ``"bound"`` or ``"none"``: see :func:`density_of`."""
    undeclared: list[str]
    """``Delta`` sites that may state their Jacobian or not, so that the density is not known."""
    units: Layout | None
    """The units into which the weight of a draw splits; None if it does not."""
    marginalized: list[str]
    """Latent sites that the run summed out."""
    moving: set[str]
    """Latent sites with a support that depends on other latent sites."""
    left_out: list[str]
    """The deterministic and observed sites, if the run summed some out that they may need."""


def guide_trace_of(fit: Fit, params: Params, key: Array, values: Sites | None = None) -> Trace:
    guide = seed(substitute(fit.guide, data={**params, **(values or {})}), key)
    return trace_of(guide, fit.args, fit.kwargs)


def draw_of(fit: Fit, params: Params, draw: Sites | None, key: Array) -> tuple[Trace, Sites]:
    """A trace of the guide and the values of its sites; no trace of a draw that exists already."""
    if draw is not None:
        return {}, draw
    trace = guide_trace_of(fit, params, key)
    return trace, {name: site["value"] for name, site in trace.items()}


def model_trace_of(fit: Fit, params: Params, latents: Sites, key: Array) -> Trace:
    def value_of(site: Site) -> Array | None:
        is_latent = site["type"] == "sample" and not site["is_observed"]
        value = latents.get(site["name"]) if is_latent else None
        if value is not None:
            _check_size(site, value)
        return value

    model: Any = fit.model
    return Program(model, fit.args, fit.kwargs, params).trace(values=value_of, rng_key=key)


def prototype(fit: Fit, rng_key: Array, *, needs_latents: bool = True) -> Prototype:
    """Look at one draw without computing it; an error names a latent site without draws."""
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
    _check_known(fit, model_trace, guide_trace)
    latents = [site["name"] for site in latent_sites(model_trace)]
    if needs_latents and not latents:
        raise ValueError("the model has no latent sample site; use predictive_scores.")
    drawn = fit.draws[0] if fit.draws else guide_trace
    missing = [model_trace[name] for name in latents if name not in drawn]
    for site in missing:
        summed = bool(fit.draws) or site["infer"].get("enumerate")
        if not (summed and site["fn"].has_enumerate_support):
            source = "the draws lack" if fit.draws else "the guide does not draw"
            raise ValueError(
                f"{source} latent site '{site['name']}' of the model; if it is data, pass it in"
                " model_args, otherwise collect it."
            )
    marginalized = [site["name"] for site in missing]
    density, undeclared, units = "none", [], None
    if guide_trace and not missing:
        density, undeclared = density_of(fit.guide, guide_trace, model_trace)
        layout = find_layout(model_trace, guide_trace, per_datum=False)
        units = layout if density == "exact" and layout.plates else None
    return Prototype(
        trace=model_trace,
        latents=[name for name in latents if name not in marginalized],
        density=density,
        undeclared=undeclared,
        units=units,
        marginalized=marginalized,
        moving=moving_supports(seed(fit.model, key_model), fit.args, fit.kwargs, model_trace),
        left_out=[
            name
            for name, site in model_trace.items()
            if missing and (site["type"] == "deterministic" or is_data(site))
        ],
    )


def _check_size(site: Site, value: Array) -> None:
    shape = site["kwargs"].get("sample_shape", ()) + tuple(site["fn"].shape())
    drawn = jnp.shape(value)
    # Inside a loop a value has an axis of steps besides.
    if len(drawn) == len(shape) and jnp.size(value) != math.prod(shape):
        raise ValueError(
            f"the draws of latent site '{site['name']}' have shape {drawn}, and on these arguments"
            f" it is {shape}: they are known for the rows of the training data alone."
        )


def _check_known(fit: Fit, model_trace: Trace, guide_trace: Trace) -> None:
    """An error that names a parameter or a mutable site that has no value in the fit. A parameter
    of the model that starts at a constant may be missing: NumPyro starts it there."""
    is_chain = "kernel" in fit.attributes
    missing = []
    for name, site in {**guide_trace, **model_trace}.items():
        if site["type"] not in ("param", "mutable") or name in fit.params[0]:
            continue
        if site["type"] == "param" and name in guide_trace:
            raise ValueError(
                f"the result has no parameter '{name}' of the guide, but {sorted(fit.params[0])}."
            )
        # Names that begin with an underscore are the counters of an objective.
        if site["type"] == "mutable" and not is_chain and not name.startswith("_"):
            raise ValueError(
                f"the mutable site '{name}' has no value in a params dict; pass result=state, or"
                " what run() returned."
            )
        if site["type"] == "param":
            missing.append(name)
    missing = _random_starts(fit, missing)
    if missing:
        remedy = "chain_method='vectorized' keeps it" if is_chain else "pass the result of the fit"
        raise ValueError(
            f"the value that parameter '{missing[0]}' of the model had in this fit is not known;"
            f" {remedy}, or use numpyro.handlers.substitute."
        )


def _random_starts(fit: Fit, names: list[str]) -> list[str]:
    """The names of the parameters, among these, that start at values that depend on the key."""
    if not names:
        return []

    def starts(key: Array) -> dict[str, Any]:
        model: Any = substitute(seed(fit.model, key), substitute_fn=init_to_sample)
        trace = trace_of(model, fit.args, fit.kwargs)
        return {name: trace[name]["value"] for name in names}

    sources = eval_provenance(starts, key=random.key(0))
    return [name for name in names if any(jax.tree.leaves(sources[name]))]


def default_block_size(trace: Trace) -> int:
    """The number of draws of which a block has at most ``BLOCK`` log densities."""
    sites = sample_sites(trace)
    count = sum(max(count_of(site), math.prod(jnp.shape(site["value"]))) for site in sites)
    return max(1, BLOCK // max(1, count))


def count_of(site: Site) -> int:
    """Number of log densities of a site."""
    fn, shape = site["fn"], jnp.shape(site["value"])
    return math.prod(np.broadcast_shapes(shape[: len(shape) - fn.event_dim], fn.batch_shape))


Evaluate = Callable[..., dict[str, Any]]
"""``(rng_key, num_samples, params=fit.params)`` to the dict that :func:`evaluator` describes."""


def evaluator(
    fit: Fit,
    proto: Prototype,
    *,
    lp: bool = False,
    log_likelihood: bool = False,
    posterior_predictive: bool = False,
) -> Evaluate:
    """A compiled function that runs draws through the model: to ``latent``, ``deterministic`` and
    ``stats``, ``(chain, draw, *site)`` each, what else was asked for, the data ``observed``, and
    which of their rows are ``counted``, by the mask of the site."""
    has_lp = lp and not proto.marginalized
    weighs = has_lp and proto.density != "none"

    def traces_of(params: Params, draw: Sites | None, keys: Array) -> tuple[Trace, Sites, Trace]:
        guide_sites, values = draw_of(fit, params, draw, keys[0])
        draw = {name: values[name] for name in proto.latents}
        return guide_sites, draw, model_trace_of(fit, params, draw, keys[1])

    def prepare(params: Params, first: Sites | None, keys: Array) -> tuple[Any, Any]:
        guide_sites, _, sites = traces_of(params, first, keys)
        reference, total = None, None
        if weighs:
            reference = reference_of(sites, guide_sites, proto.units)
            total = total_parts(sites, guide_sites, proto.units, reference)
        observed = {
            name: jnp.broadcast_to(
                site["value"],
                jnp.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape()),
            )
            for name, site in sites.items()
            if is_data(site)
        }
        counted = {name: num_seen(site) > 0 for name, site in sites.items() if is_data(site)}
        return partial(evaluate_draw, params, reference), (observed, counted, total)

    def evaluate_draw(
        params: Params, reference: Any, draw: Sites | None, keys: Array
    ) -> dict[str, Any]:
        guide_sites, draw, sites = traces_of(params, draw, keys)
        there = {name: site for name, site in sites.items() if name not in proto.left_out}
        data = {name: site for name, site in there.items() if is_data(site)}
        stats: Sites = {}
        if has_lp:
            jacobian = log_abs_det(sites, proto.latents)
            stats["lp"] = log_density(sites) + jacobian
        if weighs:
            stats["log_q"] = log_density(guide_sites) + jacobian
            weight = log_weight(sites, guide_sites, proto.units, reference)
            # Of a value outside of its support NumPyro's densities are what they are inside.
            if proto.moving:
                inside = [jnp.all(sites[n]["fn"].support(sites[n]["value"])) for n in proto.moving]
                weight = jnp.where(jnp.all(jnp.array(inside)), weight, -jnp.inf)
            stats["log_weight"] = weight
        computed = {n: x["value"] for n, x in there.items() if x["type"] == "deterministic"}
        out: dict[str, Any] = {"latent": draw, "deterministic": computed, "stats": stats}
        if log_likelihood:
            out["log_likelihood"] = {name: exact_log_prob(site) for name, site in data.items()}
        if posterior_predictive:
            unobserved = fit._replace(model=exact_draws(uncondition(fit.model)))
            replayed = model_trace_of(unobserved, params, draw, keys[2])
            out["posterior_predictive"] = {name: replayed[name]["value"] for name in data}
        return out

    over = over_draws(fit, prepare, default_block_size(proto.trace), 3)

    def evaluate(
        rng_key: Array, num_samples: int, params: Sequence[Params] = fit.params
    ) -> dict[str, Any]:
        pieces, observed, counted = [], {}, {}
        by_chain = partial(split_chains, num_chains=fit.num_chains)
        for out, (observed, counted, total) in over(rng_key, num_samples, params):  # noqa: B007
            if weighs:
                weight = out["stats"]["log_weight"]  # the sum is in double precision
                out["stats"]["log_weight"] = weight + total_of(total, proto.units)
            pieces.append(jax.tree.map(by_chain, out))
        return {**concatenate(pieces), "observed": observed, "counted": counted}

    return evaluate


def over_draws(
    fit: Fit,
    prepare: Callable[[Params, Sites | None, Array], tuple[Any, Any]],
    block: int,
    num_keys: int,
) -> Callable[..., Iterator[Any]]:
    """A function ``(rng_key, num_samples, params=fit.params)`` that maps a compiled function over
    draws in blocks, and yields host arrays for each set of parameters.

    :param prepare: takes parameters, the first draw (None of a guide) and its keys to a function
        of a draw and its keys, and to what is the same for all draws.
    """

    def run(params: Params, draws: Sites | None, keys: Array) -> Any:
        def draw(i: Any) -> Sites | None:
            return jax.tree.map(lambda x: x[i], draws)

        evaluate_draw, shared = prepare(params, draw(0), keys[0])
        return map_blocks(lambda i: evaluate_draw(draw(i), keys[i]), len(keys), block), shared

    compiled = jit_on_data(run)

    def each(
        rng_key: Array, num_samples: int, params: Sequence[Params] = fit.params
    ) -> Iterator[Any]:
        for i, key in enumerate(random.split(rng_key, len(params))):
            draws = dict(fit.draws[i]) if fit.draws else None
            size = num_samples if draws is None else len(next(iter(draws.values())))
            yield jax.device_get(compiled(params[i], draws, random.split(key, (size, num_keys))))

    return each


def concatenate(pieces: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.concatenate(xs), *pieces)
