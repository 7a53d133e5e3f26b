"""Checks of the functions of the ravelled vector that a user gives to a kernel."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.util import is_prng_key

from numpyro_ext._checks import check_choice

__all__ = [
    "Field",
    "check_correction",
    "check_definite",
    "check_shape",
    "values_at",
    "starting_points",
]

Field = Callable[[Array], Any]


def check_shape(what: str, fn: Field, x: Array, ranks: tuple[int, ...]) -> None:
    """A ``ValueError`` unless ``fn`` maps ``(m,)`` to a scalar, ``(m,)`` or ``(m, m)``, of the ``ranks`` allowed."""
    shape = jax.eval_shape(lambda x: jnp.asarray(fn(x)), x).shape
    allowed = [x.shape * rank for rank in ranks]
    if shape not in allowed:
        words = " or ".join(str(s) for s in allowed)
        raise ValueError(
            f"{what} returns shape {shape} for a vector of {x.shape[0]} numbers; it must be {words}."
        )


def check_correction(correction: Any) -> None:
    """``"autodiff"`` or a callable, or a ``ValueError``."""
    if not callable(correction):
        check_choice("correction", correction, ("autodiff",))


def starting_points(state: Any, *fields: str) -> Array | None:
    """``(chains, m)``: the ravelled ``z`` of each chain with the ``(m,)`` fields named; None if it is traced."""
    tree = [state.z, *(getattr(state, name) for name in fields)]
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
        return None
    if is_prng_key(state.rng_key):
        tree = jax.tree.map(lambda x: x[None], tree)
    return jax.vmap(lambda tree: ravel_pytree(tree)[0])(tree)


def values_at(fn: Field, points: Array) -> np.ndarray:
    """``fn`` at each of the ``(chains, m)`` points."""
    return np.asarray(jax.lax.map(lambda x: jnp.asarray(fn(x), x.dtype), points))


def check_definite(what: str, fn: Field, points: Array | None, *, singular: bool) -> None:
    """A ``ValueError`` unless the scalars, diagonals or matrices are positive (or, ``singular``, semi-) definite."""
    if points is None:
        return
    values = values_at(fn, points)
    matrix = values.ndim == 3
    finite = bool(np.all(np.isfinite(values)))
    symmetric = not matrix or np.allclose(values, np.swapaxes(values, 1, 2))
    scales = np.linalg.eigvalsh(values) if matrix and finite else values
    # Rounding may make an eigenvalue of 0 a little negative.
    low = -1e-5 * np.max(np.abs(values)) if singular and matrix else 0.0
    if not (finite and symmetric and np.all(scales >= low if singular else scales > 0)):
        kind = "semi" if singular else ""
        raise ValueError(
            f"{what} is not positive {kind}definite at the initial point; its numbers must be"
            f" {'non-negative' if singular else 'positive'}, or its matrix symmetric positive {kind}definite."
        )
