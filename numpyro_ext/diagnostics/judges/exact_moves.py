"""Check draws by running Hamiltonian Monte Carlo on all data from each of them.

It finds what weights and gradients do not: a guide that is a little too narrow, a single particle
far out in a tail, a funnel that is not filled.
"""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.operations import FEW, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import coordinate_name, model_info, sample_sites
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics import limits
from numpyro_ext.diagnostics._evaluate import Prototype, count_of
from numpyro_ext.diagnostics._facts import Numbers
from numpyro_ext.diagnostics._points import flat_draws, replace_nonfinite
from numpyro_ext.diagnostics._spread import (
    LEAPS,
    NUMBERS,
    MoveComparison,
    least_crossing,
    spread_after_moves,
    worst_combinations,
)
from numpyro_ext.diagnostics.context import FitContext, cached
from numpyro_ext.diagnostics.judges.chains import split_by_mode
from numpyro_ext.diagnostics.judges.points import has_moves
from numpyro_ext.diagnostics.judges.shares import AtModes, place_in
from numpyro_ext.diagnostics.judges.weights import weights
from numpyro_ext.diagnostics.limits import (
    CROSSING,
    FEWEST_EFFECTIVE,
    FREE,
    MOVED_RATIO,
    MOVED_SHIFT,
    PARTICLES_RATIO,
    PARTICLES_SHIFT,
    STAY,
    STUCK,
    judged_ranges,
    judged_ratios,
    judged_shifts,
    void_if_any_unjudged,
    worst_rows,
)
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["GUIDE", "PARTICLES", "HMCCheck", "exact_moves", "name_of", "run_hmc_from"]
__all__ += ["numbers_of", "plan_of", "rows_of_moves"]

MOVES = 40
DRAWS, STARTS, FEWEST_STARTS = 10_000, 1000, 128
MOST_WATCHED = 100
"""Numbers up to which a deterministic site is compared too."""
QUANTITY = "sd against exact moves, worst"
OF_SHIFT = "shift against exact moves, worst"
OF_RANGE = "shape against exact moves, worst"
_ELSEWHERE = 10.0  # standard deviations
_FEW = 10  # particles at a mode, whose spread says nothing
OF_SIDES = "crossing rate between modes"

Group = tuple[AtModes, int]
"""Where the draws are, and the mode of which those that are there are compared by themselves."""


class Wording(NamedTuple):
    """The words and the limits for one kind of points."""

    what: str
    remedy: str
    limits: tuple[float, float]
    shift: float
    shares: str
    """What the shares of modes are, and the remedy; empty if another line judges them."""


PARTICLES = Wording(
    "particles",
    "take twice as many particles, reparametrise the model, or compare with NUTS",
    PARTICLES_RATIO,
    PARTICLES_SHIFT,
    "as many particles are on a side as began there; take AutoMixtureNormal, whose importance"
    " weights check the shares",
)
GUIDE = Wording(
    "draws",
    "reparametrise the model, train longer, take a richer guide, or compare with NUTS",
    MOVED_RATIO,
    MOVED_SHIFT,
    "the share of each side is that of the guide; train longer, or take AutoMixtureNormal until its"
    " weights may be used and check the shares",
)
# Chains have moved between modes or have not, so that R-hat judges the shares.
CHAINS = GUIDE._replace(
    remedy="take a smaller step (or max_bias), reparametrise the model, or compare with NUTS",
    shares="",
)
_NO_GRADIENT = "not judged: a site was summed out, or has no gradient."


class HMCCheck(NamedTuple):
    """Points before and after moves, and what their numbers are called."""

    comparison: MoveComparison
    name: Callable[[int], str]
    """The name of a number."""
    wording: Wording
    coordinate: Callable[[int], str] = str
    """The name of a coordinate."""
    shares_known: bool = False
    """True if weights have judged the draws, and with them the shares of modes."""


@cached
def exact_moves(context: FitContext) -> list[Row]:
    """The lines of the worst numbers after moves, or why the draws were not moved."""
    groups = run_hmc_from(context)
    rows = worst_rows([_unmoved_row(x) if isinstance(x, str) else rows_of_moves(x) for x in groups])
    return [*context.target_lines, *rows] if _are_biased(context) else rows


def _are_biased(context: FitContext) -> bool:
    # A chain without a model has no potential to move by.
    return context.is_biased and context.fit.model is not None


@cached
def run_hmc_from(context: FitContext) -> list[HMCCheck | str]:
    """The points of each group that is compared by itself, or why they were not moved."""
    if context.kind == "particles":
        return _groups_of_particles(context)
    if context.num_moves == 0:
        return []
    if context.kind == "guide":
        return [_group_of_guide(context)] if has_moves(context) else []
    return _groups_of_chains(context) if _are_biased(context) else []


