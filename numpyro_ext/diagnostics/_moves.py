"""The spread of particles, or of draws of a guide, before and after a Markov chain moves them.

Reference: Neal, *MCMC using Hamiltonian dynamics* (Handbook of MCMC, 2011), section 5.3.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, model_info, sample_sites
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics._evaluate import Evaluate, Prototype, count_of, default_block_size
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._points import Points, name_in, potential_of, worst_of
from numpyro_ext.diagnostics.table import Row, judged

__all__ = ["Spread", "count_operations", "guide_moves_row", "moves_row", "spread_after_moves"]

LEAPS = 4
"""Leapfrog steps of a trajectory: the fewer, the longer a point in a narrow place takes."""
_ACCEPTED = 0.7
"""Share of accepted trajectories to which the step sizes are tuned."""
_MOST_CORRELATED = 300
"""Coordinates up to which the chains move in units of the whole covariance."""
_STUCK = 0.1
"""Share of accepted trajectories below which the points are stuck."""
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


class Spread(NamedTuple):
    """The result of :func:`spread_after_moves`."""

    ratio: Array
    """``(n,)`` standard deviations of the points over those of the chains; NaN where a number does
    not vary."""
    error: Array
    """``(n,)`` Monte Carlo errors of these ratios, if the points are independent draws."""
    shift: Array
    """``(n,)`` mean of the chains minus that of the points, in standard deviations of the points; 0
    where a number does not vary."""
    shift_error: Array
    """``(n,)`` Monte Carlo errors of these shifts."""
    between: Array
    """``(n,)`` share of the variance of the chains that is between them: 0 for chains that have
    forgotten where they began, 1 for chains that stay there; NaN where a number does not vary."""
    accepted: Array
    """Share of accepted trajectories."""


def spread_after_moves(
    potential: Callable[[Array], tuple[Array, Array]],
    numbers: Callable[[Array], Array],
    x: Array,
    rng_key: Array,
    num_moves: int,
    block: int,
    num_starts: int | None = None,
) -> Spread:
    r"""Standard deviations of points over those that they have while a Markov chain moves them.

    Every point makes trajectories of Hamiltonian Monte Carlo in the coordinates in which the points
    have unit covariance, or unit variances where there are too many coordinates. Its step size is
    its own, because points may lie where the density is much narrower than all of them together. It
    is tuned in the first three quarters of the trajectories, and the second half counts: a point
    that comes back needs longer steps on its way.

    :param potential: the potential energy at a ``(d,)`` point and its gradient.
    :param numbers: the ``(n,)`` numbers of a point whose standard deviations are compared.
    :param x: ``(m, d)`` particles, or draws.
    :param block: so many points move at a time.
    :param num_starts: so many of the points are moved, the first ones; None for all.
    """
    m, d = x.shape
    half, tuned = num_moves // 2, 3 * num_moves // 4
    before = jax.vmap(numbers)(x)
    centre, sd = jnp.mean(before, axis=0), jnp.std(before, axis=0)
    varies = sd > 1e-6 * jnp.abs(centre)
    unit = jnp.where(varies, sd, 1.0)
    scale = jnp.where(jnp.std(x, axis=0) > 0, jnp.std(x, axis=0), 1.0)
    root = scale
    if d < m and d <= _MOST_CORRELATED:
        u = (x - jnp.mean(x, axis=0)) / scale
        # The correlations are shrunk, as those of the particles' own step are.
        shrunk = jnp.matmul(u.T, u, precision="highest") / (m + d)
        root = scale[:, None] * jnp.linalg.cholesky(jnp.fill_diagonal(shrunk, 1.0, inplace=False))

    def times(root: Array, v: Array) -> Array:
        return root * v if root.ndim == 1 else jnp.matmul(root, v, precision="highest")

    def at(x: Array) -> tuple[Array, Array, Array]:
        value, grad = potential(x)
        return x, -value, times(root.T, -grad)

    def move(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, None]:
        here, log_h, sums, accepted = state
        i, (key_momentum, key_uniform) = inputs
        length, threshold = random.uniform(key_uniform, (2,), x.dtype)
        # Of random length, or a trajectory could end where it began. The first one stays at its
        # start to find the gradient there: compiled at two places, it would take longer.
        h = jnp.where(i < 0, 0.0, jnp.exp(log_h) * (0.5 + 0.5 * length))

        def leap(_: int, state: Any) -> Any:
            (place, _, force), p = state
            p = p + 0.5 * h * force
            there = at(place + times(root, h * p))
            return there, p + 0.5 * h * there[2]

        momentum = random.normal(key_momentum, (d,), x.dtype)
        there, p = lax.fori_loop(0, jnp.where(i < 0, 1, LEAPS), leap, (here, momentum))
        log_ratio = there[1] - here[1] + 0.5 * (jnp.sum(momentum**2) - jnp.sum(p**2))
        chance = jnp.exp(jnp.minimum(jnp.where(jnp.isfinite(log_ratio), log_ratio, -jnp.inf), 0.0))
        taken = threshold < chance
        here = jax.tree.map(lambda new, old: jnp.where(taken, new, old), there, here)
        log_h = log_h + jnp.where((i >= 0) & (i < tuned), chance - _ACCEPTED, 0.0)
        counts = i >= half
        y = jnp.where(counts, (numbers(here[0]) - centre) / unit, 0.0)
        sums = sums[0] + y, sums[1] + y**2
        return (here, log_h, sums, accepted + jnp.where(counts, chance, 0.0)), None

    def one(inputs: tuple[Array, Array]) -> tuple[Any, Array]:
        start, key = inputs
        nothing = jnp.zeros_like(centre)
        log_h = jnp.asarray(math.log(1.6 * d ** (-1 / 6)), x.dtype)
        here = start, jnp.asarray(-1e30, x.dtype), jnp.zeros_like(start)
        state = here, log_h, (nothing, nothing), jnp.zeros((), x.dtype)
        steps = jnp.arange(-1, num_moves), random.split(key, (num_moves + 1, 2))
        (_, _, sums, accepted), _ = lax.scan(move, state, steps)
        return jax.tree.map(lambda a: a / (num_moves - half), (sums, accepted))

    starts = x if num_starts is None else x[:num_starts]
    inputs = starts, random.split(rng_key, len(starts))
    (first, second), accepted = lax.map(one, inputs, batch_size=block)
    mean = jnp.mean(first, axis=0)
    variance = jnp.mean(second, axis=0) - mean**2
    ratio = jnp.where(varies, 1 / jnp.sqrt(variance), jnp.nan)
    # Relative errors of both variances, that of the chains by what each contributes to it.
    of_points = jnp.var(((before - centre) / unit) ** 2, axis=0) / m
    of_chains = jnp.var(second - 2 * mean * first, axis=0) / len(starts) / variance**2
    # What the chains still know of their starts is no news: it is off by what the starts are.
    known = (before[: len(starts)] - centre) / unit
    slope = jnp.mean((first - mean) * known, axis=0) / jnp.maximum(jnp.var(known, axis=0), 1e-30)
    rest = jnp.var(first - slope * known, axis=0) / len(starts)
    between = jnp.var(first, axis=0) / variance
    return Spread(
        ratio=ratio,
        error=0.5 * ratio * jnp.sqrt(of_points + of_chains),
        shift=jnp.where(varies, mean - slope * jnp.mean(known, axis=0), 0.0),
        shift_error=jnp.where(varies, jnp.sqrt(rest + (1 - slope) ** 2 / m), 0.0),
        between=jnp.where(varies, between, jnp.nan),
        accepted=jnp.mean(accepted),
    )


class _Kind(NamedTuple):
    """The words and the limits for one kind of points."""

    what: str
    remedy: str
    limits: tuple[float, float]


PARTICLES = _Kind("particles", "take another field", SD_RATIO)
GUIDE = _Kind("draws", "train longer, take a richer guide", GUIDE_SD_RATIO)


def moves_row(
    fit: Fit, proto: Prototype, found: Points, num_moves: int | None, rng_key: Array
) -> list[Row]:
    """The line of the worst number of a latent site; none for m <= d, or without moves."""
    m, d = found.x.shape
    if m <= d or num_moves == 0:
        return []
    trace = proto.trace
    count = m * MOVES * LEAPS * sum(count_of(site) for site in sample_sites(trace))
    if num_moves is None and count > MOST:
        return [_left_out(m, "particle", f"{count:.1g} log densities")]
    num_moves = MOVES if num_moves is None else num_moves
    block = default_block_size(trace)

    @jax.jit
    def run(params: Params, x: Array, rng_key: Array) -> Spread:
        target = potential_of(fit, trace, params)
        return spread_after_moves(_energy(target), _numbers(target), x, rng_key, num_moves, block)

    return [_row(run(fit.params[0], found.x, rng_key), _name_of(model_info(trace)))]


def guide_moves_row(
    fit: Fit,
    proto: Prototype,
    evaluate: Evaluate,
    draws: dict[str, Any],
    num_moves: int | None,
    rng_key: Array,
) -> list[Row]:
    """The same of draws of a guide, those of the first restart; none without moves.

    :param evaluate: makes more draws.
    :param draws: draws that exist already, ``(m, *site)``; there will be about ``DRAWS``.
    """
    if num_moves == 0:
        return []
    trace, params = proto.trace, fit.params[0]
    info = model_info(trace)

    def gradient(params: Params, x: Array) -> tuple[Array, Array]:
        return potential_of(fit, trace, params).value_and_grad_flat(x, {})

    x = jax.ShapeDtypeStruct((info.size,), jnp.result_type(float))
    try:
        one = count_operations(gradient, params, x)
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
    draws = _more(evaluate, params, draws, info, key_draws)
    starts = min(starts, len(next(iter(draws.values()))))
    block = default_block_size(trace)

    def run(params: Params, draws: Sites, rng_key: Array) -> Spread:
        target = potential_of(fit, trace, params)
        x = lax.map(lambda draw: info.ravel(target.unconstrain("x", draw)), draws, batch_size=block)
        energy, numbers = _energy(target), _numbers(target)
        return spread_after_moves(energy, numbers, x, rng_key, num_moves, block, starts)

    quick = jax.default_backend() == "cpu" and starts * each <= FEW_OPERATIONS
    options = {"xla_backend_optimization_level": 0} if quick else None
    found = jax.jit(run, compiler_options=options)(params, draws, key_moves)
    return [_row(found, _name_of(info), GUIDE)]


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


def _energy(target: Potential) -> Callable[[Array], tuple[Array, Array]]:
    """The potential of a vector and its gradient."""
    return lambda x: target.value_and_grad_flat(x, {})


def _numbers(target: Potential) -> Callable[[Array], Array]:
    """The numbers of the latent sites at a vector, constrained."""
    constrain, info = target.postprocess(), target.info

    def numbers(x: Array) -> Array:
        values = constrain(info.unravel(x))
        return jnp.concatenate([jnp.ravel(values[name]) for name in info.latents])

    return numbers


def _name_of(info: ModelInfo) -> Callable[[int], str]:
    """The name of a number of the latent sites."""
    ends = np.cumsum([math.prod(x.constrained.shape) for x in info.latents.values()]).tolist()
    slices = dict(zip(info.latents, map(slice, [0, *ends[:-1]], ends), strict=True))
    return lambda k: name_in(slices, k)


def _left_out(starts: int, what: str, cost: str) -> Row:
    verdict = (
        f"Markov chains of {MOVES} moves from each of {starts} {what}s would take {cost};"
        f" num_moves={MOVES} runs them."
    )
    return Row(QUANTITY, math.nan, None, "", None, verdict)


def _row(found: Spread, name: Callable[[int], str], kind: _Kind = PARTICLES) -> Row:
    what, remedy, limits = kind
    low, high = limits
    # A number that does not vary is as wide as it can be.
    ratios, errors = (np.asarray(x, float) for x in (found.ratio, found.error))
    ratios = np.nan_to_num(ratios, nan=1.0)
    limit, independent = f"{low} to {high}", kind is GUIDE
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
    return judged(
        QUANTITY,
        ratio,
        limit,
        low <= ratio <= high or (independent and not outside),
        f"a Markov chain on all data leaves the {what} as wide as they are; it is too short to find"
        " another mode.",
        f"a Markov chain on all data that starts from each of the {what} makes the standard"
        f" deviation of {name(worst)} {1 / ratio:.2g} times what it is; reparametrise the model,"
        f" {remedy}, or compare with NUTS.",
        error,
    )


_CUBIC = {
    "cholesky": 1,
    "lu": 1,
    "triangular_solve": 1,
    "geqrf": 2,
    "householder_product": 2,
    "eigh": 10,
    "svd": 20,
}
"""Operations on an ``(n, n)`` matrix, in units of n^3, roughly."""


def count_operations(fn: Callable[..., Any], *args: Any) -> float:
    """Numbers that ``fn(*args)`` computes, and the products in its matrix arithmetic.

    It is read off the program without running it, so the same on every machine. A loop of unknown
    length counts once, and of two branches the longer one.
    """
    return _of(jax.make_jaxpr(fn)(*args).jaxpr)


def _of(jaxpr: Any) -> float:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return max(_of(branch.jaxpr) for branch in params["branches"])
    inner = [_inner(value) for value in jax.tree.leaves(params, is_leaf=_is_program)]
    if any(one is not None for one in inner):
        repeats = params.get("length", 1) if name == "scan" else 1
        return repeats * sum(_of(one) for one in inner if one is not None)
    size = float(sum(math.prod(jnp.shape(out.aval)) for out in equation.outvars))
    shape = list(equation.invars[0].aval.shape) if equation.invars else []
    if name == "dot_general":
        (summed, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(shape[axis] for axis in summed)
    if name in _CUBIC:
        return size + _CUBIC[name] * math.prod(shape) * shape[-1]
    return size


def _is_program(value: Any) -> bool:
    return _inner(value) is not None


def _inner(value: Any) -> Any:
    """The program in a parameter of an equation, if it holds one."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None
