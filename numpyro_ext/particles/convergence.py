"""A warning of particles that have not converged by their own gradients, while they run."""

from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._typing import Float
from numpyro_ext.scores.implied_sd import implied_sd_ratio

__all__ = ["implied_ratios"]

_RATIO, _SHIFT = (0.85, 1.2), 0.05


def implied_ratios(
    x: Float[Array, "m d"],
    grad: Float[Array, "m d"],
    i: Array,
    num_steps: int,
    info: ModelInfo,
) -> Float[Array, " d"]:
    """Standard deviations over those that the gradients imply, from step ``num_steps`` on.

    In that very step an ``InferenceWarning`` says so where they are not near 1 or where the mean
    gradient is not near 0. Before, and for m <= d, they are NaN.

    :param info: the sites to which the coordinates belong.
    """
    m, d = x.shape
    unknown = jnp.full(d, jnp.nan, x.dtype)
    if m <= d:
        return unknown

    def judged() -> Array:
        ratio, shift = implied_sd_ratio(x, grad)

        def warn() -> None:
            jax.debug.callback(partial(_warn_unless_converged, info), ratio, shift)

        if num_steps:
            lax.cond(i == num_steps, warn, lambda: None)
        return ratio

    return lax.cond(i >= num_steps, judged, lambda: unknown)


def _warn_unless_converged(info: ModelInfo, ratio: Any, shift: Any) -> None:
    ratio = np.asarray(ratio, float)
    off = np.where(np.isfinite(ratio), np.abs(np.log(np.maximum(ratio, 1e-30))), np.inf)
    worst = int(np.argmax(off))
    if _RATIO[0] <= ratio[worst] <= _RATIO[1] and float(shift) <= _SHIFT:
        return
    warnings.warn(
        f"the particles have not converged, or their field is biased: the standard deviation of"
        f" {_name_of(info, worst)} is {ratio[worst]:.2f} of the one that the gradients imply"
        f" (expected {_RATIO[0]} to {_RATIO[1]}), and the mean gradient is {float(shift):.2g} in"
        f" units of the spread (expected at most {_SHIFT}); increase num_warmup or the number of"
        " particles.",
        InferenceWarning,
        stacklevel=2,
    )


def _name_of(info: ModelInfo, coordinate: int) -> str:
    """The site of a coordinate of the latent vector, and its place there."""
    site, at = next((n, s) for n, s in info.slices.items() if s.start <= coordinate < s.stop)
    inside = coordinate - at.start
    return f"site '{site}'" + (f", element {inside}" if at.stop - at.start > 1 else "")
