"""The normal of greatest ELBO, and what is measured of any normal approximation of a posterior."""

from collections.abc import Iterable
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
from numpyro_ext._model.descent import curvatures, newton_step
from numpyro_ext._model.modes import Mode, Problem
from numpyro_ext._model.normal import Normal, Plain
from numpyro_ext._model.operations import jit_on_data, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.surface import (
    FEW_ROWS,
    POINTS,
    WORTH_OPTIMISING,
    batch_rows,
    draw_batch,
    surface_of,
)

_ALL_DIRECTIONS, _POWERS = 32, 10
"""Numbers up to which the stiffest direction is exact, and steps of the power method beyond."""
_FEW_POINTS, _FEW_POWERS = 32, 5
_ROWS_OF_A_NUMBER, _MOST_ROWS = 250, 2 * 10**6
"""Of a hierarchy with many groups: points and powers, and rows for each latent number, and at
most."""
_QUANTILE, _STIFFEST = 0.95, 1e4
_ROUNDINGS = 64  # of the potential, in a difference of two
_STAGES, _STAGE_STEPS, _PARTICLES = 8, 500, 8
_OF_ADAM = 20
"""Operations on each number of a factor, in a step."""
_RATE = 0.02
"""The rate of Adam at the beginning of a stage, in which it falls to a twentieth; at most
``_FASTEST`` where the posterior is far away."""
_FASTEST = 0.2
_CONVERGED = 0.3
"""The slope at which a fit ends: a step would gain less than a twentieth of a nat."""
_NEWTON_STEPS, _MOST_PAIRS, _OF_PAIRS = 12, 4, 7e10
"""Steps of Newton of the ELBO and pairs of draws with a curvature each, at most, and numbers that a
curvature of each pair may compute."""
_WORTH_A_STEP = 0.03  # nats that the last step has gained
_WORTH_A_STAGE = 0.3  # nats that the last stage has gained, for one beyond the first eight


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
        self.rng_key, self.surface = rng_key, surface_of(potential)
        self.mutable = bool(potential.info.mutable)
        self._draw = jit_on_data(
            lambda key, like: random.normal(key, like.shape, like.dtype), quick_options()
        )

    @np.errstate(invalid="ignore", over="ignore")  # far out anything may be infinite
    def __call__(self, fit: Mode, *, shape: bool = True) -> Mode:
        r"""The normal with its ``elbo``, ``slope`` and ``departure``, from the same 64 :math:`\xi`
        for all normals; and, for ``shape``, its ``stiffness`` and whether the density jumps."""
        surface, center = self.surface, np.asarray(fit.center, float)
        n, is_arrow = len(center), isinstance(fit.factor, Arrow)
        num, rows = POINTS, surface.few_rows
        if is_arrow:  # a group has but few of ten thousand rows
            most = int(np.clip(_ROWS_OF_A_NUMBER * n, FEW_ROWS, _MOST_ROWS))
            num, rows = _FEW_POINTS, surface.read(most)
        draws = np.asarray(self._draw(self.rng_key, np.zeros((num, 2, n), surface.dtype)), float)
        xi, directions = draws[:, 0], draws[:, 1]
        moves = Moves(fit, fit.bend)
        value, full_grad = surface.sums(center)
        values, grads = surface.at(center[None], rows)
        shift = full_grad - grads[0]
        begin = moves.pull_bent(np.zeros((1, n)), full_grad[None])[0]

        def at(xi: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """What the potential changes by from the center, and its whitened gradients."""
            away, log_det = moves.bent(xi)
            ends, grads = surface.at(center + away, rows)
            change = ends - values[0] + away @ shift - log_det
            return center + away, change, moves.pull_bent(xi, grads + shift)

        points, change, g = at(xi)
        b = g - xi
        beyond = np.nan_to_num(change - xi @ begin - np.sum(xi * xi, axis=1) / 2, nan=np.inf)
        off = np.nan_to_num(np.abs(b), nan=np.inf)
        elbo = fit.laplace(value) - np.mean(beyond)
        error = np.std(beyond) / len(beyond) ** 0.5
        length, length_error = _slope(xi, b, is_arrow or fit.is_matrix)
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
        # The change of a smooth potential is Simpson's rule of its slopes on the way, as nearly as
        # the trapezoidal rule is Simpson's.
        first, middle, last = (np.sum(y * xi, axis=1) for y in (begin, at(xi / 2)[2], g))
        simpson = (first + 4 * middle + last) / 6
        off = np.abs(np.stack([change - simpson, simpson - (first + last) / 2]))
        jump, smooth = np.nan_to_num(off, nan=np.inf)
        jump = float(np.median(jump))
        rounding = float(jnp.finfo(surface.dtype).eps) * abs(values[0])
        if np.isfinite(jump) and jump > np.median(np.maximum(1 + _ROUNDINGS * rounding, smooth)):
            fit = replace(fit, problems=(*fit.problems, self._problem(jump)))
        width, powers = 1, _FEW_POWERS if is_arrow else _POWERS
        if n <= _ALL_DIRECTIONS:
            width, powers = n, 1  # of all directions, the product is the matrix
        stiffness = []
        for k, x in enumerate(points):
            block = np.take(directions, k + np.arange(width), axis=0, mode="wrap")
            for _ in range(powers):
                Q = np.linalg.qr(block.T)[0]
                block = moves.pull(surface.slopes(x, moves.push(Q.T), rows))
            finite = np.all(np.isfinite(block))
            stiffness.append(np.linalg.norm(block, 2) if finite else np.inf)
        largest = np.sort(stiffness)[int(_QUANTILE * len(stiffness))]
        return replace(fit, stiffness=float(np.clip(largest, 1.0, _STIFFEST)))

    def _problem(self, jump: float) -> Problem:
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
        return Problem(sentence, "density jumps")


class Moves:
    """The map of draws ``(m, n)`` to distances from the center of a normal, on the host but for an
    :class:`Arrow`, and what pulls gradients back to the draws."""

    def __init__(self, normal: Normal, bend: Bend | None = None) -> None:
        self.factor, self.bend = normal.on_host, bend
        self.on_host, self.dtype = isinstance(self.factor, Plain), normal.center.dtype

    def push(self, xi: np.ndarray) -> np.ndarray:
        """A times each."""
        if self.on_host:
            return self.factor.push(xi.T).T if self.factor.is_matrix else self.factor.push(xi)
        return np.asarray(push_each(self.factor, xi.astype(self.dtype)), float)

    def pull(self, g: np.ndarray) -> np.ndarray:
        """The transpose of A times each."""
        if self.on_host:
            return self.factor.pull(g.T).T if self.factor.is_matrix else self.factor.pull(g)
        return np.asarray(_pull_each(self.factor, g.astype(self.dtype)), float)

    def bent(self, xi: np.ndarray) -> tuple[np.ndarray, Any]:
        """The distances, and the logarithms of the bend's determinant."""
        if self.bend is None:
            return self.push(xi), 0.0
        both = _bend_each(self.factor, self.bend, xi.astype(self.dtype))
        away, log_det = (np.asarray(x, float) for x in both)
        return away, log_det

    def pull_bent(self, xi: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Gradients of the potential at the draws as gradients along them, less the gradient of the
        determinant."""
        if self.bend is None:
            return self.pull(g)
        inputs = (x.astype(self.dtype) for x in (xi, g))
        return np.asarray(_pull_bent_each(self.factor, self.bend, *inputs), float)


@jax.jit
def push_each(factor: Arrow, xi: Array) -> Array:
    """A times each of ``(m, n)``."""
    return jax.vmap(factor.push)(xi)


@jax.jit
def _pull_each(factor: Arrow, g: Array) -> Array:
    return jax.vmap(factor.pull)(g)


@jax.jit
def _bend_each(factor: Arrow, bend: Bend, xi: Array) -> tuple[Array, Array]:
    return bend(push_each(factor, xi))


@jax.jit
def _pull_bent_each(factor: Arrow, bend: Bend, xi: Array, g: Array) -> Array:
    _, pull = jax.vjp(partial(_bend_each, factor, bend), xi)
    return pull((g, -jnp.ones(len(g), g.dtype)))[0]


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


def fit_by_curvature(potential: Potential, measure: NormalMeasure, mode: Mode) -> Mode:
    r"""
    The normal of greatest ELBO by steps of Newton from a mode with a matrix for its factor.

    At it :math:`E \nabla U(z) = 0` and :math:`(A A^\top)^{-1} = E \nabla^2 U(z)`. A step takes the
    first from 32 opposite pairs of draws :math:`z = c + A \xi`, and the second from one to four
    pairs with :math:`\xi_i = \pm 1`, and from the steps before but the first, which lie nearer to
    the normal the later they are: step k counts k - 1 times. Steps end where the ELBO hardly rises.
    """
    surface, rng, best, spent = surface_of(potential), np.random.default_rng(2), mode, 0
    n, rows = surface.size, surface.few_rows
    center, unit = (np.asarray(x, float) for x in (mode.center, mode.factor))
    root, pairs = unit, int(np.clip(_OF_PAIRS / surface.of_curvature, 1, _MOST_PAIRS))
    xi, curvature = rng.normal(size=(POINTS // 2, n)), np.zeros((2, n, n))
    xi /= np.mean(xi**2, axis=0) ** 0.5
    for k in range(1, _NEWTON_STEPS + 1):
        signs = rng.choice([-1.0, 1.0], (pairs, n))
        points, few = (center + np.concatenate([x, -x]) @ root.T for x in (xi, signs))
        shift = surface.sums(center)[1] - surface.at(center[None], rows)[1][0]
        grad = np.mean(surface.at(points, rows)[1], axis=0) + shift
        curvature += min(1.0, 2 / k) * (curvatures(surface, few, unit) - curvature)
        step, root, *_ = newton_step(curvature, grad, unit)
        center, spent = center - step, spent + surface.all_rows
        both = jax.device_put([x.astype(surface.dtype) for x in (center, root)])
        new = measure(Mode(*both, variational=True), shape=False)
        gain = new.elbo - best.elbo
        best = new if gain > 0 else best
        if not gain > _WORTH_A_STEP:
            break
    return replace(best, row_gradients=spent)


def fit_normal(
    rng_key: Array,
    potential: Potential,
    measure: NormalMeasure,
    starts: Iterable[tuple[Any, Any]],
) -> Mode:
    r"""
    The normal of greatest ELBO from the best of several normals, each a center and a factor.

    Adam on minibatches moves :math:`q = N(c + A m, A L L^\top A^\top)` from m = 0, in stages of 500
    steps, after each of which c and A are taken from q. The gradient is called *sticking the
    landing*: its noise vanishes where q is the posterior. Each start makes one stage; the start of
    greatest ELBO goes on until its slope is small, in at most fifteen more.

    References: Roeder, Wu and Duvenaud, *Sticking the landing* (NeurIPS 2017), eq. 8.
    """
    import optax  # not imported by NumPyro itself

    surface = surface_of(potential)
    n, dense, dtype = surface.size, surface.dense, surface.dtype
    adam = optax.scale_by_adam()
    falling = np.geomspace(1, 1 / 20, _STAGE_STEPS)

    def factor(log_scale: Array, below: Array | None) -> Array:
        scale = jnp.exp(log_scale)
        return scale if below is None else scale[:, None] * (jnp.tril(below, -1) + jnp.eye(n))

    def gradient(z: Array, key: Array) -> Array:
        return surface.potential.value_and_grad_flat(z, draw_batch(key, potential))[1]

    def step(normal: Normal, carry: Any, at: tuple[Array, Array]) -> tuple[Any, None]:
        (loc, shape), state = carry
        rate, key = at
        L, pull = jax.vjp(factor, *shape)
        xi = random.normal(key, (_PARTICLES, n), loc.dtype)
        score = solve_triangular(L, xi.T, trans=1, lower=True).T if dense else xi / L
        z = jax.vmap(normal.to_z)(loc + (xi @ L.T if dense else xi * L))
        keys = random.split(random.fold_in(key, 1), _PARTICLES)  # of nothing, without a minibatch
        g = jax.vmap(gradient)(z, keys)
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

    # Most fits take no more than half of the stages.
    numbers = (surface.cost * _PARTICLES + _OF_ADAM * n**2 * dense) * (_STAGES // 2) * _STAGE_STEPS
    options = quick_options(numbers, WORTH_OPTIMISING)
    run = jit_on_data(stage, options)
    spent = _PARTICLES * _STAGE_STEPS * batch_rows(potential)

    def after_stage(k: int, fit: Mode, rate: float) -> tuple[Mode, bool]:
        """The normal after a stage, and whether it may be on the way still."""
        rates = np.asarray(rate, dtype)
        center, root, way = run(rng_key, np.uint32(k), fit.center, fit.factor, rates)
        end = measure(Mode(center, root, row_gradients=spent, variational=True), shape=False)
        return end, float(way) > rate * falling.sum() / 2

    begun = []
    for center, root in starts:
        root = np.diag(root) if dense and np.ndim(root) == 1 else root
        center, root = jax.device_put([np.asarray(x, dtype) for x in (center, root)])
        begun.append(after_stage(0, Mode(center, root), _RATE))
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
