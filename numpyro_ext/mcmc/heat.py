"""The heat of a chain: whether its momenta, or its gradients, are larger than the law allows.

Noise of the gradients and steps that are too long heat a chain, and its standard deviations are too
large. A kernel shows this in ``kinetic_temperature`` or ``implied_variance_ratio``.
"""

from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_ext._model.losses import reported

DRAWS = 50
"""Draws over which heat is averaged."""
_HOT, _HOT_BY_GRADIENTS = 2.0, 3.0
_SURELY = 16.0
"""Minus the logarithm of the probability of a false alarm."""


def measure_heat(kernel: Any, state: Any, T: Array) -> Any:
    r"""The state with the heat of its draw. The first 50 draws after warmup do not count.

    The mean of m squares of normal numbers exceeds 1 by :math:`2 \sqrt{t/m} + 2 t/m` with a
    probability of at most :math:`e^{-t}` (Laurent & Massart, 2000, lemma 1); here t is 16. Momenta
    forget each other at the rate of the friction. Implied ratios, of which a right chain has some
    in the hundreds near a bound, are averaged geometrically.
    """
    if kernel.heat_field == "kinetic_temperature":
        ratio = jnp.where(T > 0, state.kinetic_temperature / jnp.where(T > 0, T, 1), 1)
        turns = DRAWS * kernel.steps_per_sample * kernel.friction_in_use
        few = _SURELY / (len(state.z) * jnp.clip(turns * state.step_size / 2, 1, DRAWS))
        limit = jnp.maximum(_HOT, 1 + 2 * few**0.5 + 2 * few)
    else:
        ratio = jnp.where(T > 0, jnp.log(state.implied_variance_ratio), 0)
        limit = _HOT_BY_GRADIENTS
    if kernel.settings is not None:
        limit *= max(kernel.settings.kinetic_temperature[1], kernel.settings.variance_ratio)
    num = (state.i - kernel.num_adapt) // kernel.steps_per_sample
    heat = jnp.where(num > 0, state.heat + ratio, -jnp.inf)
    mean = heat / DRAWS
    if kernel.heat_field == "implied_variance_ratio":
        mean = jnp.exp(mean)
    mean = jnp.minimum(mean, 1e6)
    begins = (num > 0) & (num % DRAWS == 0) & (heat < jnp.inf)
    heat = jnp.where(begins, jnp.where(mean > limit, -mean, 0), heat)
    return state._replace(heat=heat.astype(state.heat.dtype))


def warn_if_hot(kernel: Any, state: Any) -> Any:
    """Warn once of a chain that is hot, while it runs: no kernel knows which draw is the last."""
    remedy = "leave out step_size, or take a smaller one or a ControlVariate"
    if kernel.settings is not None:
        remedy = kernel.settings.if_hot
    message = (
        f"the mean of {kernel.heat_field} over {DRAWS} draws is {{count}} times what it should be,"
        " so gradient noise or too long a step makes standard deviations too large by about the"
        f" root of this; {remedy}."
    )
    hot = jnp.isfinite(state.heat) & (state.heat < 0)
    said = reported(jnp.where(hot, -state.heat, 0), message) > 0
    return state._replace(heat=jnp.where(said, jnp.inf, state.heat))
