"""Particles at which the log density or a derivative is not finite: the others move without them.

A kernel couples all particles, so that one NaN would be the end of all. A lost particle stays where
it is. In the velocities of the others another particle stands in its place, so that a far one
changes neither the bandwidth nor the spread.
"""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext._model.losses import reported

__all__ = ["Lost"]

_MESSAGE = (
    "{count} of %d particles are where the log density is NaN or a derivative of it is not finite."
    " They stay where they are while the others move without them, and are no draws of the"
    " posterior. Mend the model there, or start nearer to the posterior, or take smaller steps."
)


class Lost(NamedTuple):
    """Which of m particles are lost, and which ones stand in for them."""

    where: Array
    """``(m,)``, True for those that are lost."""
    stand_ins: Array
    """``(m,)``, each particle itself, or for a lost one the next of the others in turn."""

    @classmethod
    def of(cls, log_p: Array, *derivatives: Array | None) -> "Lost":
        """The particles whose log density is NaN, or one of whose derivatives is not finite.

        Where that holds of all, none is lost, and the step itself is not finite.
        """
        where, m = jnp.isnan(log_p), log_p.shape[0]
        for g in derivatives:
            if g is not None:
                where |= ~jnp.all(jnp.isfinite(g).reshape(m, -1), axis=1)
        where &= ~jnp.all(where)
        others = jnp.argsort(where, stable=True)
        turn = (jnp.cumsum(where) - 1) % (m - jnp.sum(where))
        return cls(where, jnp.where(where, others[turn], jnp.arange(m)))

    def replaced(self, tree: Any) -> Any:
        """Rows of all particles, with those of the stand-ins in place of the lost ones'."""
        return jax.tree.map(lambda x: x[self.stand_ins], tree)

    def kept(self, new: Any, old: Any) -> Any:
        """The new ``(m, d)`` rows, and the old ones of the lost particles."""
        return jax.tree.map(lambda a, b: jnp.where(self.where[:, None], b, a), new, old)

    def reported(self) -> "Lost":
        """The same, whose ``where`` says how many are lost while the program runs."""
        count = reported(jnp.sum(self.where), _MESSAGE % self.where.size)
        return self._replace(where=self.where & (count > 0))
