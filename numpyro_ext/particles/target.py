"""The density that an ensemble of particles moves on: of a model, or of a function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import Sites

__all__ = ["Target", "target_of_function", "target_of_model"]


class Target(NamedTuple):
    """What a step asks of the density, for all particles at once."""

    ravel: Callable[[Any], Array]
    """Particles, a pytree with a leading axis of length m, as ``(m, d)``."""
    unravel: Callable[[Array], Any]
    evaluate: Callable[[Array, Any], tuple[Array, Any, Any]]
    """``(rng_key, z) -> (potential, grad, idx)`` on one minibatch."""
    check_start: Callable[[Any, Any, Array, Any], None]
    """``(z, idx, potential, grad)``: an error if a number is not finite."""
    minibatch: bool
    """Whether the gradients are those of some rows of the data."""
    name: Callable[[int], str]
    """What a coordinate of the flat vector is called."""


def target_of_model(potential: Potential) -> Target:
    info = potential.info

    def evaluate(rng_key: Array, z: Sites) -> tuple[Array, Sites, dict[str, Array]]:
        idx = potential.draw_rows(rng_key, jax.tree.map(lambda leaf: leaf[0], z))
        value, grad = jax.vmap(lambda z: potential.value_and_grad(z, idx))(z)
        return value, grad, idx

    def check_start(z: Sites, idx: dict[str, Array], value: Array, grad: Sites) -> None:
        each = {name: jnp.tile(i, (len(value), 1)) for name, i in idx.items()}
        potential.check_start(z, each, value, grad)

    def name(coordinate: int) -> str:
        site, at = next((n, s) for n, s in info.slices.items() if s.start <= coordinate < s.stop)
        inside = coordinate - at.start
        return f"site '{site}'" + (f", element {inside}" if at.stop - at.start > 1 else "")

    ravel, unravel = jax.vmap(info.ravel), jax.vmap(info.unravel)
    return Target(ravel, unravel, evaluate, check_start, bool(info.plates), name)


def target_of_function(fn: Callable[[Any], tuple[Array, Any]], z: Any) -> Target:
    def check_start(z: Any, idx: None, value: Array, grad: Any) -> None:
        leaves = jax.tree.leaves((value, grad))
        traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        if not traced and not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves):
            raise ValueError(
                "potential_fn or its gradient is not finite at init_params; give init_params at"
                " which both are."
            )

    return Target(
        jax.vmap(lambda tree: ravel_pytree(tree)[0]),
        jax.vmap(ravel_pytree(jax.tree.map(lambda leaf: leaf[0], z))[1]),
        lambda rng_key, z: (*jax.vmap(fn)(z), None),
        check_start,
        False,
        lambda coordinate: f"coordinate {coordinate}",
    )
