"""The density by which a fit is judged, where that is not the posterior by all rows."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.handlers import block
from numpyro.infer import MCMC

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.arguments import rows_on_host
from numpyro_ext._model.expansion import TaylorExpansion
from numpyro_ext._model.handlers import at_rows
from numpyro_ext._model.operations import jit_on_data
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import Site, call_and_trace, frames
from numpyro_ext._model.taylor import TaylorProxy, check_proxy, sd_over_minibatches
from numpyro_ext._model.units import find_layout
from numpyro_ext._typing import Model, Params, Sites, Trace
from numpyro_ext.diagnostics._fit import Fit, evaluator
from numpyro_ext.diagnostics.limits import PENALTY_NOISE, PROXY_NOISE

OVER = 10_000
"""Rows up to which a fit takes them all."""
ROWS = 2000
"""Rows that stand in for more; one of them costs as much as several without the expansion."""
_DRAWS = 64
_FEWEST, _MOST, _NUMBERS = 1000, 20_000, 5 * 10**7
"""Draws for the expectations of penalties, and the numbers that they hold together."""


def judged_by(fit: Fit, proxy: TaylorProxy | None) -> Fit:
    """The fit with the model by which it is judged, and sentences on what is wrong with that."""
    loss: Any = getattr(fit.obj, "loss", None)
    # True if the best guide is the posterior of loss.tilted(model), with parameters loss.slopes.
    if not getattr(loss, "tilts", False):
        return by_proxy(fit, proxy_of(fit.obj, proxy))
    if proxy is not None:
        raise ValueError(f"no proxy stands in for the penalties of {type(loss).__name__}.")
    return by_penalties(fit, loss)


def by_penalties(fit: Fit, loss: Any) -> Fit:
    """The fit with the posterior times exp(-slope f), of which the penalties of its loss ask."""
    sites = (x for x in fit.proto.trace.values() if x["type"] in ("sample", "deterministic"))
    size = sum(jnp.size(site["value"]) for site in sites)
    num_draws = min(max(_NUMBERS // max(size, 1), _FEWEST), _MOST)
    drawn = evaluator(fit)(fit.rng_key, num_draws)
    values, params, noise = {**drawn["deterministic"], **drawn["latent"]}, [], 0.0
    for i, given in enumerate(fit.params):
        slopes, error = loss.slopes({name: x[i] for name, x in values.items()})
        params.append({**given, **slopes})
        noise = max(noise, error)
    tilted = replace(fit, model=loss.tilted(fit.model), params=params)
    if noise <= PENALTY_NOISE:
        return tilted
    problem = (
        f"The slopes of the penalties are not known well from {num_draws:,} draws: they have a"
        f" noise of {noise:.2g} nats."
    )
    return replace(tilted, problems=(problem,))


def proxy_of(obj: Any, proxy: Any) -> TaylorProxy | None:
    """The proxy that was passed, or the one of the loss."""
    return check_proxy(proxy or getattr(getattr(obj, "loss", None), "proxy", None))


def by_proxy(fit: Fit, proxy: TaylorProxy | None) -> Fit:
    """The fit with some rows that stand in for many, where the proxy is good enough; or why not."""
    if proxy is None and rows_on_host((fit.args, fit.kwargs)) <= OVER:
        return fit
    model = fit.obj.sampler.model if isinstance(fit.obj, MCMC) else fit.obj.model
    at_draws = _proxy_at_draws(fit, model) if proxy is None else None
    proxy = proxy or at_draws
    if proxy is None:
        return fit
    try:
        if at_draws is None:
            proxy.check_data(model, fit.args, fit.kwargs)
        if proxy.size <= OVER:
            return fit
        noise = _noise(fit, model, proxy)
    except ValueError as error:
        if proxy is not proxy_of(fit.obj, None):
            raise
        problem = f"The proxy of the loss is of another model or of other data: {error}"
        return replace(fit, problems=(problem,))
    if noise <= PROXY_NOISE:
        return replace(fit, model=stand_in(model, proxy))
    warnings.warn(
        InferenceWarning(
            f"the proxy is not used: at these draws it has a noise of {noise:.2g} nats. Weights and"
            f" moves take all {proxy.size:,} rows; make it with center=(guide, params)."
        ),
        stacklevel=4,
    )
    return fit


def _proxy_at_draws(fit: Fit, model: Any) -> TaylorProxy | None:
    """The expansion of many rows on the host at the mean of the draws, if it can be made."""
    with warnings.catch_warnings(), suppress(ValueError):
        warnings.simplefilter("ignore", InferenceWarning)  # a loss with the proxy says it
        expansion = TaylorExpansion(model, fit.args, fit.kwargs)
        return expansion.proxy(random.key(0), _center_of(fit, expansion))


def _center_of(fit: Fit, expansion: TaylorExpansion) -> Any:
    """The guide, or the mean of the draws in unconstrained space, as constrained sites."""
    if not fit.existing:
        return fit.guide, fit.params[0]
    info, potential, draws = expansion.info, expansion.potential, fit.existing[0]
    info.check_names("the fit", {n: x for n, x in draws.items() if n in info.latents})
    draws = {name: jnp.asarray(draws[name]) for name in info.latents}
    ravel = jax.vmap(lambda z: info.ravel(potential.unconstrain("a draw", z)))
    sites = potential.postprocess()(info.unravel(jnp.nanmean(jax.jit(ravel)(draws), 0)))
    return {name: sites[name] for name in info.latents}


def _noise(fit: Fit, model: Any, proxy: TaylorProxy) -> float:
    """The standard deviation of the log density at draws over sets of so many rows, in nats."""
    latents, model = fit.proto.latents, on_rows(model, proxy)
    on_some, program = replace(fit, model=model), Program(model, fit.args, fit.kwargs)

    @jit_on_data
    def variances(params: Params, keys: Array, draws: Sites | None) -> Array:
        def at_draw(inputs: tuple[Array, Sites | None]) -> Array:
            key, draw = inputs
            guide_trace, values = on_some.draw(params, draw, key)
            trace = on_some.model_trace(params, values, key)
            layout = find_layout(trace, guide_trace or trace, per_datum=False)
            proxy.check("diagnose", layout, trace)
            run = partial(program.trace, rng_key=key)
            return jnp.var(proxy.log_lik(trace, run)[1], ddof=1)

        return jax.lax.map(at_draw, (keys, draws), batch_size=8)

    draws = None
    if fit.existing:
        chosen = np.linspace(0, fit.num_draws - 1, _DRAWS).astype(int)
        draws = {name: fit.existing[0][name][chosen] for name in latents}
    noise_at_draws = variances(fit.params[0], random.split(fit.keys[1], _DRAWS), draws)
    return sd_over_minibatches(noise_at_draws, proxy.size, ROWS)


def on_rows(model: Model, proxy: TaylorProxy) -> Model:
    """The model on :data:`ROWS` rows, the same random ones in every run."""
    chosen = np.random.default_rng(0).choice(proxy.size, ROWS, replace=False)
    sizes = {proxy.plate: (proxy.size, proxy.batch)}
    return at_rows(model, {proxy.plate: jnp.asarray(np.sort(chosen))}, sizes)


def stand_in(model: Model, proxy: TaylorProxy) -> Model:
    """The model with the log likelihood of its rows by a proxy and :func:`on_rows` of them."""
    some = on_rows(model, proxy)

    def of_rows(site: Site) -> bool:
        observed = site["type"] == "sample" and site["is_observed"]
        return site["name"] == proxy.plate or (observed and proxy.plate in frames(site))

    def with_proxy(*args: Any, **kwargs: Any) -> None:
        with block(hide_fn=of_rows):
            _, trace = call_and_trace(some, args, kwargs)
        program = Program(some, args, kwargs)

        def run(z: Sites) -> Trace:
            with block():
                return program.trace(z, rng_key=random.key(0))

        # Two sites, because float32 would round the change to the digits of the sum.
        numpyro.factor(f"{proxy.plate}, change from the center", proxy.log_lik(trace, run)[0])
        numpyro.factor(f"{proxy.plate}, at the center", jnp.asarray(proxy.value, float))

    return with_proxy
