"""How far a posterior is from a normal approximation, and the normal of greatest ELBO."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.minibatch import draw_indices
from numpyro_ext._model.modes import DENSE_UP_TO, Mode, Problem
from numpyro_ext._model.operations import count_operations, jit_on_data, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.whitening import Whitening

__all__ = [
    "WORTH_OPTIMISING",
    "batch_rows",
    "draw_batch",
    "shape_measure",
    "some_rows",
    "variational_fit",
]

WORTH_OPTIMISING = 2e8
"""Numbers that a search computes, above which an optimised program pays for its compilation."""
_CURVATURE_ROWS = 10_000
_POINTS, _POWERS = 64, 10
_QUANTILE, _STIFFEST = 0.95, 1e4
_ROUNDINGS = 64  # of the potential, in a difference of two
_SVI_STEPS, _PARTICLES = 5_000, 8


def batch_rows(potential: Potential) -> int:
    """Rows in one minibatch of every plate; 1 without a plate."""
    return sum(batch for _, batch in potential.plates.values()) or 1


def draw_batch(rng_key: Array, potential: Potential) -> dict[str, Array]:
    """One batch of every plate, drawn with replacement."""
    return draw_indices(rng_key, {}, potential.plates)[0]


def some_rows(potential: Potential) -> dict[str, Array]:
    """At most 10,000 evenly spaced rows of every plate, 1,000 for large n."""
    dense = potential.info.size <= DENSE_UP_TO
    most = _CURVATURE_ROWS if dense else _CURVATURE_ROWS // 10
    return {
        name: (jnp.arange(min(size, most)) * (size / min(size, most))).astype(jnp.int32)
        for name, (size, _) in potential.plates.items()
    }


def shape_measure(rng_key: Array, potential: Potential) -> Callable[[Mode], Mode]:
    """
    ``with_shape(fit)``, which gives a fit its ``departure`` and ``stiffness``, from gradients and
    curvatures at 64 points, and says whether the density jumps.

    The gradients are those of at most 10,000 rows, corrected by that of all rows at the center.
    Between the center and a point the potential must change as they say: by the trapezoidal rule,
    which is exact for a normal, and otherwise off by a part of what the gradient is off.
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

    run = jit_on_data(measure, quick_options())

    def with_shape(fit: Mode) -> Mode:
        departures, curvatures, jumps, allowed = (
            np.where(np.isfinite(x), np.asarray(x, float), np.inf)
            for x in run(rng_key, fit.center, fit.factor)
        )
        problems, jump = fit.problems, float(np.median(jumps))
        if np.isfinite(jump) and jump > np.median(allowed):
            sentence = (
                f"the potential changes by {jump:.2g} nats more than its gradient says, so the"
                " density jumps where a latent site is compared, rounded or used as an index, of"
                " which a kernel without an accept step knows nothing; sum that site out, or use"
                " NUTS."
            )
            problems += (Problem(sentence, "density jumps"),)
        stiffness = np.sort(curvatures)[int(_QUANTILE * _POINTS)]
        return replace(
            fit,
            problems=problems,
            departure=float(np.median(departures)),
            stiffness=float(np.clip(stiffness, 1.0, _STIFFEST)),
        )

    return with_shape


def variational_fit(rng_key: Array, potential: Potential) -> Callable[..., Mode]:
    """``vary(x, sds)``, which finds the normal of least KL divergence from the posterior from a
    start, by Adam on the same minibatches. In one program, because `SVI` with a guide takes some
    seconds to compile hundreds of small ones.

    Without ``sds`` it begins narrow, in coordinates as they are; ``sds`` are units ``(n,)``, in
    which it begins half as wide.
    """
    import optax  # not imported by NumPyro itself

    n = potential.info.size
    dense = n <= DENSE_UP_TO
    adam = optax.adam(optax.exponential_decay(0.02, _SVI_STEPS, 0.02))

    def factor(log_scale: Array, below: Array | None) -> Array:
        scale = jnp.exp(log_scale)
        return scale if below is None else scale[:, None] * (jnp.tril(below, -1) + jnp.eye(n))

    def gradient(z: Array, key: Array) -> Array:
        return potential.value_and_grad_flat(z, draw_batch(key, potential))[1]

    def step(units: Array, carry: Any, key: Array) -> tuple[Any, None]:
        (loc, shape), state = carry
        A, pull = jax.vjp(factor, *shape)
        key_xi, key_batches = random.split(key)
        xi = random.normal(key_xi, (_PARTICLES, n), loc.dtype)
        z = units * (loc + (xi @ A.T if dense else xi * A))
        g = units * jax.vmap(gradient)(z, random.split(key_batches, _PARTICLES))
        log_scale, below = pull(g.T @ xi / _PARTICLES if dense else jnp.mean(g * xi, 0))
        slope = jnp.mean(g, 0), (log_scale - 1, below)  # the entropy is the sum of log scales
        fine = jnp.all(jnp.isfinite(g * g))
        update, new = adam.update(slope, state)
        moved = optax.apply_updates(carry[0], update), new
        return jax.tree.map(partial(jnp.where, fine), moved, carry), None

    def fit(rng_key: Array, x: Array, units: Array, width: Array) -> tuple[Array, Array]:
        below = jnp.zeros((n, n), x.dtype) if dense else None
        params: Any = x / units, (jnp.full_like(x, jnp.log(width)), below)
        begin, keys = (params, adam.init(params)), random.split(rng_key, _SVI_STEPS)
        (loc, shape), _ = lax.scan(partial(step, units), begin, keys)[0]
        A = factor(*shape)
        return units * loc, (units[:, None] if dense else units) * A

    dtype = jnp.result_type(float)
    cost = count_operations(
        potential.value_and_grad_flat, np.zeros(n, dtype), potential.first_rows()
    )
    options = quick_options(cost * _PARTICLES * _SVI_STEPS, WORTH_OPTIMISING)
    run = jit_on_data(fit, options)

    def vary(x: Array, sds: Array | None = None) -> Mode:
        units = jnp.ones(n) if sds is None else sds
        first = 0.05 if sds is None else 0.5
        given = (jnp.asarray(value, dtype) for value in (x, units, first))
        center, A = run(rng_key, *given)
        spent = _PARTICLES * _SVI_STEPS * batch_rows(potential)
        return Mode(center, A, row_gradients=spent, variational=True)

    return vary
