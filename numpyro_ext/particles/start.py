"""Checks of the particles at the start: their number, and that they differ."""

import warnings

from jax import Array
from jax.core import Tracer
import numpy as np

from numpyro_ext._checks import InferenceWarning

__all__ = ["check_distinct", "warn_of_few_particles"]


def check_distinct(x: Array, remedy: str) -> None:
    """Refuse particles that coincide: no field ever separates them."""
    if x.shape[0] < 2 or isinstance(x, Tracer):
        return
    values = np.asarray(x)  # NumPy, because inside a loop JAX would trace the comparison
    distinct = len(np.unique(values, axis=0))
    # Of many particles in one dimension some draws coincide by rounding.
    if distinct > 0.9 * len(values):
        return
    raise ValueError(
        f"{len(values)} particles start at {distinct} different points, and those that start at the"
        f" same point would stay together; {remedy}"
    )


def warn_of_few_particles(m: int, d: int) -> None:
    """Warn where d > m / 2, because every field then makes the spread too small."""
    if 1 < m < 2 * d:
        network = (
            " With so few, precondition='covariance', the default of some fields, can diverge on"
            " minibatches; take precondition=None with optax.adam, as for a network."
        )
        warnings.warn(
            f"{m} particles for {d} latent dimensions: their spread is smaller than the posterior's"
            f" with every field where d > m / 2; give {2 * d} particles, or use their means alone."
            f"{network if d > 10 * m else ''}",
            InferenceWarning,
            stacklevel=3,
        )
