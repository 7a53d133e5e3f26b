"""The search for the modes of a posterior: descents from several points, and what did not hold."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
import math
from typing import Any
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block
from numpyro.infer.initialization import init_to_uniform

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.checks import check_rows, read_global
from numpyro_ext._model.handlers import given_rows
from numpyro_ext._model.modes import DENSE_UP_TO, Mode, Modes, Problem, of_kind
from numpyro_ext._model.normal_fit import (
    WORTH_OPTIMISING,
    NormalMeasure,
    batch_rows,
    draw_batch,
    fit_normal,
    laplace,
    some_rows,
)
from numpyro_ext._model.operations import (
    count_operations,
    jit_on_data,
    progress_bar,
    quick_options,
    run_once,
)
from numpyro_ext._model.potential import ROWS, Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.start import draw_params, draw_start, prior_center, start_near_median
from numpyro_ext._model.whole_rows import on_some_rows
from numpyro_ext._typing import Model, Sites

_ADAM_STEPS, _ADAM_PIECES, _SEARCHES = 2000, 20, 4
_NEWTON_STEPS, MOST_PASSES = 60, 300
"""The budget of one search: Newton steps, and gradients of all rows."""
_STEPS_OF_A_STAGE = 10
_CG_STEPS, _CG_TOLERANCE = 300, 1e-2
_HALVINGS, _TWICE_AS_NEAR_IN = 12, 6
_NEAR = 0.05
"""The decrement at which a search ends."""
_LEAST_CURVATURE = 1e-5  # of a matrix with a unit diagonal
_NORMAL_MODE, _NORMAL_FIT = 0.3, 0.1
"""Departures up to which a mode, and a variational fit in its place, are taken without a warning;
a fit has come as near as a normal can, so what it leaves is of another kind."""
_STEEP = 3.0
"""The slope of a fit above which it is said to be unfinished."""
_REDRAWN = 8  # starts, of up to 100 tries each
_LOST = 1e3
"""Standard deviations from a mode beyond which the start of a search was of no use: a likelihood
that is flat to the last digit there, as that of raw columns behind an exponential."""
_APART, _LEAST_SHARE = 1.5, 1e-3
_ROWS_EACH = 10  # of a minibatch, for each latent number
_SAME_HEIGHT, _SAME_PLACE = 0.1, 0.5


def find_modes(
    model: Model,
    *args: Any,
    rng_key: Array | None = None,
    starts: int = 4,
    init_params: Sites | None = None,
    **kwargs: Any,
) -> Modes:
    """
    The modes of a model's posterior, each with the normal approximation there.

    Adam on minibatches and damped Newton steps on all rows find a mode; the inverse curvature there
    is the covariance, dense up to 512 latent dimensions and diagonal above, where conjugate
    gradients solve for a step. Each search takes 2,000 minibatches and at most 300 gradients of all
    rows; of a hundred thousand rows and more it takes 10,000 first, then ten times as many, and so
    on. Ends of searches are one mode if they lie within 1.5 standard deviations of each other, and
    modes with less than a thousandth of the mass are left out.

    Where there is no mode, as in a centred hierarchy, where gradients around it are far from those
    of a normal posterior, or where another normal has an ELBO that is surely higher, the normal of
    greatest ELBO takes its place: it is fitted from the mode (or from where the search began) and
    from the prior's median in units of the prior, and the one of greater ELBO, by the same 64
    draws, goes on. It stays where its ELBO is greater than that of the mode's normal. Its ``slope``
    says whether it has converged: a step would gain half of its square in nats.

    An :class:`InferenceWarning` says what did not hold, as ``modes.problems`` does. With funsor
    installed discrete latent sites of few values are summed out.

    **When it fails.** Searches begin within 2 of 0 in unconstrained space, in pairs of opposite
    points. They find the modes into which these points fall, which need not be all.

    :param model: Python callable containing NumPyro primitives.
    :param args: arguments of the model, which may take the whole of a
        :class:`~numpyro_ext.data.HostArray`, as it takes a batch of a loader: it is given some of
        the rows at a time.
    :param rng_key: random number generator key of the search.
    :param int starts: the number of searches.
    :param dict init_params: unconstrained values of all latent sites, where one search begins
        instead.
    :param kwargs: keyword arguments of the model.
    :return: :class:`Modes`.

    .. doctest::

        >>> import numpyro, numpyro.distributions as dist
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
    modes = _modes_of(model, args, kwargs, rng_key, check_count("starts", starts), init_params)
    if modes.problems:
        warnings.warn(InferenceWarning(" ".join(modes.problems)), stacklevel=2)
    return modes


