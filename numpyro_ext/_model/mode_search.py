"""The search for a mode of a posterior from a given point, and the curvature there."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
import math
from typing import Any, Self

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from scipy.linalg import solve_triangular

from numpyro_ext._model.minibatch import draw_indices
from numpyro_ext._model.operations import (
    compile_ahead,
    count_operations,
    progress_bar,
    quick_options,
    run_once,
)
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.whitening import Whitening

__all__ = [
    "DENSE_UP_TO",
    "MOST_PASSES",
    "WORTH_OPTIMISING",
    "Mode",
    "Problem",
    "advice",
    "batch_rows",
    "draw_batch",
    "mode_search",
    "of_kind",
    "some_rows",
    "starts_of",
]

DENSE_UP_TO = 512
"""Latent dimensions up to which the curvature is a matrix."""
_ADAM_STEPS, _ADAM_PIECES, _SEARCHES = 2000, 20, 4
_NEWTON_STEPS, MOST_PASSES = 60, 300
"""The budget of one search: Newton steps, and gradients of all rows."""
_HALVINGS, _TWICE_AS_NEAR_IN = 12, 6
_CURVATURE_ROWS = 10_000
_ROOT_2_PI = math.sqrt(2 * math.pi)
_NEAR, _AT_MODE = 0.05, 0.3
"""Decrements at which a search ends, and up to which its end is a mode."""
WORTH_OPTIMISING = 2e8
"""Numbers that a search computes, above which an optimised program pays for its compilation."""
_LEAST_CURVATURE = 1e-5  # of a matrix with a unit diagonal


class Problem(str):
    """A sentence on what did not hold, with its kind: ``"no mode"``, ``"far from normal"``,
    ``"several modes"`` or ``"density jumps"``."""

    kind: str

    def __new__(cls, sentence: str, kind: str = "") -> Self:
        self = super().__new__(cls, sentence)
        self.kind = kind
        return self


def of_kind(problems: Iterable[Any], kind: str) -> list[Problem]:
    """Those of a kind; sentences alone are of none."""
    return [one for one in problems if isinstance(one, Problem) and one.kind == kind]


@dataclass(frozen=True)
class Mode:
    r"""
    A mode of a posterior with the normal approximation there, :math:`z = c + A \xi`,
    :math:`\xi \sim N(0, I)`; or the normal of greatest ELBO, where there is no mode or where the
    posterior is far from normal there.

    :param center: c, ``(n,)`` in the flat order.
    :param factor: A, lower triangular ``(n, n)``, or the ``(n,)`` diagonal for large n.
    :param float decrement: :math:`\sqrt{g^\top H^{-1} g}`, the distance of c from the mode in
        posterior standard deviations.
    :param int num_negative: number of negative directions of the curvature, which were turned
        positive.
    :param int row_gradients: gradients of single rows that were spent.
    :param float log_evidence: logarithm of the integral of :math:`e^{-U}` around the mode by
        Laplace's formula, :math:`-U(c) + \tfrac n2 \log 2\pi + \log |A|`.
    :param float share: that of the mass of all modes that were found.
    :param int copy_of: the place of a heavier mode that is the same after a permutation or changes
        of sign of coordinates; None where none was recognised.
    :param float departure: median of :math:`|A^\top \nabla U(z) - \xi|^2 / n` over draws, 0 for a
        normal posterior and 1 where the approximation is off by as much as the gradients are large.
    :param float stiffness: the largest curvature in whitened coordinates, in all but a twentieth of
        the draws, and at least 1, which is that of a normal posterior.
    :param bool out_of_budget: True if the search was stopped because it had no gradients left.
    :param bool variational: True for the normal of greatest ELBO.
    :param tuple problems: a :class:`Problem` for each thing that did not hold.
    """

    center: Array
    factor: Array
    decrement: float = 0.0
    num_negative: int = 0
    row_gradients: int = 0
    log_evidence: float = np.nan
    departure: float = np.inf
    stiffness: float = 1.0
    out_of_budget: bool = False
    variational: bool = False
    share: float = 1.0
    copy_of: int | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def whitening(self) -> Whitening:
        """The coordinates :math:`\\xi`."""
        return Whitening(self.center, self.factor)

    @property
    def sds(self) -> np.ndarray:
        """The standard deviation of each coordinate, ``(n,)``."""
        root = np.asarray(self.factor, float)
        return np.abs(root) if root.ndim == 1 else np.linalg.norm(root, axis=1)

    @property
    def conditional_sds(self) -> np.ndarray:
        """The standard deviation of each coordinate given the others, ``(n,)``."""
        root = np.asarray(self.factor, float)
        return np.abs(root) if root.ndim == 1 else 1 / np.linalg.norm(np.linalg.inv(root), axis=0)

    @property
    def budget(self) -> str:
        """The end of a sentence on where the search ended."""
        spent = f", when its budget of {MOST_PASSES} gradients of all rows was spent"
        return spent if self.out_of_budget else ""

    @property
    def at_mode(self) -> bool:
        """True if the center is a mode."""
        return self.num_negative == 0 and self.decrement <= _AT_MODE

    def distance(self, x: Array) -> float:
        """The distance of a point from the center, in standard deviations."""
        there, center, root = (np.asarray(y, np.float64) for y in (x, self.center, self.factor))
        away = there - center
        xi = away / root if root.ndim == 1 else solve_triangular(root, away, lower=True)
        return float(np.linalg.norm(xi))


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


def _curvature(potential: Potential, idx: dict[str, Array], x: Array, root: Array) -> Array:
    """The Hessian on the rows ``idx``: ``(n, n)``, in coordinates of which ``root`` is the matrix;
    or the ``(n,)`` diagonal for large n."""
    dense = root.ndim == 2

    def grad(x: Array) -> Array:
        return potential.value_and_grad_flat(x, idx)[1]

    def along(direction: Array) -> Array:
        slope = jax.jvp(grad, (x,), (direction,))[1]
        return slope if dense else jnp.vdot(slope, direction)

    directions = root.T if dense else jnp.eye(len(x), dtype=x.dtype)
    slopes = lax.map(along, directions, batch_size=32)
    return jnp.matmul(slopes, root, precision="highest") if dense else slopes


def starts_of(rng_key: Array, first: Array, num: int = 4) -> np.ndarray:
    """Where searches begin, ``(num, n)``: at ``first``, at other points within 2, and opposite of
    each, because an exchange of two numbers is one of their difference's sign."""

    def draw(rng_key: Array, first: Array) -> Array:
        keys = [random.fold_in(rng_key, i) for i in range(1, (num + 1) // 2)]
        others = [random.uniform(key, first.shape, first.dtype, -2, 2) for key in keys]
        return jnp.stack([sign * x for x in (first, *others) for sign in (1, -1)])[:num]

    return np.asarray(run_once(draw, rng_key, first))


def mode_search(
    rng_key: Array, potential: Potential, *, adam: bool = True
) -> Callable[[Any], Iterator[Mode]]:
    """
    What finds the modes from given points, one after another, ``search(starts)``: by Adam on
    minibatch gradients, then damped Newton steps with the gradient of all rows, of which a search
    takes ``MOST_PASSES`` at most. The programs are compiled while the caller goes on.

    ``starts`` are ``(n,)`` each, where to begin; if they are near modes, ``adam`` can be left out.
    """
    import optax  # not imported by NumPyro itself

    all_rows = sum(size for size, _ in potential.plates.values()) or 1
    like = jax.ShapeDtypeStruct((potential.info.size,), jnp.result_type(float))
    unknown = np.asarray([np.inf, 0], like.dtype), np.zeros(like.shape, like.dtype)
    empty = jax.eval_shape(optax.scale_by_adam().init, like)
    moments = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), empty)
    options = _options(potential, like, _SEARCHES * all_rows / batch_rows(potential))
    zero = np.zeros((), np.int32)
    pieces = _ADAM_PIECES if adam else 0
    if adam:
        first = partial(_adam, potential), like, (moments, like), rng_key, zero, zero
        piece = compile_ahead(*first, options=options)
    shape = like.shape * (2 if potential.info.size <= DENSE_UP_TO else 1)
    unit: Any = np.asarray(_make_ones(jax.ShapeDtypeStruct(shape, like.dtype)))
    newton = compile_ahead(partial(_newton, potential), like, *unknown, unit, options=options)

    def search(starts: Any) -> Iterator[Mode]:
        for which, start in enumerate(jnp.asarray(x, like.dtype) for x in starts):
            with progress_bar(pieces + _NEWTON_STEPS, "finding the mode") as advance:
                x, spent, state = start, 0, (moments, start)
                for k in range(pieces):
                    x, state = piece(x, state, rng_key, np.int32(which), np.int32(k))
                    spent += _ADAM_STEPS // _ADAM_PIECES * batch_rows(potential)
                    advance()
                fallback = [start, state[1]]  # the latter, where Adam last had a finite gradient
                left, at, factor, decrements = MOST_PASSES, unknown, unit, []
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
            diagonal = np.diagonal(factor) if factor.ndim == 2 else np.asarray(factor)
            with np.errstate(divide="ignore"):
                volume = float(np.sum(np.log(_ROOT_2_PI * np.abs(diagonal))))
                log_evidence = volume - float(np.sum(np.asarray(at[0], np.float64)))
            fit = Mode(x, factor, float(decrement), int(num_negative), spent, log_evidence)
            yield replace(fit, out_of_budget=left <= 0)

    return search


