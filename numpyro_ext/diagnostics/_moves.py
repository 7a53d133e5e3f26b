"""Particles, or draws of a guide, that Markov chains move: how many of them, and at what price."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.operations import FEW, count_operations, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, model_info, sample_sites
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._evaluate import Evaluate, Prototype, count_of, default_block_size
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._moved import GUIDE, PARTICLES, left_out, moved_rows
from numpyro_ext.diagnostics._points import (
    Points,
    flat_draws,
    in_place_of_lost,
    name_in,
    potential_of,
)
from numpyro_ext.diagnostics._spread import LEAPS, Spread, spread_after_moves
from numpyro_ext.diagnostics.table import Row

__all__ = ["guide_moves_row", "moves_row", "watched"]

MOVES = 40
MOST = 10**9
"""So many log densities of sites are evaluated for particles without being asked."""
MOST_OPERATIONS = 2 * 10**10
"""So many numbers are computed for a guide without being asked: a few seconds of a core."""
DRAWS, STARTS, FEWEST_STARTS = 10_000, 1000, 128
EACH, STEPS = 8, 80
"""A search for other modes has so many starts of each of four kinds, and steps from each of them,
of two gradients."""
MOST_WATCHED = 100
"""Numbers up to which a deterministic site is compared too."""


def moves_row(
    fit: Fit, proto: Prototype, found: Points, num_moves: int | None, rng_key: Array
) -> list[Row]:
    """The lines of the worst numbers of particles; none for m <= d, or without moves."""
    m, d = found.x.shape
    if m <= d or num_moves == 0:
        return []
    trace = proto.trace
    count = m * MOVES * LEAPS * sum(count_of(site) for site in sample_sites(trace))
    if num_moves is None and count > MOST:
        return left_out(_dear(m, "particle", f"{count:.1g} log densities"))
    num_moves = MOVES if num_moves is None else num_moves
    block = default_block_size(trace)

    @jax.jit
    def run(params: Params, x: Array, rng_key: Array) -> Spread:
        target = potential_of(fit, trace, params, watched(trace))
        energy, numbers = _energy(target), _numbers(target)
        return spread_after_moves(energy, numbers, x, rng_key, num_moves, block, independent=False)

    moved = run(fit.params[0], found.x, rng_key)
    return moved_rows(moved, name_of(trace), PARTICLES, coordinate_of(trace))


def guide_moves_row(
    fit: Fit,
    proto: Prototype,
    evaluate: Evaluate,
    draws: dict[str, Any],
    plan: "Plan | str",
    rng_key: Array,
    *,
    remedy: str | None = None,
    shares_known: bool = False,
) -> list[Row]:
    """The same of draws of a guide, those of the first restart.

    :param evaluate: makes more draws.
    :param draws: draws that exist already, ``(m, *site)``; there will be about ``DRAWS``.
    :param remedy: what to do about draws that are wrong, if it is known.
    :param shares_known: whether the weights have judged the shares of modes.
    """
    if isinstance(plan, str):
        return left_out(plan)
    trace, params = proto.trace, fit.params[0]
    info = model_info(trace)
    key_draws, key_moves = random.split(rng_key)
    draws = _more(evaluate, params, draws, info, key_draws)
    found = moved_draws(fit, trace, plan, draws, key_moves)
    kind = GUIDE if remedy is None else GUIDE._replace(remedy=remedy)
    return moved_rows(found, name_of(trace), kind, coordinate_of(trace), shares_known=shares_known)


class Plan(NamedTuple):
    """Moves that are not too dear."""

    starts: int
    num_moves: int
    options: dict[str, int] | None
    """Of the compiler."""
    searches: bool
    """Whether a search for other modes is not too dear besides."""


def planned(fit: Fit, trace: Trace, num_moves: int | None) -> Plan | str:
    """The moves of draws, by what a gradient on all data costs; or why there are none."""

    def gradient(params: Params, x: Array) -> tuple[Array, Array]:
        return potential_of(fit, trace, params).value_and_grad_flat(x, {})

    x = jax.ShapeDtypeStruct((model_info(trace).size,), jnp.result_type(float))
    try:
        one = count_operations(gradient, fit.params[0], x)
    except ValueError as error:
        if "Reverse-mode" not in str(error):
            raise
        return "the model has no gradient in reverse mode, which a Markov chain needs here."
    each = (MOVES if num_moves is None else num_moves) * LEAPS * max(one, 1.0)
    starts = int(np.clip(FEW / each, FEWEST_STARTS, STARTS))
    if num_moves is None and starts * each > MOST_OPERATIONS:
        return _dear(starts, "draw", f"{starts * each:.1g} operations")
    options = quick_options(starts * each)
    searches = (
        num_moves is not None or starts * each + 4 * EACH * 2 * STEPS * one <= MOST_OPERATIONS
    )
    return Plan(starts, MOVES if num_moves is None else num_moves, options, searches)


def moved_draws(
    fit: Fit,
    trace: Trace,
    plan: Plan,
    draws: Sites,
    rng_key: Array,
    *,
    temperature: float = 1.0,
    independent: Array | bool = True,
) -> Spread:
    """The first of the constrained draws ``(m, *site)`` before and after their moves.

    :param temperature: T of moves with the density p^(1/T).
    """
    block = default_block_size(trace)
    total = len(next(iter(draws.values())))

    def run(params: Params, draws: Sites, independent: Array | bool, rng_key: Array) -> Spread:
        target = potential_of(fit, trace, params, watched(trace))
        x = in_place_of_lost(flat_draws(target, draws, block))
        energy, numbers = _energy(target, temperature), _numbers(target)
        starts = min(plan.starts, total)
        return spread_after_moves(
            energy, numbers, x, rng_key, plan.num_moves, block, starts, independent
        )

    compiled = jax.jit(run, compiler_options=plan.options)
    return compiled(fit.params[0], draws, independent, rng_key)


def _more(
    evaluate: Evaluate, params: Params, draws: dict[str, Any], info: ModelInfo, rng_key: Array
) -> dict[str, Any]:
    """The draws of latent sites and others like them, by the program that made them."""
    chosen = {name: draws[name] for name in info.latents}
    size = len(next(iter(chosen.values())))
    # Some numbers have so heavy a tail that 1,000 draws do not tell their spread.
    times = min(DRAWS, 10**7 // info.size) // size - 1
    pieces = [chosen]
    for key in random.split(rng_key, max(0, min(times, 9))):
        latent = evaluate(key, size, [params])["latent"]
        pieces.append({name: latent[name][0] for name in chosen})
    return {name: jnp.concatenate([piece[name] for piece in pieces]) for name in chosen}


def _energy(target: Potential, T: float = 1.0) -> Callable[[Array], tuple[Array, Array]]:
    """The potential of a vector and its gradient, over T."""
    if T == 1.0:
        return lambda x: target.value_and_grad_flat(x, {})
    return lambda x: jax.tree.map(lambda y: y / T, target.value_and_grad_flat(x, {}))


def _numbers(target: Potential) -> Callable[[Array], Array]:
    """The numbers of the latent sites at a vector, constrained, and of its deterministic ones."""
    constrain, info = target.postprocess(), target.info

    def numbers(x: Array) -> Array:
        values = constrain(info.unravel(x))
        names = [*info.latents, *info.deterministic]
        return jnp.concatenate([jnp.ravel(values[name]) for name in names])

    return numbers


def watched(trace: Trace) -> tuple[str, ...]:
    """The deterministic sites whose numbers are compared too.

    A guide that is right where it is wide may be wrong in what users read, such as a scale that is
    computed from a precision near 0.
    """
    return tuple(
        name
        for name, site in trace.items()
        if site["type"] == "deterministic"
        and jnp.issubdtype(jnp.result_type(site["value"]), jnp.floating)
        and jnp.size(site["value"]) <= MOST_WATCHED
    )


def name_of(trace: Trace) -> Callable[[int], str]:
    """The name of a number of the latent sites, or of the deterministic ones after them."""
    latents = model_info(trace).latents.items()
    sizes = {name: math.prod(latent.constrained.shape) for name, latent in latents}
    sizes |= {name: jnp.size(trace[name]["value"]) for name in watched(trace)}
    ends = np.cumsum(list(sizes.values())).tolist()
    slices = dict(zip(sizes, map(slice, [0, *ends[:-1]], ends), strict=True))
    return lambda k: name_in(slices, k)


def coordinate_of(trace: Trace) -> Callable[[int], str]:
    """The name of a coordinate of a latent vector."""
    slices = model_info(trace).slices
    return lambda k: name_in(slices, k)


def _dear(starts: int, what: str, cost: str) -> str:
    return (
        f"not judged: Markov chains of {MOVES} moves from each of {starts} {what}s would take"
        f" {cost}; num_moves={MOVES} runs them."
    )
