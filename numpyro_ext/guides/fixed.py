"""Numbers of a guide that no optimiser moves or keeps moments of."""

from dataclasses import dataclass
from functools import cached_property
import hashlib
from typing import Any

import jax
import numpy as np
import numpyro
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import IdentityTransform, Transform

from numpyro_ext._model.arguments import is_traced


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Held:
    """An array as a tree without leaves, of which gradients and moments are empty too; equal to
    others of the same numbers, as JAX asks of a program."""

    value: Any

    @cached_property
    def _digest(self) -> bytes:
        x = np.asarray(self.value)
        return hashlib.sha256(f"{x.dtype} {x.shape}".encode() + x.tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


class Fixed(type(constraints.real)):  # pyright: ignore[reportGeneralTypeIssues]
    """The constraint of a parameter that an optimiser has as :class:`Held`."""


class _Hold(IdentityTransform):
    def __call__(self, x: Any) -> Any:
        return x.value if isinstance(x, Held) else x

    def _inverse(self, y: Any) -> Any:
        return y if is_traced(y) else Held(y)


@biject_to.register(Fixed)
def _hold(_: Fixed) -> Transform:
    return _Hold()


def fixed_param(name: str, value: Any = None) -> Any:
    """``numpyro.param`` of numbers that stay as they are; ``svi.get_params`` gives them with the
    others, while the state of the optimiser has none of them among its leaves."""
    return numpyro.param(name, value, constraint=Fixed())
