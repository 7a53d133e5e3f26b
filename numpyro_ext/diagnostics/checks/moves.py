"""Check draws by running Hamiltonian Monte Carlo on the full data from each of them."""

from collections.abc import Callable
import math
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.circles import circles_of, recut, unrolled
from numpyro_ext._model.labels import coordinate_name, coordinate_name_of
from numpyro_ext._model.operations import FEW, jit_on_data, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.spheres import is_sphere, without_signs
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics._fit import Fit, cached, concatenate, flat_draws
from numpyro_ext.diagnostics._moves import LEAPS, Moved, move_points, worst_combinations
from numpyro_ext.diagnostics.checks.chains import Agreement, are_at_modes, rows_of_ensemble
from numpyro_ext.diagnostics.checks.draws import has_moves
from numpyro_ext.diagnostics.checks.modes import AtModes, draws_at_modes, place_in
from numpyro_ext.diagnostics.checks.weights import weights
from numpyro_ext.diagnostics.comparison import SD, Comparison, between
from numpyro_ext.diagnostics.limits import (
    FEWEST_EFFECTIVE,
    FREE,
    MOVED_RATIO,
    PARTICLES_RATIO,
    STAY,
    STUCK,
    particles_shift,
)
from numpyro_ext.diagnostics.table import Row, equally_spaced, merge_rows

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
_TO_COMBINE = 10
"""Independent draws for each dimension from which on an ensemble knows its covariance well enough
to be compared along the worst linear combination."""
_REMEDIES = {
    "particles": "take ParVI(model) without a field, twice as many particles, or reparametrise",
    "ensemble": "warm up longer, take a smaller step_size, reparametrise, or compare with NUTS",
    "guide": "reparametrise the model, train longer, take a richer guide, or compare with NUTS",
    "chains": "take a smaller step (or max_bias), reparametrise the model, or compare with NUTS",
}
_LOST = (
    "a Markov chain on all data does not leave the draws, so nothing is known of their spread; the"
    " density may be rough, or not a number near some of them."
)

Group = tuple[AtModes, int]
"""Where the draws are, and the mode at which draws are compared by themselves."""


def compare_moved(
    moved: Moved,
    name: Callable[[int], str],
    remedy: str,
    combined: Any = (),
    shares_known: bool = False,
    **limits: Any,
) -> Comparison:
    """The comparison with moves.

    :param combined: the values of linear combinations, if there are any.
    :param shares_known: whether weights have judged the draws, and with them the shares of modes,
        or the draws' own chains go from one to the other.
    """
    values = [np.asarray(x, np.float64) for x in moved.values]
    return Comparison(
        name,
        remedy,
        np.column_stack([np.stack(values), *combined]),
        moved.widths and np.stack([np.asarray(x, float) for x in moved.widths]),
        by="Markov chains",
        num_combined=sum(x.shape[1] for x in combined),
        doubt=_doubt(moved, name, shares_known),
        lost=_LOST if moved.accepted < STUCK else None,
        draws=moved.numbers,
        **limits,
    )


def _doubt(moved: Moved, name: Callable[[int], str], shares_known: bool) -> str | None:
    """Why chains that leave the draws as they are do not judge them, if so."""
    accepted = float(moved.accepted)
    if accepted > FREE:
        return (
            f"of the steps of the Markov chains {accepted:.1%} are accepted, so they are too"
            " small for the density, or it is the same everywhere"
        )
    stays = np.nan_to_num(np.asarray(moved.between, float))
    k = int(np.argmax(stays))
    if not shares_known and stays[k] > STAY:
        return (
            f"the Markov chains are too short for {name(k)}, of whose variance {stays[k]:.0%} is"
            " between them: there may be modes, whose shares nothing has checked, or a larger"
            " num_moves is needed"
        )
    return None


def moves(fit: Fit) -> list[Row]:
    """The lines of the worst numbers after moves, or why the draws were not moved."""
    moved = moved_draws(fit)
    if isinstance(moved, str):
        verdict = f"not judged: {moved}."
        return [Row(SD, math.nan, None, between(MOVED_RATIO), None, verdict, True)]
    # Of several modes a wrong line, otherwise one that is not judged, otherwise the first.
    return merge_rows([row for each in moved for row in each.rows()], (False, None, True))


@cached
def moved_draws(fit: Fit) -> list[Comparison] | str:
    """The draws before and after moves, mode by mode; or why they were not moved."""
    of_chains = fit.kind == "chains"
    if fit.num_moves == 0:
        return []
    if fit.kind == "guide":
        return _of_guide(fit) if has_moves(fit) else []
    if of_chains and not fit.is_biased:
        return []
    if of_chains and fit.temperature is None:
        return "the draws have no temperature, or several of them"
    if not fit.has_gradient:
        return "a site was summed out, or has no gradient"
    if not of_chains:
        return _of_particles(fit)
    if are_at_modes(fit):
        return "the chains are at several modes, between which they do not move"
    return _of_chains(fit)


