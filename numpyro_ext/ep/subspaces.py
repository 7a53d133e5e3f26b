r"""The few directions of latent space in which a factor changes, found by gradients."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp

_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)
_TAME = 20.0
"""The largest change of l, in nats, from the mean to a tame point."""


class Subspace(NamedTuple):
    """The directions in which one factor changes.

    - **rank** - the smallest r for which l does not change outside r directions; 0 for a constant,
      -1 above the largest that is allowed.
    - **directions** - ``(R, D)``, of which the first r are these, orthonormal in units of the
      prior's standard deviations.
    """

    rank: Array
    directions: Array


def find_subspace(
    log_factor: Callable[[Array], Array], mean: Array, sd: Array, rng_key: Array, max_rank: int
) -> Subspace:
    r"""The directions of one factor :math:`l(x)`, with :math:`x = \text{mean} + \text{sd}\, z`.

    It is the rank of the matrix of gradients with respect to z at the mean, and at K random points
    at their full distance and where l is tame. Steps of length 1 orthogonal to the first r
    directions confirm it, and raise it until they do not change l.

    :param mean: ``(D,)``, the centre of the prior.
    :param sd: ``(D,)``, its scale.
    """
    D = len(mean)
    x64 = mean.dtype == jnp.float64
    drop, cutoff = (1e-4, 1e-8) if x64 else (1e-2, 3e-5)
    key_probes, key_steps = random.split(rng_key)
    probes = random.normal(key_probes, (2 * max_rank + 6, D), mean.dtype)

    def whitened(z: Array) -> Array:
        return log_factor(mean + sd * z)

    # Each use of l is compiled for itself, so there are three: values, gradients, steps.
    scales = jnp.asarray(_SCALES, mean.dtype)
    places = (scales[:, None, None] * probes).reshape(-1, D)
    values = jax.vmap(whitened)(jnp.concatenate([jnp.zeros((1, D), mean.dtype), places]))
    at_mean, values = values[0], values[1:].reshape(len(scales), -1)  # (scales, K)
    tame = jnp.isfinite(values) & (jnp.abs(values - at_mean) < _TAME)
    first = jnp.where(jnp.any(tame, 0), jnp.argmax(tame, 0), len(_SCALES) - 1)
    near = scales[first][:, None] * probes

    points = jnp.concatenate([near, probes, jnp.zeros((1, D), mean.dtype)])
    g = jax.vmap(jax.grad(whitened))(points)
    largest = jnp.max(jnp.abs(g), 1, keepdims=True)
    finite = jnp.all(jnp.isfinite(g), 1, keepdims=True) & (largest > 0)
    # Not the norm itself, whose squares overflow.
    g = jnp.where(finite, g / jnp.where(finite, largest, 1), 0)
    length = jnp.linalg.norm(g, axis=1, keepdims=True)
    size = jnp.where(finite, largest, 0) * length
    # A saturated gradient is rounding noise.
    keep = finite & (size > drop * jnp.max(size[: len(near)]))
    B = jnp.where(keep, g / jnp.where(keep, length, 1), 0)
    _, s, directions = jnp.linalg.svd(B, full_matrices=False)
    by_gradients = jnp.sum(s > cutoff * s[0])

    start = near[:4]
    before = values[first[:4], jnp.arange(4)]
    step = random.normal(key_steps, start.shape, mean.dtype)
    R = min(max_rank, D)

    def outside(r: int) -> Array:
        V = directions[:r]
        delta = step - (step @ V.T) @ V
        return delta / jnp.linalg.norm(delta, axis=1, keepdims=True)

    steps = jnp.stack([start + outside(r) for r in range(1, R + 1)])
    change = jnp.abs(jax.vmap(jax.vmap(whitened))(steps) - before)
    is_flat = jnp.all(change < 1e-3 * (1 + 0.1 * jnp.abs(before)), 1)
    # What rounding leaves of a step outside of all D directions is no direction.
    is_flat |= jnp.arange(1, R + 1) == D
    rank = jnp.full((), -1)
    for r in range(R, 0, -1):
        rank = jnp.where(is_flat[r - 1] & (by_gradients <= r), r, rank)
    flat = jnp.all(jnp.abs(values - at_mean) <= 1e-6 * (1 + jnp.abs(at_mean)))
    return Subspace(jnp.where(flat, 0, rank), directions[:R])


def basis_of(directions: Array, sd: Array) -> Array:
    """``(r, D)`` orthonormal rows A, with l a function of ``A x``, of directions of z."""
    if len(directions) == len(sd):  # a rotation would mix coordinates of any unit
        return jnp.eye(len(sd), dtype=directions.dtype)
    # By Gram and Schmidt, twice, and not by reflections, whose errors are relative to the
    # largest entry: an entry in large units is small.
    basis: list[Array] = []
    for row in directions / sd:
        for _ in range(2):
            for other in basis:
                row = row - (other @ row) * other
            row = row / jnp.max(jnp.abs(row))
            row = row / jnp.linalg.norm(row)
        basis.append(row)
    return jnp.stack(basis)
