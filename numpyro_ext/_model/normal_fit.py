"""The normal of greatest ELBO, and what is measured of any normal approximation of a posterior."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
import math
from typing import Any, cast

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np

from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.bend import Bend
from numpyro_ext._model.minibatch import draw_indices
from numpyro_ext._model.modes import DENSE_UP_TO, Mode, Problem
from numpyro_ext._model.normal import Normal
from numpyro_ext._model.operations import count_operations, jit_on_data, linearized, quick_options
from numpyro_ext._model.potential import Potential

WORTH_OPTIMISING = 1e9
"""Numbers that a search computes, above which an optimised program pays for its compilation."""
_CURVATURE_ROWS = 10_000
_POINTS, _POWERS = 64, 10
_FEW_POINTS, _FEW_POWERS = 32, 5
_ROWS_OF_A_NUMBER, _MOST_ROWS = 250, 2 * 10**6
"""Of a hierarchy with many groups: points and powers, and rows for each latent number."""
_QUANTILE, _STIFFEST = 0.95, 1e4
_ROUNDINGS = 64  # of the potential, in a difference of two
_STAGES, _STAGE_STEPS, _PARTICLES = 8, 500, 8
_RATE = 0.02
"""The rate of Adam at the beginning of a stage, in which it falls to a twentieth; at most
``_FASTEST`` where the posterior is far away."""
_FASTEST = 0.2
_CONVERGED = 0.3
"""The slope at which a fit ends: a step would gain less than a twentieth of a nat."""
_WORTH_A_STAGE = 0.3  # nats that the last stage has gained, for one beyond the first eight


def batch_rows(potential: Potential) -> int:
    """Rows in one minibatch of every plate; 1 without a plate."""
    plates = {**potential.plates, **potential.info.given}
    return sum(batch for _, batch in plates.values()) or 1


def draw_batch(rng_key: Array, potential: Potential) -> dict[str, Array]:
    """One batch of every plate, drawn with replacement."""
    return draw_indices(rng_key, {}, potential.plates)[0]


def some_rows(potential: Potential, most: int = _CURVATURE_ROWS) -> dict[str, Array]:
    """At most 10,000 evenly spaced rows of every plate, or another number."""
    return {
        name: (jnp.arange(min(size, most)) * (size / min(size, most))).astype(jnp.int32)
        for name, (size, _) in potential.plates.items()
    }


def sum_rows(potential: Potential, options: Any) -> Callable[..., tuple[float, np.ndarray]]:
    """``sums(x, rows=None)``: the potential of all rows, or of so many, evenly spread, and its
    gradient at a flat vector, in double precision piece by piece; one program for all who ask."""
    if potential.sums is not None:
        return potential.sums
    piece = jit_on_data(
        lambda x, idx: potential.with_rows(idx).value_and_grad_flat(x, idx), options
    )

    def sums(x: np.ndarray, rows: int | None = None) -> tuple[float, np.ndarray]:
        value, grad = 0.0, np.zeros(len(x))
        for weight, idx in potential.pieces(rows):
            part, slope = piece(x, idx)
            value, grad = value + weight * float(part), grad + weight * np.asarray(slope, float)
        return value, grad

    potential.sums = sums
    return sums


class NormalMeasure:
    r"""
    What is measured of a normal approximation :math:`z = c + A \xi`, at draws of it.

    The whitened gradient :math:`g = A^\top \nabla U` of a normal posterior would be :math:`\xi`,
    and :math:`b = g - \xi` is what is left of it. Then

    .. math::
        \text{ELBO} = -U(c) + \tfrac n2 \log 2\pi + \log |A|
        - E [U(z) - U(c) - \xi^\top g(c) - \tfrac12 |\xi|^2],

    and its natural gradient has the squared length :math:`|E b|^2 + \tfrac12 |S|^2` with the
    symmetric part S of :math:`E b \xi^\top`: by Stein's identity it is the difference between the
    mean curvature of U and the curvature of the normal.

    U is computed on at most 10,000 rows, and corrected by its gradient on all rows at the center.
    """

    def __init__(self, rng_key: Array, potential: Potential) -> None:
        self.rng_key, n = rng_key, potential.info.size
        self.dense, self.mutable = n <= DENSE_UP_TO, bool(potential.info.mutable)
        rows = int(np.clip(_ROWS_OF_A_NUMBER * n, _CURVATURE_ROWS, _MOST_ROWS))

        def draws_of(
            rng_key: Array,
            normal: Normal,
            bend: Bend | None,
            full_grad: Array,
            powers: Array,
            share: Array,
        ) -> tuple[Array, ...]:
            center, arrow = normal.center, isinstance(normal.factor, Arrow)
            # A group has but few of ten thousand rows.
            idx = some_rows(potential, rows) if arrow else some_rows(potential)
            num_points = _FEW_POINTS if arrow else _POINTS
            here = potential.with_rows(idx)
            value, at_center = here.value_and_grad_flat(center, idx)
            shift = full_grad - at_center

            def moved(xi: Array) -> tuple[Array, Array]:
                v = normal.push(xi)
                return (v, jnp.zeros((), v.dtype)) if bend is None else bend(v)

            (_, _), pull_center = jax.vjp(moved, jnp.zeros_like(center))
            minus = -jnp.ones((), center.dtype)
            (begin,) = pull_center((full_grad, minus))

            def at(points: Array) -> tuple[Array, ...]:
                xi, v = points
                xi = share * xi
                (away, log_det), pull = jax.vjp(moved, xi)

                def grad(v: Array) -> tuple[Array, Array]:
                    end, g = here.value_and_grad_flat(center + away + normal.push(v), idx)
                    return g + shift, end

                g, end, along = linearized(grad, 0 * xi, forward=potential.has_curvature)

                def power(_: Any, v: Array) -> Array:
                    return normal.pull(along(v / jnp.linalg.norm(v)))

                beyond = end - value + jnp.vdot(shift, away) - log_det
                beyond = beyond - jnp.vdot(begin, xi) - jnp.vdot(xi, xi) / 2
                stiffness = jnp.linalg.norm(lax.fori_loop(0, powers, power, v))
                return xi, pull((g, minus))[0] - xi, beyond, stiffness

            points = random.normal(rng_key, (num_points, 2, *center.shape), center.dtype)
            rounding = jnp.finfo(value.dtype).eps * jnp.abs(value)
            return rounding, begin, *lax.map(at, points)

        self._sums = sum_rows(potential, quick_options())
        self._draws_of = jit_on_data(draws_of, quick_options())

    def __call__(self, fit: Mode, *, shape: bool = True) -> Mode:
        r"""The normal with its ``elbo``, ``slope`` and ``departure``, from the same 64 :math:`\xi`
        for all normals; and, for ``shape``, its ``stiffness`` and whether the density jumps."""
        value, grad = self._sums(np.asarray(fit.center))
        arrow = isinstance(fit.factor, Arrow)
        powers = np.asarray((_FEW_POWERS if arrow else _POWERS) if shape else 0)
        grad = grad.astype(fit.center.dtype)
        at = self.rng_key, fit.whitening, fit.bend, grad
        one = np.ones((), grad.dtype)
        out = self._draws_of(*at, powers, one)
        rounding, slope, xi, b, beyond, curvatures = (np.asarray(x, float) for x in out)
        beyond, curvatures = (np.nan_to_num(x, nan=np.inf) for x in (beyond, curvatures))
        off = np.nan_to_num(np.abs(b), nan=np.inf)
        with np.errstate(invalid="ignore", over="ignore"):
            elbo = fit.laplace(value) - np.mean(beyond)
            error = np.std(beyond) / len(beyond) ** 0.5
        length, length_error = _slope(xi, b, self.dense or arrow)
        departure, departure_error = median_and_error(np.mean(off**2, axis=1))
        fit = replace(
            fit,
            elbo=float(np.nan_to_num(elbo, nan=-np.inf)),
            elbo_error=float(np.nan_to_num(error, nan=np.inf)),
            slope=length,
            slope_error=length_error,
            departure=departure,
            departure_error=departure_error,
            worst=int(np.argmax(np.mean(off, axis=0))),
            worst_error=float(np.max(np.mean(off, axis=0))),
        )
        if fit.variational:
            fit = replace(fit, log_evidence=fit.elbo, decrement=np.nan)
        if not shape:
            return fit
        stiffness = np.sort(curvatures)[int(_QUANTILE * len(curvatures))]
        # The change of a smooth potential is Simpson's rule of its slopes on the way, as nearly as
        # the trapezoidal rule is Simpson's.
        half = self._draws_of(*at, np.zeros_like(powers), one / 2)
        slopes = (np.asarray(x, float) for x in (slope, half[3] + half[2], b + xi))
        begin, middle, end = (np.sum(x * xi, axis=-1) for x in slopes)
        with np.errstate(invalid="ignore", over="ignore"):
            change = beyond + begin + np.sum(xi * xi, axis=1) / 2
            simpson = (begin + 4 * middle + end) / 6
            off = np.abs(np.stack([change - simpson, simpson - (begin + end) / 2]))
            jump, smooth = np.nan_to_num(off, nan=np.inf)
        jump = float(np.median(jump))
        if np.isfinite(jump) and jump > np.median(np.maximum(1 + _ROUNDINGS * rounding, smooth)):
            what = "where a latent site is compared or rounded; sum it out, or use NUTS"
            if self.mutable:
                what = (
                    "or changes within less than a standard deviation, as where batch normalisation"
                    " divides by a small spread; use its running averages, or LayerNorm"
                )
            sentence = (
                f"the potential changes by {jump:.2g} nats more than its gradient says: the density"
                f" jumps {what}."
            )
            fit = replace(fit, problems=(*fit.problems, Problem(sentence, "density jumps")))
        return replace(fit, stiffness=float(np.clip(stiffness, 1.0, _STIFFEST)))


def median_and_error(x: np.ndarray) -> tuple[float, float]:
    """The median of m independent values, and its standard error: half of the distance between the
    order statistics sqrt(m) / 2 ranks below and above, as far as the rank of the right median
    scatters. It is 0 where one of these is not finite."""
    away = 0.5 / len(x) ** 0.5
    with np.errstate(invalid="ignore"):
        low, median, high = np.quantile(x, [0.5 - away, 0.5, 0.5 + away])
        error = (high - low) / 2
    return float(median), float(error) if np.isfinite(error) else 0.0


def _slope(xi: np.ndarray, b: np.ndarray, dense: bool) -> tuple[float, float]:
    """The length of the ELBO's natural gradient and its standard error, from pairs of ``(m, n)``
    draws, so that its square has no bias."""
    if not np.all(np.isfinite(b)):
        return np.inf, np.inf
    m = len(xi)
    if dense:
        both, mixed = b @ b.T, b @ xi.T
        pairs = both + (both * (xi @ xi.T) + mixed * mixed.T) / 4
    else:
        pairs = b @ b.T + (b * xi) @ (b * xi).T / 2
    np.fill_diagonal(pairs, 0)
    of_each = np.sum(pairs, axis=1) / (m - 1)
    square = np.mean(of_each)
    # The error of a mean over pairs by the draws; where the slope is 0, by the pairs themselves.
    error = 2 * np.std(of_each) / m**0.5 + np.std(pairs) / m
    length = max(square, 0.0) ** 0.5
    return float(length), float(error / max(2 * length, error**0.5, 1e-30))


def fit_normal(rng_key: Array, potential: Potential, measure: NormalMeasure) -> Any:
    r"""
    ``fit(starts)``, the normal of greatest ELBO from the best of several normals.

    Adam on minibatches moves :math:`q = N(c + A m, A L L^\top A^\top)` from m = 0, in stages of 500
    steps, after each of which c and A are taken from q. The gradient is called *sticking the
    landing*: its noise vanishes where q is the posterior. Each start makes one stage; the start of
    greatest ELBO goes on until its slope is small, in at most fifteen more.

    References: Roeder, Wu and Duvenaud, *Sticking the landing* (NeurIPS 2017), eq. 8.
    """
    import optax  # not imported by NumPyro itself

    n = potential.info.size
    dense = n <= DENSE_UP_TO
    adam = optax.scale_by_adam()
    falling = np.geomspace(1, 1 / 20, _STAGE_STEPS)

    def factor(log_scale: Array, below: Array | None) -> Array:
        scale = jnp.exp(log_scale)
        return scale if below is None else scale[:, None] * (jnp.tril(below, -1) + jnp.eye(n))

    def gradient(z: Array, key: Array) -> Array:
        return potential.value_and_grad_flat(z, draw_batch(key, potential))[1]

    def step(normal: Normal, carry: Any, at: tuple[Array, Array]) -> tuple[Any, None]:
        (loc, shape), state = carry
        rate, key = at
        L, pull = jax.vjp(factor, *shape)
        key_xi, key_batches = random.split(key)
        xi = random.normal(key_xi, (_PARTICLES, n), loc.dtype)
        score = solve_triangular(L, xi.T, trans=1, lower=True).T if dense else xi / L
        z = jax.vmap(normal.to_z)(loc + (xi @ L.T if dense else xi * L))
        g = jax.vmap(gradient)(z, random.split(key_batches, _PARTICLES))
        b = jax.vmap(normal.pull)(g) - score
        slope = jnp.mean(b, 0), pull(b.T @ xi / _PARTICLES if dense else jnp.mean(b * xi, 0))
        fine = jnp.all(jnp.isfinite(g * g))
        update, new = adam.update(slope, state)
        by_loc, (by_scale, below) = cast(Any, update)
        # A row of the factor moves as one: with steps of Adam in each of its n numbers, noise alone
        # would move it by the root of n times the rate.
        by = by_loc, (by_scale, None if below is None else below / n**0.5)
        moved = jax.tree.map(lambda x, by: x - rate * by, carry[0], by), new
        return jax.tree.map(partial(jnp.where, fine), moved, carry), None

    def stage(rng_key: Array, k: Array, center: Array, root: Array, rate: Array) -> Any:
        """Center and factor after a stage, and how far the center has gone, in old units."""
        rng_key = random.fold_in(rng_key, k)
        below = jnp.zeros((n, n), center.dtype) if dense else None
        params: Any = jnp.zeros_like(center), (jnp.zeros_like(center), below)
        normal = Normal(center, root)
        steps = (rate * falling).astype(center.dtype), random.split(rng_key, _STAGE_STEPS)
        (loc, shape), _ = lax.scan(partial(step, normal), (params, adam.init(params)), steps)[0]
        L = factor(*shape)
        root = jnp.tril(root @ L) if dense else root * L
        return normal.to_z(loc), root, jnp.max(jnp.abs(loc))

    dtype = jnp.result_type(float)
    cost = count_operations(
        potential.value_and_grad_flat, np.zeros(n, dtype), potential.first_rows()
    )
    # Most fits take no more than half of the stages.
    numbers = cost * _PARTICLES * (_STAGES // 2) * _STAGE_STEPS
    options = quick_options(numbers, WORTH_OPTIMISING)
    run = jit_on_data(stage, options)
    spent = _PARTICLES * _STAGE_STEPS * batch_rows(potential)

    def after_stage(k: int, fit: Mode, rate: float) -> tuple[Mode, bool]:
        """The normal after a stage, and whether it may be on the way still."""
        rates = np.asarray(rate, dtype)
        center, root, way = run(rng_key, np.uint32(k), fit.center, fit.factor, rates)
        end = measure(Mode(center, root, row_gradients=spent, variational=True), shape=False)
        return end, float(way) > rate * falling.sum() / 2

    def fit(starts: Iterable[tuple[Any, Any]]) -> Mode:
        begun = []
        for center, root in starts:
            root = np.diag(root) if dense and np.ndim(root) == 1 else root
            center, root = jax.device_put([np.asarray(x, dtype) for x in (center, root)])
            start = Mode(center, root)
            begun.append(after_stage(0, start, _RATE))
        best, far = max(begun, key=lambda end: (end[0].elbo, -end[0].departure))
        rows, gain, rate = sum(end.row_gradients for end, _ in begun), math.inf, _RATE
        for k in range(1, 2 * _STAGES):
            if best.slope < _CONVERGED or (k >= _STAGES and gain < _WORTH_A_STAGE):
                break
            rate = min(2 * rate, _FASTEST) if far else min(rate, _RATE)
            new, far = after_stage(k, best, rate)
            rows, gain = rows + new.row_gradients, new.elbo - best.elbo
            if gain > 0:
                best = new
            else:
                rate, far = rate / 2, False
        return replace(best, row_gradients=rows)

    return fit
