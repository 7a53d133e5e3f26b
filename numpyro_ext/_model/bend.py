"""The map between a hierarchy and coordinates in which the scales of effects do not move."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

WIDEST = 8
"""Numbers of one effect, such as intercept and slope, up to which an effect is a block."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["of", "slopes", "rows", "columns", "shears"],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class Bend:
    r"""
    The map :math:`z = c + T(x - c)` that leaves b globals g as they are and, with the distance d of
    these from the center, scales each effect and shears the effects of one group:

    .. math:: T(v)_j = \exp(C_j d)\, v_j + \sum_k (D_{jk} d)\, v_k .

    At the center it is the identity, also in its first derivative. Where rows say little of an
    effect, its scale is the prior's at any g (C = 1 for the logarithm of a scale: the coordinates
    are decentred); where they say much, it is theirs (C = 0).

    :param of: ``(b,)``, the places of g in the flat order, of which none is itself scaled.
    :param slopes: C, ``(n, b)``, 0 for what is no effect.
    :param rows: ``(m,)``, the places j of numbers that are sheared.
    :param columns: ``(m,)``, the places k before them in the same group.
    :param shears: D, ``(m, b)``.
    """

    of: Array
    slopes: Array
    rows: Array
    columns: Array
    shears: Array

    def __call__(self, v: Array) -> tuple[Array, Array]:
        """T(v) of ``(..., n)``, and the logarithm of its determinant."""
        d = v[..., self.of]
        log_scale = d @ self.slopes.T
        bent = jnp.exp(log_scale) * v
        bent = bent.at[..., self.rows].add((d @ self.shears.T) * v[..., self.columns])
        return bent, jnp.sum(log_scale, -1)

    def inverse(self, bent: Array) -> Array:
        """v of T(v)."""
        d = bent[..., self.of]
        scale, shear = jnp.exp(-(d @ self.slopes.T)), d @ self.shears.T
        v = bent * scale
        # Of a group of w effects the shear has the power w of 0.
        for _ in range(WIDEST - 1 if self.rows.size else 0):
            moved = bent.at[..., self.rows].add(-shear * v[..., self.columns])
            v = moved * scale
        return v

    @property
    def packed(self) -> tuple[Array, Array]:
        """All numbers ``(n + m, b)``, and all places ``(b + 2 m,)``."""
        numbers = jnp.concatenate([self.slopes, self.shears])
        return numbers, jnp.concatenate([self.of, self.rows, self.columns])

    @classmethod
    def unpacked(cls, numbers: Array, places: Array, size: int) -> "Bend":
        """The bend of ``packed``, of n coordinates."""
        b, m = numbers.shape[1], len(numbers) - size
        of, rows, columns = jnp.split(jnp.asarray(places).astype(int), (b, b + m))
        return cls(of, numbers[:size], rows, columns, numbers[size:])

    @classmethod
    def straight(cls, size: int) -> "Bend":
        """The identity."""
        nowhere = jnp.zeros(0, int)
        return cls(jnp.zeros(1, int), jnp.zeros((size, 1)), nowhere, nowhere, jnp.zeros((0, 1)))

    def astype(self, dtype: Any) -> "Bend":
        """The same in another precision."""
        slopes, shears = (jnp.asarray(x, dtype) for x in (self.slopes, self.shears))
        return Bend(self.of, slopes, self.rows, self.columns, shears)
