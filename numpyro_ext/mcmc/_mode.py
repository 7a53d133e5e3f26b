"""Where a posterior has its mode, how it is curved there, and how noisy minibatch gradients are
around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import optax
from tqdm.auto import tqdm

from numpyro_ext._model.minibatch import draw_indices
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import GradientEstimator
from numpyro_ext.mcmc.whitening import Whitening

__all__ = [
    "DENSE_UP_TO",
    "NEAR",
    "NOISE_ESTIMATES",
    "Mode",
    "Surface",
    "batch_rows",
    "find_modes",
    "measure_noise",
]

DENSE_UP_TO = 512
"""Latent dimensions up to which the curvature is a matrix."""
_ADAM_STEPS, _ADAM_PIECES = 2000, 20
_NEWTON_STEPS = 60
_HALVINGS = 12
_CURVATURE_ROWS = 10_000
NEAR = 0.05
"""Decrement below which a point is a mode."""
_LEAST_CURVATURE = 1e-5  # of a matrix with a unit diagonal
_NOISE_POINTS, _NOISE_BATCHES = 512, 4
# The noise of a corrected gradient grows as the square of the distance, so it varies from point to
# point by one to two times its mean: few points with many batches would miss the mean by a third.
NOISE_ESTIMATES = _NOISE_POINTS * _NOISE_BATCHES
"""Gradient estimates from which their noise is measured."""


class Mode(NamedTuple):
    """
    The end of a search:

     - **x** - ``(n,)``, the flat point found.
     - **factor** - A of ``z = x + A xi``: lower triangular ``(n, n)``, or the ``(n,)`` diagonal
       for large n.
     - **decrement** - :math:`\\sqrt{g^\\top H^{-1} g}`, the distance to the mode in posterior
       standard deviations.
     - **num_negative** - negative directions of the curvature, which were turned positive.
     - **row_gradients** - gradients of single rows that the search took.
     - **log_evidence** - logarithm of the integral of :math:`e^{-U}` by this normal, up to a
       constant.
    """

    x: Array
    factor: Array
    decrement: float
    num_negative: int
    row_gradients: int
    log_evidence: float = np.nan

    @property
    def known(self) -> bool:
        """Whether the point is a mode."""
        return self.num_negative == 0 and self.decrement <= NEAR

    def distance(self, x: Array) -> float:
        """Of another point, in standard deviations of this normal."""
        to_xi = Whitening(self.x, self.factor).to_xi
        return float(jnp.linalg.norm(to_xi(x)))


def batch_rows(potential: Potential) -> int:
    """Rows in one minibatch of every plate; 1 without a plate."""
    return sum(batch for _, batch in potential.plates.values()) or 1


class Surface:
    """A potential as functions of the flat vector."""

    def __init__(self, potential: Potential) -> None:
        self.potential, self.info = potential, potential.info

    def batch(self, rng_key: Array) -> dict[str, Array]:
        """One batch of every plate, drawn with replacement."""
        return draw_indices(rng_key, {}, self.potential.plates)[0]

    def value_and_grad(self, x: Array, idx: dict[str, Array]) -> tuple[Array, Array]:
        value, grad = self.potential.value_and_grad(self.info.unravel(x), idx)
        return value, self.info.ravel(grad)

    def full(self, x: Array) -> tuple[Array, Array]:
        value, grad = self.potential.full_value_and_grad(self.info.unravel(x))
        return value, self.info.ravel(grad)

    def some_rows(self) -> dict[str, Array]:
        """At most 10,000 evenly spaced rows of every plate, 1,000 for large n."""
        dense = self.info.size <= DENSE_UP_TO
        most = _CURVATURE_ROWS if dense else _CURVATURE_ROWS // 10
        return {
            name: (jnp.arange(min(size, most)) * (size / min(size, most))).astype(jnp.int32)
            for name, (size, _) in self.potential.plates.items()
        }

    def curvature(self, x: Array) -> Array:
        """``(n, n)``, or the ``(n,)`` diagonal for large n, on some rows."""
        idx = self.some_rows()
        return self._second(lambda x: self.value_and_grad(x, idx)[1], x)

    def prior_curvature(self, x: Array) -> Array:
        """That of the prior alone."""
        first, prior = self.potential.first_rows(), self.potential.prior()
        return self._second(
            lambda x: self.info.ravel(prior.value_and_grad(self.info.unravel(x), first)[1]), x
        )

    def _second(self, grad: Callable[[Array], Array], x: Array) -> Array:
        dense = self.info.size <= DENSE_UP_TO

        def along(direction: Array) -> Array:
            slope = jax.jvp(grad, (x,), (direction,))[1]
            return slope if dense else jnp.vdot(slope, direction)

        basis = jnp.eye(self.info.size, dtype=x.dtype)
        return lax.map(along, basis, batch_size=32)


def find_modes(rng_key: Array, potential: Potential, starts: list[Array]) -> Iterator[Mode]:
    """
    The modes found from each of these points, one after another, by the same compiled functions:
    Adam on minibatch gradients, then damped Newton steps with the gradient of all rows.

    :param starts: ``(n,)`` each, where to begin.
    """
    surface = Surface(potential)
    all_rows = sum(size for size, _ in potential.plates.values()) or 1
    piece, newton = _adam(surface), jax.jit(partial(_newton, surface))
    for start, key_start in zip(starts, random.split(rng_key, len(starts)), strict=True):
        with _bar(_ADAM_PIECES + _NEWTON_STEPS, "finding the mode") as advance:
            x, spent, state = start, 0, _moments(start)
            for k, key in enumerate(random.split(key_start, _ADAM_PIECES)):
                x, state = piece(x, state, key, k)
                spent += _ADAM_STEPS // _ADAM_PIECES * batch_rows(potential)
                advance()
            for _ in range(_NEWTON_STEPS):
                x, value, decrement, moved, factor, num_negative, tries = newton(x)
                spent += int(tries) * all_rows
                advance()
                if not bool(moved):
                    break
        diagonal = jnp.diagonal(factor) if factor.ndim == 2 else factor
        log_evidence = float(jnp.sum(jnp.log(jnp.abs(diagonal))) - value)
        yield Mode(x, factor, float(decrement), int(num_negative), spent, log_evidence)


def _moments(x: Array) -> Any:
    return optax.scale_by_adam().init(x)


def _adam(surface: Surface) -> Callable[..., tuple[Array, Any]]:
    """A hundred steps, at a rate that falls over the whole search."""
    num = _ADAM_STEPS // _ADAM_PIECES
    rate = optax.exponential_decay(0.05, _ADAM_STEPS, 0.001 / 0.05)
    adam = optax.scale_by_adam()

    @jax.jit
    def piece(x: Array, state: Any, rng_key: Array, k: Array) -> tuple[Array, Any]:
        def step(carry: tuple[Array, Any], at: tuple[Array, Array]) -> tuple[Any, None]:
            x, state = carry
            i, key = at
            _, g = surface.value_and_grad(x, surface.batch(key))
            fine = jnp.all(jnp.isfinite(g))
            update, new = adam.update(jnp.where(fine, g, 0), state)
            step = jnp.asarray(rate(i), x.dtype) * jnp.asarray(update)
            return (x - step, new), None

        at = (k * num + jnp.arange(num), random.split(rng_key, num))
        return lax.scan(step, (x, state), at)[0]

    return piece


def _newton(surface: Surface, x: Array) -> tuple[Array, ...]:
    """One damped step: ``(x, potential, decrement, whether it moved, factor, number of negative
    directions, passes)``."""
    value, g = surface.full(x)
    H, prior = surface.curvature(x), surface.prior_curvature(x)
    if H.ndim == 2:
        # With a unit diagonal, so that float32 resolves coordinates of very unequal scale.
        unit = 1 / jnp.sqrt(jnp.maximum(jnp.abs(jnp.diagonal(H)), jnp.abs(jnp.diagonal(prior))))
        w, Q = jnp.linalg.eigh(unit[:, None] * (H + H.T) / 2 * unit)
        least = jnp.einsum("ik,ij,jk->k", Q, unit[:, None] * prior * unit, Q)
        scales = jnp.maximum(jnp.abs(w), jnp.maximum(least, _LEAST_CURVATURE))
        step = unit * (Q @ ((Q.T @ (unit * g)) / scales))
        # A A^T = H^{-1}, lower triangular: the R of a QR of a root.
        R = jnp.linalg.qr((unit[:, None] * Q / jnp.sqrt(scales)).T, mode="r")
        factor = R.T * jnp.sign(jnp.diagonal(R))
    else:
        w, scales = H, jnp.maximum(jnp.abs(H), jnp.abs(prior))
        step, factor = g / scales, 1 / jnp.sqrt(scales)
    decrement = jnp.sqrt(jnp.maximum(jnp.vdot(g, step), 0))

    def worse(carry: tuple[Array, Array]) -> Array:
        k, new_value = carry
        return (k < _HALVINGS) & ~(new_value <= value)

    def halve(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        k = carry[0] + 1
        return k, surface.full(x - 0.5**k * step)[0]

    near = decrement < NEAR
    k, new_value = lax.while_loop(
        worse, halve, (jnp.asarray(-1, jnp.int32), jnp.where(near, value, jnp.inf))
    )
    moved = ~near & (new_value <= value)
    x = jnp.where(moved, x - 0.5 ** k.astype(x.dtype) * step, x)
    value = jnp.where(moved, new_value, value)
    return x, value, decrement, moved, factor, jnp.sum(w < 0), k + 2


def measure_noise(
    rng_key: Array, potential: Potential, mode: Mode, estimator: GradientEstimator
) -> np.ndarray:
    """
    The variance of a gradient estimate over its batches, whitened: ``(n,)``.

    It is the mean over points of the normal approximation: of a noise that depends on the place,
    :math:`s^2(\\xi)`, the variance of a Gaussian target feels the mean to first order, without a
    weight, because the function whose drift is :math:`\\xi_k^2 - 1` is a quadratic one.
    """
    surface, info = Surface(potential), potential.info
    whitening = Whitening(mode.x, mode.factor)

    @jax.jit
    def measure(rng_key: Array) -> Array:
        state = estimator.init(info.unravel(mode.x), potential)

        def at_point(key: Array) -> Array:
            key_xi, key_batches = random.split(key)
            z = info.unravel(whitening.to_z(random.normal(key_xi, mode.x.shape, mode.x.dtype)))

            def one(key: Array) -> Array:
                key_batch, key_gradient = random.split(key)
                i, idx = jnp.zeros((), int), surface.batch(key_batch)
                _, grad, _ = estimator.estimate(key_gradient, i, z, idx, potential, state)
                return whitening.pull(info.ravel(grad))

            return jnp.var(lax.map(one, random.split(key_batches, _NOISE_BATCHES)), 0, ddof=1)

        return jnp.mean(lax.map(at_point, random.split(rng_key, _NOISE_POINTS)), 0)

    return np.asarray(measure(rng_key), float)


@contextmanager
def _bar(total: int, description: str) -> Iterator[Callable[[], Any]]:
    """A progress bar that appears after a second, and only on a terminal."""
    with tqdm(total=total, desc=description, delay=1.0, disable=None, leave=False) as bar:
        yield bar.update
