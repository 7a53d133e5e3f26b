"""Whether particles, or draws of a guide, stay as wide as they are when a Markov chain moves them.

Reference: Neal, *MCMC using Hamiltonian dynamics* (Handbook of MCMC, 2011), section 5.3.
"""

from collections.abc import Callable
from dataclasses import replace
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.potential import Potential, value_and_grad
from numpyro_ext._model.read import ModelInfo, model_info, sample_sites
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics._evaluate import count_of, default_block_size, evaluate, prototype
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._memo import remember
from numpyro_ext.diagnostics._operations import count_operations
from numpyro_ext.diagnostics._particles import Scored, name_in, worst_of
from numpyro_ext.diagnostics._rules import Row
from numpyro_ext.diagnostics._spread import LEAPS, Spread, ValueAndGrad, spread_after_moves

__all__ = ["guide_moves_row", "moves_row"]

MOVES = 40
MOST = 10**9
"""So many log densities of sites are evaluated for particles without being asked."""
MOST_OPERATIONS = 2 * 10**10
"""So many numbers are computed for a guide without being asked: a few seconds of a core."""
FEW_OPERATIONS = 10**9
"""Up to here more chains are started, and the program is not worth optimising."""
DRAWS, STARTS, FEWEST_STARTS = 10_000, 1000, 128
SD_RATIO = (0.8, 1.2)
GUIDE_SD_RATIO = (0.85, 1.2)
"""As of the implied ratio: chains that are short have not left all of their bias behind."""
QUANTITY = "sd ratio after moves, worst"
_STUCK = 0.1


class _Judged(NamedTuple):
    """What is said of the points, in words."""

    what: str
    remedy: str
    limits: tuple[float, float]


PARTICLES = _Judged("particles", "take another field", SD_RATIO)
GUIDE = _Judged("draws", "train longer, take a richer guide", GUIDE_SD_RATIO)


def moves_row(
    obj: Any, fit: Fit, found: Scored, num_moves: int | None, rng_key: Array
) -> list[Row]:
    """The line of the worst number of a latent site; none for m <= d, or without moves."""
    m, d = found.x.shape
    if m <= d or num_moves == 0:
        return []
    kernel: Any = getattr(obj, "sampler", None)
    forward = getattr(kernel, "forward_mode_differentiation", False)
    if fit.model is None:
        unravel: Any = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], obj.last_state.z))[1]
        energy = value_and_grad(lambda x: kernel.potential_fn(unravel(x)), forward_mode=forward)
        num_moves = MOVES if num_moves is None else num_moves
        run = jax.jit(lambda x, key: spread_after_moves(energy, jnp.ravel, x, key, num_moves, m))
        return [_row(run(found.x, rng_key), found.name)]
    trace = prototype(fit, rng_key).trace
    count = m * MOVES * LEAPS * sum(count_of(site) for site in sample_sites(trace))
    if num_moves is None and count > MOST:
        return [_left_out(m, "particle", f"{count:.1g} log densities")]
    num_moves = MOVES if num_moves is None else num_moves
    memo = {} if fit.memo is None else fit.memo

    def make() -> Callable[[Params, Array, Array], Spread]:
        @jax.jit
        def run(params: Params, x: Array, rng_key: Array) -> Spread:
            _, energy, numbers = _target(fit, params, trace, forward_mode=forward)
            block = default_block_size(trace)
            return spread_after_moves(energy, numbers, x, rng_key, num_moves, block)

        return run

    run = remember(memo, ("moves", num_moves), make)
    return [_row(run(fit.params[0], found.x, rng_key), _name_of(model_info(trace)))]


def guide_moves_row(
    fit: Fit, draws: dict[str, Any], num_moves: int | None, rng_key: Array
) -> list[Row]:
    """The same of draws of a guide, those of the first restart; none without moves.

    :param draws: some that exist already, ``(m, *site)``; there will be about ``DRAWS``.
    """
    if num_moves == 0:
        return []
    proto = prototype(fit, rng_key)
    trace, params = proto.trace, fit.params[0]
    info = model_info(trace)
    memo = {} if fit.memo is None else fit.memo

    def gradient(params: Params, x: Array) -> tuple[Array, Array]:
        return _target(fit, params, trace)[1](x)

    x = jax.ShapeDtypeStruct((info.size,), jnp.result_type(float))
    try:
        one = remember(memo, "operations", lambda: count_operations(gradient, params, x))
    except ValueError as error:
        if "Reverse-mode" not in str(error):
            raise
        verdict = "the model has no gradient in reverse mode, which a Markov chain needs here."
        return [Row(QUANTITY, math.nan, None, "", None, verdict)]
    each = (MOVES if num_moves is None else num_moves) * LEAPS * max(one, 1.0)
    starts = int(np.clip(FEW_OPERATIONS / each, FEWEST_STARTS, STARTS))
    if num_moves is None and starts * each > MOST_OPERATIONS:
        return [_left_out(starts, "draw", f"{starts * each:.1g} operations")]
    num_moves = MOVES if num_moves is None else num_moves
    key_draws, key_moves = random.split(rng_key)
    draws = _more(fit, draws, info, key_draws)
    starts = min(starts, len(next(iter(draws.values()))))

    def make() -> Callable[[Params, Sites, Array], Spread]:
        block = default_block_size(trace)

        def run(params: Params, draws: Sites, rng_key: Array) -> Spread:
            target, energy, numbers = _target(fit, params, trace)

            def point(draw: Sites) -> Array:
                return info.ravel(target.unconstrain("x", draw))

            x = lax.map(point, draws, batch_size=block)
            return spread_after_moves(energy, numbers, x, rng_key, num_moves, block, starts)

        quick = jax.default_backend() == "cpu" and starts * each <= FEW_OPERATIONS
        options = {"xla_backend_optimization_level": 0} if quick else None
        return jax.jit(run, compiler_options=options)

    run = remember(memo, ("moves of draws", num_moves, starts), make)
    return [_row(run(params, draws, key_moves), _name_of(info), GUIDE)]