def _groups_of_particles(context: FitContext) -> list[HMCCheck | str]:
    """The group of all particles; none if there are as many coordinates, or no moves."""
    if not context.has_gradient:
        return [_NO_GRADIENT]
    x, num_moves = context.points.x, context.num_moves
    m, d = x.shape
    if m <= d or num_moves == 0:
        return []
    count = m * MOVES * LEAPS * sum(map(count_of, sample_sites(context.proto.trace)))
    if num_moves is None and count > limits.MOST_DENSITIES:
        return [_dear(m, "particle", f"{count:.1g} log densities")]
    plan = Plan(m, MOVES if num_moves is None else num_moves, None)

    def moved(x: Array, group: Group | None) -> HMCCheck:
        # They follow each other, so that they are no independent draws.
        key = context.rng_key
        kind = PARTICLES._replace(shift=limits.particles_shift(len(x)))
        return _moved(context, plan, x, key, kind, independent=False, group=group)

    if (at := split_by_mode(context)) is None:
        return [moved(x, None)]
    # Too few at a mode for their spread have too few of all to matter.
    groups = [np.flatnonzero(at.which[0] == k) for k in range(len(at.modes))]
    large = {k: here for k, here in enumerate(groups) if len(here) > max(d, _FEW)}
    if sum(map(len, large.values())) < 0.9 * m:
        return ["not judged: at a mode there are too few particles."]
    return [moved(x[here], (at, k)) for k, here in large.items()]


def _group_of_guide(context: FitContext) -> HMCCheck | str:
    """The group of the draws of the first restart, and of more draws of its guide."""
    if isinstance(plan := plan_of(context), str):
        return plan
    key_draws, key_moves = random.split(context.rng_key)
    kind = GUIDE if context.cause is None else GUIDE._replace(remedy=context.cause)
    found = _moved(context, plan, _more(context, key_draws), key_moves, kind)
    # Where the weights may be used, they have judged the draws, and with them the shares of modes.
    return found._replace(shares_known=weights(context)[0].ok is True)


def _groups_of_chains(context: FitContext) -> list[HMCCheck | str]:
    """The groups of draws of kernels whose stationary law is not the posterior: chains that are far
    from it agree with each other."""
    if context.facts.temperature is None:
        return ["not judged: the draws have no temperature, or several of them."]
    if not context.has_gradient:
        return [_NO_GRADIENT]
    if (at := split_by_mode(context)) is None:
        return [_group_of_chains(context, *context.mixed)]
    draws = {name: context.draws[name] for name in context.info.latents}
    groups = at.within(draws).items()
    return [_group_of_chains(context, *context.mix(x), (at, k)) for k, x in groups]


def _group_of_chains(
    context: FitContext, mixed: Numbers, sizes: np.ndarray, group: Group | None = None
) -> HMCCheck | str:
    """Draws of chains in a random order, of one mode where one is given."""
    if not np.min(sizes) >= FEWEST_EFFECTIVE:
        return f"not judged: the effective sample size of the draws is below {FEWEST_EFFECTIVE}."
    if isinstance(plan := plan_of(context), str):
        return plan
    trace, total = context.proto.trace, len(next(iter(mixed.values())))
    derived = sum(jnp.size(trace[name]["value"]) for name in watched_sites(context.proto))
    sizes = np.append(sizes, np.full(derived, np.min(sizes)))
    inflation = jnp.asarray(np.maximum(total / sizes, 1.0), float)
    draws = {name: jnp.asarray(y) for name, y in mixed.items()}
    key = context.key_moves
    return _moved(context, plan, draws, key, CHAINS, independent=inflation, group=group)


class Plan(NamedTuple):
    """Moves that are not too dear."""

    starts: int
    num_moves: int
    options: dict[str, int] | None
    """Options of the compiler."""
    operations: float = 0.0
    """Numbers that they compute."""


def plan_of(context: FitContext) -> Plan | str:
    """The moves of draws, by what a gradient on all data costs; or why there are none."""
    if (cost := context.gradient_cost) is None:
        return "the model has no gradient in reverse mode, which a Markov chain needs here."
    num_moves = MOVES if context.num_moves is None else context.num_moves
    each = num_moves * LEAPS * cost
    starts = int(np.clip(FEW / each, FEWEST_STARTS, STARTS))
    operations = starts * each
    if context.num_moves is None and operations > limits.MOST_OPERATIONS:
        return _dear(starts, "draw", f"{operations:.1g} operations")
    return Plan(starts, num_moves, quick_options(operations), operations)


def _dear(starts: int, what: str, cost: str) -> str:
    return (
        f"not judged: Markov chains of {MOVES} moves from each of {starts} {what}s would take"
        f" {cost}; num_moves={MOVES} runs them."
    )


