"""The base of the bijections of vectors: batches, cached log determinants, pytrees, equality."""

from abc import abstractmethod
import functools
from typing import Any, ClassVar

import jax
from jax import Array
import jax.numpy as jnp
from jax.tree_util import Partial, all_leaves, tree_flatten
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.distributions.util import array_equiv

from numpyro_ext._typing import Float


def as_pytree(net: Any) -> Any:
    """``net`` with its weights as leaves: from a closure they cannot cross ``jit`` or ``vmap``."""
    if isinstance(net, functools.partial) and not isinstance(net, Partial):
        return Partial(net.func, *net.args, **net.keywords)
    return Partial(net) if all_leaves([net]) else net


def checked_output(name: str, x: Array, out: Any, shape: tuple[int, ...], because: str) -> Array:
    """The output of a network for x; an error unless it has this shape."""
    if (own := jax.tree.map(jnp.shape, out)) != shape:
        raise ValueError(
            f"{name} turns shape {x.shape} into {own}; it must give {shape}, {because}."
        )
    return out


def softly_bounded(s_raw: Array, clamp: float | Array) -> Array:
    """``clamp * tanh(s_raw / clamp)``: the identity near 0, between ``-clamp`` and ``clamp``."""
    return clamp * jnp.tanh(s_raw / clamp)


class VectorTransform(Transform):
    r"""Base of the bijections of :math:`R^d`, in the shape of NumPyro's ``Transform``.

    A subclass writes :meth:`call_with_intermediates`, which returns :math:`(f(x), \log|\det
    \partial f / \partial x|)`, and ``_inverse``. It lists in ``arrays`` the attributes with arrays
    in them (leaves of the pytree, so that they cross ``jit``, ``vmap`` and ``grad``) and in
    ``static`` the others. All leading axes are batch axes.

    **Reference:** Papamakarios, Nalisnick, Rezende, Mohamed and Lakshminarayanan, *Normalizing
    flows for probabilistic modeling and inference* (JMLR 2021), section 2.

    >>> class Scale(VectorTransform):
    ...     arrays = ("scale",)
    ...     def __init__(self, scale):
    ...         self.scale = scale
    ...     def call_with_intermediates(self, x):
    ...         return self.scale * x, x.shape[-1] * jnp.log(self.scale) + 0 * x[..., 0]
    ...     def _inverse(self, y):
    ...         return y / self.scale
    >>> double = Scale(jnp.array(2.0))
    >>> x = jnp.ones(3)
    >>> print(f"{double.log_abs_det_jacobian(x, double(x)):.3f}")
    2.079
    """

    arrays: ClassVar[tuple[str, ...]] = ()
    static: ClassVar[tuple[str, ...]] = ()

    @property
    def domain(self) -> constraints.Constraint:
        return constraints.real_vector

    codomain = domain

    @abstractmethod
    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        """``(y, log |det|)`` of shapes ``(*batch, d)`` and ``(*batch,)``."""

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.call_with_intermediates(x)[0]

    def log_abs_det_jacobian(
        self,
        x: Float[Array, "*batch d"],
        y: Float[Array, "*batch d"],
        intermediates: Array | None = None,
    ) -> Float[Array, "*batch"]:
        return self.call_with_intermediates(x)[1] if intermediates is None else intermediates

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[tuple[str, ...], dict[str, Any]]]:
        leaves = tuple(getattr(self, name) for name in self.arrays)
        return leaves, (self.arrays, {name: getattr(self, name) for name in self.static})

    def eq(self, other: object, static: bool = False) -> Any:
        if type(other) is not type(self):
            return False
        if any(getattr(self, name) != getattr(other, name) for name in self.static):
            return False
        ours, structure = tree_flatten([getattr(self, name) for name in self.arrays])
        theirs, other_structure = tree_flatten([getattr(other, name) for name in self.arrays])
        if structure != other_structure:
            return False
        same: Any = True
        for a, b in zip(ours, theirs, strict=True):
            same = same & array_equiv(a, b, static=static)
        return same
