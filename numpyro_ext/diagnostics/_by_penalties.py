"""A fit whose loss asks for another density than the posterior: what is judged by that density."""

from typing import Any, Protocol, runtime_checkable

from jax import Array
import jax.numpy as jnp

from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.diagnostics._evaluate import evaluator, prototype
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.limits import PENALTY_NOISE
from numpyro_ext.diagnostics.table import Row

__all__ = ["by_penalties"]

_FEWEST, _MOST, _NUMBERS = 1000, 20_000, 5 * 10**7
"""Draws, and the numbers that they hold together: 200 MB in float32."""
_KINDS = "sample", "deterministic"


@runtime_checkable
class Tilts(Protocol):
    """A loss with penalties of expectations under the guide."""

    @property
    def tilts(self) -> bool:
        """Whether the best guide is the posterior of :meth:`tilted`."""
        ...

    def tilted(self, model: Model) -> Model:
        """The model with the factors of the penalties, whose slopes are parameters of it."""
        ...

    def slopes(self, values: Sites) -> tuple[Params, float]:
        """These parameters, of draws of all sites, and the noise of the factors in nats."""
        ...


def by_penalties(fit: Fit, obj: Any, proxy: Any, rng_key: Array) -> tuple[Fit, list[Row]]:
    """The fit with the model that the penalties of its loss make of its own, and a line that says
    so; as it is, and no line, if there are none."""
    loss = getattr(obj, "loss", None)
    if not isinstance(loss, Tilts) or not loss.tilts or fit.model is None:
        return fit, []
    if proxy is not None:
        raise ValueError(
            f"proxy is given, and the loss is a {type(loss).__name__}, whose penalties are of all"
            " rows, which no proxy stands in for; leave out proxy=."
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
