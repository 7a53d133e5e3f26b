"""A normal approximation of a posterior: at its mode, or a variational one where that is nearer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer.initialization import init_to_uniform
import optax

from numpyro_ext._model.mode_search import (
    DENSE_UP_TO,
    WORTH_OPTIMISING,
    NormalFit,
    batch_rows,
    draw_batch,
    find_modes,
    some_rows,
    starts_of,
)
from numpyro_ext._model.operations import count_operations, quick_options, run_once
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.start import draw_start, start_near_median
from numpyro_ext._typing import Model, Sites

__all__ = ["advice", "constrained", "find_normal", "with_shape"]

_NORMAL_MODE, _NORMAL_FIT = 0.3, 0.1
"""Departures up to which a mode, and a variational fit in its place, are taken without a warning;
a fit has come as near as a normal can, so what it leaves is of another kind."""
_POINTS, _POWERS = 64, 10
_QUANTILE, _STIFFEST = 0.95, 1e4
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
    given = start is not None
    energy: Any = 0.0
    if start is None:
        start, energy, _ = draw_start(
            key_start, model, info, *potential.arguments, init_strategy=init_strategy
        )

    def search(start: Sites) -> tuple[NormalFit, Iterator[NormalFit]]:
        modes = find_modes(key_mode, potential, starts_of(key_start, info.ravel(start)))
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
        mode = with_shape(key_shape, potential, mode)
        if mode.departure <= _NORMAL_MODE:
            return mode
    if not np.isfinite(mode.decrement):
        # The search leaves out minibatches whose gradient is not finite; all rows are in here.
        rows = {n: jnp.arange(N) for n, (N, _) in potential.plates.items()}
        potential.check_start(start, rows, *jax.jit(potential.full_value_and_grad)(start))
    fit = with_shape(key_shape, potential, _variational(key_svi, potential, info.ravel(start)))
    spent = mode.row_gradients + fit.row_gradients
    if mode.at_mode and mode.departure <= fit.departure:
        fit = mode
    fit = replace(fit, row_gradients=spent, problems=mode.problems)
    if not mode.at_mode:
        what = "the search for a mode ended where the gradient of all rows is not finite"
        if mode.num_negative:
            what = (
                f"the curvature has {mode.num_negative} negative directions where the search for a"
                " mode ended"
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


def advice(info: ModelInfo) -> str:
    """The advice on hierarchies, to a model that has not followed it and to one that has."""
    done = [name.removesuffix("_decentered") for name in info.latents if "_decentered" in name]
    if done:
        return f"change centered in the LocScaleReparam of '{done[0]}' (0 and 1 are its ends)"
    return "reparametrise the model (LocScaleReparam for hierarchies)"


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


def with_shape(rng_key: Array, potential: Potential, fit: NormalFit) -> NormalFit:
    """
    The fit with its ``departure`` and ``stiffness``, from gradients and curvatures at 64 points.

    The gradients are those of at most 10,000 rows, corrected by that of all rows at the center.
    """
    whitening = fit.whitening

    def measure(rng_key: Array) -> tuple[Array, Array]:
        idx = some_rows(potential)
        at_center = potential.value_and_grad_flat(fit.center, idx)[1]
        shift = potential.full_value_and_grad_flat(fit.center)[1] - at_center

        def grad(xi: Array) -> Array:
            g = potential.value_and_grad_flat(whitening.to_z(xi), idx)[1]
            return whitening.pull(g + shift)

        def at(points: Array) -> tuple[Array, Array]:
            xi, v = points
            g, slope = jax.linearize(grad, xi)

            def power(_: int, v: Array) -> Array:
                return slope(v / jnp.linalg.norm(v))

            return jnp.mean((g - xi) ** 2), jnp.linalg.norm(lax.fori_loop(0, _POWERS, power, v))

        points = random.normal(rng_key, (_POINTS, 2, *fit.center.shape), fit.center.dtype)
        return lax.map(at, points)

    found = (np.asarray(x, float) for x in run_once(measure, rng_key))
    departures, curvatures = (np.where(np.isfinite(x), x, np.inf) for x in found)
    stiffness = np.sort(curvatures)[int(_QUANTILE * _POINTS)]
    return replace(
        fit,
        departure=float(np.median(departures)),
        stiffness=float(np.clip(stiffness, 1.0, _STIFFEST)),
    )


def _variational(rng_key: Array, potential: Potential, x: Array) -> NormalFit:
    """The normal of least KL divergence from the posterior, by Adam on the same minibatches. In one
    program, because `SVI` with a guide takes some seconds to compile hundreds of small ones."""
    dense = len(x) <= DENSE_UP_TO
    adam = optax.adam(optax.exponential_decay(0.02, _SVI_STEPS, 0.02))

    def factor(log_scale: Array, below: Array | None) -> Array:
        scale = jnp.exp(log_scale)
        return scale if below is None else scale[:, None] * (jnp.tril(below, -1) + jnp.eye(len(x)))

    def gradient(z: Array, key: Array) -> Array:
        return potential.value_and_grad_flat(z, draw_batch(key, potential))[1]

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        (loc, shape), state = carry
        A, pull = jax.vjp(factor, *shape)
        key_xi, key_batches = random.split(key)
        xi = random.normal(key_xi, (_PARTICLES, len(x)), x.dtype)
        z = loc + (xi @ A.T if dense else xi * A)
        g = jax.vmap(gradient)(z, random.split(key_batches, _PARTICLES))
        log_scale, below = pull(g.T @ xi / _PARTICLES if dense else jnp.mean(g * xi, 0))
        slope = jnp.mean(g, 0), (log_scale - 1, below)  # the entropy is the sum of log scales
        fine = jnp.all(jnp.isfinite(g * g))
        update, new = adam.update(slope, state)
        moved = optax.apply_updates(carry[0], update), new
        return jax.tree.map(partial(jnp.where, fine), moved, carry), None

    def fit(rng_key: Array, x: Array) -> tuple[Array, Array]:
        below = jnp.zeros((len(x), len(x)), x.dtype) if dense else None
        params: Any = x, (jnp.full_like(x, np.log(0.05)), below)
        (loc, shape), _ = lax.scan(
            step, (params, adam.init(params)), random.split(rng_key, _SVI_STEPS)
        )[0]
        return loc, factor(*shape)

    one = count_operations(potential.value_and_grad_flat, x, potential.first_rows())
    options = quick_options(one * _PARTICLES * _SVI_STEPS, WORTH_OPTIMISING)
    center, A = jax.jit(fit, compiler_options=options)(rng_key, x)
    return NormalFit(center, A, row_gradients=_PARTICLES * _SVI_STEPS * batch_rows(potential))


def constrained(potential: Potential, x: Array) -> Sites:
    """The latent sites of a flat vector, in their supports."""
    info, sites = potential.info, potential.postprocess()
    at = jax.jit(lambda x: sites(info.unravel(x)), compiler_options=quick_options())
    return info.in_order(at(x))
