"""Whether the draws of a guide vary at all, or are points. It costs nothing."""

from typing import Any

import numpy as np

from numpyro_ext._model.read import Site, is_delta
from numpyro_ext.diagnostics._density import coordinates
from numpyro_ext.diagnostics._spread import least_spread, mean_and_sd
from numpyro_ext.diagnostics.context import FitContext, cached
from numpyro_ext.diagnostics.table import Row

__all__ = ["has_moves", "points"]


@cached
def points(context: FitContext) -> list[Row]:
    """The line of latent sites of which draws differ by rounding alone, if there are any."""
    proto, draws = context.proto, context.latent
    some = [name for name in proto.latents if draws[name].size]
    if not some or draws[some[0]].shape[1] < 2:
        return []
    still = {name: _still(proto.trace[name], draws[name]) for name in some}
    points = [name for name in some if np.any(still[name]) and _can_vary(proto.trace[name])]
    if all(np.any(np.all(still[name], 1)) for name in some):
        verdict = (
            "all draws are the same but for rounding, so this is an estimate and no posterior:"
            " nothing can be said of its error; take a guide with a density, such as AutoNormal, or"
            " another loss if it has one."
        )
        return [Row("spread of the draws", 0.0, None, "> 0", None, verdict, of_draws=True)]
    if not points:
        return []
    named = ", ".join(f"'{name}'" for name in points)
    verdict = (
        f"all draws of {named} are the same: a Delta, or a number narrower than its rounding, is"
        " not a posterior, and other sites are too narrow given it; take a guide with a density"
        " for it, or double precision."
    )
    return [Row("sites that do not vary", len(points), None, "0", False, verdict, of_draws=True)]


@cached
def has_moves(context: FitContext) -> bool:
    """Whether draws of a guide have a gradient, and are no points: where a density has collapsed to
    a point, moves say how far."""
    is_estimate = context.density == "none" and any(row.ok is None for row in points(context))
    return context.has_gradient and not is_estimate


def _still(site: Site, x: np.ndarray) -> np.ndarray:
    """``(chain, number)``: whether all draws of a number are the same but for rounding; one for a
    whole site where numbers may be constants, as the zeros of a triangular factor."""
    flat = x.reshape(*x.shape[:2], -1)
    if not np.issubdtype(x.dtype, np.floating):
        still = np.all(flat == flat[:, :1], 1)
    else:
        mean, sd = mean_and_sd(np.moveaxis(flat, 1, 0).astype(np.float64))
        still = sd <= least_spread(mean, float(np.finfo(x.dtype).eps))
    support: Any = site["fn"].support
    each = not support.is_discrete and coordinates(support, site) == flat.shape[2]
    return still if each else np.all(still, 1, keepdims=True)


def _can_vary(site: Site) -> bool:
    """True for a latent site of the model with a coordinate that is neither discrete nor given."""
    support: Any = site["fn"].support
    return not support.is_discrete and not is_delta(site) and coordinates(support, site) > 0
