"""Message passing: SVGD with a kernel of its own for each block of coordinates.

Reference: Zhuo, Liu, Shi, Zhu, Chen and Zhang, *Message passing Stein variational gradient descent*
(ICML 2018).
"""

from collections.abc import Sequence
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext.particles.base import ParticleField
from numpyro_ext.particles.pairs import stein_sums

__all__ = ["checked_blocks", "message_passing_velocity"]

Blocks = Sequence[tuple[Sequence[int], Sequence[int]]]


def checked_blocks(blocks: Any) -> Blocks:
    """Pairs of lists; the coordinates that a block moves come first among those that it sees."""
    checked, moved = [], []
    for own, seen in blocks:
        own, seen = [int(a) for a in own], [int(a) for a in seen]
        if not own or min([*own, *seen]) < 0 or not set(own) <= set(seen):
            raise ValueError(
                f"blocks has the pair ({own}, {seen}); it must be coordinates that the block moves,"
                " and its neighbourhood, which contains them."
            )
        checked.append((own, own + sorted(set(seen) - set(own))))
        moved += own
    if len(set(moved)) < len(moved):
        raise ValueError(f"blocks move {sorted(moved)}; every coordinate must be in one block.")
    return checked


def message_passing_velocity(
    field: ParticleField, blocks: Blocks, x: Array, grad_log_p: Array
) -> Array:
    """The velocity of SVGD, in each block with the kernel on its neighbourhood alone."""
    num_moved = sum(len(own) for own, _ in blocks)
    if num_moved != x.shape[1]:
        raise ValueError(
            f"blocks move {num_moved} coordinates, but a particle has {x.shape[1]}; every"
            " coordinate must be in one block."
        )
    v = jnp.zeros_like(x)
    for own, seen in blocks:
        own, seen = np.array(own), np.array(seen)
        y = x[:, seen]
        kernel = field.kernel.resolve(y)
        # Zeros for the coordinates that are seen but not moved.
        g = jnp.zeros_like(y).at[:, : len(own)].set(grad_log_p[:, own])
        sums = field.by_rows(lambda yi, k=kernel, y=y, g=g: stein_sums(k, yi, y, g)[1], y)
        v = v.at[:, own].set(sums[:, : len(own)] / len(x))
    return v
