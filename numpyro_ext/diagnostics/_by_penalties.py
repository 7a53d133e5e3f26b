"""A fit whose loss asks for another density than the posterior: what is judged by that density."""

from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_ext.diagnostics._evaluate import evaluator, prototype
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.limits import PENALTY_NOISE
from numpyro_ext.diagnostics.table import Row

__all__ = ["by_penalties"]

_FEWEST, _MOST, _NUMBERS = 1000, 20_000, 5 * 10**7
"""Draws, and the numbers that they hold together: 200 MB in float32."""
_KINDS = "sample", "deterministic"


def by_penalties(fit: Fit, obj: Any, proxy: Any, rng_key: Array) -> tuple[Fit, list[Row]]:
    """The fit with the model that the penalties of its loss make of its own, and a line that says
    so; as it is, and no line, if there are none."""
    loss: Any = getattr(obj, "loss", None)
    # True if the best guide is the posterior of loss.tilted(model), with parameters loss.slopes.
    if not getattr(loss, "tilts", False) or fit.model is None:
        return fit, []
    if proxy is not None:
        raise ValueError(
            f"no proxy stands in for the penalties of a {type(loss).__name__}, which are of all"
            " rows; leave out proxy=."
        )
    proto = prototype(fit, rng_key)
    size = sum(jnp.size(site["value"]) for site in proto.trace.values() if site["type"] in _KINDS)
    num_draws = min(max(_NUMBERS // max(size, 1), _FEWEST), _MOST)
    drawn = evaluator(fit, proto)(rng_key, num_draws)
    values, params, noise = {**drawn["deterministic"], **drawn["latent"]}, [], 0.0
    for i, one in enumerate(fit.params):
        slopes, error = loss.slopes({name: x[i] for name, x in values.items()})
        params.append({**one, **slopes})
        noise = max(noise, error)
    verdict = "the lines below are of the posterior times exp(-slope f), as the penalties ask"
    ok = True if noise <= PENALTY_NOISE else None
    verdict += "." if ok else f", whose slopes are not known well from {num_draws:,} draws."
    line = Row("noise of the penalties in nats", noise, None, f"{PENALTY_NOISE}", ok, verdict)
    return fit._replace(model=loss.tilted(fit.model), params=params), [line]