def _options(potential: Potential, x: Any, passes: float) -> dict[str, int] | None:
    """Those of the compiler, by what a gradient costs on a minibatch and on as many as all rows."""
    one = count_operations(potential.value_and_grad_flat, x, potential.first_rows())
    return quick_options(one * (4 * _ADAM_STEPS + 30 * passes), WORTH_OPTIMISING)


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

    def step(carry: tuple[Array, Any], at: tuple[Array, Array]) -> tuple[Any, None]:
        x, (state, known) = carry
        i, key = at
        _, g = potential.value_and_grad_flat(x, draw_batch(key, potential))
        fine = jnp.all(jnp.isfinite(g * g))  # Adam takes the square
        update, new = adam.update(jnp.where(fine, g, 0), state)
        step = jnp.asarray(rate(i), x.dtype) * jnp.asarray(update)
        fresh = adam.init(x), known
        moved = jax.tree.map(partial(jnp.where, fine), (x - step, (new, x)), (known, fresh))
        return moved, None

    keys = random.split(random.fold_in(random.fold_in(rng_key, which), k), num)
    return lax.scan(step, (x, state), (k * num + jnp.arange(num), keys))[0]


def _newton(potential: Potential, x: Array, value: Array, g: Array, root: Array) -> tuple[Any, ...]:
    """One damped step: ``(x, (value, g), decrement, moved, factor, num_negative, passes)``.

    The value is a pair, whose sum it is: see :meth:`Potential.full_sums`. Where it is infinite, it
    and the gradient g are not known yet: the step then has the length 0 and finds them. So they are
    taken once at each point, and compiled once.

    :param root: the factor before, in whose coordinates the curvature is taken, because in float32
        that of columns as they come would lose its least eigenvalues beside the largest.
    """
    known = jnp.isfinite(value[0])

    def curvatures() -> tuple[Array, Array]:
        prior = _curvature(potential.prior(), potential.first_rows(), x, root)
        return _curvature(potential, some_rows(potential), x, root), prior

    shapes = jax.eval_shape(curvatures)
    H, prior = lax.cond(known, curvatures, lambda: jax.tree.map(_make_ones, shapes))
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
        step, factor = g / scales, 1 / jnp.sqrt(scales)
    decrement = jnp.sqrt(jnp.maximum(jnp.vdot(g, step), 0))
    near = known & (decrement < _NEAR)
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
        high, low = potential.full_sums(potential.info.unravel(x - 0.5**k * step))
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


def _make_ones(shape: Any) -> Array:
    one = jnp.eye(*shape.shape) if len(shape.shape) == 2 else jnp.ones(shape.shape)
    return one.astype(shape.dtype)