def _modes_of(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    rng_key: Array | None = None,
    starts: int = 4,
    init_params: Sites | None = None,
) -> Modes:
    if is_traced((args, kwargs)):
        raise ValueError(
            "an argument of the model is traced (jax.jit, jax.vmap), while modes are found from"
            " numbers; call find_modes outside, and use its result inside."
        )
    rng_key = random.key(0) if rng_key is None else rng_key
    model = on_some_rows(model, args, kwargs)
    because = "the modes are those of all latent sites together"
    info = read_global(model, args, kwargs, because=because, sums=True)
    if info.size == 0:
        raise ValueError("the latent sites of the model have no free coordinate, so no modes.")
    check_rows(given_rows(model, info.given), args, kwargs, init_to_uniform)
    params = draw_params(rng_key, model, info, args, kwargs)
    potential = Potential(model, info, params, args, kwargs).on_one_batch()
    if init_params is not None:
        init_params = info.check_unconstrained("init_params", init_params)
    return search_modes(rng_key, model, potential, init_params, starts=starts)


def is_searched(size: int, params: Iterable[str], mutable: bool) -> bool:
    """Whether a search makes sense: neither for networks, nor for more latent dimensions than a
    matrix is for.

    :param params: names of the model's ``param`` sites.
    :param bool mutable: whether it has ``mutable`` ones.
    """
    networks = mutable or any(name.endswith("$params") for name in params)
    return 0 < size <= DENSE_UP_TO and not networks


def modes_or_warning(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    starts: int = 4,
    room: int | None = None,
    who: str = "the guide begins",
) -> Modes | None:
    """The modes of the posterior on these arguments; None, with a warning, where none are found.

    :param room: the number of modes at which the guide can begin; a warning says if there are more.
    """
    if is_traced((args, kwargs)):
        _warn(
            f"{who} at NumPyro's start, because its model's arguments are traced (jax.jit,"
            " jax.vmap) and have no numbers to find a mode from; start it outside, give"
            " init_from=find_modes(model, *args), or init_from=None to be silent."
        )
        return None
    # The search is on numbers, also where the program around it is traced.
    traced = is_traced(jnp.zeros(()))
    try:
        with block(), jax.ensure_compile_time_eval() if traced else nullcontext():
            modes = _modes_of(model, args, kwargs, starts=starts)
    except Exception as error:  # whatever stops the search, there is a start without it
        _warn(
            f"{who} at NumPyro's start, because the search for a mode failed: {error}"
            " Give init_from=None to be silent."
        )
        return None
    several = of_kind(modes.problems, "several modes")
    if several and room is not None and len(modes.modes) > room:
        _warn(f"{who} at the heaviest of several modes: {' '.join(several)}")
    if few := of_kind(modes.problems, "few rows"):
        _warn(f"{who} at the mode of few rows: {' '.join(few)}")
    return modes


def _warn(message: str) -> None:
    warnings.warn(InferenceWarning(message), stacklevel=3)


