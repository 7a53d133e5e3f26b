"""SGHMC without splitting, as a pair of matrices."""

from typing import Any

from jax import Array
import jax.numpy as jnp


def unsplit_sghmc(friction: float) -> dict[str, Any]:
    """The options of ``RecipeKernel``: x is ``(z, r)``, D has the friction at r, and Q turns z into
    r.
    """

    def diffusion(x: Array) -> Array:
        return friction * jnp.repeat(jnp.array([0.0, 1.0]), len(x) // 2)

    def curl(x: Array) -> Array:
        n = len(x) // 2
        return jnp.eye(2 * n, k=-n) - jnp.eye(2 * n, k=n)

    return {
        "num_auxiliary": 1,
        "diffusion": diffusion,
        "curl": curl,
        "correction": jnp.zeros_like,
    }
