"""Checks of sample arrays, their distances, and functions of their rows piece by piece."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_ext._typing import Float

# Accelerators would otherwise round the factors to fewer bits.
matmul = partial(jnp.matmul, precision="highest")

# Coordinates that one pass over the (n, m) result adds up: enough to keep the result in registers.
_UNROLL = 8


def check_finite(name: str, x: Any) -> np.ndarray | None:
    """Rows in double precision, None if traced, or an error if numbers are NaN or infinite."""
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    numbers = np.asarray(x, np.float64)
    bad = len(numbers) - int(np.isfinite(numbers).all(1).sum())
    if bad:
        raise ValueError(
            f"{name} has {bad} of {len(x)} rows that are not finite; leave out those that diverged."
        )
    return numbers


def _check_spread(name: str, x: Array) -> None:
    """A ``ValueError`` if squares of distances would be infinite, or 0 where no distance is."""
    numbers = check_finite(name, x)
    if numbers is None or not numbers.size:
        return
    squares, limits = np.max(np.ptp(numbers, 0)) ** 2, jnp.finfo(x.dtype)
    if squares and not 1e3 * float(limits.tiny) < squares < 1e-3 * float(limits.max):
        raise ValueError(
            f"{name} has a spread of {squares**0.5:.2g}, whose square is no number of {x.dtype};"
            " rescale the samples, and with them kernel and score."
        )


def as_points(name: str, x: Any) -> Array:
    """``x`` as a floating-point array of rows, or a ``ValueError`` that says how to make one."""
    x = jnp.asarray(x)
    if x.ndim != 2:
        hint = f"; pass {name}[:, None]" if x.ndim == 1 else ""
        raise ValueError(
            f"{name} has shape {x.shape}, but samples are the rows of a (K, d) array{hint}."
        )
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)
    _check_spread(name, x)
    return x


def as_point_pair(x: Any, y: Any, names: tuple[str, str] = ("x", "y")) -> tuple[Array, Array]:
    """Two sets of points in the same space."""
    x, y = as_points(names[0], x), as_points(names[1], y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"{names[0]} has points of dimension {x.shape[1]} and {names[1]} of dimension"
            f" {y.shape[1]}; they must be the same."
        )
    return x, y


@jax.jit  # so that an eager call compiles once per shape, not once per call
def squared_distances(x: Array, y: Array) -> Float[Array, "n m"]:
    """``|x_i - y_j|^2`` from exact differences; ``|x|^2 + |y|^2 - 2 x.y`` cancels in float32."""

    @jax.checkpoint
    def add_coordinate(total: Array, columns: tuple[Array, Array]) -> tuple[Array, None]:
        a, b = columns
        return total + (a[:, None] - b[None, :]) ** 2, None

    zero = jnp.zeros((x.shape[0], y.shape[0]), jnp.result_type(x, y))
    return lax.scan(add_coordinate, zero, (x.T, y.T), unroll=_UNROLL)[0]


def weighted_differences(w: Array, x: Array, y: Array) -> Float[Array, "n d"]:
    """``sum_j w_ij (x_i - y_j)`` without an (n, m, d) array."""
    # A difference of two products that keeps its digits only near the origin.
    centre = jnp.mean(y, axis=0)
    return jnp.sum(w, axis=1, keepdims=True) * (x - centre) - matmul(w, y - centre)


def strided(x: Array, number: int) -> Array:
    """``number`` evenly spaced rows of x, or all of them if there are no more."""
    num = x.shape[0]
    return x if num <= number else x[np.rint(np.arange(number) * (num / number)).astype(int)]


def by_rows(fn: Callable[..., Array], rows_at_a_time: int, *arrays: Array) -> Array:
    """``fn`` of all rows of the arrays, computed for a few rows at a time to save memory."""
    if rows_at_a_time >= len(arrays[0]):
        return fn(*arrays)
    return _by_pieces(fn, rows_at_a_time, *arrays)


def _by_pieces(fn: Callable[..., Array], rows_at_a_time: int, *arrays: Array) -> Array:
    num = len(arrays[0])
    num_pieces = -(-num // rows_at_a_time)

    def pieces(a: Array) -> Array:
        width = [(0, num_pieces * rows_at_a_time - num)] + [(0, 0)] * (a.ndim - 1)
        padded = jnp.pad(a, width, mode="edge")
        return padded.reshape(num_pieces, rows_at_a_time, *a.shape[1:])

    values = lax.map(lambda rows: fn(*rows), tuple(map(pieces, arrays)))
    return values.reshape(num_pieces * rows_at_a_time, *values.shape[2:])[:num]
