"""What losses share: maps over particles, and steps that are not finite, which are skipped."""

from collections.abc import Callable
from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax
from jax.lax import stop_gradient
import jax.numpy as jnp

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._typing import Params

_SKIPPED = (
    "the loss is NaN or its gradient not finite in a step, which leaves the parameters as they"
    " are. If there are more than a few, take a smaller learning rate, or a guide that starts"
    " nearer to the posterior."
)


def map_over(how: Any, fn: Callable[..., Any], xs: Any) -> Any:
    """``fn`` over the leading axis of the pytree ``xs``; ``how`` is a ``vectorize_particles``."""
    if how is False:  # each is computed again in the backward pass, to save memory
        return jax.lax.map(jax.checkpoint(fn, prevent_cse=False), xs)
    how = jax.vmap if how is True else how
    # jax.vmap and jax.pmap, bare or in a functools.partial, return a function; others map at once.
    return how(fn)(xs) if getattr(how, "func", how) in (jax.vmap, jax.pmap) else how(fn, xs)


def finite_step(
    step: Callable[[Params], tuple[Any, Any]], params: Params
) -> tuple[Any, dict[str, Any]]:
    """The loss of ``step(params)`` and the mutable sites that it leaves, without an effect where
    they are not finite."""
    # What is no argument of a program, as the fixed map of a guide, has no gradient.
    real = {name: x for name, x in params.items() if _is_real(x) and is_traced(x)}

    def drop(cts: tuple[Params, Array]) -> tuple[Params, Array]:
        bad = ~jnp.all(jnp.array([jnp.all(jnp.isfinite(ct)) for ct in jax.tree.leaves(cts)]))
        bad = reported(bad, _SKIPPED) > 0
        return jax.tree.map(lambda ct: jnp.where(bad, 0.0, ct), cts)

    # The cotangent of the zero is NaN where the loss is, also if no parameter's is.
    real, zero = change_cotangents((real, jnp.zeros(())), drop)
    loss, state = step({**jax.tree.map(jnp.asarray, params), **real})
    state = stop_gradient(jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.result_type(x)), state))
    is_nan = jnp.isnan(loss)
    loss = loss + zero.astype(loss.dtype) * jnp.where(is_nan, jnp.nan, 0.0)
    return loss, {n: _keep_finite(x, params.get(n), is_nan) for n, x in state.items()}


def _is_real(x: Any) -> bool:
    return all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in jax.tree.leaves(x))


def _keep_finite(new: Any, before: Any, is_nan: Array) -> Any:
    """The mutable site after a step, or before it where that is not finite or the loss NaN."""
    if jax.tree.structure(new) != jax.tree.structure(before):  # of a loss that is called alone
        return new
    real = [x for x in jax.tree.leaves(new) if _is_real(x)]
    fine = jnp.all(jnp.array([~is_nan, *(jnp.all(jnp.isfinite(x)) for x in real)]))
    return jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, before)


def change_cotangents[T](tree: T, change: Callable[[T], T]) -> T:
    """``tree`` of floating-point arrays. Their cotangents become ``change(cotangents)`` on the way
    back, and their tangents in forward mode are untouched."""
    # A solve of the identity is the one way of JAX to give a transpose that works in forward and
    # reverse mode and under vmap: jax.custom_vjp has no forward mode, linear_call no vmap.
    same = lax.custom_linear_solve(
        lambda x: x, _tied(tree), lambda _, b: b, lambda _, cts: change(cts)
    )
    return _tied(same)


def _tied[T](tree: T) -> T:
    """``tree``, in which each array depends on all: the solve needs a cotangent of each."""
    tie = jnp.sum(jnp.stack([jnp.sum(x).astype(float) for x in jax.tree.leaves(tree)]))
    return jax.tree.map(lambda x: jnp.where(True, x, tie.astype(x.dtype)), tree)


def reported(count: Array, message: str) -> Array:
    """The count (``{count}`` in the message), which must be used, and an ``InferenceWarning`` while
    a compiled program runs if it is not zero."""

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
