"""Whether exact Markov chains on all data leave the draws, or the particles, as they are.

Each particle, or up to 1,000 of 10,000 draws, starts a chain of 40 trajectories of Hamiltonian
Monte Carlo, of 4 gradients on all data each. The numbers, or linear combinations, whose spread and
mean the chains change most are shown. This finds what weights and gradients do not: a guide that is
a little too narrow, a single particle far out in a tail, a funnel that is not filled.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.operations import FEW, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import model_info, sample_sites
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics import limits
from numpyro_ext.diagnostics._evaluate import Prototype, count_of
from numpyro_ext.diagnostics._facts import Numbers
from numpyro_ext.diagnostics._points import flat_draws, names_in, replace_nonfinite
from numpyro_ext.diagnostics._spread import (
    LEAPS,
    NUMBERS,
    Spread,
    least_crossing,
    spread_after_moves,
    worst_combinations,
)
from numpyro_ext.diagnostics.judges.chains import split_by_mode
from numpyro_ext.diagnostics.judges.shares import AtModes, place_in
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
    together,
    worst_rows,
)
from numpyro_ext.diagnostics.subject import OfFit
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["GUIDE", "PARTICLES", "Moved", "exact_moves", "move_draws", "name_of"]
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


class Moved(NamedTuple):
    """Points before and after moves, and what their numbers are called."""

    found: Spread
    name: Callable[[int], str]
    """The name of a number."""
    kind: Wording
    coordinate: Callable[[int], str] = str
    """The name of a coordinate."""
    shares_known: bool = False
    """True if weights have judged the draws, and with them the shares of modes."""


def exact_moves(subject: OfFit) -> list[Row]:
    """The lines of the worst numbers after moves, or why the draws were not moved."""
    groups = subject.once(move_draws)
    rows = worst_rows([_unmoved_row(x) if isinstance(x, str) else rows_of_moves(x) for x in groups])
    return [*subject.target_lines, *rows] if _are_biased(subject) else rows


def _are_biased(subject: OfFit) -> bool:
    # A chain without a model has no potential to move by.
    return subject.is_biased and subject.fit.model is not None


def move_draws(subject: OfFit) -> list[Moved | str]:
    """The points of each group that is compared by itself, or why they were not moved."""
    if subject.kind == "particles":
        return _groups_of_particles(subject)
    if subject.num_moves == 0:
        return []
    if subject.kind == "guide":
        return [_group_of_guide(subject)] if subject.has_moves else []
    return _groups_of_chains(subject) if _are_biased(subject) else []


def _groups_of_particles(subject: OfFit) -> list[Moved | str]:
    """The group of all particles; none if there are as many coordinates, or no moves."""
    if not subject.has_gradient:
        return [_NO_GRADIENT]
    x, num_moves = subject.points.x, subject.num_moves
    m, d = x.shape
    if m <= d or num_moves == 0:
        return []
    count = m * MOVES * LEAPS * sum(map(count_of, sample_sites(subject.proto.trace)))
    if num_moves is None and count > limits.MOST_DENSITIES:
        return [_dear(m, "particle", f"{count:.1g} log densities")]
    plan = Plan(m, MOVES if num_moves is None else num_moves, None)

    def moved(x: Array, group: Group | None) -> Moved:
        # They follow each other, so that they are no independent draws.
        key = subject.rng_key
        kind = PARTICLES._replace(shift=limits.particles_shift(len(x)))
        return _moved(subject, plan, x, key, kind, independent=False, group=group)

    if (at := split_by_mode(subject)) is None:
        return [moved(x, None)]
    # Too few at a mode for their spread have too few of all to matter.
    groups = [np.flatnonzero(at.which[0] == k) for k in range(len(at.modes))]
    large = {k: here for k, here in enumerate(groups) if len(here) > max(d, _FEW)}
    if sum(map(len, large.values())) < 0.9 * m:
        return ["not judged: at a mode there are too few particles."]
    return [moved(x[here], (at, k)) for k, here in large.items()]


def _group_of_guide(subject: OfFit) -> Moved | str:
    """The group of the draws of the first restart, and of more draws of its guide."""
    if isinstance(plan := plan_of(subject), str):
        return plan
    key_draws, key_moves = random.split(subject.rng_key)
    kind = GUIDE if subject.cause is None else GUIDE._replace(remedy=subject.cause)
    found = _moved(subject, plan, _more(subject, key_draws), key_moves, kind)
    # Where the weights may be used, they have judged the draws, and with them the shares of modes.
    return found._replace(shares_known=subject.lines("weights")[0].ok is True)


def _groups_of_chains(subject: OfFit) -> list[Moved | str]:
    """The groups of draws of kernels whose stationary law is not the posterior.

    Chains that are far from the posterior agree with each other, and a momentum may have its
    temperature where the coordinates have not: only exact moves on all data say so.
    """
    if subject.facts.temperature is None:
        return ["not judged: the draws have no temperature, or several of them."]
    if not subject.has_gradient:
        return [_NO_GRADIENT]
    if (at := split_by_mode(subject)) is None:
        return [_group_of_chains(subject, *subject.mixed)]
    draws = {name: subject.draws[name] for name in subject.info.latents}
    groups = at.within(draws).items()
    return [_group_of_chains(subject, *subject.mix(x), (at, k)) for k, x in groups]


def _group_of_chains(
    subject: OfFit, mixed: Numbers, sizes: np.ndarray, group: Group | None = None
) -> Moved | str:
    """Draws of chains in a random order, of one mode where one is given."""
    if not np.min(sizes) >= FEWEST_EFFECTIVE:
        return f"not judged: the effective sample size of the draws is below {FEWEST_EFFECTIVE}."
    if isinstance(plan := plan_of(subject), str):
        return plan
    trace, total = subject.proto.trace, len(next(iter(mixed.values())))
    derived = sum(jnp.size(trace[name]["value"]) for name in watched_sites(subject.proto))
    sizes = np.append(sizes, np.full(derived, np.min(sizes)))
    inflation = jnp.asarray(np.maximum(total / sizes, 1.0), float)
    draws = {name: jnp.asarray(y) for name, y in mixed.items()}
    key = subject.key_moves
    return _moved(subject, plan, draws, key, CHAINS, independent=inflation, group=group)


class Plan(NamedTuple):
    """Moves that are not too dear."""

    starts: int
    num_moves: int
    options: dict[str, int] | None
    """Options of the compiler."""
    operations: float = 0.0
    """Numbers that they compute."""


def plan_of(subject: OfFit) -> Plan | str:
    """The moves of draws, by what a gradient on all data costs; or why there are none."""
    if (cost := subject.gradient_cost) is None:
        return "the model has no gradient in reverse mode, which a Markov chain needs here."
    num_moves = MOVES if subject.num_moves is None else subject.num_moves
    each = num_moves * LEAPS * cost
    starts = int(np.clip(FEW / each, FEWEST_STARTS, STARTS))
    operations = starts * each
    if subject.num_moves is None and operations > limits.MOST_OPERATIONS:
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
    subject: OfFit,
    plan: Plan,
    draws: Sites | Array,
    rng_key: Array,
    kind: Wording,
    independent: Array | bool = True,
    group: Group | None = None,
) -> Moved:
    """The first of the constrained draws ``(m, *site)``, or of ``(m, d)`` points, before and after
    moves with the density p^(1/T), which do not leave the mode of a group."""

    def run(params: Params, x: Any, independent: Array | bool, rng_key: Array) -> Spread:
        target = subject.potential(params, watched_sites(subject.proto))
        starts = min(plan.starts, len(jax.tree.leaves(x)[0]))
        if isinstance(x, dict):
            x = replace_nonfinite(flat_draws(target, x, subject.block))
        energy, numbers = _energy(subject, target, group), numbers_of(target)
        return spread_after_moves(
            energy, numbers, x, rng_key, plan.num_moves, subject.block, starts, independent
        )

    compiled = jax.jit(run, compiler_options=plan.options)
    found = compiled(subject.fit.params[0], draws, independent, rng_key)
    found = found._replace(combined=worst_combinations(found))
    where = "" if group is None else f" (at {group[0].places[group[1]]})"
    name, coordinate = name_of(subject.proto), names_in(subject.info.slices)
    return Moved(found, lambda k: name(k) + where, kind, lambda k: coordinate(k) + where)


def _more(subject: OfFit, rng_key: Array) -> Sites:
    """The draws of latent sites and others like them, by the program that made them."""
    info = subject.info
    chosen = {name: subject.first[name] for name in info.latents}
    size = len(next(iter(chosen.values())))
    # Some numbers have so heavy a tail that 1,000 draws do not tell their spread.
    times = min(DRAWS, 10**7 // info.size) // size - 1
    pieces = [chosen]
    for key in random.split(rng_key, max(0, min(times, 9))):
        latent = subject.evaluate(key, size, [subject.fit.params[0]])["latent"]
        pieces.append({name: latent[name][0] for name in chosen})
    return {name: jnp.concatenate([piece[name] for piece in pieces]) for name in chosen}


def _energy(
    subject: OfFit, target: Potential, group: Group | None
) -> Callable[[Array], tuple[Array, Array]]:
    """The potential of a vector and its gradient, over the temperature of chains; infinite where it
    is not at the mode of the group."""
    T = subject.facts.temperature if subject.kind == "chains" else 1.0

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
    """The deterministic sites whose numbers are compared too.

    A guide that is right where it is wide may be wrong in what users read, such as a scale that is
    computed from a precision near 0.
    """
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
    return names_in(slices)


def rows_of_moves(group: Moved) -> list[Row]:
    """The lines of the worst numbers: their spread, mean and shape, and modes that no chain
    leaves."""
    found, name, kind, coordinate, shares_known = group
    ratios, errors, shifts, shift_errors, between = (np.asarray(x, float) for x in found[:5])
    what, remedy, limits, farthest, shares = kind
    accepted, n = float(found.accepted), len(ratios)
    if accepted < STUCK:
        ratio, limit = float(np.nanmin(np.append(ratios, np.inf))), f"{limits[0]} to {limits[1]}"
        verdict = (
            f"a Markov chain on all data does not leave the {what}, so nothing can be said of"
            " their spread; the density may be rough, or not a number near some of them."
        )
        return [Row(QUANTITY, ratio, None, limit, False, verdict, True)]
    combined = found.combined
    pairs = np.zeros((0, 2), int) if combined is None else combined.coordinates

    def number(k: int, of: int) -> str:
        if k < n:
            return name(k)
        first, second = sorted(pairs[of + k - n].tolist())
        return f"a linear combination of {coordinate(first)} and {coordinate(second)} most of all"

    begins = f"a Markov chain on all data that starts from each of the {what}"
    end = f"{remedy}."
    elsewhere = f"the {what} are elsewhere: begin at the modes, find_modes(model, *args)."

    def lines(*given: np.ndarray) -> list[Row]:
        ratios, errors, shifts, shift_errors = given
        return [
            judged_ratios(
                QUANTITY,
                ratios,
                errors,
                limits,
                f"a Markov chain on all data leaves the {what} as wide as they are; it is too short"
                " to find another mode.",
                lambda k, by: (
                    f"{begins} makes the standard deviation of {number(k, 0)} {1 / by:.2g} times"
                    f" what it is; {end}"
                ),
            ),
            judged_shifts(
                OF_SHIFT,
                shifts,
                shift_errors,
                farthest,
                f"a Markov chain on all data leaves the mean of the {what} where it is.",
                lambda k, by: (
                    f"{begins} moves the mean of {number(k, 2)} by {by:.2g} of its standard"
                    f" deviations; {elsewhere if abs(by) > _ELSEWHERE else end}"
                ),
            ),
        ]

    single = ratios, errors, shifts, shift_errors
    rows = lines(*single)
    if combined is not None:
        both = zip(single, combined[:4], strict=True)
        with_combinations = lines(*(np.append(one, other) for one, other in both))
        # The worst of so many is known less well, and says something only where it is wrong.
        if any(row.ok is False for row in with_combinations):
            rows = with_combinations
    stays = int(np.argmax(np.nan_to_num(between)))
    why = None
    if accepted > FREE:
        why = (
            f"of the steps of the Markov chains {accepted:.1%} are accepted, so they are too small"
            " for the density, or it is the same everywhere"
        )
    elif not shares_known and between[stays] > STAY:
        why = (
            f"the Markov chains are too short for {name(stays)}, of whose variance"
            f" {between[stays]:.0%} is between them; a larger num_moves makes them longer"
        )
    if why and all(row.ok for row in rows):
        rows = [row._replace(ok=None, verdict=f"not judged: {why}.") for row in rows]
    rows = together(rows)
    # Where the draws lie elsewhere, the ranges have other shares in any case.
    if found.range_ratio is not None and rows[1].ok is not False:
        ranges = found.range_ratio, found.range_error
        row = judged_ranges(OF_RANGE, *ranges, name, f"{begins} makes", end)
        # Few draws may be enough for a mean, and not for a shape; but not the other way round.
        rows.append(together([*rows, row])[-1])
    known = shares_known or not shares
    ends = np.asarray(found.ends, float)
    value, least = (math.inf, 0) if known else least_crossing(*ends)
    if value < CROSSING:
        least = int(equally_spaced(n, NUMBERS)[least])
        verdict = (
            f"the {what} lie on two sides of a value of {name(least)} that hardly any Markov chain"
            f" crosses, so nothing has checked how many belong on each: {shares}."
        )
        rows.append(Row(OF_SIDES, value, None, f"{CROSSING}", False, verdict, True))
    return rows
