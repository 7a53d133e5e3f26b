"""Modes of a posterior in which no draw lies, and the mass that they have."""

from collections.abc import Callable, Sequence
from dataclasses import replace
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import optax
from scipy import linalg, special

from numpyro_ext._model.mode_search import make_search
from numpyro_ext._model.modes import Mode
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics import limits
from numpyro_ext.diagnostics._evaluate import model_trace_of
from numpyro_ext.diagnostics._facts import several_modes
from numpyro_ext.diagnostics._points import flat_draws, replace_nonfinite
from numpyro_ext.diagnostics._spread import mean_and_sd, unit_root
from numpyro_ext.diagnostics.context import FitContext, cached
from numpyro_ext.diagnostics.judges.exact_moves import QUANTITY as MOVED
from numpyro_ext.diagnostics.judges.exact_moves import exact_moves, name_of, numbers_of, plan_of
from numpyro_ext.diagnostics.judges.points import has_moves
from numpyro_ext.diagnostics.table import Row

__all__ = ["QUANTITY", "search_of_chains", "other_modes", "unvisited_rows"]

MOST_LATENTS, FEWEST_DRAWS = 100, 100
"""Coordinates up to which, and draws from which on, there is a search."""
EACH, STEPS = 8, 80
"""Starts of each of four kinds, and steps from each of them, of two gradients."""
_NEAR, _CAME = 0.02, 0.3
"""Gradients, in units of the draws, at which a descent ends, and up to which it has found a
mode."""
_WIDTHS = 2.0, 20.0
"""Width of the points around the draws, in standard deviations of the draws."""
_AT_MOST = 10.0
"""Nats by which the potential of a mode may be above that of half of the draws."""
_SAME, _LOOKED_AT = 1.0, 3
_WIDEST = 100.0
"""Standard deviations of the draws above which a mode is flat, so that it has no mass to tell."""
_NORMAL_DRAWS, _BETWEEN, _NEAREST = 256, 24, 8
_BARRIER = 2.0
"""Nats below which the draws at one side of a barrier reach the other."""
_OF_SHARE = 0.1
QUANTITY = "mass of an unvisited mode"
SEARCHED = 1000
"""The number of draws of chains that are compared with the modes that a search finds."""


class End(NamedTuple):
    """Where a descent ended."""

    x: Any
    """``(d,)``"""
    value: Any
    """Of the potential; no number where the start has none."""
    gradient: Any
    """Its length, in units of the draws."""


def other_modes(context: FitContext, others: Sequence[Row]) -> list[Row]:
    """The line of modes without draws, where no line has found the draws wrong; of chains where
    the settings say that there are several, and the moves nothing."""
    if context.kind == "chains":
        return search_of_chains(context) or []
    if any(row.ok is False for row in others):
        return []
    if not has_moves(context) or context.num_moves == 0:
        return []
    potentials, key = -context.stats["lp"][0], random.fold_in(context.rng_key, 2)
    return unvisited_rows(context, context.first, potentials, key) or []


@cached
def search_of_chains(context: FitContext) -> list[Row] | None:
    """The lines of a search from the draws of chains; None where there was no search."""
    if not several_modes(context.facts) or context.facts.temperature != 1:
        return None
    moved = exact_moves(context)
    judged = any(row.quantity == MOVED and not math.isnan(row.value) for row in moved)
    if not judged or any(row.ok is False for row in moved):
        return None
    some = {name: x[:SEARCHED] for name, x in context.mixed[0].items()}
    return unvisited_rows(context, some, None, random.fold_in(context.key_moves, 1))


