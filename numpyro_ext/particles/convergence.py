"""A warning of particles that have not converged by their own gradients, while they run."""

from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.read import ModelInfo, coordinate_name
from numpyro_ext._typing import Float
from numpyro_ext.scores.implied_sd import IMPLIED_RATIO, IMPLIED_SHIFT, implied_sd_ratio

__all__ = ["implied_ratios"]

_NOISE = 0.2


def implied_ratios(
    x: Float[Array, "m d"],
    grad: Float[Array, "m d"],
    i: Array,
    num_steps: int,
    info: ModelInfo,
    error: Array | None = None,
) -> Float[Array, " d"]:
    """Standard deviations over those that the gradients imply, from step ``num_steps`` on.

    In that very step an ``InferenceWarning`` says so where they are not near 1 or where the mean
    gradient is not near 0. Before, and for m <= d, they are NaN.

    :param info: the sites to which the coordinates belong.
    :param error: by how much the shift is off because of the minibatches; None without them.
    """
    m, d = x.shape
    unknown = jnp.full(d, jnp.nan, x.dtype)
    if m <= d:
        return unknown

    def judged() -> Array:
        ratio, shift = implied_sd_ratio(x, grad)

        def warn() -> None:
            known = jnp.zeros_like(shift) if error is None else error
            jax.debug.callback(partial(_warn_unless_converged, info, m), ratio, shift, known)

        if num_steps:
            lax.cond(i == num_steps, warn, lambda: None)
        return ratio

    return lax.cond(i >= num_steps, judged, lambda: unknown)


def _warn_unless_converged(info: ModelInfo, m: int, ratio: Any, shift: Any, error: Any) -> None:
    ratio, shift, error = np.asarray(ratio, float), float(shift), float(error)
    off = np.where(np.isfinite(ratio), np.abs(np.log(np.maximum(ratio, 1e-30))), np.inf)
    worst = int(np.argmax(off))
    # The mean of m independent draws has this error.
    limit = max(IMPLIED_SHIFT, m**-0.5)
    if error > _NOISE:
        known = f"known to {error:.2g}"
        remedy = (
            "all particles share the noise of the minibatches, which their mean follows, so take a"
            " larger batch, or more steps"
        )
    elif IMPLIED_RATIO[0] <= ratio[worst] <= IMPLIED_RATIO[1] and shift <= limit + 3 * error:
        return
    else:
        known = f"expected at most {limit:.2g}"
        remedy = "increase num_warmup or the number of particles"
    warnings.warn(
        "the particles have not converged, or their field is biased: the standard deviation of"
        f" {coordinate_name(info.slices, worst)} is {ratio[worst]:.2f} of the one that the"
        f" gradients imply (expected {IMPLIED_RATIO[0]} to {IMPLIED_RATIO[1]}), and the mean"
        f" gradient is {shift:.2g} in units of the spread ({known}); {remedy}.",
        InferenceWarning,
        stacklevel=2,
    )