def search_modes(
    rng_key: Array,
    model: Model,
    potential: Potential,
    start: Sites | None,
    init_strategy: Callable[..., Any] = init_to_uniform,
    key_again: Array | None = None,
    starts: int = 4,
) -> Modes:
    """The modes of a posterior, as :func:`find_modes` says.

    :param start: unconstrained sites where one search begins.
    :param key_again: key of other starts, some nearer to the prior's median, of which the one of
        lowest potential is taken where the search from the first one has led nowhere.
    """
    info, given = potential.info, start is not None
    key_start, key_mode, key_svi, key_shape = random.split(rng_key, 4)
    search, measure = make_search(key_mode, potential), NormalMeasure(key_shape, potential)
    energy: Any = 0.0
    if start is None:
        start, energy, _ = draw_start(
            key_start, model, info, *potential.arguments, init_strategy=init_strategy
        )
    mode, ends, spent = None, iter(()), 0
    if np.isfinite(energy):
        ends = search(starts_of(key_start, info.ravel(start), starts))
        mode = next(ends)
    if mode is None or not (given or mode.decrement <= _LOST):
        spent = 0 if mode is None else mode.row_gradients
        key_again = key_start if key_again is None else key_again
        start = _start_again(key_again, model, potential, init_strategy)
        ends = search(starts_of(key_start, info.ravel(start), starts))
        mode = next(ends)
    all_ends = [mode, *ends] if mode.at_mode and not given else [mode]
    spent += sum(end.row_gradients for end in all_ends)
    modes = [measure.with_shape(x) for x in _merge_ends(all_ends)] if mode.at_mode else [mode]
    mode, problems = modes[0], _several_problem(modes, len(all_ends))
    if not mode.at_mode or mode.departure > _NORMAL_MODE or _is_uphill(mode):
        if not np.isfinite(mode.decrement):
            # The search leaves out minibatches whose gradient is not finite; all rows are in here.
            rows = {n: jnp.arange(N) for n, (N, _) in potential.plates.items()}
            potential.check_start(start, rows, *jax.jit(potential.full_value_and_grad)(start))
        x = info.ravel(start)
        begins = [(mode.center, mode.factor) if mode.at_mode else (x, jnp.full_like(x, 0.05))]
        if len(modes) == 1 and not given:  # of several modes, it might end in another one
            median, sds = prior_center(key_start, model, potential)
            begins.append((median, sds / 10))
        fit = measure.with_shape(fit_normal(key_svi, potential, measure)(begins))
        spent += fit.row_gradients
        fit_problems = (*mode.problems, *fit.problems)
        if mode.at_mode and mode.elbo >= fit.elbo:
            fit = mode
        problems += (*_distance_problem(mode, fit, advice(info)), *_slope_problem(fit))
        modes[0] = replace(fit, share=mode.share, problems=fit_problems)
    problems = (*(problem for mode in modes for problem in mode.problems), *problems)
    problems += _few_rows_problem(info)
    return Modes(tuple(modes), info.shapes, spent, tuple(dict.fromkeys(problems)))


def _is_uphill(mode: Mode) -> bool:
    """True if another normal has an ELBO that is surely higher, by more than half a nat."""
    return mode.slope - 2 * mode.slope_error > 1


def _few_rows_problem(info: ModelInfo) -> tuple[Problem, ...]:
    """What is said where the rows that are given are too few to stand for all."""
    rows = sum(batch for _, batch in info.given.values())
    if not rows or rows >= _ROWS_EACH * info.size:
        return ()
    sentence = (
        f"the arguments of the model are a minibatch of {rows} rows, fewer than {_ROWS_EACH} for"
        f" each of {info.size} latent numbers, so that its mode and scales may be far from those of"
        " all rows; give init_from of a guide, or whitening of a kernel, the result of"
        " find_modes(model, *args) on more rows."
    )
    return (Problem(sentence, "few rows"),)


def _start_again(
    rng_key: Array, model: Model, potential: Potential, init_strategy: Callable[..., Any]
) -> Sites:
    """The start of lowest potential near the prior's median, or of those that are drawn anew."""
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
    potential.check_start(start, potential.first_rows(), energy, grad)
    return start


def _merge_ends(ends: list[Mode]) -> list[Mode]:
    """The modes among the ends of searches, with their shares, the heaviest first."""
    found = [end for end in ends if end.at_mode and np.isfinite(end.log_evidence)]
    kept: list[Mode] = []
    for mode in sorted(found, key=lambda mode: -mode.log_evidence):
        # A diagonal knows no direction in which a posterior of many dimensions is long.
        least = _APART if mode.factor.ndim == 2 else 3 + math.sqrt(len(mode.center))
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


def _is_copy(mode: Mode, other: Mode) -> bool:
    """True if the two are as high, and their coordinates the same but for signs and places."""
    x, y = (np.abs(np.asarray(one.center, np.float64)) for one in (mode, other))
    order = np.argsort(x)
    near = np.all(abs(x[order] - np.sort(y)) < _SAME_PLACE * mode.sds[order])
    return bool(near and abs(mode.log_evidence - other.log_evidence) < _SAME_HEIGHT)


