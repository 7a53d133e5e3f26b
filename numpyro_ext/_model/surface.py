"""A potential at points that are given by the host: values, gradients and curvature there."""

from functools import cached_property, partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.minibatch import draw_indices
from numpyro_ext._model.modes import DENSE_UP_TO, MATRIX_UP_TO
from numpyro_ext._model.operations import (
    NO_FORWARD_MODE,
    count_operations,
    jit_on_data,
    quick_options,
)
from numpyro_ext._model.potential import Potential

WORTH_OPTIMISING = 1e9
"""Numbers that a search computes, above which an optimised program pays for its compilation."""
_GRADIENTS, _PASSES = 8_000, 120
"""Gradients of a minibatch and of all rows that a search takes, roughly."""
_MOST_OF_CURVATURE = 2e11
"""The most numbers that the curvature at one point of a search above 512 numbers computes."""
FEW_ROWS = 10_000
"""Rows of every plate, at most, on which curvature is taken, and a normal is measured."""
POINTS, _DIRECTIONS = 64, 32
"""Points and directions that a program takes together."""


def batch_rows(potential: Potential) -> int:
    """Rows in one minibatch of every plate; 1 without a plate."""
    plates = {**potential.plates, **potential.info.given}
    return sum(batch for _, batch in plates.values()) or 1


def draw_batch(rng_key: Array, potential: Potential) -> dict[str, Array]:
    """One batch of every plate, drawn with replacement."""
    return draw_indices(rng_key, {}, potential.plates)[0]


def some_rows(potential: Potential, most: int = FEW_ROWS) -> dict[str, Any]:
    """At most 10,000 evenly spaced rows of every plate, or another number."""
    rows = {
        name: (np.arange(min(size, most)) * (size / min(size, most))).astype(np.int32)
        for name, (size, _) in potential.plates.items()
    }
    return jax.device_put(rows)  # a plate takes nothing else


type Rows = tuple[dict[str, Any], Any]
"""Row numbers of each plate, and what is read of these on the host."""


class Surface:
    """A potential as a search sees it: points and results are NumPy arrays, sums over rows are in
    double precision, and all who ask share a few programs."""

    def __init__(self, potential: Potential) -> None:
        potential = self.potential = potential.read_once()
        self.size = potential.info.size
        self.dense, self.dtype = self.size <= DENSE_UP_TO, jnp.result_type(float)
        self.all_rows = sum(size for size, _ in potential.plates.values()) or batch_rows(potential)
        x = np.zeros(self.size, self.dtype)
        self.cost = count_operations(potential.value_and_grad_flat, x, potential.first_rows())
        """The numbers that one gradient of a minibatch computes."""
        gradients = _GRADIENTS + _PASSES * self.all_rows / batch_rows(potential)
        self.options = quick_options(self.cost * gradients, WORTH_OPTIMISING)
        of_rows = self.cost * min(self.all_rows, FEW_ROWS) / batch_rows(potential)
        self.of_curvature = self.size * of_rows
        """The numbers that the curvature at one point computes."""
        is_many = DENSE_UP_TO < self.size <= MATRIX_UP_TO and self.cost > self.size**2 / 8
        self.ends_dense = is_many and self.of_curvature < _MOST_OF_CURVATURE
        """Whether a search above 512 numbers ends with the whole curvature: where a product with it
        costs little beside a gradient."""
        self._at_points = jit_on_data(partial(_at_points, potential), self.options)
        self.slopes = Slopes(potential, self.options)
        self.slopes_of_prior = Slopes(potential.prior(), self.options)

    @np.errstate(invalid="ignore", over="ignore")
    def sums(self, x: np.ndarray, rows: int | None = None) -> tuple[float, np.ndarray]:
        """The potential of all rows, or of so many, evenly spread, and its gradient at a flat
        vector, piece by piece."""
        value, grad = 0.0, np.zeros(self.size)
        for weight, idx in self.potential.pieces(rows):
            values, grads = self.at(np.asarray(x)[None], (idx, None))
            value, grad = value + weight * float(values[0]), grad + weight * grads[0]
        return value, grad

    @cached_property
    def no_rows(self) -> Rows:
        """What the potential of the prior is computed on."""
        return self.potential.first_rows(), None

    @cached_property
    def few_rows(self) -> Rows:
        """At most 10,000 evenly spaced rows of every plate, read once."""
        return self.read(FEW_ROWS)

    def read(self, most: int) -> Rows:
        """Evenly spaced rows of every plate, at most so many; what is on the host is read now."""
        idx = some_rows(self.potential, most)
        return idx, self.potential.read_ahead(idx) if self.potential.reads_ahead else None

    def at(self, points: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Potentials ``(m,)`` and gradients ``(m, n)`` at points ``(m, n)``, on these rows."""
        m = len(points)
        # A program for one point does for many, too, and beyond 512 numbers is not worth it.
        padded = np.zeros((max(m, POINTS) if self.dense else m, self.size), self.dtype)
        padded[:m] = points
        both = self._at_points(padded, np.int32(m), rows)
        values, grads = (np.asarray(x, float)[:m] for x in both)
        return values, grads


class Slopes:
    """``slopes(x, directions, rows)``, the Hessian on these rows times directions ``(m, n)``, each
    of about a standard deviation."""

    exact: bool | None = None
    """Whether the gradient has a derivative, once that is known; where it has none differences are
    taken, over a part of each direction."""

    def __init__(self, potential: Potential, options: Any) -> None:
        self.most = min(potential.info.size, _DIRECTIONS)
        self.along = [
            jit_on_data(partial(_along, potential, how), options) for how in (False, True)
        ]

    def __call__(self, x: np.ndarray, directions: np.ndarray, rows: Rows) -> np.ndarray:
        if self.exact is None:
            try:
                products = self._products(self.along[1], x, directions, rows)
            except NO_FORWARD_MODE:
                # A part of the gradient is a jax.custom_vjp, as odeint is, or on the host.
                self.exact = False
            else:
                self.exact = True
                return products
        return self._products(self.along[self.exact], x, directions, rows)

    def _products(
        self, along: Any, x: np.ndarray, directions: np.ndarray, rows: Rows
    ) -> np.ndarray:
        dtype, products = jnp.result_type(float), []
        most = self.most if len(directions) > 1 else 1  # of a hierarchy it may be large
        for k in range(0, len(directions), most):
            block = directions[k : k + most]
            padded = np.zeros((most, directions.shape[1]), dtype)
            padded[: len(block)] = block
            product = along(np.asarray(x, dtype), padded, rows)
            products.append(np.asarray(product, float)[: len(block)])
        return np.concatenate(products)


def surface_of(potential: Potential) -> Surface:
    """The surface of a potential, which keeps it."""
    if potential.surface is None:
        potential.surface = Surface(potential)
    return potential.surface


def _at_points(potential: Potential, points: Array, num: Array, rows: Rows) -> Any:
    """U and its gradient at the first ``num`` points."""
    here, (idx, _) = potential.with_rows(*rows), rows

    def at(i: Array, both: Any) -> Any:
        value, grad = here.value_and_grad_flat(points[i], idx)
        return both[0].at[i].set(value), both[1].at[i].set(grad)

    return lax.fori_loop(0, num, at, (jnp.zeros(len(points), points.dtype), jnp.zeros_like(points)))


def _along(potential: Potential, exact: bool, x: Array, directions: Array, rows: Rows) -> Array:
    _, along = potential.with_rows(*rows).linearized_grad(x, rows[0], forward=exact)
    return jax.vmap(along)(directions)