def _of_particles(fit: Fit) -> list[Comparison] | str:
    """All particles, or those at each of several modes."""
    m, d = len(next(iter(fit.first.values()))), fit.info.size
    if m <= d:
        return []
    if isinstance(plan := _plan(fit, m if fit.kind == "particles" else None), str):
        return plan
    groups: list[tuple[Group | None, np.ndarray]] = [(None, np.arange(m))]
    if are_at_modes(fit) and (by_mode := draws_at_modes(fit)) is not None:
        each = [np.flatnonzero(by_mode.which[0] == k) for k in range(len(by_mode.modes))]
        groups = [((by_mode, k), x) for k, x in enumerate(each) if len(x) > max(d, _FEW)]
        if sum(len(here) for _, here in groups) < 0.9 * m:
            return "at a mode there are too few particles"
    result = []
    for group, here in groups:
        draws = {name: x[here] for name, x in fit.first.items()}
        # Particles of a field follow each other, so that they are no independent draws.
        draws_each, mixes = (0.0, False) if fit.kind == "particles" else _mixing(fit, here)
        combines = len(here) >= _TO_COMBINE * d * draws_each
        within = {"limits": PARTICLES_RATIO, "farthest": particles_shift(len(here))}
        options = {"combines": combines, "shares_known": mixes, **within}
        result.append(_moved(fit, plan, draws, fit.rng_key, draws_each, group, **options))
    return result


def _mixing(fit: Fit, here: np.ndarray) -> tuple[float, bool]:
    """How many draws of an ensemble are worth an independent one, and whether its chains go
    everywhere; both of the chains that are always among the draws that ``here`` names."""
    chains = fit.by_chain()
    num, length = next(iter(chains.values())).shape[:2]
    # The draws of the last time come first.
    stays = np.bincount(here % num, minlength=num) == length
    compared = Agreement({name: x[stays] for name, x in chains.items()}, independent=True)
    rows = rows_of_ensemble(compared) if np.any(stays) else []
    if not rows or np.all(np.isnan(compared.ess)):
        return float(length), False
    draws_each = np.sum(stays) * length / float(np.nanmin(compared.ess))
    return max(draws_each, 1.0), all(row.ok for row in rows)


def _of_guide(fit: Fit) -> list[Comparison] | str:
    """The draws of the first restart, and more draws of its guide."""
    if isinstance(plan := _plan(fit), str):
        return plan
    key_draws, key_moves = fit.keys
    draws = _more_draws(fit, key_draws)
    # Where the weights may be used, they have judged the shares of modes.
    shares_known = weights(fit)[0].ok is True
    return [_moved(fit, plan, draws, key_moves, shares_known=shares_known)]


