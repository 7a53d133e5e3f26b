"""The normal of greatest ELBO of a hierarchy with many groups, with the structure of its rows."""

from functools import cache
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from numpyro_ext._model.arrow import Arrow, ArrowPrecision
from numpyro_ext._model.bend import Bend
from numpyro_ext._model.descent import HALVINGS, halved
from numpyro_ext._model.modes import Mode
from numpyro_ext._model.normal_fit import push_each
from numpyro_ext._model.operations import quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import elementwise
from numpyro_ext._model.row_curvature import RowCurvature
from numpyro_ext._model.surface import WORTH_OPTIMISING, batch_rows, surface_of

_NEWTON_STEPS, _STEPS = 20, 40
_OF_PRIOR, _MOST_PAIRS, _ROWS_OF_DRAWS = 16, 8, 10**6
"""Pairs of opposite draws of the prior's terms; of the rows' at most so many, and so many rows."""
_SHIFT, _NEAR, _FARTHEST, _MEMORY = 1.0, 0.03, 2.0, 5
"""What scales are moved by for another start; standard deviations that the last step moves a
coordinate, and that a mixed one may; and the number of points before the last that it is mixed
from."""
_NATS, _LEAST = 1.0, 0.05
"""What a step may raise the loss, which the draws know so well, and the least part of a step."""
_PINNED, _MOST_BEYOND = 1e30, 5.0
_AT, _SKEWS = np.arange(-3.0, 4.0), np.linspace(-1.2, 1.2, 121)
_AT_END, _STRETCH, _MOST_SDS = 0.01, 1.4, 20.0
"""The density of a scale, of its largest, beyond which its points go out, and how far."""


def fit_structured(potential: Potential, x: np.ndarray) -> Mode | None:
    r"""
    The normal of greatest ELBO with an :class:`Arrow` for its factor; None where the terms of the
    model do not have that structure.

    At it, with the draws :math:`z = c + A \xi` of the normal itself,

    .. math:: E \nabla U(z) = 0, \qquad (A A^\top)^{-1} = E \nabla^2 U(z) .

    Steps :math:`c \leftarrow c - (E \nabla^2 U)^{-1} E \nabla U`, each halved until the mean
    potential of the draws falls, and :math:`(A A^\top)^{-1} \leftarrow E \nabla^2 U` solve both;
    for the scale s of J effects u they contain :math:`J s^2 = E \sum u_j^2`, with the variances
    that a joint mode leaves out. The draws are the same in each step: opposite pairs with second
    moments of 1, more of them for the terms of the prior, which cost little. Before, Newton steps
    with all scales held find where effects and slopes are. Where steps on few rows do not end, it
    begins again from smaller and from larger scales, and keeps the greatest ELBO.
    """
    surface = surface_of(potential)
    rows = surface.all_rows
    numbers = 100 * surface.cost * rows / batch_rows(potential)
    options = quick_options(numbers, WORTH_OPTIMISING)
    curvature = RowCurvature(potential, x, options)
    if not curvature.arrow:
        return None
    held = np.zeros(potential.info.size, bool)
    for name, latent in potential.info.latents.items():
        if elementwise(latent.support) is not constraints.real:
            held[potential.info.slices[name]] = True
    held[np.setdiff1d(np.arange(len(held)), curvature.singles)] = False
    fit, ended = _fit_from(x, curvature, potential, rows, held)
    if fit is None or ended or not curvature.few_rows:
        return fit
    again = (x + shift * held for shift in (-_SHIFT, _SHIFT))
    fits = (_fit_from(start, curvature, potential, rows, held)[0] for start in again)
    return max([fit, *filter(None, fits)], key=lambda x: x.log_evidence)


