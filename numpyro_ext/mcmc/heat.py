"""A chain says so in its run if its momenta, or gradients, are much larger than its law allows.

Noise of the gradients and steps that are too long heat a chain, and its standard deviations are too
large.
"""

from typing import Any

import jax.numpy as jnp

from numpyro_ext._model.losses import reported

DRAWS = 50
"""Draws over which heat is averaged; no kernel knows which draw of a run is the last."""
_HOT, _HOT_BY_GRADIENTS = 2.0, 3.0
_SURELY = 16.0
"""Minus the logarithm of the probability of a false alarm."""


def warn_if_hot(kernel: Any, state: Any) -> Any:
    r"""The state after a draw, with a warning where the mean of 50 draws is far too large.

    The mean of m squares of normal numbers exceeds 1 by :math:`2 \sqrt{t/m} + 2 t/m` with a
    probability of at most :math:`e^{-t}` (Laurent & Massart, 2000, lemma 1); here t is 16. Momenta
    forget each other at the rate of the friction. Implied ratios, of which a right chain has some
    in the hundreds near a bound, are averaged geometrically.
    """
    shown = {"kinetic_temperature", "implied_variance_ratio"} & {*state._fields}
    if not shown:
        return state
    name, T = shown.pop(), kernel.temperature_at(state.i - 1, state.heat.dtype)
    x = getattr(state, name)
    if name == "kinetic_temperature":
        C = kernel.friction_in_use if hasattr(kernel, "friction") else 1.0
        turns = DRAWS * kernel.steps_per_sample * C
        few = _SURELY / (len(state.z) * jnp.clip(turns * state.step_size / 2, 1, DRAWS))
        limit = jnp.maximum(_HOT, 1 + 2 * few**0.5 + 2 * few)
        ratio, mean_of = x / jnp.where(T > 0, T, 1), lambda mean: mean
    else:
        ratio, mean_of, limit = jnp.log(x), jnp.exp, jnp.asarray(_HOT_BY_GRADIENTS)
    if kernel.settings is not None:
        limit *= max(kernel.settings.kinetic_temperature[1], kernel.settings.variance_ratio)
    message = (
        f"the mean of {name} over {DRAWS} draws is at least {{count}} times what it should be, so"
        " gradient noise or too long a step makes standard deviations too large by about the root"
        f" of this; {kernel.if_hot}."
    )
    draws = (state.i - kernel.num_adapt) // kernel.steps_per_sample
    # Infinite once it has been said.
    heat = jnp.where(draws > 0, state.heat + jnp.where(T > 0, ratio, 0), 0)
    ends = (draws > 0) & (draws % DRAWS == 0) & jnp.isfinite(heat)
    mean = jnp.minimum(mean_of(heat / DRAWS), 1e6)
    said = reported(jnp.where(ends & (mean > limit), mean, 0), message) > 0
    heat = jnp.where(said, jnp.inf, jnp.where(ends, 0, heat))
    return state._replace(heat=heat.astype(state.heat.dtype))
