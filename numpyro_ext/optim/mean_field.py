r"""The pairs of leaves of a mean-field normal, their gradient, and the loop of their optimisers.

For the loss L of a normal with mean mu and standard deviation sd, number by number,

.. math:: G = \frac{\partial L}{\partial \mu}, \qquad
    C = 2 \frac{\partial L}{\partial \mathrm{sd}^2}
      = \frac{1}{\mathrm{sd}} \frac{\partial L}{\partial \mathrm{sd}},

and a step of size rho along the natural gradient adds rho C to the precision 1 / sd^2 and then
takes rho G / (new precision) from the mean.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.distributions.transforms import SoftplusTransform, Transform
import optax

LOC, SCALE = "_loc", "_scale"


class MeanFieldState(NamedTuple):
    """State of :func:`ivon`, :func:`von` and :func:`vadam`."""

    count: Array
    """Number of steps so far."""
    normals: dict[str, Any]
    """The memory of the rule for each pair, by the name of its mean."""
    other: Any
    """State of the optimiser of all other parameters."""


class Gradient(NamedTuple):
    """A normal and the gradient of its loss; arrays of one shape."""

    name: str
    """Name of the leaf of the mean."""
    mean: Array
    precision: Array
    of_mean: Array
    """G, the derivative of the loss by the mean."""
    of_precision: Array
    """C, twice the derivative by the variance: what natural gradients add to the precision."""


Rule = Callable[[Array, Gradient, Any], tuple[Array, Array, Any]]
"""``(count, gradient, memory) -> (mean, precision, memory)`` of the next step."""


def mean_field_optimiser(
    start: Callable[[str, Array, Array], Any],
    rule: Rule,
    scale_transform: Transform | None,
    other: optax.GradientTransformation | None,
) -> optax.GradientTransformation:
    """A rule for the means and precisions of a mean-field normal, with the memory ``start(name,
    mean, precision)`` at first, as an optax transformation."""
    to_sd: Any = SoftplusTransform() if scale_transform is None else scale_transform
    rest = optax.adam(1e-3) if other is None else other

    def init(params: Any) -> MeanFieldState:
        names, others = pairs_of(params)
        normals = {n: start(n, params[n], to_sd(params[scale_of(n)]) ** -2) for n in names}
        return MeanFieldState(jnp.zeros((), jnp.int32), normals, rest.init(others))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MeanFieldState]:
        names, others = pairs_of(params)
        steps, normals = {}, {}
        for name in names:
            mu, leaf = params[name], params[scale_of(name)]
            sd, slope = jax.jvp(to_sd, (leaf,), (jnp.ones_like(leaf),))
            g = Gradient(name, mu, sd**-2, updates[name], updates[scale_of(name)] / (slope * sd))
            mean, precision, normals[name] = rule(state.count, g, state.normals[name])
            # A gradient that is not finite is passed on: `stable_update` looks for it.
            steps[name] = (mean - mu).astype(mu.dtype)
            steps[scale_of(name)] = (to_sd.inv(precision**-0.5) - leaf).astype(leaf.dtype)
        rest_steps: Any
        rest_steps, rest_state = rest.update({n: updates[n] for n in others}, state.other, others)
        steps = {name: {**steps, **rest_steps}[name] for name in params}
        return steps, MeanFieldState(state.count + 1, normals, rest_state)

    return optax.GradientTransformation(init, update)


def pairs_of(params: Any) -> tuple[list[str], dict[str, Any]]:
    """Names of the means ``<x>_loc`` that have a ``<x>_scale`` of their shape, and what is left."""

    def is_mean(name: str) -> bool:
        shapes = [getattr(params.get(n), "shape", None) for n in (name, scale_of(name))]
        return name.endswith(LOC) and shapes[0] is not None and shapes[0] == shapes[1]

    names = [n for n in params if is_mean(n)] if isinstance(params, dict) else []
    if not names:
        have = sorted(params) if isinstance(params, dict) else type(params).__name__
        raise ValueError(
            f"no leaves <x>_loc and <x>_scale of one shape are among the parameters {have}; use"
            " AutoNormal or AutoDiagonalNormal, or another optimiser."
        )
    taken = {*names, *(scale_of(n) for n in names)}
    return names, {name: leaf for name, leaf in params.items() if name not in taken}


def scale_of(name: str) -> str:
    """The name of the scale that belongs to the mean ``name``."""
    return name.removesuffix(LOC) + SCALE


def retract(precision: Array, step: Array) -> Array:
    """``precision + step`` and the term of second order that keeps half of it at least."""
    return precision + step + step**2 / (2 * precision)
