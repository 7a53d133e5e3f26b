"""A step whose loss is NaN, or whose gradient is not finite, is none, and says so.

One minibatch or one draw may overflow, and NaN in the parameters would be the end of the fit. The
gradient of such a step is zero in all parameters. The loss stays what it is, so that the losses of
a run show these steps, and an ``InferenceWarning`` is raised while it runs. A loss may be infinite
with a gradient that is right, that of the particles whose weights are not zero.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax
from jax.lax import stop_gradient
import jax.numpy as jnp

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.cotangents import change_cotangents
from numpyro_ext._typing import Params

__all__ = ["finite_step", "reported"]

_LOST = (
    "the loss is NaN or its gradient not finite in a step, which leaves the parameters as they"
    " are. If there are more than a few, take a smaller learning rate, or a guide that starts"
    " nearer to the posterior."
)


def finite_step(
    step: Callable[[Params], tuple[Any, Any]], params: Params
) -> tuple[Any, dict[str, Any]]:
    """The loss of ``step(params)`` and the mutable sites that it leaves, without an effect if the
    step is none."""
    guarded, zero = _guard(params)
    loss, state = step(guarded)
    state = stop_gradient(jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.result_type(x)), state))
    is_none = jnp.isnan(loss)
    loss = loss + zero.astype(loss.dtype) * jnp.where(is_none, jnp.nan, 0.0)
    return loss, {n: _keep_finite(x, params.get(n), is_none) for n, x in state.items()}


def _guard(params: Params) -> tuple[Params, Array]:
    """The parameters, and a zero to be multiplied and added to the loss. Their gradients become
    zero on the way back if any of them is not finite, that of the zero among them."""
    real = {n: x for n, x in params.items() if _is_real(x)}

    def drop(cts: tuple[Params, Array]) -> tuple[Params, Array]:
        lost = ~jnp.all(jnp.array([jnp.all(jnp.isfinite(ct)) for ct in jax.tree.leaves(cts)]))
        lost = reported(lost, _LOST) > 0
        return jax.tree.map(lambda ct: jnp.where(lost, 0.0, ct), cts)

    real, zero = change_cotangents((real, jnp.zeros(())), drop)
    return {**params, **real}, zero


def _is_real(x: Any) -> bool:
    return all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in jax.tree.leaves(x))


def _keep_finite(new: Any, before: Any, is_none: Array) -> Any:
    """What a step computes, or what was before it where that is not finite, or the step none."""
    if jax.tree.structure(new) != jax.tree.structure(before):  # of a loss that is called alone
        return new
    real = [x for x in jax.tree.leaves(new) if _is_real(x)]
    fine = jnp.array([~is_none, *(jnp.all(jnp.isfinite(x)) for x in real)])
    return jax.tree.map(lambda a, b: jnp.where(jnp.all(fine), a, b), new, before)


def reported(count: Array, message: str) -> Array:
    """The count, and an ``InferenceWarning`` while a compiled program runs if it is not zero. The
    compiler drops the warning with the count, if that is not used.

    :param count: a number, or whether there is anything to say; ``{count}`` in the message.
    """

    @jax.custom_batching.custom_vmap
    def say(count: Array) -> Array:
        # A callback with effects would take every call out of the fast path of JAX.
        warn, kind = partial(_warn, message), jax.ShapeDtypeStruct((), jnp.int32)
        return lax.cond(count > 0, lambda: jax.pure_callback(warn, kind, count), lambda: count)

    @say.def_vmap
    def _(axis_size: int, in_batched: list[bool], count: Array) -> tuple[Array, bool]:
        # One question for all: under vmap the callback itself would be made in every step.
        return jnp.minimum(count, say(jnp.max(count))), True

    return say(jnp.asarray(count, jnp.int32))


def _warn(message: str, count: Any) -> Any:
    warnings.warn(InferenceWarning(message.format(count=int(count))), stacklevel=2)
    return count
