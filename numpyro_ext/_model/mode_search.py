"""The search for the modes of a posterior: descents from several points, and what did not hold."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
import math
from typing import Any
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block
from numpyro.infer.initialization import init_to_uniform
from scipy.linalg import solve_triangular

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.beyond import mass_beyond
from numpyro_ext._model.checks import DataError, check_rows, read_global
from numpyro_ext._model.circles import (
    Turns,
    circles_of,
    circular_sites,
    cut_by_draws,
    recut,
    reflected,
    rolled_out_of,
    with_circles,
    wrapped,
)
from numpyro_ext._model.descent import make_search
from numpyro_ext._model.handlers import given_rows
from numpyro_ext._model.labels import (
    Coords,
    Names,
    labels_of,
    number_name,
    split_names,
)
from numpyro_ext._model.modes import DENSE_UP_TO, Mode, Modes, of_kind
from numpyro_ext._model.normal_fit import NormalMeasure, fit_by_curvature, fit_normal
from numpyro_ext._model.operations import on_numbers, run_once
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.problems import (
    far_problem,
    few_rows_problem,
    normal_problems,
    precision_problem,
    several_problem,
    unfinished,
)
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.start import draw_params, draw_start, prior_center, start_near_median
from numpyro_ext._model.structured_fit import fit_structured
from numpyro_ext._model.surface import surface_of
from numpyro_ext._model.whole_rows import on_some_rows
from numpyro_ext._typing import Model, Params, Sites

_GROUPS_FROM = 256
"""Latent numbers from which a hierarchy is searched by the structure of its rows."""
_SEARCHES = 4
_NORMAL_MODE = 0.3
"""The departure up to which a mode is taken as it is."""
_REDRAWN = 8  # starts, of up to 100 tries each
_LOST = 1e3
"""Standard deviations from a mode beyond which the start of a search was of no use."""
_APART, _LEAST_SHARE = 1.5, 1e-3
_SAME_HEIGHT, _SAME_PLACE = 0.1, 0.5
_DRAWS_OF_ANGLES = 2000
_EDGE, _JUMP = 1e-5, 0.1
"""The distance from pi of both sides, and the nats by which they may differ."""
_SAME_COORDINATE = 0.999  # the cosine of the directions of two


def find_modes(
    model: Model,
    *args: Any,
    rng_key: Array | None = None,
    starts: int = 4,
    init_params: Sites | None = None,
    coords: Coords | None = None,
    dims: Names | None = None,
    **kwargs: Any,
) -> Modes:
    """
    The modes of a model's posterior, each with the normal approximation there.

    Adam on minibatches and damped Newton steps on all rows find a mode; the inverse curvature there
    is the covariance. It is dense up to 512 latent dimensions, and up to 2,048 where a gradient
    computes more numbers than an eighth of the matrix has, as for a regression on many columns;
    else it is diagonal, and above 512 conjugate gradients solve for a step. A hierarchy of more
    than 256 numbers, of which each row sees one effect of each factor, has the normal of greatest
    ELBO in place of a mode, with the structure of its rows. Where the gradient of a model has no
    derivative (``odeint``, or another ``jax.custom_vjp``), differences of gradients give the
    curvature, two gradients a direction.

    Each search takes 2,000 minibatches and at most 300 gradients of all rows; of a hundred thousand
    rows and more it takes 10,000 first, then ten times as many, and so on. Ends of searches are one
    mode if they lie within 1.5 standard deviations of each other, and modes with less than a
    thousandth of the mass are left out.

    The normal of greatest ELBO takes the place of a mode in three cases: there is no mode, as in a
    centred hierarchy; gradients around the mode are not as a normal posterior has them; or another
    normal surely has a higher ELBO. It does so only if its ELBO is greater than at the mode. It is
    fitted from the mode (or from where the search began) and from the prior's median; above 512
    numbers a matrix by steps of Newton, with the mean curvature of draws. Its ``slope``
    says whether it has converged: a step would gain half of its square in nats.

    An :class:`InferenceWarning` says what did not hold, as ``modes.problems`` does. With funsor
    installed discrete latent sites of few values are summed out.

    **When it fails.** Searches begin within 2 of 0 in unconstrained space, in pairs of opposite
    points. They find the modes into which these points fall, which need not be all.

    :param model: Python callable containing NumPyro primitives.
    :param args: arguments of the model, which may take the whole of a
        :class:`~numpyro_ext.data.HostArray`: it is given some of the rows at a time.
    :param rng_key: random number generator key of the search.
    :param int starts: the number of searches.
    :param dict init_params: unconstrained values of all latent sites, where one search begins
        instead.
    :param coords: labels by dimension, as :func:`to_arviz` takes them, for the names that are
        printed; a model that takes ``coords`` or ``dims`` itself gets them.
    :param dims: dimensions by site, where they are not the model's plates or ``event_dims``.
    :param kwargs: keyword arguments of the model.
    :return: :class:`Modes`.

    >>> from numpyro_ext.optim import find_modes
    >>> def model(x):
    ...     z = numpyro.sample("z", dist.Normal(300.0, 20.0))
    ...     numpyro.sample("x", dist.Normal(z, 5.0), obs=x)
    >>> modes = find_modes(model, 310.0)
    >>> print(f"{modes.heaviest.center[0]:.1f} {modes.heaviest.factor[0, 0]:.2f}")
    309.4 4.85
    >>> print(f"{modes.log_evidence:.2f}")  # of N(310; 300, 20^2 + 5^2)
    -4.06
    """
    check_count("starts", starts)
    rng_key = random.key(0) if rng_key is None else rng_key
    if is_traced(rng_key):
        raise ValueError(
            "rng_key is traced, while modes are found from numbers; call find_modes outside, and"
            " use its result inside."
        )
    kwargs, coords, dims = split_names(model, kwargs, coords, dims)
    labels = labels_of(model, args, kwargs, coords, dims) if coords or dims else str
    modes, potential = search_model(rng_key, model, args, kwargs, starts, init_params, labels)
    if len(modes.modes) > 1:
        places = map(labels, places_of(potential, modes.modes))
        each = zip(modes.modes, places, strict=True)
        modes = replace(modes, modes=tuple(replace(mode, place=place) for mode, place in each))
    beyond, error, why = mass_beyond(random.fold_in(rng_key, 1), potential, modes)
    if math.isnan(beyond) and init_params is not None:  # the search is for one mode alone
        why = ()
    modes = replace(modes, beyond=beyond, beyond_error=error, problems=(*modes.problems, *why))
    if modes.problems:
        warnings.warn(InferenceWarning(" ".join(modes.problems)), stacklevel=2)
    return modes


def search_model(
    rng_key: Array,
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    starts: int = 4,
    init_params: Sites | None = None,
    labels: Callable[[str], str] = str,
    by_groups: bool = False,
) -> tuple[Modes, Potential]:
    """The modes of a model on these arguments, and its potential."""
    if is_traced((args, kwargs)):
        raise ValueError(
            "an argument of the model is traced, while modes are found from numbers; call"
            " find_modes outside, and use its result inside."
        )
    model = on_some_rows(model, args, kwargs)
    because = "the modes are those of all latent sites together"
    info = read_global(model, args, kwargs, because=because, sums=True)
    if info.size == 0:
        raise ValueError("the latent sites of the model have no free coordinate, so no modes.")
    check_rows(given_rows(model, info.given), args, kwargs, init_to_uniform)
    params = draw_params(rng_key, model, info, args, kwargs)
    cut_at_pi, info = info, place_cuts(model, info, params, args, kwargs)
    potential = Potential(model, info, params, args, kwargs).on_one_batch()
    if init_params is not None:
        init_params = info.check_unconstrained("init_params", init_params)
        init_params = recut_sites(init_params, cut_at_pi, info)
    how: Any = {"starts": starts, "labels": labels, "by_groups": by_groups}
    return search_modes(rng_key, model, potential, init_params, **how), potential


def place_cuts(
    model: Model, info: ModelInfo, params: Params | None, args: tuple, kwargs: dict[str, Any]
) -> ModelInfo:
    """The same with each circle cut where the posterior has least mass, by the normals at the ends
    of searches that follow the angles round and round. A site stays cut at pi if the density
    differs between both sides of pi, as where an angle is used as a number."""
    if not circular_sites(info) or is_traced((args, kwargs)):
        return info
    return _cut_by_search(model, info, params, args, kwargs)


def _cut_by_search(
    model: Model, info: ModelInfo, params: Params | None, args: tuple, kwargs: dict[str, Any]
) -> ModelInfo:
    at_pi, rng_key = with_circles(info, np.zeros(info.size)), random.key(0)
    with block(), on_numbers():
        if params is None:
            params = draw_params(rng_key, model, info, args, kwargs)
        turns = with_circles(info, np.zeros(info.size), Turns)
        closed = _closed_sites(Potential(model, turns, params, args, kwargs).on_one_batch())
        if not closed:
            return at_pi
        turns = with_circles(at_pi, np.zeros(info.size), Turns, closed)
        potential = Potential(model, turns, params, args, kwargs).on_one_batch()
        _, points = _keys_and_points(rng_key, potential, _SEARCHES)
        ends = make_search(rng_key, potential)(_finite(potential, _opposite(points)))
        ends = [end for end in ends if np.all(np.isfinite(end.factor))]
        if not ends:
            return at_pi
        merged = Modes(tuple(_merge_ends(ends)), turns.shapes)
        draws = merged.sample(rng_key, (_DRAWS_OF_ANGLES,))
        sites = jax.vmap(turns.unravel)(jnp.asarray(draws))
        return cut_by_draws(info, {name: wrapped(sites[name]) for name in closed})


def _closed_sites(potential: Potential) -> list[str]:
    """The sites on circles for which the density is the same on both sides of pi, at the point of
    :class:`Turns` where all coordinates are 0."""
    info, rows = potential.info, potential.first_rows()
    names = circular_sites(info)
    places = np.concatenate([np.arange(info.size)[info.slices[name]] for name in names])

    def energies(edges: Array) -> Array:
        def energy(place: Array, edge: Array) -> Array:
            return potential(info.unravel(jnp.zeros(info.size).at[place].set(edge)), rows)

        return lax.map(lambda edge: jax.vmap(energy, (0, None))(jnp.asarray(places), edge), edges)

    below, above = np.asarray(run_once(energies, (np.pi - _EDGE) * jnp.array([1.0, -1.0])))
    with np.errstate(invalid="ignore"):  # both may be infinite, of which nothing is known
        open_at = places[np.abs(below - above) > _JUMP + 1e-5 * np.abs(below)]
    return [name for name in names if not np.any(np.isin(open_at, np.r_[info.slices[name]]))]


def recut_sites(z: Sites, before: ModelInfo, after: ModelInfo) -> Sites:
    """Unconstrained sites ``{site: (*batch, *site)}`` in the coordinates of other cuts."""
    old, new = (
        {} if circles is None else after.unravel(circles)
        for circles in (circles_of(before), circles_of(after))
    )
    moved = {n: recut(z[n], old.get(n), new.get(n)) for n in circular_sites(after)}
    return {**z, **moved}


def is_searched(
    size: int, params: Iterable[str], mutable: bool, most: int | None = DENSE_UP_TO
) -> bool:
    """Whether a search makes sense: not for networks, nor for many latent dimensions."""
    networks = mutable or any(name.endswith("$params") for name in params)
    return 0 < size <= (size if most is None else most) and not networks


def modes_or_warning(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    starts: int = 4,
    room: int | None = None,
    who: str = "the guide begins",
    start: str = "init_loc_fn",
    by_groups: bool = False,
) -> Modes | None:
    """The modes of the posterior on these arguments; None, with a warning, where none are found,
    and a warning where there are more than ``room`` at which the guide can begin; ``start`` is the
    argument that says where it begins without them, and ``by_groups`` whether it takes an ``Arrow``
    of a hierarchy of any size. Data that do not fit are an error."""
    try:
        with block(), on_numbers(), warnings.catch_warnings():
            warnings.simplefilter("ignore", InferenceWarning)
            rng_key = random.key(0)
            modes, _ = search_model(rng_key, model, args, kwargs, starts, by_groups=by_groups)
    except DataError:
        raise
    except Exception as error:  # whatever else stops the search, there is a start without it
        reason = str(error).strip().removesuffix(".") or type(error).__name__
        _warn(
            f"{who} at NumPyro's start, because the search for a mode failed: {reason}. Give"
            f" another {start}, such as init_to_median(), or init_from=None to be silent."
        )
        return None
    said = {
        "no rows": "normal of greatest ELBO",
        "one factor twice": "normal of greatest ELBO",
        "few rows": "mode of few rows",
        "single precision": "point where a log density is wrong",
    }
    if isinstance(modes.heaviest.factor, Arrow):  # steps need not follow
        said["not converged"] = "normal of greatest ELBO"
    if room is not None and len(modes.modes) > room:
        said["several modes"] = "heaviest of several modes"
    for kind, where in said.items():
        if problems := of_kind(modes.problems, kind):
            _warn(f"{who} at the {where}: {' '.join(problems)}")
    return modes


def _warn(message: str) -> None:
    warnings.warn(InferenceWarning(message), stacklevel=3)


def search_modes(
    rng_key: Array,
    model: Model,
    potential: Potential,
    start: Sites | None,
    init_strategy: Callable[..., Any] = init_to_uniform,
    starts: int = 4,
    labels: Callable[[str], str] = str,
    by_groups: bool = False,
) -> Modes:
    """The modes of a posterior, as :func:`find_modes` says, from one ``start`` if it is given."""
    info, has_start = potential.info, start is not None
    keys, points = _keys_and_points(rng_key, potential, starts)
    key_start, key_mode, key_svi, key_shape = keys
    measure = NormalMeasure(key_shape, potential)
    many = by_groups or info.size > _GROUPS_FROM
    if many and not info.summed and potential.has_curvature:
        fit = _of_groups(key_start, model, potential, start, measure, labels, by_groups)
        if fit is not None:
            return fit
    if start is None and init_strategy is not init_to_uniform:
        start, _, _ = draw_start(
            key_start, model, info, *potential.arguments, init_strategy=init_strategy
        )
    if start is not None:
        points[0] = info.ravel(start)
    search, places = make_search(key_mode, potential), _opposite(points)[:starts]
    if not has_start:
        places = _finite(potential, places)
    ends = search(places)
    mode, spent = next(ends, None), 0
    if mode is None or not (has_start or mode.decrement <= _LOST):
        spent = 0 if mode is None else mode.row_gradients
        points[0] = info.ravel(_start_again(key_start, model, potential, init_strategy))
        places = _opposite(points)[:starts]
        ends = search(places)
        mode = next(ends)
    all_ends = [mode]
    if mode.at_mode and not has_start:
        all_ends += ends
        if (exchanged := reflected(mode.center, circles_of(info))) is not None:
            all_ends += search(np.asarray(exchanged)[None])
    spent += sum(end.row_gradients for end in all_ends)
    merged = _merge_ends(all_ends, rolled_out_of(info)) if mode.at_mode else [mode]
    modes = [measure(x) for x in merged] if mode.at_mode else merged
    mode = modes[0]
    problems = several_problem(modes, len(all_ends)) if len(modes) > 1 else ()
    # Another normal has an ELBO that is surely higher, by more than half a nat.
    is_uphill = mode.slope - 2 * mode.slope_error > 1
    if not mode.at_mode or mode.departure > _NORMAL_MODE or is_uphill:
        fits = []
        if mode.is_matrix and info.size > DENSE_UP_TO:
            fits = [fit_by_curvature(potential, measure, mode)]
        is_found = [x.departure <= _NORMAL_MODE and not unfinished(x) for x in fits]
        if not any(is_found):  # along a curved ridge steps of Newton are short
            begins = _begins_of_fit(mode, places[0], potential)
            # Of several modes it might end in another; and near a normal mode it gains nothing.
            is_far = not mode.at_mode or mode.departure > _NORMAL_MODE
            if is_far and len(modes) == 1 and not has_start:
                median, sds = prior_center(key_start, model, potential)
                begins.append((median, np.asarray(sds) / 10))
            fits.append(fit_normal(key_svi, potential, measure, begins))
        fit = measure(max(fits, key=lambda fit: fit.elbo))
        spent += fit.row_gradients
        fit_problems = (*mode.problems, *fit.problems)
        if mode.at_mode and mode.elbo >= fit.elbo:
            fit = mode
        problems += normal_problems(mode, fit, info, labels)
        modes[0] = replace(fit, share=mode.share, problems=fit_problems)
    problems = (*(problem for mode in modes for problem in mode.problems), *problems)
    problems += few_rows_problem(info)
    centers = mode.center, modes[0].center
    if wrong := precision_problem(potential, centers):  # which makes a density jump, too
        problems = (*wrong, *(x for x in problems if x.kind != "density jumps"))
    modes = [replace(mode, circles=circles_of(info)) for mode in modes]
    return Modes(tuple(modes), info.shapes, spent, tuple(dict.fromkeys(problems)))


def _begins_of_fit(mode: Mode, place: np.ndarray, potential: Potential) -> list[tuple[Any, Any]]:
    """The normal at a mode, or around the place where a search that found none has begun; an error
    where that place has no finite density."""
    if mode.at_mode:
        is_many = len(mode.center) > DENSE_UP_TO
        return [(mode.center, mode.conditional_sds if is_many else mode.factor)]
    if not np.isfinite(mode.decrement):
        # The search leaves out minibatches without a finite gradient; all rows are in here.
        rows = {n: jnp.arange(N) for n, (N, _) in potential.plates.items()}
        begin = potential.info.unravel(jnp.asarray(place))
        at_start = jax.jit(potential.full_value_and_grad)(begin)
        potential.check_start(begin, rows, *at_start, give="another start")
    return [(place, np.full_like(place, 0.05))]


def _of_groups(
    rng_key: Array,
    model: Model,
    potential: Potential,
    start: Sites | None,
    measure: NormalMeasure,
    labels: Callable[[str], str],
    as_arrow: bool,
) -> Modes | None:
    """The normal of greatest ELBO of a hierarchy with many groups; None for another model."""
    info = potential.info
    x = prior_center(rng_key, model, potential)[0] if start is None else info.ravel(start)
    fit = fit_structured(potential, np.asarray(x, float))
    if fit is None:
        return None
    fit = measure(fit)
    if not np.isfinite(fit.elbo):
        return None
    problems = (*fit.problems, *far_problem(fit, info, labels), *unfinished(fit))
    problems += (*few_rows_problem(info), *precision_problem(potential, (fit.center,)))
    fit = replace(fit, problems=problems, circles=circles_of(info))
    if info.size <= DENSE_UP_TO and not as_arrow:
        # In another order of sites some coordinates are others.
        arrow: Any = fit.factor
        root, sides = np.asarray(fit.matrix), np.array(fit.sides)
        turn = solve_triangular(root, np.asarray(arrow.dense()), lower=True)
        sides[np.abs(np.diagonal(turn)) < _SAME_COORDINATE] = 0, 1, 0
        fit = replace(fit, factor=jnp.asarray(root), sides=jnp.asarray(sides))
    return Modes((fit,), info.shapes, fit.row_gradients, tuple(dict.fromkeys(problems)))


def _start_again(
    rng_key: Array, model: Model, potential: Potential, init_strategy: Callable[..., Any]
) -> Sites:
    """The start of lowest potential near the prior's median, or among starts drawn anew."""
    start, energy, grad = start_near_median(rng_key, model, potential)
    drawn, energies, _ = draw_start(
        random.split(rng_key, _REDRAWN),
        model,
        potential.info,
        *potential.arguments,
        init_strategy=init_strategy,
        validate_grad=True,
    )
    best = int(np.argmin(np.nan_to_num(energies, nan=np.inf)))
    if np.isfinite(energies[best]) and not energy <= energies[best]:
        return {name: x[best] for name, x in drawn.items()}
    potential.check_start(start, potential.first_rows(), energy, grad, give="another start")
    return start


