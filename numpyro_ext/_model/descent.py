"""From a point to a mode: Adam on minibatches, then damped Newton steps on all rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.modes import Mode
from numpyro_ext._model.operations import jit_on_data
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.surface import Surface, batch_rows, draw_batch, some_rows, surface_of

_ADAM_STEPS, _ADAM_PIECE = 2000, 100
_MOST_OF_ADAM = 5e10
"""Numbers that Adam may compute; a search that takes more begins with Newton steps."""
_NEWTON_STEPS, MOST_PASSES = 60, 300
"""The budget of one search: Newton steps, and gradients of all rows."""
_STEPS_OF_A_STAGE = 10
_CG_STEPS, _CG_TOLERANCE = 300, 1e-2
HALVINGS, _TWICE_AS_NEAR_IN = 12, 6
"""Of a step that raises the potential; and the steps in which a search comes twice as near."""
_NEAR, _SAME_END = 0.05, 0.5
"""The decrement at which a search ends, and the standard deviations between ends at one mode."""
_LEAST_CURVATURE, _TIMES_AT_AN_END = 1e-5, 3
"""Of a matrix with a unit diagonal; and times that a flatter one is computed in the coordinates of
the factor before, in which digits show it."""


class _Point(NamedTuple):
    """Where a descent is, with what has been computed there; all in double precision."""

    x: np.ndarray
    value: float
    grad: np.ndarray
    factor: np.ndarray
    decrement: float = np.inf
    num_negative: int = 0
    passes: int = 1


def make_search(rng_key: Array, potential: Potential) -> Callable[[Any], Iterator[Mode]]:
    """``search(starts)``, which goes from each of the points ``(n,)`` to a mode: by Adam on
    minibatch gradients, then by damped Newton steps, of many rows on more and more of them."""
    surface = surface_of(potential)
    descent = _Descent(surface)
    by_adam = None
    if _ADAM_STEPS * surface.cost < _MOST_OF_ADAM:
        by_adam = jit_on_data(partial(_adam, surface.potential), surface.options)
    size = max((size for size, _ in potential.plates.values()), default=0)
    stages = [10**k for k in range(4, 12) if 10 ** (k + 1) <= size]

    def search(starts: Any) -> Iterator[Mode]:
        before: list[tuple[Any, Mode]] = []
        for which, start in enumerate(np.asarray(x, surface.dtype) for x in starts):
            x, spent = start, 0
            if by_adam is not None:
                x = np.asarray(by_adam(start, rng_key, np.uint32(which)))
                spent = _ADAM_STEPS * batch_rows(potential)
            # Above 512 numbers the diagonal of the search before does for the steps of this one.
            is_known = bool(before) and not surface.dense
            factor = np.asarray(before[-1][1].conditional_sds, float) if is_known else descent.unit
            for rows in stages:
                enough = _NEAR * math.sqrt(size / rows)
                some = descent(x, factor, enough, rows, _STEPS_OF_A_STAGE)
                spent += some.passes * rows
                if not np.isfinite(some.decrement):
                    break
                x, factor = some.x, some.factor
            # On some of the rows, and so on all of them: their modes are as far as the root tells.
            apart = 0.5 * math.sqrt(size / stages[-1]) if stages else 0.0
            same = [end for y, end in before if replace(end, center=y).distance(x) < apart]
            if same:
                yield replace(same[0], row_gradients=spent)
                continue
            point = descent(x, factor, _NEAR)
            spent += point.passes * surface.all_rows
            if not np.isfinite(point.decrement):
                point = descent(start, descent.unit, _NEAR)
                spent += point.passes * surface.all_rows
            if not surface.dense and np.isfinite(point.decrement):
                point = descent.with_diagonal(point)
            end = _end_at(surface, point, spent)
            if surface.ends_dense and np.isfinite(end.decrement):
                here = (x for _, x in before if x.is_matrix and x.distance(end.center) < _SAME_END)
                known = next(here, None)
                end = replace(known, row_gradients=spent) if known else descent.by_matrix(end)
            if end.at_mode:
                before.append((x, end))
            yield end

    return search


def _end_at(surface: Surface, point: _Point, spent: int) -> Mode:
    """The normal at the end of a search that has computed so many gradients of rows."""
    both = point.x, point.factor
    center, factor = jax.device_put([np.asarray(y, surface.dtype) for y in both])
    end = Mode(center, factor, None, point.decrement, point.num_negative, spent)
    return replace(end, log_evidence=end.laplace(point.value))


class _Descent:
    r"""Damped Newton steps from a point, and the factor A with :math:`A A^\top = H^{-1}`, from the
    curvature H of at most 10,000 rows with its negative directions turned positive; for many
    numbers its diagonal."""

    def __init__(self, surface: Surface) -> None:
        self.surface, n = surface, surface.size
        self.unit = 0.1 * (np.eye(n) if surface.dense else np.ones(n))
        self.solve = jit_on_data(partial(_conjugate_step, surface), surface.options)

    @np.errstate(divide="ignore", invalid="ignore", over="ignore")  # what is not finite ends it
    def __call__(
        self,
        x: np.ndarray,
        factor: np.ndarray,
        enough: float,
        rows: int | None = None,
        most: int = _NEWTON_STEPS,
    ) -> _Point:
        """Steps on all rows, or on some, until the decrement is small enough."""
        x, surface = np.asarray(x), self.surface
        point, decrements, times = _Point(x, *surface.sums(x, rows), factor), [], 0
        for k in range(most):
            step, factor, num_negative, is_least = self.newton(point)
            if k == 0 and point.factor is self.unit and not surface.slopes.exact:
                # Differences are over a part of a standard deviation, which was not known yet.
                again = point._replace(factor=factor)
                step, factor, num_negative, is_least = self.newton(again)
            slope = float(point.grad @ step)
            decrement = math.sqrt(max(slope, 0)) if np.isfinite(slope) else np.nan
            point = point._replace(factor=factor, decrement=decrement, num_negative=num_negative)
            decrements.append(decrement)
            spent = point.passes >= MOST_PASSES or (factor.ndim == 1 and _is_slow(decrements))
            if is_least and rows is None and decrement < enough and times < _TIMES_AT_AN_END:
                times += 1  # as long a direction of the factor as it may be, and so perhaps longer
                continue
            if not decrement >= enough or spent:
                break
            new = self._halved(point, step, rows)
            if new.x is point.x:
                break
            point = new
        return point

    def newton(self, point: _Point) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """The step, the factor, the number of negative directions, and whether a curvature was as
        small as digits show."""
        surface, x = self.surface, point.x
        if point.factor.ndim == 1:
            if point.factor is self.unit:
                point = self.with_diagonal(point)
            inputs = (y.astype(surface.dtype) for y in (x, point.grad, point.factor**-2))
            step = np.asarray(self.solve(*inputs), float)
            return step, point.factor, point.num_negative, False
        root = point.factor
        return newton_step(curvatures(surface, x[None], root), point.grad, root)

    def by_matrix(self, end: Mode) -> Mode:
        """The end of a search by a diagonal after steps with the whole curvature, of which one is
        enough at a mode; the same where they do not find one."""
        surface = self.surface
        x, diagonal = np.asarray(end.center), np.asarray(end.factor, float)
        point = self(x, np.diag(diagonal), _NEAR, most=_STEPS_OF_A_STAGE)
        new = _end_at(surface, point, end.row_gradients + point.passes * surface.all_rows)
        return new if new.at_mode else end

    def with_diagonal(self, point: _Point) -> _Point:
        """The point with the factor of the diagonal there."""
        surface, n = self.surface, self.surface.size
        both = np.zeros((2, n))
        for k in range(0, n, surface.slopes.most):
            places = np.arange(k, min(k + surface.slopes.most, n))
            units = np.zeros((len(places), n))
            units[np.arange(len(places)), places] = point.factor[places]
            products = (
                surface.slopes(point.x, units, surface.few_rows),
                surface.slopes_of_prior(point.x, units, surface.no_rows),
            )
            both[:, places] = [np.sum(units * x, axis=1) for x in products]
        w, prior = both / point.factor**2
        scales = np.maximum(np.abs(w), np.abs(prior))
        return point._replace(factor=1 / np.sqrt(scales), num_negative=int(np.sum(w < 0)))

    def _halved(self, point: _Point, step: np.ndarray, rows: int | None) -> _Point:
        """The point after a step, or after the half, the quarter, ... of it that lowers the
        potential; the same point where none does."""
        digits = float(jnp.finfo(self.surface.dtype).eps) * abs(point.value)

        def is_lower(part: float, value: float, grad: np.ndarray) -> bool:
            change = value - point.value
            if abs(change) <= digits:  # its digits do not show it, but the trapezoidal rule does
                change = -0.5 * part * float(point.grad @ step + grad @ step)
            return change <= 0

        end = halved(point.x, step, lambda x: self.surface.sums(x, rows), is_lower)
        if end is None:
            return point
        x, value, grad, k = end
        return point._replace(x=x, value=value, grad=grad, passes=point.passes + k + 1)


def curvatures(surface: Surface, points: np.ndarray, root: np.ndarray) -> np.ndarray:
    """The mean curvature at points ``(m, n)``, on at most 10,000 rows, and the prior's, ``(2, n,
    n)``; both in the coordinates of a root."""
    # In the coordinates of the factor before, because in float32 the curvature of columns as
    # they come would lose its least eigenvalues beside the largest.
    both = (surface.slopes, surface.few_rows), (surface.slopes_of_prior, surface.no_rows)
    means = [np.mean([slopes(x, root.T, rows) for x in points], 0) for slopes, rows in both]
    return np.stack(means) @ root


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def newton_step(
    curvature: np.ndarray, grad: np.ndarray, root: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int, bool]:
    r"""The step :math:`H^{-1} g`, the lower triangular A with :math:`A A^\top = H^{-1}`, the number
    of negative directions of H, which are turned positive, and whether others are as flat as digits
    show, where H is steeper than it is; of :func:`curvatures`."""
    H, prior = curvature
    unit = 1 / np.sqrt(np.maximum(np.abs(np.diagonal(H)), np.abs(np.diagonal(prior))))
    of_unit_diagonal = unit[:, None] * (H + H.T) / 2 * unit
    if not np.all(np.isfinite(of_unit_diagonal)):
        return np.full(len(grad), np.nan), root, 0, False
    w, Q = np.linalg.eigh(of_unit_diagonal)
    least = np.sum(Q * ((unit[:, None] * prior * unit) @ Q), axis=0)
    scales = np.maximum(np.abs(w), np.maximum(least, _LEAST_CURVATURE))
    step = root @ (unit * (Q @ ((Q.T @ (unit * (grad @ root))) / scales)))
    # The factor is lower triangular: the R of a QR of a root.
    R = np.linalg.qr((unit[:, None] * Q / np.sqrt(scales)).T, mode="r")
    is_least = bool(np.any(np.maximum(np.abs(w), least) < _LEAST_CURVATURE))
    return step, root @ (R.T * np.sign(np.diagonal(R))), int(np.sum(w < 0)), is_least


def halved(
    x: np.ndarray,
    step: np.ndarray,
    at: Callable[[np.ndarray], tuple[float, np.ndarray]],
    is_lower: Callable[[float, float, np.ndarray], bool],
) -> tuple[np.ndarray, float, np.ndarray, int] | None:
    """The point after a step, or after the half, the quarter, ... of it that lowers a potential,
    with value and gradient ``at`` it and the number of halvings; None where none does.

    :param is_lower: ``is_lower(part, value, grad)`` after this part of the step.
    """
    for k in range(HALVINGS + 1):
        new = x - (0.5**k * step).astype(x.dtype)
        value, grad = at(new)
        if is_lower(0.5**k, value, grad):
            return new, value, grad, k
    return None


def _conjugate_step(surface: Surface, x: Array, g: Array, scales: Array) -> Array:
    """H^{-1} g for some rows by conjugate gradients, or by the diagonal if that is not downhill."""
    potential, diagonal = surface.potential, g / scales

    def length(v: Array) -> Array:
        return jnp.sqrt(jnp.vdot(v, scales * v))

    # The diagonal of the curvature was taken before.
    options: Any = {"forward": surface.slopes.exact, "length": length}
    _, product = potential.linearized_grad(x, some_rows(potential), **options)
    step, _ = jax.scipy.sparse.linalg.cg(
        product, g, diagonal, tol=_CG_TOLERANCE, maxiter=_CG_STEPS, M=lambda v: v / scales
    )
    downhill = (jnp.vdot(g, step) > 0) & (jnp.vdot(step, product(step)) > 0)
    return jnp.where(downhill, step, diagonal)


def _adam(potential: Potential, x: Array, rng_key: Array, which: Array) -> Array:
    """Steps of Adam, which begins anew at the last point where the gradient was finite."""
    import optax  # not imported by NumPyro itself

    rng_key = random.fold_in(rng_key, which)
    rate = optax.exponential_decay(0.05, _ADAM_STEPS, 0.001 / 0.05)
    adam = optax.scale_by_adam()

    def step(carry: tuple[Array, Any], at: tuple[Array, Any, Any]) -> tuple[Any, None]:
        x, (state, last) = carry
        i, idx, rows = at
        _, g = potential.with_rows(idx, rows).value_and_grad_flat(x, idx)
        fine = jnp.all(jnp.isfinite(g * g))  # Adam takes the square
        update, new = adam.update(jnp.where(fine, g, 0), state)
        step = jnp.asarray(rate(i), x.dtype) * jnp.asarray(update)
        fresh = adam.init(x), last
        moved = jax.tree.map(partial(jnp.where, fine), (x - step, (new, x)), (last, fresh))
        return moved, None

    def piece(carry: Any, k: Array) -> tuple[Any, None]:
        keys = random.split(random.fold_in(rng_key, k), _ADAM_PIECE)
        idx = jax.vmap(partial(draw_batch, potential=potential))(keys)
        batches = k * _ADAM_PIECE + jnp.arange(_ADAM_PIECE), idx, potential.read_ahead(idx)
        return lax.scan(step, carry, batches)[0], None

    start = x, (adam.init(x), x)
    (x, _), _ = lax.scan(piece, start, jnp.arange(_ADAM_STEPS // _ADAM_PIECE))
    return x


def _is_slow(decrements: list[float]) -> bool:
    """True if six steps have not come twice as near, as of sixty that go nowhere."""
    before = decrements[:-_TWICE_AS_NEAR_IN]
    return bool(before) and decrements[-1] > before[-1] / 2
