"""Parameters of exponential families: trees with leaves that declare their shapes."""

from functools import cache
from typing import Any, NamedTuple, get_type_hints

from jax import Array
import jax.numpy as jnp

from numpyro_ext.expfam.linalg import symmetric


class Leaf(NamedTuple):
    """The declaration of one field of a ``NamedTuple`` of parameters."""

    name: str
    dims: tuple[str, ...]  # after the batch; a letter stands for one size in the whole tuple
    symmetric: bool  # whether only the symmetric part of the matrix counts


@cache
def leaves_of(kind: type) -> tuple[Leaf, ...]:
    """The fields of a class with annotations as ``Annotated[Array, "d d symmetric"]``."""
    leaves = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        dims, symmetric = hint.__metadata__[0].split(), False
        if dims and dims[-1] == "symmetric":
            dims, symmetric = dims[:-1], True
        leaves.append(Leaf(name, tuple(dims), symmetric))
    return tuple(leaves)


def canonical(parameters: Any) -> Any:
    """Parameters as arrays of one floating type and batch shape, with symmetric matrices."""
    kind = type(parameters)
    leaves, arrays = leaves_of(kind), [jnp.asarray(value) for value in parameters]
    dtype, sizes = jnp.result_type(float, *arrays), {}
    for leaf, array in zip(leaves, arrays, strict=True):
        _check_shape(kind, leaf, array, sizes)
    cuts = [array.ndim - len(leaf.dims) for leaf, array in zip(leaves, arrays, strict=True)]
    batches = [array.shape[:cut] for array, cut in zip(arrays, cuts, strict=True)]
    batch, broadcast = jnp.broadcast_shapes(*batches), []
    for leaf, array, cut in zip(leaves, arrays, cuts, strict=True):
        array = symmetric(array.astype(dtype)) if leaf.symmetric else array.astype(dtype)
        broadcast.append(jnp.broadcast_to(array, batch + array.shape[cut:]))
    return kind(*broadcast)


def _check_shape(kind: type, leaf: Leaf, array: Array, sizes: dict[str, tuple[int, str]]) -> None:
    wanted = f"({', '.join(leaf.dims)})"
    where = f"{leaf.name} of {kind.__name__} has shape {array.shape}"
    if array.ndim < len(leaf.dims):
        raise ValueError(f"{where}; it must end in {wanted}.")
    for dim, size in zip(leaf.dims, array.shape[array.ndim - len(leaf.dims) :], strict=True):
        letter, _, less = dim.partition("-")
        size += int(less or 0)
        expected, owner = sizes.setdefault(letter, (size, leaf.name))
        if size != expected:
            raise ValueError(
                f"{where}; it must end in {wanted}, with {letter} = {expected} as in {owner}."
            )


def event_sum(kind: type, first: Any, second: Any) -> Array:
    """Sum over the leaves and their event dimensions of the products of two tuples."""
    total = jnp.zeros(())
    for leaf, a, b in zip(leaves_of(kind), first, second, strict=True):
        total = total + jnp.sum(a * b, axis=tuple(range(-len(leaf.dims), 0)))
    return total


def _combined(name: str, naturals: tuple[Any, ...], sign: float) -> Any:
    first, *rest = map(canonical, naturals)
    kind = type(first)
    for other in rest:
        if type(other) is not kind:
            raise TypeError(
                f"{name} was given a {kind.__name__} and a {type(other).__name__}; the factors must"
                " belong to one family."
            )
        for leaf, a, b in zip(leaves_of(kind), first, other, strict=True):
            ndim = len(leaf.dims)
            if a.shape[a.ndim - ndim :] != b.shape[b.ndim - ndim :]:
                raise ValueError(
                    f"{leaf.name} of {kind.__name__} has shape {a.shape} in one factor and"
                    f" {b.shape} in another."
                )
        first = kind(*(a + sign * b for a, b in zip(first, other, strict=True)))
    return first


def multiply[N](first: N, *others: N) -> N:
    r"""Product of densities of one family: the sum of their natural parameters, leaf by leaf.

    .. math:: p(v | n_1)\, p(v | n_2) \propto p(v | n_1 + n_2).

    The statistics of data are added in the same way, which is the conjugate update of a prior.

    >>> from numpyro_ext.expfam import Beta, BetaNatural, multiply
    >>> posterior = multiply(Beta.from_standard(2.0, 2.0), BetaNatural(6.0, 4.0))
    >>> float(Beta.to_standard(posterior).concentration1)
    8.0
    """
    return _combined("multiply", (first, *others), 1.0)


def divide[N](numerator: N, denominator: N) -> N:
    r"""Quotient of densities of one family: the difference of their natural parameters.

    .. math:: p(v | n_1) / p(v | n_2) \propto p(v | n_1 - n_2).

    The quotient may be improper: ask ``in_domain`` of the family before it is used as a density.

    >>> from numpyro_ext.expfam import Bernoulli, BernoulliNatural, divide
    >>> print(divide(BernoulliNatural(1.5), BernoulliNatural(0.25)).log_odds)
    1.25
    """
    return _combined("divide", (numerator, denominator), -1.0)