def _fit_from(
    x: np.ndarray, curvature: RowCurvature, potential: Potential, rows: int, held: np.ndarray
) -> tuple[Mode | None, bool]:
    """The normal that the steps from x find, with the scales ``held`` at first; None where the
    curvature is not finite. And whether the steps have ended."""
    n, rng = potential.info.size, np.random.default_rng(1)
    pairs = int(np.clip(_ROWS_OF_DRAWS // (2 * rows), 1, _MOST_PAIRS))
    xis = _draws(rng, pairs, n), _draws(rng, _OF_PRIOR, n)
    passes = 0

    def around(x: np.ndarray, factor: Arrow | None) -> tuple[np.ndarray, np.ndarray]:
        if factor is None:
            return x[None], x[None]
        rows, prior = (x + np.asarray(push_each(factor, xi.astype(curvature.dtype))) for xi in xis)
        return rows, prior

    def bent(bend: Bend, move: np.ndarray) -> np.ndarray:
        moved = bend.astype(curvature.dtype)(jnp.asarray(move, curvature.dtype))[0]
        return np.asarray(moved, float)

    def lowered(
        x: np.ndarray, step: np.ndarray, value: float, factor: Arrow | None, frame: Any = None
    ) -> Any:
        digits = float(jnp.finfo(curvature.dtype).eps) * abs(value) * 4

        def at(x: np.ndarray) -> tuple[float, np.ndarray]:
            return curvature.value_and_grad(around(x, factor), frame)

        def is_lower(_: float, after: float, grad: np.ndarray) -> bool:
            fine = np.isfinite(after) and np.all(np.isfinite(grad))
            return bool(fine and after <= value + digits)

        end = halved(x, step, at, is_lower)
        return end or (x, value, None, HALVINGS)

    value, grad = curvature.value_and_grad(around(x, None))
    for _ in range(_NEWTON_STEPS):
        precision = curvature.precision(around(x, None))
        if not precision.is_finite:
            return None, True
        factor, negative = _pinned(precision, held).factor()
        free = np.where(held, 0, grad)
        step = np.where(held, 0, np.asarray(_solve(factor, free.astype(curvature.dtype)), float))
        decrement = math.sqrt(max(float(step @ free), 0.0))
        x, value, grad, k = lowered(x, step, value, None)
        passes += 4 + k
        if grad is None or (decrement < 1 and negative == 0):
            break
    of_rows = curvature.precision(around(x, None), [0])
    precision = of_rows.plus(curvature.precision(around(x, None), [1]))
    if not precision.is_finite:
        return None, True
    factor, _ = precision.factor()
    best, before, size = (math.inf, x, factor, curvature.straight), [], math.inf
    lowest, share, move = math.inf, 1.0, np.zeros(n)
    last = x, factor, precision, of_rows, curvature.straight
    for _ in range(_STEPS):
        bend = curvature.bend(x, of_rows)
        frame = x, bend
        # Where curvature knows nothing of a direction draws may be too far for the density. A log
        # density that is normal is n / 2 nats lower at its draws than at its center.
        center = math.inf if before else curvature.value_and_grad(around(x, None))[0]
        for _ in range(HALVINGS):
            value, grad = curvature.value_and_grad(around(x, factor), frame)
            if value < center + _MOST_BEYOND * n and np.all(np.isfinite(grad)):
                break
            factor = factor.times(0.5)
        # Near the end the covariance must follow its center, or steps are no function of it.
        for _ in range(2 if before else 1):
            of_rows, of_prior = (
                curvature.precision(around(x, factor), [kind], frame) for kind in range(2)
            )
            new = of_rows.plus(of_prior)
            if new.is_finite:
                precision = precision.towards(new, share)
                factor, _ = precision.factor()
        value, grad = curvature.value_and_grad(around(x, factor), frame)
        passes += 5 * len(xis[0])
        loss = value - float(jnp.sum(factor.log_diagonal()))
        digits = float(jnp.finfo(curvature.dtype).eps) * abs(value) * 4
        if not (loss < lowest + _NATS + digits and np.all(np.isfinite(grad))):
            share /= 2
            if share < _LEAST:
                break
            x, factor, precision, of_rows, bend = last
            x = x + bent(bend, share * move)
            continue
        lowest, last = min(lowest, loss), (x, factor, precision, of_rows, bend)
        step = -np.asarray(_solve(factor, grad.astype(curvature.dtype)), float)
        sds = np.asarray(factor.sds(), float)
        size = float(np.max(np.abs(step) / sds))
        # Of steps of which none ends the search, the one with the greatest ELBO.
        if size < _NEAR or loss < best[0]:
            best = loss, x, factor, bend
        if size < _NEAR:
            break
        if size < 1:
            before = [*before[-_MEMORY:], (x, step)]
            move = _mixed(before, sds, curvature.singles)
            if move @ grad >= 0:  # where steps grow on their way, mixing turns back
                before = before[-1:]
                move = _mixed(before, sds, curvature.singles)
        else:
            new, _, _, k = lowered(x, -step, value, factor, frame)
            move, before, passes = new - x, [], passes + k * len(xis[0])
        share = min(1.0, 2 * share)
        x = x + bent(bend, share * move)
    loss, x, factor, bend = best
    bending = np.asarray(bend.of)[np.any(np.asarray(bend.of_parts[0]) != 0, axis=0)]
    scales = np.intersect1d(np.union1d(np.flatnonzero(held), bending), curvature.singles)
    sides = _sides(curvature, x, factor, bend, xis, scales)
    passes += len(scales) * len(_AT) * len(xis[0])
    dtype = curvature.dtype
    center = jnp.asarray(x, dtype)
    fit = Mode(
        center,
        factor.astype(dtype),
        bend=bend.astype(dtype),
        sides=jnp.asarray(sides, dtype),
        row_gradients=passes * rows,
        log_evidence=-loss,
        variational=True,
        problems=curvature.problems(),
    )
    return fit, size < _NEAR


def _sides(
    curvature: RowCurvature,
    x: np.ndarray,
    factor: Arrow,
    bend: Bend,
    xis: tuple[np.ndarray, np.ndarray],
    scales: np.ndarray,
) -> np.ndarray:
    r"""Location, scale and skew ``(n, 3)`` of each coordinate :math:`\xi_i`: 0, 1 and 0 but for the
    scales. A scale has the moments of the density :math:`\exp(-E[U \mid \xi_i])`, by its slopes at
    a few points, out to where there is little of it: the density of greatest ELBO if all other
    coordinates stay as they are."""
    from scipy.interpolate import PchipInterpolator  # which imports much

    sides = np.tile([0.0, 1.0, 0.0], (curvature.size, 1))
    for i in scales:
        unit = np.eye(1, curvature.size, i)[0]
        column = np.asarray(factor.push(jnp.asarray(unit, curvature.dtype)), float)

        def slope(at: float, unit: np.ndarray = unit, column: np.ndarray = column) -> float:
            given = (np.where(unit > 0, at, xi).astype(curvature.dtype) for xi in xis)
            rows, prior = (x + np.asarray(push_each(factor, xi)) for xi in given)
            return float(column @ curvature.value_and_grad((rows, prior), (x, bend))[1])

        slopes, beyond, t, p = {at: slope(at) for at in _AT}, [0.0], _AT, np.ones(len(_AT))
        while beyond and np.all(np.isfinite(list(slopes.values()))):
            at = np.sort(list(slopes))
            t = np.linspace(at[0], at[-1], 801)
            energy = PchipInterpolator(at, [slopes[y] for y in at]).antiderivative()(t)
            p = np.exp(energy.min() - energy)
            beyond = [y for y, end in ((at[0], p[0]), (at[-1], p[-1])) if end > _AT_END]
            if np.max(np.abs(beyond), initial=0) >= _MOST_SDS:
                break
            slopes |= {_STRETCH * y: slope(_STRETCH * y) for y in beyond}
        if not beyond:
            p /= p.sum()
            mean = p @ t
            sd = (p @ (t - mean) ** 2) ** 0.5
            means, sds, thirds = _skewed()
            a = np.interp(p @ (t - mean) ** 3 / sd**3, thirds, _SKEWS)
            scale = sd / np.interp(a, _SKEWS, sds)
            sides[i] = mean - scale * np.interp(a, _SKEWS, means), scale, a
    return sides


@cache
def _skewed() -> np.ndarray:
    """Mean, standard deviation and skewness ``(3, 121)`` of a standard normal number after
    :class:`SkewTransform` for each of ``_SKEWS``."""
    e, w = np.polynomial.hermite_e.hermegauss(40)
    y = e + np.tanh(_SKEWS)[:, None] * (np.sqrt(1 + e**2) - 1)
    w = w / w.sum()
    mean = y @ w
    sd = ((y - mean[:, None]) ** 2 @ w) ** 0.5
    return np.array([mean, sd, (y - mean[:, None]) ** 3 @ w / sd**3])


def _mixed(before: list[Any], sds: np.ndarray, singles: np.ndarray) -> np.ndarray:
    """A step of Anderson's method from the last points and their steps ``(n,)``, in the sense of
    least squares of what single numbers move: a scale of effects would go to its end by a factor in
    each step, which is near 1 where rows say little of each effect."""
    x, steps = (np.array(part) for part in zip(*before, strict=True))
    step = steps[-1]
    if len(before) > 1 and len(singles):
        moved, changed = np.diff(x, axis=0), np.diff(steps, axis=0)
        units = 1 / sds[singles]
        shares = np.linalg.lstsq((changed[:, singles] * units).T, step[singles] * units, 1e-6)[0]
        step = step - shares @ (moved + changed)
    return step * min(1.0, _FARTHEST / float(np.max(np.abs(step) / sds)))


@jax.jit
def _solve(factor: Arrow, grad: jax.Array) -> jax.Array:
    """The step of Newton, A A^T g."""
    return factor.push(factor.pull(grad))


def _draws(rng: np.random.Generator, pairs: int, n: int) -> np.ndarray:
    """``(2 pairs, n)``, opposite pairs with the second moment 1 in each coordinate."""
    xi = rng.normal(size=(pairs, n)) if pairs > 4 else rng.choice([-1.0, 1.0], (pairs, n))
    xi /= np.sqrt(np.mean(xi**2, axis=0))
    return np.concatenate([xi, -xi])


def _pinned(precision: ArrowPrecision, held: np.ndarray) -> ArrowPrecision:
    """The precision of a normal that does not move where ``held``, all of it in the core."""
    at = held[precision.core]
    between = np.where(at[:, None] | at, 0, precision.between)
    between[at, at] = _PINNED
    across = np.where(at, 0, precision.across)
    return ArrowPrecision(precision.core, precision.leaves, between, across, precision.within)
