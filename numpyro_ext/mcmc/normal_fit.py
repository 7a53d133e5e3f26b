"""A normal approximation of a posterior, at its mode or variational, and what is around it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer.initialization import init_to_uniform

from numpyro_ext._model.mode_search import (
    DENSE_UP_TO,
    WORTH_OPTIMISING,
    NormalFit,
    advice,
    batch_rows,
    draw_batch,
    mode_search,
    some_rows,
    starts_of,
)
from numpyro_ext._model.operations import (
    compile_ahead,
    count_operations,
    quick_options,
    run_once,
)
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.start import draw_start, start_near_median
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import GradientEstimator, Model, Sites
from numpyro_ext.mcmc.gradients import ControlVariate, MinibatchGradient

__all__ = [
    "NOISE_ESTIMATES",
    "factor_like",
    "find_normal",
    "noise_measure",
    "probe",
    "shape_measure",
]

_NORMAL_MODE, _NORMAL_FIT = 0.3, 0.1
"""Departures up to which a mode, and a variational fit in its place, are taken without a warning;
a fit has come as near as a normal can, so what it leaves is of another kind."""
_POINTS, _POWERS, _PROBES = 64, 10, 4
_QUANTILE, _STIFFEST = 0.95, 1e4
_ROUNDINGS = 64  # of the potential, in a difference of two
_NOISE_POINTS, _NOISE_BATCHES = 512, 4
# The noise of a corrected gradient grows as the square of the distance, so it varies from point to
# point by one to two times its mean: few points with many batches would miss the mean by a third.
NOISE_ESTIMATES = _NOISE_POINTS * _NOISE_BATCHES
"""Estimates of a gradient by each estimator, from which its noise is known."""
_SVI_STEPS, _PARTICLES = 5_000, 8
_REDRAWN = 8  # starts, of up to 100 tries each
_SHARE = 7.0  # nats: a mode with less than a thousandth of the mass is not looked at


def find_normal(
    rng_key: Array,
    model: Model,
    potential: Potential,
    start: Sites | None,
    init_strategy: Callable[..., Any] = init_to_uniform,
    key_again: Array | None = None,
) -> NormalFit:
    """The normal approximation at the posterior's mode; a variational one where there is no mode,
    or where the posterior around it is far from normal, as with scales of a hierarchy.

    :param key_again: key of other starts, some nearer to the prior's median, of which the one of
        lowest potential is taken where the first one or its gradient is not finite.
    """
    info = potential.info
    key_start, key_mode, key_svi, key_shape = run_once(_four, rng_key)
    find_modes = mode_search(key_mode, potential)
    with_shape = shape_measure(key_shape, potential, factor_like(info))
    # Of many dimensions a posterior is seldom near normal at its mode.
    vary = _variational(key_svi, potential) if info.size > DENSE_UP_TO else None
    given = start is not None
    energy: Any = 0.0
    if start is None:
        start, energy, _ = draw_start(
            key_start, model, info, *potential.arguments, init_strategy=init_strategy
        )

    def search(start: Sites) -> tuple[NormalFit, Iterator[NormalFit]]:
        modes = find_modes(starts_of(key_start, info.ravel(start)))
        return next(modes), modes

    mode = NormalFit(info.ravel(start), jnp.ones(info.size), np.nan)
    modes: Iterator[NormalFit] = iter(())
    if np.isfinite(energy):
        mode, modes = search(start)
    if not (given or np.isfinite(mode.decrement)):
        again = key_start if key_again is None else key_again
        start, energy, grad = start_near_median(again, model, potential)
        drawn, energies, _ = draw_start(
            random.split(again, _REDRAWN),
            model,
            info,
            *potential.arguments,
            init_strategy=init_strategy,
            validate_grad=True,
        )
        best = int(np.argmin(np.nan_to_num(energies, nan=np.inf)))
        if np.isfinite(energies[best]) and not energy <= energies[best]:
            start = {name: x[best] for name, x in drawn.items()}
        else:
            potential.check_start(start, potential.first_rows(), energy, grad)
        mode, modes = search(start)
    if mode.at_mode and not given:
        mode = _most_likely([mode, *modes])
    if mode.at_mode:
        mode = with_shape(mode)
        if mode.departure <= _NORMAL_MODE:
            return mode
    if not np.isfinite(mode.decrement):
        # The search leaves out minibatches whose gradient is not finite; all rows are in here.
        rows = {n: jnp.arange(N) for n, (N, _) in potential.plates.items()}
        potential.check_start(start, rows, *jax.jit(potential.full_value_and_grad)(start))
    vary = vary or _variational(key_svi, potential)
    fit = with_shape(vary(info.ravel(start)))
    spent = mode.row_gradients + fit.row_gradients
    if mode.at_mode and mode.departure <= fit.departure:
        fit = mode
    problems = tuple(dict.fromkeys(mode.problems + fit.problems))
    fit = replace(fit, row_gradients=spent, problems=problems)
    if not mode.at_mode:
        what = "the search for a mode ended where the gradient of all rows is not finite"
        if mode.num_negative:
            what = (
                "the curvature is not that of a mode where the search ended (negative directions:"
                f" {mode.num_negative})"
            )
        elif np.isfinite(mode.decrement):
            what = f"the search for a mode ended {mode.decrement:.2g} standard deviations from one"
        problem = (
            f"{what}{mode.budget}, so center and scales come from a variational fit instead;"
            f" {advice(info)}, or give init_params near the mode."
        )
    elif fit.departure > _NORMAL_FIT:
        error = f"relative error {fit.departure**0.5:.2g}"
        if not np.isfinite(fit.departure):
            error = "at half of the points they are not finite"
        problem = (
            f"gradients around the center are far from those of a normal posterior ({error}), so"
            f" the scales found do not hold in all of it; {advice(info)}, or use NUTS."
        )
    else:
        return fit
    return replace(fit, problems=(*fit.problems, problem))


def _four(rng_key: Array) -> tuple[Array, ...]:
    return tuple(random.split(rng_key, 4))


def _most_likely(modes: list[NormalFit]) -> NormalFit:
    """The mode of most mass, with the gradients of all searches, and with a sentence if another
    mode has a share in it."""
    spent = sum(mode.row_gradients for mode in modes)
    known = [mode for mode in modes if mode.at_mode and np.isfinite(mode.log_evidence)]
    best = max(known, key=lambda mode: mode.log_evidence, default=modes[0])
    far = 3 + float(np.sqrt(best.center.size))
    distances = [
        best.distance(mode.center)
        for mode in known
        if mode.log_evidence > best.log_evidence - _SHARE
    ]
    problems = ()
    if max(distances, default=0.0) > far:
        problems = (
            f"searches from {len(modes)} points ended at different modes, {max(distances):.2g}"
            " standard deviations apart, and all chains start at one of them and may not leave it;"
            " give each chain init_params of its own, or check that the modes are copies of each"
            " other.",
        )
    return replace(best, row_gradients=spent, problems=problems)


def factor_like(info: ModelInfo) -> jax.ShapeDtypeStruct:
    """Shape and type of the factor that is found for a model."""
    dtype = jnp.result_type(float)
    shape = (info.size,) if info.size > DENSE_UP_TO else (info.size, info.size)
    return jax.ShapeDtypeStruct(shape, dtype)


def shape_measure(
    rng_key: Array, potential: Potential, factor: Any
) -> Callable[[NormalFit], NormalFit]:
    """
    What gives a fit its ``departure`` and ``stiffness``, from gradients and curvatures at 64
    points, and says whether the density jumps, ``with_shape(fit)``; compiled while the fit is
    searched.

    The gradients are those of at most 10,000 rows, corrected by that of all rows at the center.
    Between the center and a point the potential must change as they say: by the trapezoidal rule,
    which is exact for a normal, and otherwise off by a part of what the gradient is off.

    :param factor: one like that of the fit.
    """

    def measure(rng_key: Array, center: Array, factor: Array) -> tuple[Array, ...]:
        idx, whitening = some_rows(potential), Whitening(center, factor)
        value, at_center = potential.value_and_grad_flat(center, idx)
        shift = potential.full_value_and_grad_flat(center)[1] - at_center
        begin, others = whitening.pull(at_center), whitening.pull(shift)
        rounding = jnp.finfo(value.dtype).eps * jnp.abs(value)

        def grad(xi: Array) -> tuple[Array, Array]:
            value, g = potential.value_and_grad_flat(whitening.to_z(xi), idx)
            return whitening.pull(g + shift), value

        def at(points: Array) -> tuple[Array, ...]:
            xi, v = points
            g, slope, end = jax.linearize(grad, xi, has_aux=True)

            def power(_: int, v: Array) -> Array:
                return slope(v / jnp.linalg.norm(v))

            bent = g - others - begin - xi
            jump = end - value - jnp.vdot(begin + (bent + xi) / 2, xi)
            stiffness = jnp.linalg.norm(lax.fori_loop(0, _POWERS, power, v))
            allowed = jnp.maximum(1 + _ROUNDINGS * rounding, jnp.abs(jnp.vdot(bent, xi)))
            return jnp.mean((g - xi) ** 2), stiffness, jnp.abs(jump), allowed

        points = random.normal(rng_key, (_POINTS, 2, *center.shape), center.dtype)
        return lax.map(at, points)

    run = _at_normal(measure, rng_key, factor)

    def with_shape(fit: NormalFit) -> NormalFit:
        found = (np.asarray(x, float) for x in run(rng_key, fit.center, fit.factor))
        departures, curvatures, jumps, allowed = (
            np.where(np.isfinite(x), x, np.inf) for x in found
        )
        problems, jump = fit.problems, float(np.median(jumps))
        if np.isfinite(jump) and jump > np.median(allowed):
            problems += (
                f"the potential changes by {jump:.2g} nats more than its gradient says, so the"
                " density jumps where a latent site is compared, rounded or used as an index, of"
                " which a kernel without an accept step knows nothing; sum that site out, or use"
                " NUTS.",
            )
        stiffness = np.sort(curvatures)[int(_QUANTILE * _POINTS)]
        return replace(
            fit,
            problems=problems,
            departure=float(np.median(departures)),
            stiffness=float(np.clip(stiffness, 1.0, _STIFFEST)),
        )

    return with_shape


def noise_measure(
    rng_key: Array, potential: Potential, given: GradientEstimator | None, factor: Any
) -> Callable[[NormalFit], tuple[Sites, list[np.ndarray], np.ndarray]]:
    """
    What looks around the center of a normal approximation, ``look_around(normal)``;
    compiled while the center is searched. It returns the constrained center, variances of gradient
    estimates, and the gradients of all rows by which :class:`Fitness` knows the data.

    Variances are those over batches, whitened, ``(n,)`` for each estimator: the one that is given,
    or the plain one and the one that is corrected at the center, or none without a plate. Each is
    the mean over points of the normal approximation: of a noise that depends on the place,
    :math:`s^2(\\xi)`, the variance of a Gaussian target feels the mean to first order, without a
    weight, because the function whose drift is :math:`\\xi_k^2 - 1` is a quadratic one. Points at
    which it is not finite are left out; NaN if these are more than half.

    :param factor: one like that of the normal approximation.
    """
    info, sites = potential.info, potential.postprocess()

    def measure(rng_key: Array, center: Array, factor: Array) -> tuple[Sites, list[Array], Array]:
        whitening, values = Whitening(center, factor), info.in_order(sites(info.unravel(center)))
        estimators: list[GradientEstimator] = []
        if given is not None:
            estimators = [given]
        elif potential.plates:
            estimators = [MinibatchGradient(), ControlVariate(values)]
        noises = _noises(rng_key, potential, whitening, estimators) if estimators else []
        return values, noises, probe(potential, whitening)

    run = _at_normal(measure, rng_key, factor)

    def look_around(normal: NormalFit) -> tuple[Sites, list[np.ndarray], np.ndarray]:
        center, noises, gradients = run(rng_key, normal.center, normal.factor)
        return center, [np.asarray(x, float) for x in noises], np.asarray(gradients, float)

    return look_around


def _at_normal(measure: Callable[..., Any], rng_key: Array, factor: Any) -> Callable[..., Any]:
    """``measure(rng_key, center, factor)``, compiled ahead for a factor like this one."""
    center = jax.ShapeDtypeStruct(factor.shape[:1], factor.dtype)
    return compile_ahead(measure, rng_key, center, factor, options=quick_options())


def _noises(
    rng_key: Array, potential: Potential, whitening: Whitening, estimators: list[GradientEstimator]
) -> list[Array]:
    info, center = potential.info, whitening.center
    states = [estimator.init(info.unravel(center), potential) for estimator in estimators]

    def at_point(key: Array) -> list[Array]:
        key_xi, key_batches = random.split(key)
        z = info.unravel(whitening.to_z(random.normal(key_xi, center.shape, center.dtype)))

        def one(key: Array) -> list[Array]:
            key_batch, key_gradient = random.split(key)
            i, idx = jnp.zeros((), int), draw_batch(key_batch, potential)
            grads = [
                estimator.estimate(key_gradient, i, z, idx, potential, state)[1]
                for estimator, state in zip(estimators, states, strict=True)
            ]
            return [whitening.pull(info.ravel(grad)) for grad in grads]

        found = lax.map(one, random.split(key_batches, _NOISE_BATCHES))
        return [jnp.var(grads, 0, ddof=1) for grads in found]

    def mean(found: Array) -> Array:
        finite = jnp.all(jnp.isfinite(found), 1)
        share = jnp.mean(finite, dtype=found.dtype)
        mean = jnp.mean(jnp.where(finite[:, None], found, 0), 0) / share
        return jnp.where(share < 0.5, jnp.nan, mean)

    return [mean(x) for x in lax.map(at_point, random.split(rng_key, _NOISE_POINTS))]


def probe(potential: Potential, whitening: Whitening) -> Array:
    """Gradients of all rows at four points of a normal approximation, whitened: ``(4, n)``."""

    def grad(xi: Array) -> Array:
        return whitening.pull(potential.full_value_and_grad_flat(whitening.to_z(xi))[1])

    center = whitening.center
    return lax.map(grad, random.normal(random.key(0), (_PROBES, *center.shape), center.dtype))


def _variational(rng_key: Array, potential: Potential) -> Callable[[Array], NormalFit]:
    """What finds the normal of least KL divergence from the posterior, by Adam on the same
    minibatches, from a start. In one program, because `SVI` with a guide takes some
    seconds to compile hundreds of small ones."""
    import optax  # not imported by NumPyro itself

    n = potential.info.size
    dense = n <= DENSE_UP_TO
    adam = optax.adam(optax.exponential_decay(0.02, _SVI_STEPS, 0.02))

    def factor(log_scale: Array, below: Array | None) -> Array:
        scale = jnp.exp(log_scale)
        return scale if below is None else scale[:, None] * (jnp.tril(below, -1) + jnp.eye(n))

    def gradient(z: Array, key: Array) -> Array:
        return potential.value_and_grad_flat(z, draw_batch(key, potential))[1]

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        (loc, shape), state = carry
        A, pull = jax.vjp(factor, *shape)
        key_xi, key_batches = random.split(key)
        xi = random.normal(key_xi, (_PARTICLES, n), loc.dtype)
        z = loc + (xi @ A.T if dense else xi * A)
        g = jax.vmap(gradient)(z, random.split(key_batches, _PARTICLES))
        log_scale, below = pull(g.T @ xi / _PARTICLES if dense else jnp.mean(g * xi, 0))
        slope = jnp.mean(g, 0), (log_scale - 1, below)  # the entropy is the sum of log scales
        fine = jnp.all(jnp.isfinite(g * g))
        update, new = adam.update(slope, state)
        moved = optax.apply_updates(carry[0], update), new
        return jax.tree.map(partial(jnp.where, fine), moved, carry), None

    def fit(rng_key: Array, x: Array) -> tuple[Array, Array]:
        below = jnp.zeros((n, n), x.dtype) if dense else None
        params: Any = x, (jnp.full_like(x, np.log(0.05)), below)
        (loc, shape), _ = lax.scan(
            step, (params, adam.init(params)), random.split(rng_key, _SVI_STEPS)
        )[0]
        return loc, factor(*shape)

    start = jax.ShapeDtypeStruct((n,), jnp.result_type(float))
    one = count_operations(potential.value_and_grad_flat, start, potential.first_rows())
    options = quick_options(one * _PARTICLES * _SVI_STEPS, WORTH_OPTIMISING)
    run = compile_ahead(fit, rng_key, start, options=options)

    def vary(x: Array) -> NormalFit:
        center, A = run(rng_key, x.astype(start.dtype))
        return NormalFit(center, A, row_gradients=_PARTICLES * _SVI_STEPS * batch_rows(potential))

    return vary
