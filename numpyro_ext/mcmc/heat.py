"""Whether a chain is hotter than its posterior, seen and said while it runs."""

from typing import Any

import jax.numpy as jnp

from numpyro_ext._model.finite_steps import reported

__all__ = ["HEAT", "say_if_hot", "with_heat"]

HEAT = (
    "sum of ``kinetic_temperature`` over T, or else of the logarithm of ``implied_variance_ratio``,"
    " of up to 50 draws; minus their mean if it is far above what is predicted, infinite after a"
    " warning that says so, and minus infinity in draws that do not count."
)
_DRAWS, _HOT, _HOT_BY_GRADIENTS, _SURELY = 50, 2.0, 3.0, 16.0


def with_heat(kernel: Any, state: Any) -> Any:
    r"""
    The state with the heat of its draw, which is minus the mean where 50 draws have one far above
    what is predicted. The first 50 after warmup, perhaps on their way, do not count.

    The mean of m squares of normal numbers exceeds 1 by :math:`2 \sqrt{t/m} + 2 t/m` with a
    probability of at most :math:`e^{-t}` (Laurent & Massart, 2000, lemma 1); here t is 16. Momenta
    forget each other at the rate of the friction. Of implied ratios, which a right chain has in the
    hundreds where it comes near a bound, the mean is the geometric one.
    """
    name = _measure_of(kernel)
    if name is None:
        return state
    T = kernel.temperature_at(state.i - 1, state.z.dtype)
    if name == "kinetic_temperature":
        ratio = jnp.where(T > 0, state.kinetic_temperature / jnp.where(T > 0, T, 1), 1)
        turns = _DRAWS * kernel.steps_per_sample * getattr(kernel, "_friction", 0)
        few = _SURELY / (len(state.z) * jnp.clip(turns * state.step_size / 2, 1, _DRAWS))
        limit, mean_of = jnp.maximum(_HOT, 1 + 2 * few**0.5 + 2 * few), lambda x: x
    else:
        ratio = jnp.where(T > 0, jnp.log(state.implied_variance_ratio), 0)
        limit, mean_of = _HOT_BY_GRADIENTS, jnp.exp
    if kernel.settings is not None:
        limit *= max(kernel.settings.kinetic_temperature[1], kernel.settings.variance_ratio)
    num = (state.i - kernel.num_adapt) // kernel.steps_per_sample
    heat = jnp.where(num > 0, state.heat + ratio, -jnp.inf)
    mean = jnp.minimum(mean_of(heat / _DRAWS), 1e6)
    begins = (num > 0) & (num % _DRAWS == 0) & (heat < jnp.inf)
    heat = jnp.where(begins, jnp.where(mean > limit, -mean, 0), heat)
    return state._replace(heat=heat.astype(state.heat.dtype))


def say_if_hot(kernel: Any, state: Any) -> Any:
    """The same state after an ``InferenceWarning`` if the chain is hot. It comes while a chain
    runs, because a kernel cannot know which draw is the last."""
    name, settings = _measure_of(kernel), kernel.settings
    if name is None:
        return state
    remedy = "leave out step_size, or take a smaller one or a ControlVariate"
    message = (
        f"the mean of {name} over {_DRAWS} draws is {{count}} times what it should be, so gradient"
        " noise or too long a step heats the chain, and its standard deviations are too large by"
        f" about the root of this; {remedy if settings is None else settings.if_hot}."
    )
    hot = jnp.isfinite(state.heat) & (state.heat < 0)
    told = reported(jnp.where(hot, -state.heat, 0), message) > 0
    return state._replace(heat=jnp.where(told, jnp.inf, state.heat))


def _measure_of(kernel: Any) -> str | None:
    """The field of the state that shows how hot a chain is."""
    shown = ("kinetic_temperature", "implied_variance_ratio")
    return next((name for name in shown if name in kernel.state_class._fields), None)
