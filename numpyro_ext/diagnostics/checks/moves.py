"""Check draws by running Hamiltonian Monte Carlo on the full data from each of them.

It finds what weights and gradients do not: a guide that is a little too narrow, a single particle
far out in a tail, a funnel that is not filled.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.operations import FEW, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import coordinate_name, slices_of
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics import limits
from numpyro_ext.diagnostics._fit import Fit, Numbers, compile_with_data, flatten
from numpyro_ext.diagnostics._moves import LEAPS, Combined, Moved, move_points, worst_combinations
from numpyro_ext.diagnostics.checks.chains import split_by_mode
from numpyro_ext.diagnostics.checks.draws import has_moves
from numpyro_ext.diagnostics.checks.modes import AtModes, place_in
from numpyro_ext.diagnostics.checks.weights import weights
from numpyro_ext.diagnostics.comparison import SD, Comparison
from numpyro_ext.diagnostics.context import FitContext, cached, flat_draws, potential_of
from numpyro_ext.diagnostics.limits import FEWEST_EFFECTIVE, FREE, MOVED_RATIO, STAY, STUCK
from numpyro_ext.diagnostics.table import Row, equally_spaced

MOVES = 40
MOST_OPERATIONS, SPEED = 2 * 10**10, 5 * 10**8
"""The most numbers that moves compute without being asked, and about how many a core computes in a
second: they take 40 seconds at most."""
_DRAWS, _STARTS, _FEWEST_STARTS, _LEAST_STARTS = 10_000, 1000, 128, 32
"""Draws that are compared, and of them the number that is moved: at most; where they cost much; and
where they would cost too much."""
_MOST_WATCHED = 100
"""Numbers up to which a deterministic site is compared too."""
_FEW = 10
"""Particles at a mode that are too few for their spread to be known."""
_REMEDIES = {
    "particles": "take twice as many particles, reparametrise the model, or compare with NUTS",
    "guide": "reparametrise the model, train longer, take a richer guide, or compare with NUTS",
    "chains": "take a smaller step (or max_bias), reparametrise the model, or compare with NUTS",
}

Group = tuple[AtModes, int]
"""Where the draws are, and the mode whose draws are compared by themselves."""


class MovedGroup(NamedTuple):
    """Draws before and after moves, and the sentences about them."""

    moved: Moved
    name: Callable[[int], str]
    """The name of a number."""
    coordinate: Callable[[int], str]
    """The name of a coordinate."""
    limits: tuple[float, float]
    """Limits of the ratios of sds."""
    farthest: float
    """The limit of the shift."""
    remedy: str
    combined: Combined | None = None
    """The linear combinations that differ most."""
    shares_known: bool = False
    """True if weights have judged the draws, and with them the shares of modes."""

    @property
    def values(self) -> np.ndarray:
        """``(4, n)`` shifts and their errors, ratios of sds and their errors."""
        moved = self.moved
        values = moved.shift, moved.shift_error, moved.ratio, moved.error
        return np.stack([np.asarray(x, np.float64) for x in values])

    def rows(self) -> list[Row]:
        """The lines of the worst numbers: their mean, spread and shape."""
        if self.moved.accepted < STUCK:
            low, high = self.limits
            verdict = (
                "a Markov chain on all data does not leave the draws, so nothing is known of their"
                " spread; the density may be rough, or not a number near some of them."
            )
            ratio = float(np.nanmin(np.append(self.moved.ratio, np.inf)))
            return [Row(SD, ratio, None, f"{low} to {high}", False, verdict, True)]
        rows = self._compared()
        if (why := self._doubt()) and all(row.ok for row in rows):
            rows = [row._replace(ok=None, verdict=f"not judged: {why}.") for row in rows]
        return rows

    def _compared(self) -> list[Row]:
        """The lines of single numbers; of linear combinations too where one of them is wrong, as
        the worst of so many is known less well."""
        moved, values = self.moved, self.values
        comparison = Comparison(
            "a Markov chain on all data from each draw",
            "Markov chains",
            self.name,
            self.remedy,
            *values,
            widths=None if moved.range_ratio is None else np.asarray(moved.range_ratio, float),
            width_errors=None if moved.range_error is None else np.asarray(moved.range_error),
            limits=self.limits,
            farthest=self.farthest,
            elsewhere="the draws are elsewhere: begin at the modes, find_modes(model, *args)",
        )
        if (combined := self.combined) is None:
            return comparison.rows()
        count = values.shape[1]

        def name(k: int) -> str:
            if k < count:
                return self.name(k)
            first, second = map(self.coordinate, sorted(combined.coordinates[k - count].tolist()))
            return f"a linear combination of {first} and {second} most of all"

        fields = "shift", "shift_error", "ratio", "ratio_error"
        both = np.concatenate([values, combined.values], 1)
        rows = comparison._replace(name=name, **dict(zip(fields, both, strict=True))).rows()
        return rows if any(row.ok is False for row in rows[:2]) else comparison.rows()

    def _doubt(self) -> str | None:
        """Why chains that leave the draws as they are do not judge them, if so."""
        accepted = float(self.moved.accepted)
        if accepted > FREE:
            return (
                f"of the steps of the Markov chains {accepted:.1%} are accepted, so they are too"
                " small for the density, or it is the same everywhere"
            )
        between = np.nan_to_num(np.asarray(self.moved.between, float))
        k = int(np.argmax(between))
        if not self.shares_known and between[k] > STAY:
            return (
                f"the Markov chains are too short for {self.name(k)}, of whose variance"
                f" {between[k]:.0%} is between them; a larger num_moves makes them longer"
            )
        return None


def moves(context: FitContext) -> list[Row]:
    """The lines of the worst numbers after moves, or why the draws were not moved."""
    return worst_rows([row for group in move_groups(context) for row in _rows_of(group)])


def _rows_of(group: MovedGroup | str) -> list[Row]:
    if isinstance(group, MovedGroup):
        return group.rows()
    low, high = MOVED_RATIO
    return [Row(SD, math.nan, None, f"{low} to {high}", None, f"not judged: {group}.", True)]


def worst_rows(rows: Sequence[Row]) -> list[Row]:
    """One line for each quantity of several groups: a wrong one, otherwise one that is not judged,
    otherwise the first."""
    worst: dict[str, Row] = {}
    rank = {False: 0, None: 1, True: 2}
    for row in rows:
        before = worst.setdefault(row.quantity, row)
        if rank[row.ok] < rank[before.ok]:
            worst[row.quantity] = row
    return list(worst.values())


@cached
def move_groups(context: FitContext) -> list[MovedGroup | str]:
    """The draws of each group that is compared by itself, or why they were not moved."""
    if context.num_moves == 0:
        return []
    if context.kind == "guide":
        return [_group_of_guide(context)] if has_moves(context) else []
    # A chain without a model has no potential to move by.
    if context.kind == "chains" and not (context.is_biased and context.fit.model):
        return []
    if context.kind == "chains" and context.temperature is None:
        return ["the draws have no temperature, or several of them"]
    if not context.has_gradient:
        return ["a site was summed out, or has no gradient"]
    return _groups_of_chains(context) if context.kind == "chains" else _groups_of_particles(context)


def _groups_of_particles(context: FitContext) -> list[MovedGroup | str]:
    """The group of all particles; none if there are as many coordinates."""
    x, _ = context.points
    m, d = x.shape
    if m <= d:
        return []
    if isinstance(plan := _plan(context, m), str):
        return [plan]

    def moved(x: Array, group: Group | None) -> MovedGroup:
        # They follow each other, so that they are no independent draws.
        moved = _moved(context, plan, x, context.rng_key, independent=False, group=group)
        farthest = limits.particles_shift(len(x))
        return moved._replace(limits=limits.PARTICLES_RATIO, farthest=farthest)

    if (by_mode := split_by_mode(context)) is None:
        return [moved(x, None)]
    groups = [np.flatnonzero(by_mode.which[0] == k) for k in range(len(by_mode.modes))]
    large = {k: here for k, here in enumerate(groups) if len(here) > max(d, _FEW)}
    if sum(map(len, large.values())) < 0.9 * m:
        return ["at a mode there are too few particles"]
    return [moved(x[here], (by_mode, k)) for k, here in large.items()]


def _group_of_guide(context: FitContext) -> MovedGroup | str:
    """The group of the draws of the first restart, and of more draws of its guide."""
    if isinstance(plan := _plan(context), str):
        return plan
    key_draws, key_moves = random.split(context.rng_key)
    group = _moved(context, plan, _more_draws(context, key_draws), key_moves)
    # Where the weights may be used, they have judged the draws, and with them the shares of modes.
    return group._replace(shares_known=weights(context)[0].ok is True)


def _more_draws(context: FitContext, rng_key: Array) -> Sites:
    """The draws of latent sites and others like them, by the program that made them."""
    info = context.info
    chosen = {name: context.first[name] for name in info.latents}
    size = len(next(iter(chosen.values())))
    # Some numbers have so heavy a tail that 1,000 draws do not tell their spread.
    times = min(_DRAWS, 10**7 // info.size) // size - 1
    pieces = [chosen]
    for key in random.split(rng_key, max(0, min(times, 9))):
        latent = context.evaluate(key, size, [context.fit.params[0]])["latent"]
        pieces.append({name: latent[name][0] for name in chosen})
    return {name: jnp.concatenate([piece[name] for piece in pieces]) for name in chosen}


def _groups_of_chains(context: FitContext) -> list[MovedGroup | str]:
    """The groups of draws of kernels whose stationary law is not the posterior: chains that are far
    from it agree with each other."""
    draws = {name: context.draws[name] for name in context.info.latents}
    if (by_mode := split_by_mode(context)) is not None:
        return [
            _group_of_chains(context, x, (by_mode, k)) for k, x in by_mode.within(draws).items()
        ]
    kept = np.all([np.isfinite(y).all((0, *range(2, y.ndim))) for y in draws.values()], 0)
    if context.sampling is not None:
        kept &= context.sampling.all(0)
    return [_group_of_chains(context, {name: y[:, kept] for name, y in draws.items()})]


def _group_of_chains(
    context: FitContext, draws: Numbers, group: Group | None = None
) -> MovedGroup | str:
    """Draws of chains in a random order, of one mode if there is a group."""
    mixed, sizes = _mixed(draws)
    if not np.min(sizes) >= FEWEST_EFFECTIVE:
        return f"the effective sample size of the draws is below {FEWEST_EFFECTIVE}"
    if isinstance(plan := _plan(context), str):
        return plan
    total = len(next(iter(mixed.values())))
    derived = sum(_watched_sizes(context).values())
    sizes = np.append(sizes, np.full(derived, np.min(sizes)))
    independent = jnp.asarray(np.maximum(total / sizes, 1.0), float)
    x = {name: jnp.asarray(y) for name, y in mixed.items()}
    return _moved(context, plan, x, context.key_moves, independent=independent, group=group)


def _mixed(draws: Numbers) -> tuple[Numbers, np.ndarray]:
    """Draws ``{site: (m, *site)}`` of chains in a random order, of which the first ones are moved,
    and the effective sample sizes of their numbers."""
    from arviz_stats.base.array import array_stats

    chains, length = next(iter(draws.values())).shape[:2]
    total = sum(math.prod(y.shape[2:]) for y in draws.values())
    most = min(_DRAWS, 10**7 // max(total, 1)) // chains
    chosen = equally_spaced(length, max(most, 1))
    draws = {name: y[:, chosen] for name, y in draws.items()}
    shape = chains, len(chosen)
    order = np.random.default_rng(0).permutation(math.prod(shape))
    mixed = {n: y.reshape(len(order), *y.shape[2:])[order] for n, y in draws.items()}
    if len(chosen) < 4:
        return mixed, np.zeros(1)
    x = flatten(draws).astype(np.float64)
    # At most so many numbers get their own effective size; the others get the least of these.
    some = equally_spaced(x.shape[-1], 1000)
    varies = np.any(x != x[:1, :1], (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        ess: Any = array_stats.ess(x[..., some], chain_axis=0, draw_axis=1)
    effective = np.where(varies[some], ess, math.prod(shape))
    sizes = np.full(x.shape[-1], np.min(effective))
    sizes[some] = effective
    return mixed, sizes


class _Plan(NamedTuple):
    """Moves that are not too dear."""

    starts: int
    num_moves: int
    options: dict[str, int] | None
    """Options of the compiler."""


def _plan(context: FitContext, starts: int | None = None) -> _Plan | str:
    """The moves, by what a gradient on all data costs; or why there are none.

    :param starts: the number of particles, all of which are moved; of draws as many as is cheap.
    """
    if (cost := context.gradient_cost) is None:
        return "the model has no gradient in reverse mode, which a Markov chain needs here"
    num_moves = MOVES if context.num_moves is None else context.num_moves
    each, asked = num_moves * LEAPS * cost, context.num_moves is not None
    if starts is None:
        starts = int(np.clip(FEW / each, _FEWEST_STARTS, _STARTS))
        if not asked:
            starts = min(starts, max(int(MOST_OPERATIONS / each), _LEAST_STARTS))
    if not asked and starts * each > MOST_OPERATIONS:
        return (
            f"Markov chains of {MOVES} moves from each of {starts} draws would take about"
            f" {starts * each / SPEED:,.0f} seconds of a core; num_moves={MOVES} runs them"
        )
    return _Plan(starts, num_moves, quick_options(starts * each))


def _moved(
    context: FitContext,
    plan: _Plan,
    draws: Sites | Array,
    rng_key: Array,
    independent: Array | bool = True,
    group: Group | None = None,
) -> MovedGroup:
    """The first of the constrained draws ``(m, *site)``, or of ``(m, d)`` points, before and after
    moves with the density p^(1/T), which do not leave the mode of a group."""
    info, watched = context.info, _watched_sizes(context)

    def run(fit: Fit, params: Params, x: Any, independent: Array | bool, rng_key: Array) -> Moved:
        target = potential_of(fit, info, params, tuple(watched))
        starts = min(plan.starts, len(jax.tree.leaves(x)[0]))
        if isinstance(x, dict):
            x = _replace_nonfinite(flat_draws(target, x, context.block))
        energy, numbers = _energy(context, target, group), numbers_of(target)
        return move_points(
            energy, numbers, x, rng_key, plan.num_moves, context.block, starts, independent
        )

    compiled = compile_with_data(context.fit, run, plan.options)
    moved = compiled(context.fit.params[0], draws, independent, rng_key)
    sizes = {name: math.prod(site.constrained.shape) for name, site in info.latents.items()}
    places = slices_of(tuple((name, (size,)) for name, size in (sizes | watched).items()))
    where = "" if group is None else f" (at {group[0].places[group[1]]})"
    return MovedGroup(
        moved,
        name=lambda k: coordinate_name(places, k) + where,
        coordinate=lambda k: coordinate_name(info.slices, k) + where,
        limits=MOVED_RATIO,
        farthest=limits.SHIFT,
        remedy=_REMEDIES[context.kind],
        combined=worst_combinations(moved),
    )


def _replace_nonfinite(x: Array) -> Array:
    """Points with the first finite one in place of those that are not: a transform that is
    saturated has no finite inverse."""
    fine = jnp.all(jnp.isfinite(x), 1)
    return x[jnp.where(fine, jnp.arange(len(x)), jnp.argmax(fine))]


def _energy(
    context: FitContext, target: Potential, group: Group | None
) -> Callable[[Array], tuple[Array, Array]]:
    """The potential of a vector and its gradient, over the temperature of chains; infinite where it
    is not at the mode of the group."""
    T = (context.temperature or 1.0) if context.kind == "chains" else 1.0

    def energy(x: Array) -> tuple[Array, Array]:
        U, gradient = target.value_and_grad_flat(x, {})
        if T != 1.0:
            U, gradient = U / T, gradient / T
        if group is not None:
            by_mode, k = group
            U = jnp.where(place_in(by_mode.modes)(x)[0] == k, U, jnp.inf)
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


def _watched_sizes(context: FitContext) -> dict[str, int]:
    """The sizes of the deterministic sites whose numbers are compared too, such as a scale that is
    computed from a precision near 0."""
    return {
        name: jnp.size(site["value"])
        for name, site in context.proto.trace.items()
        if site["type"] == "deterministic"
        and name not in context.proto.left_out
        and jnp.issubdtype(jnp.result_type(site["value"]), jnp.floating)
        and jnp.size(site["value"]) <= _MOST_WATCHED
    }