def _more_draws(fit: Fit, rng_key: Array) -> Sites:
    """The draws of latent sites, and more of them."""
    names, size = fit.info.latents, fit.num_samples
    # Some numbers have so heavy a tail that 1,000 draws do not tell their spread.
    times = min(_DRAWS, 10**7 // fit.info.size) // size - 1
    pieces = [{name: fit.first[name] for name in names}]
    for key in random.split(rng_key, max(0, min(times, 9))):
        latent = fit.evaluate(key, size, [fit.params[0]])["latent"]
        pieces.append({name: latent[name][0] for name in names})
    return concatenate(pieces)


def _of_chains(fit: Fit) -> list[Comparison] | str:
    """Draws, in a random order, of kernels with another stationary law than the posterior."""
    draws = {name: fit.draws[name] for name in fit.info.latents}
    kept = np.all([np.isfinite(y).all((0, *range(2, y.ndim))) for y in draws.values()], 0)
    if fit.sampling is not None:
        kept &= fit.sampling.all(0)
    numbers = sum(math.prod(y.shape[2:]) for y in draws.values())
    most = min(_DRAWS, 10**7 // max(numbers, 1)) // next(iter(draws.values())).shape[0]
    chosen = np.flatnonzero(kept)[equally_spaced(int(np.sum(kept)), max(most, 1))]
    draws = {name: y[:, chosen] for name, y in draws.items()}
    compared = Agreement(draws)
    total = compared.chains * compared.draws
    if not (least := np.min(compared.ess, initial=total)) >= FEWEST_EFFECTIVE:
        return f"the effective sample size of the draws is below {FEWEST_EFFECTIVE}"
    if isinstance(plan := _plan(fit), str):
        return plan
    order = np.random.default_rng(0).permutation(total)
    mixed = {n: jnp.asarray(y.reshape(total, *y.shape[2:])[order]) for n, y in draws.items()}
    # What has no effective size of its own gets the least of all.
    sizes = np.full(numbers + sum(map(math.prod, _watched_shapes(fit).values())), least)
    sizes[compared.which] = compared.ess
    independent = jnp.asarray(np.maximum(total / sizes, 1.0), float)
    return [_moved(fit, plan, mixed, fit.keys[1], independent)]


_Plan = tuple[int, int, dict[str, int] | None]
"""The number of draws that are moved, and of moves, and options of the compiler."""


def _plan(fit: Fit, starts: int | None = None) -> _Plan | str:
    """The moves of all particles, or of as many draws as is cheap; or why there are none."""
    num_moves = MOVES if fit.num_moves is None else fit.num_moves
    each, asked = num_moves * LEAPS * fit.gradient_cost, fit.num_moves is not None
    if starts is None:
        starts = int(np.clip(FEW / each, _FEWEST_STARTS, _STARTS))
        if not asked:
            starts = min(starts, max(int(MOST_OPERATIONS / each), _LEAST_STARTS))
    if not asked and starts * each > MOST_OPERATIONS:
        return (
            f"Markov chains of {MOVES} moves from each of {starts} draws would take about"
            f" {starts * each / SPEED:,.0f} seconds of a core; num_moves={MOVES} runs them"
        )
    return starts, num_moves, quick_options(starts * each)


def _moved(
    fit: Fit,
    plan: _Plan,
    draws: Sites,
    rng_key: Array,
    independent: Array | float = True,
    group: Group | None = None,
    combines: bool = True,
    **options: Any,
) -> Comparison:
    """Constrained draws ``(m, *site)`` beside moves with the density p^(1/T), within a mode; and
    linear combinations of them, if there are enough."""
    info, watched = fit.info, _watched_shapes(fit)
    most, num_moves, compiler_options = plan
    T = (fit.temperature or 1.0) if fit.kind == "chains" else 1.0

    def run(params: Params, x: Sites, independent: Array | float, rng_key: Array) -> Moved:
        target = fit.potential(params, info, tuple(watched))

        def energy(x: Array) -> tuple[Array, Array]:
            U, gradient = target.value_and_grad_flat(x, {})
            if T != 1.0:
                U, gradient = U / T, gradient / T
            if group is not None:
                by_mode, k = group
                there = recut(x, circles_of(info), by_mode.modes[0].circles)
                U = jnp.where(place_in(by_mode.modes)(there)[0] == k, U, jnp.inf)
            return U, gradient

        points = _replace_nonfinite(flat_draws(target, x, fit.block))
        starts, numbers = min(most, len(points)), _numbers_of(target)
        return move_points(
            energy, numbers, points, rng_key, num_moves, fit.block, starts, independent
        )

    compiled = jit_on_data(run, compiler_options)
    chosen = {name: draws[name] for name in info.latents}
    moved = compiled(fit.params[0], chosen, independent, rng_key)
    # The draws have no length that belongs to a point of a sphere, and the moved ones have.
    on_sphere = any(is_sphere(latent.support) for latent in info.latents.values())
    combined, n = None, len(moved.between)
    if combines and not on_sphere:
        combined = worst_combinations(moved)
    shapes = {name: site.constrained.shape for name, site in info.latents.items()} | watched

    where = "" if group is None else f" (at {group[0].places[group[1]]})"

    def name(k: int) -> str:
        if combined is None or k < n:
            return coordinate_name((*shapes.items(),), k) + where
        both = sorted(combined[1][k - n].tolist())
        first, second = (coordinate_name_of(info, i) for i in both)
        return f"a linear combination of {first} and {second} most of all{where}"

    remedy = fit.noise_problem or _REMEDIES[fit.kind]
    return compare_moved(moved, name, remedy, combined[:1] if combined else (), **options)


def _replace_nonfinite(x: Array) -> Array:
    """Points, the first finite one in place of each that a saturated transform has lost."""
    fine = jnp.all(jnp.isfinite(x), 1)
    return x[jnp.where(fine, jnp.arange(len(x)), jnp.argmax(fine))]


def _numbers_of(target: Potential) -> Callable[[Array], Array]:
    """The numbers of the latent and the deterministic sites, constrained, at a vector; roots of
    probabilities without their signs, which no chain changes."""
    constrain, info = target.postprocess(), target.info
    supports = {name: latent.support for name, latent in info.latents.items()}

    def numbers(x: Array) -> Array:
        values = without_signs(unrolled(constrain(info.unravel(x)), info), supports)
        names = [*info.latents, *info.deterministic]
        return jnp.concatenate([jnp.ravel(values[name]) for name in names])

    return numbers


def _watched_shapes(fit: Fit) -> dict[str, tuple[int, ...]]:
    """The shapes of the deterministic sites that are compared too."""
    return {
        name: jnp.shape(site["value"])
        for name, site in fit.proto.trace.items()
        if site["type"] == "deterministic"
        and name not in fit.proto.left_out
        and jnp.issubdtype(jnp.result_type(site["value"]), jnp.floating)
        and jnp.size(site["value"]) <= _MOST_WATCHED
    }