def _unmoved_row(verdict: str) -> list[Row]:
    """The line that says why the points were not judged by moves."""
    low, high = MOVED_RATIO
    return [Row(QUANTITY, math.nan, None, f"{low} to {high}", None, verdict, True)]


def _moved(
    context: FitContext,
    plan: Plan,
    draws: Sites | Array,
    rng_key: Array,
    kind: Wording,
    independent: Array | bool = True,
    group: Group | None = None,
) -> HMCCheck:
    """The first of the constrained draws ``(m, *site)``, or of ``(m, d)`` points, before and after
    moves with the density p^(1/T), which do not leave the mode of a group."""

    def run(params: Params, x: Any, independent: Array | bool, rng_key: Array) -> MoveComparison:
        target = context.potential(params, watched_sites(context.proto))
        starts = min(plan.starts, len(jax.tree.leaves(x)[0]))
        if isinstance(x, dict):
            x = replace_nonfinite(flat_draws(target, x, context.block))
        energy, numbers = _energy(context, target, group), numbers_of(target)
        return spread_after_moves(
            energy, numbers, x, rng_key, plan.num_moves, context.block, starts, independent
        )

    compiled = jax.jit(run, compiler_options=plan.options)
    found = compiled(context.fit.params[0], draws, independent, rng_key)
    found = found._replace(combined=worst_combinations(found))
    where = "" if group is None else f" (at {group[0].places[group[1]]})"
    name, coordinate = name_of(context.proto), partial(coordinate_name, context.info.slices)
    return HMCCheck(found, lambda k: name(k) + where, kind, lambda k: coordinate(k) + where)