def _several_problem(modes: list[Mode], num_searches: int) -> tuple[Problem, ...]:
    best, *others = modes
    apart = max((best.distance(other.center) for other in others), default=0.0)
    if apart <= 3 + math.sqrt(len(best.center)):
        return ()
    shares = ", ".join(f"{mode.share:.2g}" for mode in modes)
    copies = "check that the modes are copies of each other"
    if all(mode.copy_of is not None for mode in others):
        copies = "let it be, if the modes are copies of each other, as it seems"
    sentence = (
        f"searches from {num_searches} points ended at different modes, {apart:.2g} standard"
        f" deviations apart, with {shares} of the mass, and what starts at one of them may not"
        " leave it; take particles or at least four chains that start together"
        " (chain_method='vectorized'), which begin at all of them with these shares, use"
        f" AutoMixtureNormal, or {copies}."
    )
    return (Problem(sentence, "several modes"),)


def _distance_problem(mode: Mode, fit: Mode, advice: str) -> tuple[Problem, ...]:
    """What is said where a search has not ended at a mode that is near normal."""
    if not mode.at_mode:
        what = "the search for a mode ended where the gradient of all rows is not finite"
        if mode.num_negative:
            what = (
                "the curvature is not that of a mode where the search ended (negative directions:"
                f" {mode.num_negative})"
            )
        elif np.isfinite(mode.decrement):
            what = f"the search for a mode ended {mode.decrement:.2g} standard deviations from one"
        sentence = (
            f"{what}{budget_note(mode)}, so center and scales come from a variational fit instead;"
            f" {advice}, or give init_params near the mode."
        )
        return (Problem(sentence, "no mode"),)
    if fit.departure > _NORMAL_FIT:
        error = f"relative error {fit.departure**0.5:.2g}"
        if not np.isfinite(fit.departure):
            error = "at half of the points they are not finite"
        sentence = (
            f"gradients around the center are far from those of a normal posterior ({error}), so"
            " the scales found do not hold in all of it. A flow, which bends, may be right; for a"
            f" kernel, a proxy or a normal guide {advice}, or use NUTS."
        )
        return (Problem(sentence, "far from normal"),)
    return ()


def _slope_problem(fit: Mode) -> tuple[Problem, ...]:
    """What is said of a fit that has not come to the greatest ELBO."""
    if not fit.variational or fit.slope - 2 * fit.slope_error <= _STEEP:
        return ()
    sentence = (
        f"the normal of greatest ELBO is not found: another step would still gain about"
        f" {fit.slope**2 / 2:.2g} nats, so center and scales may be far off; reparametrise the"
        " model, or give init_params near the posterior."
    )
    return (Problem(sentence, "not converged"),)


def budget_note(mode: Mode) -> str:
    """The end of a sentence on where a search ended."""
    spent = f", when its budget of {MOST_PASSES} gradients of all rows was spent"
    return spent if mode.out_of_budget else ""


def advice(info: ModelInfo) -> str:
    """The advice on hierarchies, to a model that has not followed it and to one that has."""
    done = [name.removesuffix("_decentered") for name in info.latents if "_decentered" in name]
    change = "reparametrise the model (LocScaleReparam for hierarchies)"
    if done:
        change = f"change centered in the LocScaleReparam of '{done[0]}' (0 and 1 are its ends)"
    return (
        f"{change}, or, where there are few groups, give their scale a prior that vanishes at 0"
        " (LogNormal)"
    )


