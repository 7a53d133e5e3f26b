"""The gradient estimate as a kernel's step sees it: a function of the ravelled vector."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, random
from jax.flatten_util import ravel_pytree

from numpyro_ext._typing import GradientEstimator, Sites
from numpyro_ext.mcmc._oracle import Oracle

__all__ = ["GradFn"]


class GradFn:
    """
    The gradient estimate of one transition: batch, keys and estimator are fixed, ``z`` is the ravelled vector.

    A step takes one estimate, by calling the object or by :meth:`with_hvp`, outside of any JAX transform of its
    own; ``state`` is then the estimator's new state. The other methods may be called at any time.
    """

    def __init__(
        self,
        estimator: GradientEstimator,
        oracle: Oracle,
        unravel: Callable[[Array], Sites],
        i: Array,
        idx: dict[str, Array],
        rng_key: Array,
        state: Any,
        new_batch: Callable[[Array], dict[str, Array]],
    ) -> None:
        self.state = state
        self._estimator, self._oracle, self._unravel = estimator, oracle, unravel
        self._i, self._idx, self._rng_key = i, idx, rng_key
        self._new_batch = new_batch

    def _estimate(self, rng_key: Array, idx: dict[str, Array], z: Array) -> tuple[Array, Any]:
        potential, grad, state = self._estimator.estimate(
            rng_key, self._i, self._unravel(z), idx, self._oracle, self.state
        )
        return ravel_pytree(grad)[0].astype(z.dtype), (potential, state)

    def __call__(self, z: Array) -> tuple[Array, Array]:
        """``(potential, g)`` at ``z``."""
        grad, (potential, self.state) = self._estimate(self._rng_key, self._idx, z)
        return potential, grad

    def with_hvp(self, z: Array, v: Array) -> tuple[Array, Array, Array]:
        """``(potential, g, H v)`` at ``z``, all from the step's batch."""
        estimate = partial(self._estimate, self._rng_key, self._idx)
        grad, hvp, (potential, self.state) = jax.jvp(estimate, (z,), (v,), has_aux=True)
        return potential, grad, hvp

    def independent(self, rng_key: Array, z: Array) -> tuple[Array, Array]:
        """``(potential, g)`` at ``z`` from a batch of its own, independent of the step's."""
        key_batch, key_gradient = random.split(rng_key)
        grad, (potential, _) = self._estimate(key_gradient, self._new_batch(key_batch), z)
        return potential, grad

    def potential(self, z: Array) -> Array:
        """The model's potential at ``z`` on the step's batch; no gradient is taken."""
        return self._oracle.potential(self._unravel(z), self._idx)
