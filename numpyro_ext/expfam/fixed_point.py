"""Fixed points, differentiated at the solution and not through the iterations."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_ext._checks import check_count, check_nonnegative


class FixedPointResult(NamedTuple):
    """Result of :func:`fixed_point`: the last finite iterate, the number of evaluations of f, the
    largest change in the last of them, infinite if it was not finite, and whether it was within the
    tolerance."""

    value: Any
    num_iter: Array
    residual: Array
    converged: Array


def fixed_point(
    f: Callable[[Any, Any], Any],
    args: Any,
    init: Any,
    *,
    tol: float | None = None,
    max_iter: int = 200,
) -> FixedPointResult:
    r"""Solve x = f(args, x) by iteration, with the derivative of the implicit function.

    The iteration starts at ``init`` and stops where

    .. math:: \max |f(x) - x| \le tol\, (1 + \max |x|).

    The transposed equation maps the cotangent v of the solution to the one of ``args``,

    .. math:: u = v + (\partial f / \partial x)^\top u, \qquad
        \bar{args} = (\partial f / \partial args)^\top u,

    which is iterated from u = v by the same rule, so that the memory does not depend on the number
    of iterations. ``init`` and the diagnostics have no gradient. Only reverse mode is defined.

    **When it fails.** Without convergence the value is the last finite iterate, and ``converged``
    is False; nothing is raised. Where the transposed iteration does not converge, as at a fixed
    point that repels (a symmetric start of mean field), u = v: the derivative of a single step.

    :param f: a map ``(args, x) -> x`` that keeps the tree, the shapes and the dtypes of x.
    :param args: pytree of what the gradient is taken in; so is what ``f`` closes over.
    :param init: pytree of floating arrays, the start.
    :param tol: tolerance; 1e-5 in float32 and 1e-10 in double precision by default.
    :param max_iter: largest number of evaluations of f, and of transposed steps.

    References: Christianson, *Reverse accumulation and attractive fixed points* (1994).

    >>> from numpyro_ext.expfam import fixed_point
    >>> def root(a):  # Newton's iteration for the square root
    ...     return fixed_point(lambda a, x: (x + a / x) / 2, a, jnp.ones(())).value
    >>> print(f"{root(4.0):.4f} {jax.grad(root)(4.0):.4f}")
    2.0000 0.2500
    """
    max_iter = check_count("max_iter", max_iter)
    init = jax.tree.map(_as_strong, init)
    if tol is None:
        double = jnp.result_type(*jax.tree.leaves(init)) == jnp.float64
        tol = 1e-10 if double else 1e-5
    check_nonnegative("tol", tol)
    # A custom derivative may not close over values that are differentiated.
    closed, consts = jax.closure_convert(f, args, init)
    value, *rest = _solve(closed, float(tol), max_iter, (args, consts), init)
    return FixedPointResult(value, *map(lax.stop_gradient, rest))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _solve(f: Callable, tol: float, max_iter: int, args: Any, init: Any) -> FixedPointResult:
    return _iterate(lambda x: _call(f, args, x), init, tol, max_iter)


def _call(f: Callable, args: Any, x: Any) -> Any:
    own_args, consts = args
    return f(own_args, x, *consts)


def _solve_fwd(f: Callable, tol: float, max_iter: int, args: Any, init: Any) -> tuple[Any, Any]:
    result = _solve(f, tol, max_iter, args, init)
    return result, (args, result.value)


def _solve_bwd(f: Callable, tol: float, max_iter: int, saved: Any, cotangent: Any) -> tuple:
    transposed = jax.vjp(partial(_call, f), *saved)[1]
    size = _largest(cotangent[0])
    scale = jnp.where(size > 0, size, 1)
    v = jax.tree.map(lambda x: x / scale.astype(x.dtype), cotangent[0])

    def step(u: Any) -> Any:
        return jax.tree.map(jnp.add, v, transposed(u)[1])

    result = _iterate(step, v, tol, max_iter)
    # A change that is larger than v itself cannot be the tail of a series that converges.
    good = result.converged & (result.residual <= 1)
    u = jax.tree.map(lambda x, y: jnp.where(good, x, y), result.value, v)
    u = jax.tree.map(lambda x: x * scale.astype(x.dtype), u)
    return transposed(u)[0], jax.tree.map(jnp.zeros_like, saved[1])


_solve.defvjp(_solve_fwd, _solve_bwd)


def _iterate(f: Callable[[Any], Any], init: Any, tol: float, max_iter: int) -> FixedPointResult:
    def within(x: Any, residual: Array) -> Array:
        return residual <= tol * (1 + _largest(x))

    def unfinished(state: FixedPointResult) -> Array:
        return (state.num_iter < max_iter) & ~state.converged & (state.residual < jnp.inf)

    def advance(state: FixedPointResult) -> FixedPointResult:
        old = state.value
        new = jax.tree.map(lambda x, like: x.astype(like.dtype), f(old), old)
        residual = _largest(jax.tree.map(jnp.subtract, new, old))
        finite = jnp.isfinite(_largest(new)) & jnp.isfinite(residual)
        residual = jnp.where(finite, residual, jnp.inf)
        value = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)
        return FixedPointResult(value, state.num_iter + 1, residual, within(value, residual))

    # Any finite number: the first step replaces it.
    residual = jnp.ones_like(_largest(init))
    start = FixedPointResult(init, jnp.zeros((), int), residual, jnp.zeros((), bool))
    return lax.while_loop(unfinished, advance, start)


def _largest(x: Any) -> Array:
    """The largest absolute value in a tree; NaN where there is one."""
    return reduce(jnp.maximum, [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(x)])


def _as_strong(x: Any) -> Array:
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype)


def newton(step: Callable[[Array], Array], start: Array, max_steps: int = 50) -> Array:
    """Newton's ``step`` repeated until every element stays within rounding or is NaN."""
    tol = 4 * jnp.finfo(start.dtype).eps

    def moving(carry: tuple[Array, Array, Array]) -> Array:
        i, old, new = carry
        return (i < max_steps) & jnp.any(jnp.abs(new - old) > tol * jnp.abs(new))

    def advance(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, _, new = carry
        return i + 1, new, step(new)

    return lax.while_loop(moving, advance, (jnp.ones((), int), start, step(start)))[2]