def starts_of(rng_key: Array, first: Array, num: int = 4) -> np.ndarray:
    """Where searches begin, ``(num, n)``: at ``first``, at other points within 2, and opposite of
    each, because an exchange of two numbers is one of their difference's sign."""

    def draw(rng_key: Array, first: Array) -> Array:
        keys = [random.fold_in(rng_key, i) for i in range(1, (num + 1) // 2)]
        others = [random.uniform(key, first.shape, first.dtype, -2, 2) for key in keys]
        return jnp.stack([sign * x for x in (first, *others) for sign in (1, -1)])[:num]

    return np.asarray(run_once(draw, rng_key, first))


def make_search(
    rng_key: Array, potential: Potential, *, adam: bool = True
) -> Callable[[Any], Iterator[Mode]]:
    """
    ``search(starts)``, which goes from each of the points ``(n,)`` to a mode: by Adam on minibatch
    gradients, then by damped Newton steps with the gradient of all rows, of which a search takes
    ``MOST_PASSES`` at most. If the points are near modes, ``adam`` can be left out.
    """
    import optax  # not imported by NumPyro itself

    all_rows = sum(size for size, _ in potential.plates.values()) or batch_rows(potential)
    n, dtype = potential.info.size, jnp.result_type(float)
    unknown = np.asarray([np.inf, 0], dtype), np.zeros(n, dtype)
    empty = jax.eval_shape(optax.scale_by_adam().init, jax.ShapeDtypeStruct((n,), dtype))
    moments = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), empty)
    unit: Any = np.eye(n, dtype=dtype) if n <= DENSE_UP_TO else np.ones(n, dtype)
    cost = count_operations(
        potential.value_and_grad_flat, np.zeros(n, dtype), potential.first_rows()
    )
    gradients = 4 * _ADAM_STEPS + 30 * _SEARCHES * all_rows / batch_rows(potential)
    options = quick_options(cost * gradients, WORTH_OPTIMISING)
    piece = jit_on_data(partial(_adam, potential), options)
    newton = jit_on_data(partial(_newton, potential, _NEAR), options)
    most = max((size for size, _ in potential.plates.values()), default=0) / ROWS
    stages = [10**k for k in range(9) if 10 ** (k + 1) <= most]
    on_some = jit_on_data(
        lambda num, *at: _newton(potential, _NEAR * jnp.sqrt(most / num), *at, pieces=num), options
    )
    pieces = _ADAM_PIECES if adam else 0

    def begin(x: Array) -> tuple[Array, Array, int]:
        """Newton steps on 10,000 rows, then on ten times as many, and so on: a point, the factor
        there, and the gradients of a row that were spent. All rows then take few passes."""
        factor, spent = unit, 0
        for num in stages:
            y, at, moved = x, unknown, True
            for _ in range(_STEPS_OF_A_STAGE):
                y, at, decrement, moved, factor, _, tries = on_some(np.int32(num), y, *at, factor)
                spent += int(tries) * num * ROWS
                if not moved or not np.isfinite(decrement):
                    break
            if not np.isfinite(decrement):
                return x, unit, spent
            x = y
        return x, factor, spent

    def search(starts: Any) -> Iterator[Mode]:
        before: list[tuple[Array, Mode]] = []
        for which, start in enumerate(jnp.asarray(x, dtype) for x in starts):
            with progress_bar(pieces + _NEWTON_STEPS, "finding the mode") as advance:
                x, spent, state = start, 0, (moments, start)
                for k in range(pieces):
                    x, state = piece(x, state, rng_key, np.int32(which), np.int32(k))
                    spent += _ADAM_STEPS // _ADAM_PIECES * batch_rows(potential)
                    advance()
                fallback = [start, state[1]]  # the latter, where Adam last had a finite gradient
                first, factor, more = begin(x)
                x, spent = first, spent + more
                same = [end for y, end in before if stages and _is_same(end, x, y, most, stages)]
                if same:  # on some of the rows, and so on all of them
                    yield replace(same[0], row_gradients=spent)
                    continue
                left, at, decrements = MOST_PASSES, unknown, []
                for _ in range(_NEWTON_STEPS):
                    x, at, decrement, moved, factor, num_negative, tries = newton(x, *at, factor)
                    spent, left = spent + int(tries) * all_rows, left - int(tries)
                    decrements.append(float(decrement))
                    advance()
                    if left <= 0 or (factor.ndim == 1 and _is_slow(decrements)):
                        break
                    if fallback and not np.isfinite(decrement):
                        x, at, factor = fallback.pop(), unknown, unit
                    elif not bool(moved):
                        break
            fit = Mode(
                x, factor, float(decrement), int(num_negative), spent, laplace(at[0], factor)
            )
            end = replace(fit, out_of_budget=left <= 0)
            if end.at_mode:
                before.append((first, end))
            yield end

    return search