def _merge_ends(ends: list[Mode], rolled_out: np.ndarray | None = None) -> list[Mode]:
    """The modes among the ends of searches, with their shares, the heaviest first. Of those that
    are whole turns apart in ``rolled_out`` angles, the nearest to 0 is kept."""
    if rolled_out is not None and rolled_out.any():
        once: list[Mode] = []
        for mode in sorted(ends, key=lambda x: np.abs(np.asarray(x.center))[rolled_out].sum()):
            if not any(_is_turned(mode, x, rolled_out) for x in once):
                once.append(mode)
        ends = [x for x in ends if any(x is y for y in once)]
    at_modes = [end for end in ends if end.at_mode and np.isfinite(end.log_evidence)]
    kept: list[Mode] = []
    for mode in sorted(at_modes, key=lambda mode: -mode.log_evidence):
        # A diagonal knows no direction in which a posterior of many dimensions is long.
        least = _APART if mode.is_matrix else 3 + math.sqrt(len(mode.center))
        if all(max(mode.distance(x.center), x.distance(mode.center)) > least for x in kept):
            kept.append(mode)
    if not kept:
        return ends[:1]
    shares = np.exp([mode.log_evidence - kept[0].log_evidence for mode in kept])
    kept = kept[: int(np.sum(shares >= _LEAST_SHARE * shares.sum()))]
    shares = shares[: len(kept)] / shares[: len(kept)].sum()
    merged: list[Mode] = []
    for mode, share in zip(kept, shares, strict=True):
        same = (k for k, other in enumerate(merged) if _is_copy(mode, other))
        merged.append(replace(mode, share=float(share), copy_of=next(same, None)))
    return merged


