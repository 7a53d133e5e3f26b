"""A fit to more rows than its draws can be run through, by a proxy of these rows."""

from functools import partial
import math
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.handlers import block
from numpyro.infer import MCMC

from numpyro_ext._model.handlers import rows
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import Site, call_and_trace, frames
from numpyro_ext._model.taylor import TaylorProxy, check_proxy, sd_over_minibatches
from numpyro_ext._model.units import find_layout
from numpyro_ext._typing import Model, Params, Sites, Trace
from numpyro_ext.diagnostics._evaluate import draw_of, model_trace_of, prototype
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.limits import PROXY_NOISE
from numpyro_ext.diagnostics.table import Row

__all__ = ["by_proxy", "proxy_of"]

OVER = 10_000
"""Rows up to which a fit takes them all."""
ROWS = 2000
"""Rows that stand in for more; one of them costs as much as several without the expansion."""
_DRAWS = 64


def proxy_of(obj: Any, proxy: Any) -> TaylorProxy | None:
    """The proxy that is given, or that of the loss of an ``SVI``."""
    found = getattr(getattr(obj, "loss", None), "proxy", None) if proxy is None else proxy
    return None if found is None else check_proxy(found)


def by_proxy(
    fit: Fit, obj: Any, proxy: TaylorProxy | None, rng_key: Array
) -> tuple[Fit, list[Row]]:
    """The fit with a model of some rows that stand in for all, and a line that says so; the fit as
    it is, where its own rows are to be taken."""
    if proxy is None or fit.model is None:
        return fit, []
    model = obj.sampler.model if isinstance(obj, MCMC) else obj.model
    try:
        proxy.check_data(model, fit.args, fit.kwargs)
        if proxy.size <= OVER:
            return fit, []
        noise = _noise(fit, model, proxy, rng_key)
    except ValueError as error:
        if proxy is not proxy_of(obj, None):
            raise
        verdict = f"of another model or of other data; the fit was trained with it: {error}"
        return fit, [Row("proxy of the loss", math.nan, None, "of these data", False, verdict)]
    what, limit = "noise of the proxy in nats", f"{PROXY_NOISE}"
    if noise <= PROXY_NOISE:
        verdict = (
            f"{rows_for(proxy):,} rows and the proxy stand in for {proxy.size:,} rows in the"
            " lines on weights and moves."
        )
        fit = fit._replace(model=stand_in(model, proxy))
        return fit, [Row(what, noise, None, limit, True, verdict)]
    verdict = (
        "not used: at these draws it is so noisy that the weights would be those of its noise, so"
        f" weights and moves are those of all {proxy.size:,} rows; move it to the draws by"
        " proxy=proxy.at(guide, params)."
    )
    return fit, [Row(what, noise, None, limit, None, verdict)]


def _noise(fit: Fit, model: Any, proxy: TaylorProxy, rng_key: Array) -> float:
    """The standard deviation of the log density at draws over sets of so many rows, in nats."""
    key_prototype, key_draws = random.split(rng_key)
    proto = prototype(fit, key_prototype)
    model = on_rows(model, proxy)
    fit, program = fit._replace(model=model), Program(model, fit.args, fit.kwargs)

    @jax.jit
    def variances(params: Params, keys: Array, draws: Sites | None) -> Array:
        def one(inputs: tuple[Array, Sites | None]) -> Array:
            key, draw = inputs
            guide_trace, values = draw_of(fit, params, draw, key)
            trace = model_trace_of(fit, params, values, key)
            layout = find_layout(trace, guide_trace or trace, per_datum=False)
            proxy.check("diagnose", layout, trace)
            run = partial(program.trace, rng_key=key)
            return jnp.var(proxy.log_lik(trace, run)[1], ddof=1)

        return jax.lax.map(one, (keys, draws), batch_size=8)

    draws = None
    if fit.draws:
        some = {name: fit.draws[0][name] for name in proto.latents}
        total = len(next(iter(some.values())))
        draws = {n: x[np.linspace(0, total - 1, _DRAWS).astype(int)] for n, x in some.items()}
    found = variances(fit.params[0], random.split(key_draws, _DRAWS), draws)
    return sd_over_minibatches(found, proxy.size, rows_for(proxy))


def rows_for(proxy: TaylorProxy) -> int:
    """How many rows stand in for all."""
    return min(proxy.size, ROWS)


def on_rows(model: Model, proxy: TaylorProxy) -> Model:
    """The model on so many rows, the same random ones in every run."""
    chosen = np.random.default_rng(0).choice(proxy.size, rows_for(proxy), replace=False)
    known = {proxy.plate: (proxy.size, proxy.batch)}
    return rows(model, {proxy.plate: jnp.asarray(np.sort(chosen))}, known)


def stand_in(model: Model, proxy: TaylorProxy) -> Model:
    """The model with the log likelihood of its rows by a proxy and the same :data:`ROWS` of them in
    every run, whose log density differs from that of all rows by a function of the latent sites."""
    some = on_rows(model, proxy)

    def of_rows(site: Site) -> bool:
        observed = site["type"] == "sample" and site["is_observed"]
        return site["name"] == proxy.plate or (observed and proxy.plate in frames(site))

    def with_proxy(*args: Any, **kwargs: Any) -> None:
        with block(hide_fn=of_rows):
            _, found = call_and_trace(some, args, kwargs)
        program = Program(some, args, kwargs)

        def run(z: Sites) -> Trace:
            with block():
                return program.trace(z, rng_key=random.key(0))

        # Two sites, because float32 would round the change to the digits of the sum.
        numpyro.factor(f"{proxy.plate}, change from the center", proxy.log_lik(found, run)[0])
        numpyro.factor(f"{proxy.plate}, at the center", jnp.asarray(proxy.value, float))

    return with_proxy