def _is_same(end: Mode, x: Array, y: Array, most: float, stages: list[int]) -> bool:
    """True if two searches have come to one point of the rows of the last stage, near which the
    mode of all rows is as far as the root of their number tells."""
    return replace(end, center=y).distance(x) < 0.5 * math.sqrt(most / stages[-1])


def _hessian_product(
    potential: Potential, idx: dict[str, Array], x: Array
) -> Callable[[Array], Array]:
    """The Hessian on the rows ``idx`` times a direction."""

    def grad(x: Array) -> Array:
        return potential.value_and_grad_flat(x, idx)[1]

    return lambda direction: jax.jvp(grad, (x,), (direction,))[1]


def _curvature(potential: Potential, idx: dict[str, Array], x: Array, root: Array) -> Array:
    """The Hessian on the rows ``idx``: ``(n, n)``, in coordinates of which ``root`` is the matrix;
    or the ``(n,)`` diagonal for large n."""
    dense = root.ndim == 2

    product = _hessian_product(potential, idx, x)

    def along(direction: Array) -> Array:
        slope = product(direction)
        return slope if dense else jnp.vdot(slope, direction)

    directions = root.T if dense else jnp.eye(len(x), dtype=x.dtype)
    slopes = lax.map(along, directions, batch_size=32)
    return jnp.matmul(slopes, root, precision="highest") if dense else slopes


def _conjugate_step(potential: Potential, x: Array, g: Array, scales: Array) -> Array:
    """H^{-1} g for the Hessian of some rows, by conjugate gradients in the units of its diagonal;
    the step of the diagonal alone, where the curvature along theirs is negative."""
    product, diagonal = _hessian_product(potential, some_rows(potential), x), g / scales
    step, _ = jax.scipy.sparse.linalg.cg(
        product, g, diagonal, tol=_CG_TOLERANCE, maxiter=_CG_STEPS, M=lambda v: v / scales
    )
    downhill = (jnp.vdot(g, step) > 0) & (jnp.vdot(step, product(step)) > 0)
    return jnp.where(downhill, step, diagonal)


def _adam(
    potential: Potential, x: Array, state: Any, rng_key: Array, which: Array, k: Array
) -> tuple[Array, Any]:
    """A hundred steps, at a rate that falls over the whole search; from a point whose gradient is
    not finite back to the last one where it was, and Adam begins anew.

    :param k: counts the pieces of the search ``which``.
    """
    import optax  # not imported by NumPyro itself

    num = _ADAM_STEPS // _ADAM_PIECES
    rate = optax.exponential_decay(0.05, _ADAM_STEPS, 0.001 / 0.05)
    adam = optax.scale_by_adam()

    def step(carry: tuple[Array, Any], at: tuple[Array, Any, Any]) -> tuple[Any, None]:
        x, (state, known) = carry
        i, idx, rows = at
        _, g = potential.with_rows(idx, rows).value_and_grad_flat(x, idx)
        fine = jnp.all(jnp.isfinite(g * g))  # Adam takes the square
        update, new = adam.update(jnp.where(fine, g, 0), state)
        step = jnp.asarray(rate(i), x.dtype) * jnp.asarray(update)
        fresh = adam.init(x), known
        moved = jax.tree.map(partial(jnp.where, fine), (x - step, (new, x)), (known, fresh))
        return moved, None

    keys = random.split(random.fold_in(random.fold_in(rng_key, which), k), num)
    idx = jax.vmap(partial(draw_batch, potential=potential))(keys)
    batches = k * num + jnp.arange(num), idx, potential.read_ahead(idx)
    return lax.scan(step, (x, state), batches)[0]