def _more(fit: Fit, draws: dict[str, Any], info: ModelInfo, rng_key: Array) -> dict[str, Any]:
    """The draws of latent sites and others like them, by the program that made them."""
    chosen = {name: draws[name] for name in info.latents}
    size = len(next(iter(chosen.values())))
    # Some numbers have so heavy a tail that 1,000 draws do not tell their spread.
    times = min(DRAWS, 10**7 // info.size) // size - 1
    pieces = [chosen]
    for key in random.split(rng_key, max(0, min(times, 9))):
        one = fit._replace(params=fit.params[:1])
        latent = evaluate(one, prototype(fit, key), key, size, lp=True)["latent"]
        pieces.append({name: latent[name][0] for name in chosen})
    return {name: jnp.concatenate([piece[name] for piece in pieces]) for name in chosen}


def _target(
    fit: Fit, params: Params, trace: Any, *, forward_mode: bool = False
) -> tuple[Potential, ValueAndGrad, Callable[[Array], Array]]:
    """The potential on all data, the same of a vector with its gradient, and the numbers of the
    latent sites at a vector."""
    assert fit.model is not None
    info = model_info(trace)
    # Deterministic sites would only take another run of the model at each point.
    latents = replace(info, deterministic=())
    target = Potential(fit.model, latents, params, fit.args, fit.kwargs, forward_mode=forward_mode)
    constrain = target.postprocess()

    def energy(x: Array) -> tuple[Array, Array]:
        value, grad = target.value_and_grad(info.unravel(x), {})
        return value, info.ravel(grad)

    def numbers(x: Array) -> Array:
        values = constrain(info.unravel(x))
        return jnp.concatenate([jnp.ravel(values[name]) for name in info.latents])

    return target, energy, numbers


def _name_of(info: ModelInfo) -> Callable[[int], str]:
    """What a number of the latent sites is called."""
    ends = np.cumsum([math.prod(x.constrained.shape) for x in info.latents.values()]).tolist()
    slices = dict(zip(info.latents, map(slice, [0, *ends[:-1]], ends), strict=True))
    return lambda k: name_in(slices, k)


def _left_out(starts: int, what: str, cost: str) -> Row:
    verdict = (
        f"Markov chains of {MOVES} moves from each of {starts} {what}s would take {cost};"
        f" num_moves={MOVES} runs them."
    )
    return Row(QUANTITY, math.nan, None, "", None, verdict)


def _row(found: Spread, name: Callable[[int], str], judged: _Judged = PARTICLES) -> Row:
    what, remedy, limits = judged
    low, high = limits
    # A number that does not vary is as wide as it can be.
    ratios, errors = (np.asarray(x, float) for x in (found.ratio, found.error))
    ratios = np.nan_to_num(ratios, nan=1.0)
    limit, independent = f"{low} to {high}", judged is GUIDE
    if independent:
        # The largest of n errors: their own size, if all is right, is no reason to complain.
        noise = (1 + math.sqrt(2 * math.log(len(ratios)))) * errors / ratios
        significant = np.where(np.abs(np.log(ratios)) > noise, ratios, 1.0)
        outside = np.any((significant < low) | (significant > high))
        ratios = significant if outside else ratios
    worst = worst_of(ratios, limits)
    ratio = float(ratios[worst])
    error = float(errors[worst]) if independent else None
    if float(found.accepted) < _STUCK:
        verdict = (
            f"a Markov chain on all data does not leave the {what}, so nothing can be said of"
            " their spread; the density may be rough, or not a number near some of them."
        )
        return Row(QUANTITY, ratio, error, limit, False, verdict)
    ok = low <= ratio <= high or (independent and not outside)
    verdict = (
        f"a Markov chain on all data leaves the {what} as wide as they are; it is too short to"
        " find another mode."
    )
    if not ok:
        verdict = (
            f"a Markov chain on all data that starts from each of the {what} makes the standard"
            f" deviation of {name(worst)} {1 / ratio:.2g} times what it is; reparametrise the"
            f" model, {remedy}, or compare with NUTS."
        )
    return Row(QUANTITY, ratio, error, limit, ok, verdict)
