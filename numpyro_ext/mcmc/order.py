"""Whether the rows of a minibatch may be taken in blocks."""

from functools import partial
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.minibatch import draw_indices
from numpyro_ext._model.potential import Potential

_BATCHES, _SORTED = 64, 3.0
"""With 64 batches of each kind a ratio of variances is above 3 by chance once in 10^5 times."""


def warn_if_sorted(potential: Potential) -> None:
    """A warning where gradients vary more over blocks of contiguous rows than over random rows,
    at the origin of unconstrained space."""
    if not potential.plates:
        return

    @partial(jax.jit, static_argnums=0)
    def variance(policy: str) -> Array:
        def grad(key: Array) -> Array:
            idx, _ = draw_indices(key, {}, potential.plates, policy=policy)
            here = potential.with_rows(idx)
            return here.value_and_grad_flat(jnp.zeros(potential.info.size), idx)[1]

        return jnp.var(lax.map(grad, random.split(random.key(0), _BATCHES)), 0)

    block, scattered = (np.asarray(variance(x), float) for x in ("block", "replace"))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = float(np.nanmedian(block / scattered))
    if ratio > _SORTED:
        names = ", ".join(f"'{name}'" for name in potential.plates)
        words = (
            f"the rows of the plate {names} are not in random order: the gradient has"
            f" {ratio:.2g} times the variance on contiguous rows; write a shuffled copy"
            " (numpyro_ext.data.shuffled_copy), or use minibatch='replace'."
        )
        warnings.warn(InferenceWarning(words), stacklevel=3)