def unvisited_rows(
    context: FitContext, draws: dict[str, Any], potentials: np.ndarray | None, rng_key: Array
) -> list[Row] | None:
    r"""The line of the mode of most mass that has no draws, if there is one; None where descents do
    not show the modes.

    Descents from draws, from points around them and near 0, and from draws of the prior end near
    modes, at which Newton's method comes to rest. A mode has been missed if the potential rises by
    2 nats on straight lines from the nearest draws to it, and hardly a draw lies in its normal
    approximation. The mass of the draws is :math:`e^{m/2 - U} |2 \pi \Sigma|^{1/2}` with the
    medians U of their potential and m of the chi-square law.
    """
    info, plan, m = context.info, plan_of(context), len(next(iter(draws.values())))
    if isinstance(plan, str) or m < FEWEST_DRAWS or info.size > min(MOST_LATENTS, m // 2):
        return None
    cost = plan.operations + 4 * EACH * 2 * STEPS * (context.gradient_cost or 0.0)
    if context.num_moves is None and cost > limits.MOST_OPERATIONS:
        return None
    key_search, key_mass = random.split(rng_key)
    latent = {name: draws[name] for name in info.latents}
    found = _search(context, latent, key_search, plan.options)
    eps = float(np.finfo(found[0].dtype).eps)
    x, mean, root, ends = jax.tree.map(lambda y: np.asarray(y, np.float64), found)
    at = _values_of(context, plan.options)
    potentials = at(x) if potentials is None else potentials
    fine = np.isfinite(potentials) & np.all(np.isfinite(x), 1)
    if not (fine.mean() > 0.9 and np.all(np.isfinite(root))):
        return None
    potentials = np.where(fine, potentials, np.nan)
    middle = float(np.nanmedian(potentials))
    chosen, known = _choose_ends(_solve(root, ends.x - mean), ends, middle + _AT_MOST)
    if not known.size:
        return None
    if not chosen:
        return []
    # Of a normal, whose U has the median of half a chi-square above the mode.
    of_draws = -middle + 0.5 * special.chdtri(info.size, 0.5) + _log_volume(root)
    target = context.potential()
    modes: list[Mode] = []
    for mode in make_search(rng_key, target, adam=False)(ends.x[chosen]):
        if mode.at_mode and all(mode.distance(other.center) >= _SAME for other in modes):
            modes.append(mode)
    modes = _unvisited_modes(at, _Drawn(x, potentials, root, of_draws), modes, key_mass)
    if not modes:
        return []
    masses = np.array([of_draws, *(mode.log_evidence for mode in modes)])
    shares = np.exp(masses - np.logaddexp.reduce(masses))[1:]
    largest = int(np.argmax(shares))
    if not shares[largest] >= limits.UNVISITED:
        return []
    mode, share = modes[largest], float(shares[largest])
    where = _place(target, mode.center, draws, name_of(context.proto))
    lowest, value = float(np.min(ends.value[known])), float(at(np.asarray(mode.center)[None])[0])
    rounding = 256 * eps * max(1.0, abs(lowest))
    if abs(value - lowest) <= max(0.01, rounding):
        verdict = (
            f"not judged: no draw has found a mode at {where}, of the same height as that of the"
            " draws; if it is the same answer with other labels or signs, order or constrain them"
            " in the model, and if not, take AutoMixtureNormal."
        )
        return [Row(QUANTITY, share, None, f"{limits.UNVISITED}", None, verdict)]
    verdict = (
        f"no draw has found a mode at {where}, which has this share of the mass by its normal"
        " approximation; take AutoMixtureNormal, or keep the best loss of several restarts, or run"
        " chains from dispersed starts."
    )
    return [Row(QUANTITY, share, None, f"{limits.UNVISITED}", False, verdict)]


def _solve(L: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``(n, d)`` points times the transposed inverse of a lower triangular matrix."""
    return linalg.solve_triangular(L, x.T, lower=True, check_finite=False).T


def _log_volume(root: np.ndarray) -> float:
    """Half the log determinant of 2 pi times a covariance."""
    return float(np.sum(np.log(np.diagonal(root)))) + 0.5 * len(root) * math.log(2 * math.pi)


def _search(
    context: FitContext, draws: Sites, rng_key: Array, options: dict[str, int] | None
) -> Any:
    """Unconstrained draws with their mean and the root of their covariance, and the ends of the
    descents: first those from draws."""
    fit, info, block = context.fit, context.info, context.block

    def run(params: Params, draws: Sites, rng_key: Array) -> tuple[Array, Array, Array, End]:
        target = context.potential(params)

        def of_prior(key: Array) -> Array:
            sites = model_trace_of(fit, params, {}, key)
            drawn = {name: sites[name]["value"] for name in info.latents}
            return info.ravel(target.unconstrain("x", drawn))

        x = flat_draws(target, draws, block)
        kept = replace_nonfinite(x)
        mean, root = mean_and_sd(kept)[0], unit_root(kept)
        keys = random.split(rng_key, 4)
        widths = jnp.geomspace(*_WIDTHS, EACH, dtype=x.dtype)[:, None]
        moves = widths * random.normal(keys[0], (EACH, info.size), x.dtype)
        around = mean + jnp.matmul(moves, root.T, precision="highest")
        near_zero = random.uniform(keys[1], moves.shape, x.dtype, -2, 2)
        try:
            prior = jax.vmap(of_prior)(random.split(keys[2], EACH))
        except NotImplementedError:  # an improper one
            prior = random.uniform(keys[3], moves.shape, x.dtype, -10, 10)
        starts = jnp.concatenate([kept[:EACH], around, near_zero, prior])
        xi = jax.scipy.linalg.solve_triangular(root, (starts - mean).T, lower=True).T

        def to_x(xi: Array) -> Array:
            return mean + jnp.matmul(root, xi, precision="highest")

        def value(xi: Array) -> Array:
            return target(info.unravel(to_x(xi)), {})

        # A power of two, so that the blocks are all of one size.
        at_once = 2 ** int(math.log2(min(block, len(xi))))
        ends = lax.map(lambda xi: _descend(value, xi), xi, batch_size=at_once)
        return x, mean, root, ends._replace(x=jax.vmap(to_x)(ends.x))

    return jax.jit(run, compiler_options=options)(fit.params[0], draws, rng_key)


def _descend(value: Callable[[Array], Array], start: Array) -> End:
    """L-BFGS from one start, in coordinates in which a curvature of 1 is usual."""
    optim, value = optax.lbfgs(), jax.jit(value)  # traced once, though it is taken often

    def goes_on(state: Any) -> Array:
        k, _, U, g, _ = state
        return (k < STEPS) & jnp.isfinite(U) & (jnp.linalg.norm(g) > _NEAR)

    def step(state: Any) -> Any:
        k, x, U, g, memory = state
        move, memory = optim.update(g, memory, x, value=U, grad=g, value_fn=value)
        U, g = (optax.tree_utils.tree_get(memory, name) for name in ("value", "grad"))
        return k + 1, x + move, U, g, memory

    state = jnp.zeros((), int), start, *jax.value_and_grad(value)(start), optim.init(start)
    _, x, U, g, _ = lax.while_loop(goes_on, step, state)
    return End(x, U, jnp.linalg.norm(g))


def _choose_ends(xi: np.ndarray, ends: End, highest: float) -> tuple[list[int], np.ndarray]:
    """A few ends that are not those of descents from draws, the lowest first; and the latter."""
    d = xi.shape[1]
    fine = np.isfinite(ends.value) & (ends.value <= highest) & np.all(np.isfinite(xi), 1)
    # A first step may be a long one, into another mode.
    stayed = np.sum(xi[:EACH] ** 2, 1) <= limits.farthest(d)
    known = np.flatnonzero(fine[:EACH] & stayed & (ends.gradient[:EACH] <= _CAME))
    chosen: list[int] = []
    for k in np.argsort(np.where(fine, ends.value, np.inf)).tolist():
        others = np.concatenate([known, np.array(chosen, int)])
        near = others.size and np.min(np.linalg.norm(xi[k] - xi[others], axis=1)) < _SAME
        if fine[k] and not near and len(chosen) < _LOOKED_AT:
            chosen.append(k)
    return (chosen, known) if known.size else ([], known)


def _values_of(
    context: FitContext, options: dict[str, int] | None
) -> Callable[[np.ndarray], np.ndarray]:
    """U at ``(n, d)`` points, inf where it is no number."""
    target, block = context.potential(), context.block

    def values(points: Array) -> Array:
        return lax.map(lambda x: target(target.info.unravel(x), {}), points, batch_size=block)

    compiled, dtype = jax.jit(values, compiler_options=options), jnp.result_type(float)

    def at(points: np.ndarray) -> np.ndarray:
        found = np.asarray(compiled(jnp.asarray(points, dtype)), np.float64)
        return np.where(np.isfinite(found), found, np.inf)

    return at


class _Drawn(NamedTuple):
    """Draws in unconstrained space."""

    x: np.ndarray
    """``(m, d)``"""
    potentials: np.ndarray
    """``(m,)`` values of U there, NaN where it has none."""
    root: np.ndarray
    """A root of their covariance."""
    log_mass: float


def _unvisited_modes(
    at: Callable[[np.ndarray], np.ndarray], drawn: _Drawn, modes: list[Mode], rng_key: Array
) -> list[Mode]:
    """The modes in which there is hardly a draw, with the evidence that they have."""
    (x, potentials, root, of_draws), d = drawn, drawn.x.shape[1]
    e = np.asarray(random.normal(rng_key, (_NORMAL_DRAWS, d)), np.float64)
    found: list[Mode] = []
    steps = np.linspace(0, 1, _BETWEEN + 2)[1:]  # from a draw to the mode, which is the last one
    for mode in modes:
        center, factor = (np.asarray(y, np.float64) for y in (mode.center, mode.factor))
        if not np.linalg.norm(_solve(root, factor.T), 2) < _WIDEST:
            continue
        distances = np.sum(_solve(factor, x - center) ** 2, 1)
        distances = np.where(np.isfinite(potentials), distances, np.inf)
        nearest = np.argsort(distances)[:_NEAREST]
        lines = x[nearest, None] + steps[:, None] * (center - x[nearest, None])
        U = at(np.concatenate([center + e @ factor.T, lines.reshape(-1, d)]))
        lines = U[_NORMAL_DRAWS:].reshape(_NEAREST, -1)
        barrier = np.min(lines.max(1) - np.maximum(potentials[nearest], U[-1]))
        weights = -U[:_NORMAL_DRAWS] + 0.5 * np.sum(e**2, 1)
        sampled = np.logaddexp.reduce(weights) - math.log(_NORMAL_DRAWS) + _log_volume(factor)
        mass = min(mode.log_evidence, float(sampled))
        share = 1 / (1 + math.exp(min(of_draws - mass, 700.0)))
        inside = float(np.mean(distances <= limits.farthest(d)))
        if barrier >= _BARRIER and inside < _OF_SHARE * share:
            found.append(replace(mode, log_evidence=mass))
    return found


def _place(target: Potential, x: Array, draws: dict[str, Any], name: Callable[[int], str]) -> str:
    """The two numbers of the latent sites that are farthest from the draws there."""
    here = np.asarray(numbers_of(target)(x))
    flat = [np.reshape(draws[n], (len(draws[n]), -1)) for n in target.info.latents]
    flat = np.concatenate(flat, 1)
    mean, sd = mean_and_sd(flat)
    away = np.where(sd > 0, np.abs(here - mean) / np.maximum(sd, 1e-30), 0.0)
    first = np.sort(np.argsort(-away)[:2])
    return ", ".join(f"{name(int(k))} = {here[k]:.3g}" for k in first)