def _more(context: FitContext, rng_key: Array) -> Sites:
    """The draws of latent sites and others like them, by the program that made them."""
    info = context.info
    chosen = {name: context.first[name] for name in info.latents}
    size = len(next(iter(chosen.values())))
    # Some numbers have so heavy a tail that 1,000 draws do not tell their spread.
    times = min(DRAWS, 10**7 // info.size) // size - 1
    pieces = [chosen]
    for key in random.split(rng_key, max(0, min(times, 9))):
        latent = context.evaluate(key, size, [context.fit.params[0]])["latent"]
        pieces.append({name: latent[name][0] for name in chosen})
    return {name: jnp.concatenate([piece[name] for piece in pieces]) for name in chosen}


def _energy(
    context: FitContext, target: Potential, group: Group | None
) -> Callable[[Array], tuple[Array, Array]]:
    """The potential of a vector and its gradient, over the temperature of chains; infinite where it
    is not at the mode of the group."""
    T = context.facts.temperature if context.kind == "chains" else 1.0

    def energy(x: Array) -> tuple[Array, Array]:
        U, gradient = target.value_and_grad_flat(x, {})
        if T != 1.0:
            U, gradient = U / T, gradient / T
        if group is not None:
            at, k = group
            U = jnp.where(place_in(at.modes)(x)[0] == k, U, jnp.inf)
        return U, gradient

    return energy


def numbers_of(target: Potential) -> Callable[[Array], Array]:
    """The numbers of the latent sites at a vector, constrained, and of its deterministic ones."""
    constrain, info = target.postprocess(), target.info

    def numbers(x: Array) -> Array:
        values = constrain(info.unravel(x))
        names = [*info.latents, *info.deterministic]
        return jnp.concatenate([jnp.ravel(values[name]) for name in names])

    return numbers


def watched_sites(proto: Prototype) -> tuple[str, ...]:
    """The deterministic sites whose numbers are compared too, such as a scale that is computed from
    a precision near 0."""
    return tuple(
        name
        for name, site in proto.trace.items()
        if site["type"] == "deterministic"
        and name not in proto.left_out
        and jnp.issubdtype(jnp.result_type(site["value"]), jnp.floating)
        and jnp.size(site["value"]) <= MOST_WATCHED
    )


def name_of(proto: Prototype) -> Callable[[int], str]:
    """The name of a number of the latent sites, or of the deterministic ones after them."""
    trace, latents = proto.trace, model_info(proto.trace, sums=True).latents.items()
    sizes = {name: math.prod(latent.constrained.shape) for name, latent in latents}
    sizes |= {name: jnp.size(trace[name]["value"]) for name in watched_sites(proto)}
    ends = np.cumsum(list(sizes.values())).tolist()
    slices = dict(zip(sizes, map(slice, [0, *ends[:-1]], ends), strict=True))
    return partial(coordinate_name, slices)


def rows_of_moves(check: HMCCheck) -> list[Row]:
    """The lines of the worst numbers: their spread, mean and shape, and modes that no chain
    leaves."""
    comparison, name, wording = check.comparison, check.name, check.wording
    if comparison.accepted < STUCK:
        return [_stuck_row(check)]
    rows = _moment_rows(check)
    if (why := _reason_for_doubt(check)) and all(row.ok for row in rows):
        rows = [row._replace(ok=None, verdict=f"not judged: {why}.") for row in rows]
    rows = void_if_any_unjudged(rows)
    # Where the draws lie elsewhere, the ranges have other shares in any case.
    if comparison.range_ratio is not None and rows[1].ok is not False:
        ranges, begins = (comparison.range_ratio, comparison.range_error), f"{_begin(check)} makes"
        row = judged_ranges(OF_RANGE, *ranges, name, begins, f"{wording.remedy}.")
        # Few draws may be enough for a mean, and not for a shape; but not the other way round.
        rows.append(void_if_any_unjudged([*rows, row])[-1])
    return rows + _side_rows(check)


def _begin(check: HMCCheck) -> str:
    return f"a Markov chain on all data that starts from each of the {check.wording.what}"


def _stuck_row(check: HMCCheck) -> Row:
    low, high = check.wording.limits
    verdict = (
        f"a Markov chain on all data does not leave the {check.wording.what}, so nothing can be"
        " said of their spread; the density may be rough, or not a number near some of them."
    )
    ratio = float(np.nanmin(np.append(check.comparison.ratio, np.inf)))
    return Row(QUANTITY, ratio, None, f"{low} to {high}", False, verdict, True)


def _moment_rows(check: HMCCheck) -> list[Row]:
    """Spread and mean of single numbers; of linear combinations too where one of them is wrong, as
    the worst of so many is known less well."""
    comparison = check.comparison
    single = comparison.ratio, comparison.error, comparison.shift, comparison.shift_error
    single = [np.asarray(x, float) for x in single]
    if (combined := comparison.combined) is not None:
        both = zip(single, combined[:4], strict=True)
        rows = _judge_moments(check, *(np.append(one, other) for one, other in both))
        if any(row.ok is False for row in rows):
            return rows
    return _judge_moments(check, *single)


def _judge_moments(
    check: HMCCheck, ratios: np.ndarray, errors: np.ndarray, shifts: np.ndarray, of_shifts: Any
) -> list[Row]:
    """The lines of the worst ratio and of the worst shift, of single numbers and then, if there are
    more, of combinations."""
    (what, remedy, limits, farthest, _), combined = check.wording, check.comparison.combined
    count, begins = len(check.comparison.ratio), _begin(check)
    elsewhere = f"the {what} are elsewhere: begin at the modes, find_modes(model, *args)"

    def number(k: int, first_combination: int) -> str:
        if k < count or combined is None:
            return check.name(k)
        pair = sorted(combined.coordinates[first_combination + k - count].tolist())
        first, second = map(check.coordinate, pair)
        return f"a linear combination of {first} and {second} most of all"

    return [
        judged_ratios(
            QUANTITY,
            ratios,
            errors,
            limits,
            f"a Markov chain on all data leaves the {what} as wide as they are; it is too short to"
            " find another mode.",
            lambda k, by: (
                f"{begins} makes the standard deviation of {number(k, 0)} {1 / by:.2g} times what"
                f" it is; {remedy}."
            ),
        ),
        judged_shifts(
            OF_SHIFT,
            shifts,
            of_shifts,
            farthest,
            f"a Markov chain on all data leaves the mean of the {what} where it is.",
            lambda k, by: (
                f"{begins} moves the mean of {number(k, 2)} by {by:.2g} of its standard"
                f" deviations; {elsewhere if abs(by) > _ELSEWHERE else remedy}."
            ),
        ),
    ]


def _reason_for_doubt(check: HMCCheck) -> str | None:
    """Why chains that leave the draws as they are say nothing of them, if they do not."""
    accepted = float(check.comparison.accepted)
    if accepted > FREE:
        return (
            f"of the steps of the Markov chains {accepted:.1%} are accepted, so they are too small"
            " for the density, or it is the same everywhere"
        )
    between = np.nan_to_num(np.asarray(check.comparison.between, float))
    stays = int(np.argmax(between))
    if not check.shares_known and between[stays] > STAY:
        return (
            f"the Markov chains are too short for {check.name(stays)}, of whose variance"
            f" {between[stays]:.0%} is between them; a larger num_moves makes them longer"
        )
    return None


def _side_rows(check: HMCCheck) -> list[Row]:
    """The line of two modes between which hardly a chain moves, where nothing else judges their
    shares."""
    what, *_, shares = check.wording
    if check.shares_known or not shares:
        return []
    value, least = least_crossing(*np.asarray(check.comparison.ends, float))
    if value >= CROSSING:
        return []
    least = int(equally_spaced(len(check.comparison.ratio), NUMBERS)[least])
    verdict = (
        f"the {what} lie on two sides of a value of {check.name(least)} that hardly any Markov"
        f" chain crosses, so nothing has checked how many belong on each: {shares}."
    )
    return [Row(OF_SIDES, value, None, f"{CROSSING}", False, verdict, True)]
