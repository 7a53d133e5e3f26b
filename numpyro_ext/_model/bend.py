"""The map between a hierarchy and coordinates in which the scales of effects do not move."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

WIDEST = 8
"""Numbers of one effect, such as intercept and slope, up to which an effect is a block."""
_FAR = 60.0
"""The logarithm of what a precision may change by, which single precision holds."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Bend:
    r"""
    The map :math:`z = c + T(x - c)` that leaves b globals g as they are and, with the distance d of
    these from the center, moves and scales each effect and shears the effects of one group.

    An effect has the precision :math:`p\, e^{a d} + (1 - p)\, e^{\tilde a d}` by its prior and by
    its rows, in units of the precision at the center, and the pulls to both sides of it :math:`w`,
    which change by K d and :math:`\tilde K d`. So its standard deviation and mean change by

    .. math::
        s = \big(p\, e^{a d} + (1 - p)\, e^{\tilde a d}\big)^{-1/2}, \qquad
        m = s^2 \big(e^{a d} (K d - w) + e^{\tilde a d} (\tilde K d + w)\big) ,

        T(v) = m + s\, e^{C d} \big(v - (K + \tilde K + w (\tilde a - a)) d\big)
        + \sum_l (D_l d)\, v_l .

    At the center it is the identity, also in its first derivative. For normal effects with normal
    rows it is the conditional normal at any g, of which a is -2 for the logarithm of the prior's
    scale: centred where rows say much of an effect, and decentred where they say little. C and D,
    of effects of several numbers, are to first order. Numbers that go together, such as a path in
    time, are first turned to coordinates in which prior and rows are both diagonal.

    :param of: ``(b,)``, the places of g in the flat order, of which none is itself scaled.
    :param of_effects: p and w, ``(2, n)``, 0 for what is no effect.
    :param of_parts: a, :math:`\tilde a`, K and :math:`\tilde K`, ``(4, n, b)``.
    :param slopes: C, ``(n, b)``.
    :param rows: ``(m,)``, the places of numbers that are sheared.
    :param columns: ``(m,)``, the places l before them in the same group.
    :param shears: D, ``(m, b)``.
    :param turned: ``(t,)``, the places of numbers that go together.
    :param turns: the matrix Q of their coordinates, and its inverse, ``(2, t, t)``.
    """

    of: Array
    of_effects: Array
    of_parts: Array
    slopes: Array
    rows: Array
    columns: Array
    shears: Array
    turned: Array
    turns: Array

    def __call__(self, v: Array) -> tuple[Array, Array]:
        """T(v) of ``(..., n)``, and the logarithm of its determinant."""
        d, v = v[..., self.of], self._turn(v, 1)
        log_scale, mean, before = self._moves(d)
        bent = mean + jnp.exp(log_scale) * (v - before)
        bent = bent.at[..., self.rows].add((d @ self.shears.T) * v[..., self.columns])
        return self._turn(bent, 0), jnp.sum(log_scale, -1)

    def inverse(self, bent: Array) -> Array:
        """v of T(v)."""
        d, bent = bent[..., self.of], self._turn(bent, 1)
        log_scale, mean, before = self._moves(d)
        scale, shear = jnp.exp(-log_scale), d @ self.shears.T
        v = before + (bent - mean) * scale
        # Of a group of w effects the shear has the power w of 0.
        for _ in range(WIDEST - 1 if self.rows.size else 0):
            moved = bent.at[..., self.rows].add(-shear * v[..., self.columns])
            v = before + (moved - mean) * scale
        return self._turn(v, 0)

    def _turn(self, v: Array, to: int) -> Array:
        """The vectors with other coordinates of ``turned``: 1 for those, 0 for the usual ones."""
        if not self.turned.size:
            return v
        return v.at[..., self.turned].set(v[..., self.turned] @ self.turns[to].T)

    def _moves(self, d: Array) -> tuple[Array, Array, Array]:
        """The logarithm of an effect's scale, its mean, and what of the mean is linear in d."""
        p, w = self.of_effects
        of_prior, of_rows, K, K_rows = (d @ x.T for x in self.of_parts)
        prior, rows = (jnp.exp(jnp.clip(x, -_FAR, _FAR)) for x in (of_prior, of_rows))
        precision = p * prior + (1 - p) * rows
        mean = (prior * (K - w) + rows * (K_rows + w)) / precision
        before = K + K_rows + w * (of_rows - of_prior)
        return d @ self.slopes.T - jnp.log(precision) / 2, mean, before

    @property
    def packed(self) -> tuple[Array, Array, Array, Array]:
        """The numbers of globals ``(5 n + m, b)``, of effects, the turns, and all places ``(b + 2 m
        + t,)``."""
        of_globals = jnp.concatenate([*self.of_parts, self.slopes, self.shears])
        places = jnp.concatenate([self.of, self.rows, self.columns, self.turned])
        return of_globals, self.of_effects, self.turns, places

    @classmethod
    def unpacked(cls, of_globals: Array, of_effects: Array, turns: Array, places: Any) -> "Bend":
        """The bend of ``packed``."""
        n, b = of_effects.shape[1], of_globals.shape[1]
        m = len(of_globals) - 5 * n
        ends = np.cumsum([0, b, m, m, turns.shape[1]])
        of, rows, columns, turned = (places[i:j] for i, j in pairwise(ends))
        parts, slopes = of_globals[: 4 * n].reshape(4, n, b), of_globals[4 * n : 5 * n]
        shears = of_globals[5 * n :]
        return cls(of, of_effects, parts, slopes, rows, columns, shears, turned, turns)

    @classmethod
    def straight(cls, size: int, of: Any = (0,), rows: Any = (), columns: Any = ()) -> "Bend":
        """The identity."""
        of, rows, columns = (jnp.asarray(x, int) for x in (of, rows, columns))
        b, zeros = len(of), jnp.zeros
        parts = zeros((2, size)), zeros((4, size, b)), zeros((size, b))
        rest = zeros((len(rows), b)), zeros(0, int), zeros((2, 0, 0))
        return cls(of, *parts, rows, columns, *rest)

    def astype(self, dtype: Any) -> "Bend":
        """The same in another precision."""
        names = "of_effects", "of_parts", "slopes", "shears", "turns"
        return replace(self, **{name: jnp.asarray(getattr(self, name), dtype) for name in names})
