"""The data of a network: checks, each with a sentence, and standardisation."""

from typing import Any

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

__all__ = ["data_of", "inputs_of", "scaling_of"]


def inputs_of(X: Any, num_inputs: int) -> Array:
    """X as an array ``(N, num_inputs)``."""
    X = _numbers("X", X)
    if X.ndim != 2 or X.shape[1] != num_inputs or len(X) == 0:
        remedy = ", by X[:, None] for a single input" if X.ndim == 1 and num_inputs == 1 else ""
        raise ValueError(
            f"X has shape {X.shape}; it must be (N, {num_inputs}), as layer_sizes[0] is"
            f" {num_inputs}{remedy}."
        )
    return X


def data_of(X: Any, y: Any, num_inputs: int) -> tuple[Array, Array]:
    """X and y as arrays ``(N, num_inputs)`` and ``(N,)``."""
    X, y = inputs_of(X, num_inputs), _numbers("y", y)
    if y.shape != (len(X),):
        raise ValueError(
            f"y has shape {y.shape} and X {X.shape}; y must be ({len(X)},), a number for each row"
            " of X."
        )
    return X, y


def _numbers(name: str, value: Any) -> Array:
    """A finite array of floats, or a sentence."""
    if isinstance(value, Tracer):
        return value
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "biuf":
            found = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} does not hold numbers only ({error}); code the columns of words as numbers,"
            " or leave them out."
        ) from None
    if not np.all(np.isfinite(found)):
        where = np.argwhere(~np.isfinite(found))
        raise ValueError(
            f"{name} has {len(where)} entries that are not finite, the first in row"
            f" {int(where[0, 0]) if found.ndim else 0}; leave these rows out, or fill them."
        )
    return jnp.asarray(value if isinstance(value, Array) else found, float)


def scaling_of(X: np.ndarray, y: np.ndarray, normalise: bool) -> dict[str, Array]:
    """Mean and standard deviation of X and y by name; 0 and 1 without ``normalise``."""

    def of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not normalise:
            return np.zeros(x.shape[1:]), np.ones(x.shape[1:])
        # Rounding would give a constant column a small standard deviation.
        return x.mean(0), np.where(x.max(0) == x.min(0), 1.0, x.std(0))

    names = "X_mean", "X_sd", "y_mean", "y_sd"
    return {n: jnp.asarray(x, float) for n, x in zip(names, (*of(X), *of(y)), strict=True)}