def places_of(target: Potential, modes: Sequence[Mode]) -> list[str]:
    """For each mode, the number in which the modes are farthest apart, in their widths."""
    centers = np.stack([np.asarray(mode.center, np.float64) for mode in modes])
    sds = np.stack([mode.sds for mode in modes])
    k = int(np.argmax(np.ptp(centers, 0) / sds.mean(0)))
    constrain, info = target.postprocess(), target.info
    site, coordinates = next((n, s) for n, s in info.slices.items() if s.start <= k < s.stop)
    values = [np.asarray(constrain(info.unravel(mode.center))[site]) for mode in modes]
    j = k - coordinates.start
    if values[0].size != coordinates.stop - coordinates.start:
        j = int(np.argmax(np.ptp(values, 0)))  # no number has a coordinate of its own
    name = number_name(site, values[0].shape, j)
    return [f"{name} = {value.flat[j]:.3g}" for value in values]


def _is_copy(mode: Mode, other: Mode) -> bool:
    """True if the two are as high, and their coordinates the same but for signs and places."""
    x, y = (np.abs(np.asarray(end.center, np.float64)) for end in (mode, other))
    order = np.argsort(x)
    near = np.all(abs(x[order] - np.sort(y)) < _SAME_PLACE * mode.sds[order])
    return bool(near and abs(mode.log_evidence - other.log_evidence) < _SAME_HEIGHT)


