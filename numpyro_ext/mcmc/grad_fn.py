"""The gradient estimate of one transition, as a kernel's step sees it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_ext._model.potential import Potential
from numpyro_ext.mcmc.state import Estimate

__all__ = ["GradFn"]


@dataclass(frozen=True)
class GradFn:
    """
    The gradient estimate as a step sees it: a function of the flat vector.

    Batch, keys and the estimator's state are those of the transition. Nothing is changed by a
    call, so a step may call it any number of times, also inside a JAX loop.
    """

    kernel: Any
    potential: Potential
    i: Array
    idx: dict[str, Array]
    rng_key: Array
    state: Any
    bound: Array | None = None

    def __call__(self, z: Array) -> Estimate:
        """The estimate at ``z`` from the batch of the transition."""
        grad, (potential, state) = self._estimate(self.rng_key, self.idx, z)
        return Estimate(potential, grad, state)

    def with_hvp(self, z: Array, v: Array) -> tuple[Estimate, Array]:
        """The estimate at ``z``, and the product of its Jacobian (the Hessian of U) with ``v``."""
        estimate = partial(self._estimate, self.rng_key, self.idx)
        grad, hvp, (potential, state) = jax.jvp(estimate, (z,), (v,), has_aux=True)
        return Estimate(potential, grad, state), hvp

    def independent(self, rng_key: Array, z: Array) -> Estimate:
        """The estimate at ``z`` from a batch of its own, independent of the transition's."""
        key_batch, key_gradient = random.split(rng_key)
        idx = self.kernel.new_batch(key_batch, self.potential)
        grad, (potential, state) = self._estimate(key_gradient, idx, z)
        return Estimate(potential, grad, state)

    def _estimate(self, rng_key: Array, idx: dict[str, Array], z: Array) -> tuple[Array, Any]:
        sites = self.kernel.unflatten(z)
        potential, grad, state = self.kernel.gradient.estimate(
            rng_key, self.i, sites, idx, self.potential, self.state
        )
        g = self.kernel.flatten_gradient(grad).astype(z.dtype)
        if self.bound is not None:
            g = jnp.clip(g, -self.bound, self.bound)
        return g, (potential, state)