def _newton(
    potential: Potential,
    enough: Any,
    x: Array,
    value: Array,
    g: Array,
    root: Array,
    pieces: Array | None = None,
) -> tuple[Any, ...]:
    """One damped step: ``(x, (value, g), decrement, moved, factor, num_negative, passes)``.

    The value is a pair, whose sum it is: see :meth:`Potential.full_sums`. Where it is infinite, it
    and the gradient g are not known yet: the step then has the length 0 and finds them. So they are
    taken once at each point, and compiled once.

    :param enough: the decrement at which it stays.
    :param pieces: see :meth:`Potential.full_sums`.
    :param root: the factor before, in whose coordinates the curvature is taken, because in float32
        that of columns as they come would lose its least eigenvalues beside the largest.
    """
    known = jnp.isfinite(value[0])

    def curvatures() -> tuple[Array, Array]:
        prior = _curvature(potential.prior(), potential.first_rows(), x, root)
        return _curvature(potential, some_rows(potential), x, root), prior

    one = jnp.eye(len(x), dtype=x.dtype) if root.ndim == 2 else jnp.ones_like(x)
    H, prior = lax.cond(known, curvatures, lambda: (one, one))
    if H.ndim == 2:
        # With a unit diagonal, so that float32 resolves coordinates of very unequal scale.
        unit = 1 / jnp.sqrt(jnp.maximum(jnp.abs(jnp.diagonal(H)), jnp.abs(jnp.diagonal(prior))))
        w, Q = jnp.linalg.eigh(unit[:, None] * (H + H.T) / 2 * unit)
        least = jnp.einsum("ik,ij,jk->k", Q, unit[:, None] * prior * unit, Q)
        scales = jnp.maximum(jnp.abs(w), jnp.maximum(least, _LEAST_CURVATURE))
        step = root @ (unit * (Q @ ((Q.T @ (unit * (g @ root))) / scales)))
        # A A^T = H^{-1}, lower triangular: the R of a QR of a root.
        R = jnp.linalg.qr((unit[:, None] * Q / jnp.sqrt(scales)).T, mode="r")
        factor = root @ (R.T * jnp.sign(jnp.diagonal(R)))
    else:
        w, scales = H, jnp.maximum(jnp.abs(H), jnp.abs(prior))
        step, factor = _conjugate_step(potential, x, g, scales), 1 / jnp.sqrt(scales)
    decrement = jnp.sqrt(jnp.maximum(jnp.vdot(g, step), 0))
    near = known & (decrement < enough)
    most = jnp.where(known, _HALVINGS, 0)

    def change(k: Array, new_value: Array, new_g: Array) -> Array:
        """Of the potential by a step; where its digits do not show it, by the trapezoidal rule."""
        seen = jnp.sum(new_value - value)
        told = -0.5 * 0.5 ** k.astype(x.dtype) * (jnp.vdot(g, step) + jnp.vdot(new_g, step))
        digits = jnp.finfo(x.dtype).eps * jnp.abs(value[0])
        return jnp.where(known & (jnp.abs(seen) <= digits), told, seen)

    def worse(carry: tuple[Array, Any]) -> Array:
        k, new = carry
        return (k < most) & ~(change(k, *new) <= 0)

    def halve(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        k = carry[0] + 1
        z = potential.info.unravel(x - 0.5**k * step)
        high, low = potential.full_sums(z, None if pieces is None else ROWS, pieces)
        ravel = potential.info.ravel
        return k, (jnp.stack([high[0], low[0]]), ravel(high[1]) + ravel(low[1]))

    start = jnp.asarray(-1, jnp.int32), (jnp.where(near, value, jnp.nan), g)
    k, new = lax.while_loop(worse, halve, start)
    moved = ~near & jnp.isfinite(new[0][0]) & (change(k, *new) <= 0)
    x = jnp.where(moved, x - 0.5 ** k.astype(x.dtype) * step, x)
    at = jax.tree.map(partial(jnp.where, moved), new, (value, g))
    not_known = jnp.where(moved, jnp.finfo(x.dtype).max, jnp.nan)
    return x, at, jnp.where(known, decrement, not_known), moved, factor, jnp.sum(w < 0), k + 1


def _is_slow(decrements: list[float]) -> bool:
    """True if six steps have not come twice as near: those of a diagonal come linearly nearer, and
    sixty of them would then not come a thousand times nearer."""
    last = decrements[1:]  # the first step finds the gradient
    return len(last) > _TWICE_AS_NEAR_IN and last[-1] > last[-1 - _TWICE_AS_NEAR_IN] / 2