def _is_turned(mode: Mode, other: Mode, rolled_out: np.ndarray) -> bool:
    """True if the two are as high and lie in one place but for whole turns of angles."""
    apart = np.asarray(mode.center, np.float64) - np.asarray(other.center, np.float64)
    turns = np.where(rolled_out, np.round(apart / (2 * np.pi)), 0)
    near = np.all(np.abs(apart - 2 * np.pi * turns) < _SAME_PLACE * mode.sds)
    as_high = abs(mode.log_evidence - other.log_evidence) < _SAME_HEIGHT
    return bool(near and turns.any() and as_high)


def _keys_and_points(rng_key: Array, potential: Potential, starts: int) -> tuple[Any, np.ndarray]:
    """Four keys, and points within 2 of 0, ``(ceil(starts / 2), n)``, from one program."""
    shape = -(-starts // 2), potential.info.size

    def draw(rng_key: Array) -> tuple[Any, Array]:
        keys = random.split(rng_key, 4)
        return tuple(keys), random.uniform(random.fold_in(keys[0], 1), shape, minval=-2, maxval=2)

    keys, points = run_once(draw, rng_key)
    return keys, np.array(points)


def _opposite(points: np.ndarray) -> np.ndarray:
    """Each point and the one opposite of it, because an exchange of two numbers changes the sign of
    their difference."""
    return np.stack([points, -points], 1).reshape(-1, points.shape[1])


def _finite(potential: Potential, points: np.ndarray) -> np.ndarray:
    """The points at which the potential of some of the rows is finite."""
    sums = surface_of(potential).sums
    return points[[bool(np.isfinite(sums(x, 1)[0])) for x in points]]
