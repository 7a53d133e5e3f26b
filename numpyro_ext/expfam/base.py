"""Exponential families: their maps between parameters, and everything that follows from them."""

from abc import ABC, abstractmethod
from types import get_original_bases
from typing import Any, ClassVar, get_args

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp

from numpyro_ext._typing import Bool, Float, Shape
from numpyro_ext.expfam.leaves import canonical, event_sum, leaves_of


class ExponentialFamily[N: tuple, M: tuple, S: tuple](ABC):
    r"""Base of the families: a class without state, with methods that are called on the class.

    .. math::
        p(v \mid n) = h(v) \exp\{\langle n, t(v) \rangle - A(n)\}, \qquad
        \mu = \mathrm{E}\, t(v) = \nabla A(n).

    Natural parameters n and means :math:`\mu` are two ``NamedTuple``\ s with leaves of the same
    shapes in the same order, so that the product pairs them leaf by leaf. Batch dimensions lead,
    and the batch shapes of the leaves broadcast. Matrices are full, and only the symmetric part of
    a symmetric one counts: the representation is overcomplete, and gradients are symmetric.
    Parameters outside the domain give NaN, never another number; :meth:`in_domain` tells
    beforehand.

    **A family of your own.** Subclass ``ExponentialFamily[Natural, Mean, Standard]``, with three
    tuples that carry the shapes of their leaves by ``Annotated[Array, "d d symmetric"]``; say in
    ``domain`` what the standard parameters must satisfy; and write :meth:`statistics` and the
    methods with an underscore, which are given arrays of one floating type and of one batch shape,
    with symmetric matrices.

    **Limits of float32.** :meth:`kl` is a difference of numbers as large as the counts in n, so
    that it needs double precision where these are above about 1e4.

    References: Wainwright and Jordan, *Graphical models, exponential families, and variational
    inference* (2008), section 3.
    """

    Natural: ClassVar[type[Any]]
    """The type of natural parameters."""
    Mean: ClassVar[type[Any]]
    """The type of mean parameters and statistics, with the leaves of ``Natural``."""
    Standard: ClassVar[type[Any]]
    """The type of the parameters that textbooks use."""
    domain: ClassVar[str]
    """The conditions on the standard parameters, in words, for the message of an error."""
    distribution: ClassVar[Any]
    """The distribution of NumPyro that takes the standard parameters in their order."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in get_original_bases(cls):
            if types := get_args(base):
                cls.Natural, cls.Mean, cls.Standard = types

    @classmethod
    def from_standard(cls, *args: Any, **kwargs: Any) -> N:
        """Natural parameters from the fields of ``Standard``; an error outside the domain."""
        standard = canonical(cls.Standard(*args, **kwargs))
        return cls._constructed(cls._from_standard(standard))

    @classmethod
    def log_partition(cls, natural: N) -> Float[Array, "*batch"]:
        """A(n), of the batch shape."""
        return cls._log_partition(cls._checked(cls.Natural, natural))

    @classmethod
    def mean(cls, natural: N) -> M:
        """The mean of the statistics, which is the gradient of A, in closed form."""
        return cls._mean(cls._checked(cls.Natural, natural))

    @classmethod
    def natural(cls, mean: M) -> N:
        """The natural parameters that have this mean; NaN where there are none."""
        return cls._natural(cls._checked(cls.Mean, mean))

    @classmethod
    def to_standard(cls, natural: N) -> S:
        """The textbook parameters."""
        return cls._to_standard(cls._checked(cls.Natural, natural))

    @classmethod
    def in_domain(cls, natural: N) -> Bool[Array, "*batch"]:
        """Return whether the density exists, of the batch shape; NaN and infinity are outside."""
        checked = cls._checked(cls.Natural, natural)
        inside = cls._in_domain(checked)
        for leaf, array in zip(leaves_of(cls.Natural), checked, strict=True):
            inside &= jnp.all(jnp.isfinite(array), axis=tuple(range(-len(leaf.dims), 0)))
        return inside

    @classmethod
    def sample(cls, rng_key: Array, natural: N, sample_shape: Shape = ()) -> Any:
        """Draws of shape ``sample_shape + batch + event``, differentiable where possible."""
        return cls._sample(rng_key, cls._checked(cls.Natural, natural), tuple(sample_shape))

    @classmethod
    def to_distribution(cls, natural: N) -> Any:
        """The distribution of NumPyro that has this density."""
        return cls._to_distribution(cls._checked(cls.Natural, natural))

    @classmethod
    def inner(cls, natural: N, mean: M) -> Float[Array, "*batch"]:
        """The product of natural parameters and means, summed over leaves and event dimensions."""
        n, m = cls._checked(cls.Natural, natural), cls._checked(cls.Mean, mean)
        return event_sum(cls.Natural, n, m)

    @classmethod
    def log_base_measure(cls, value: Any) -> Float[Array, "*batch"]:
        """log h(v), of the batch shape of ``value``."""
        t = canonical(cls.statistics(value))
        batch = t[0].shape[: t[0].ndim - len(leaves_of(cls.Mean)[0].dims)]
        return jnp.broadcast_to(cls._log_base_measure(t), batch)

    @classmethod
    def log_prob(cls, natural: N, value: Any) -> Float[Array, "*batch"]:
        """The normalised log density at ``value``, of a batch shape that broadcasts with n's."""
        t = cls.statistics(value)
        return cls.inner(natural, t) - cls.log_partition(natural) + cls._log_base_measure(t)

    @classmethod
    def kl(cls, q: N, p: N) -> Float[Array, "*batch"]:
        """KL(q || p), which is <q - p, mean(q)> - A(q) + A(p)."""
        q, p = cls._checked(cls.Natural, q), cls._checked(cls.Natural, p)
        gap = cls.Natural(*(a - b for a, b in zip(q, p, strict=True)))
        return cls.inner(gap, cls.mean(q)) - cls.log_partition(q) + cls.log_partition(p)

    @classmethod
    def entropy(cls, natural: N) -> Float[Array, "*batch"]:
        """-E log p(v), with respect to the measure in which :meth:`log_prob` is a density."""
        mean = cls.mean(natural)
        below = cls.inner(natural, mean) + cls._log_base_measure(mean)
        return cls.log_partition(natural) - below

    # Methods of each family, which the public ones above call with checked arguments.

    @classmethod
    def _from_standard(cls, standard: S) -> N:
        return cls._natural(cls.Mean(*standard))

    @classmethod
    @abstractmethod
    def statistics(cls, value: Any) -> M:
        """t(v): the mean of a point mass at ``value``."""

    @classmethod
    @abstractmethod
    def _log_partition(cls, natural: N) -> Array: ...

    @classmethod
    @abstractmethod
    def _mean(cls, natural: N) -> M: ...

    @classmethod
    @abstractmethod
    def _natural(cls, mean: M) -> N: ...

    @classmethod
    def _to_standard(cls, natural: N) -> S:
        """By default the standard parameters are the means."""
        return cls.Standard(*cls._mean(natural))

    @classmethod
    def _in_domain(cls, natural: N) -> Array:
        return jnp.isfinite(cls._log_partition(natural))

    @classmethod
    @abstractmethod
    def _sample(cls, rng_key: Array, natural: N, sample_shape: Shape) -> Any: ...

    @classmethod
    def _to_distribution(cls, natural: N) -> Any:
        return cls.distribution(*cls._to_standard(natural))

    @classmethod
    def _log_base_measure(cls, mean: M) -> Array:
        """log h; linear in the statistics of all families but Poisson, so that this is its mean."""
        return jnp.zeros(())

    @classmethod
    def _checked(cls, kind: type, parameters: Any) -> Any:
        if not isinstance(parameters, kind):
            raise TypeError(
                f"{cls.__name__} was given a {type(parameters).__name__} where it takes a"
                f" {kind.__name__}."
            )
        return canonical(parameters)

    @classmethod
    def _constructed(cls, natural: Any, inside: Any = True, in_domain: Any = None) -> N:
        """The result of ``from_standard``: checked where the values are known, NaN otherwise."""
        natural = canonical(natural)
        inside = inside & (cls.in_domain(natural) if in_domain is None else in_domain)
        if not isinstance(inside, Tracer):
            if not bool(jnp.all(inside)):
                raise ValueError(f"{cls.__name__}.from_standard requires {cls.domain}.")
            return natural
        outside = jnp.logical_not(inside)
        return cls.Natural(
            *(
                jnp.where(jnp.expand_dims(outside, tuple(range(-len(leaf.dims), 0))), jnp.nan, a)
                for leaf, a in zip(leaves_of(cls.Natural), natural, strict=True)
            )
        )


class LocationFamily[N: tuple, M: tuple, S: tuple](ExponentialFamily[N, M, S]):
    """A normal family with the linear parameter ``h``; its densities are taken at its mean, so that
    float32 is enough wherever the mean is."""

    @classmethod
    @abstractmethod
    def _slope(cls, natural: N, x: Array) -> Array:
        """The gradient of the log density at ``x``, which is ``h`` of the density of v - x."""

    @classmethod
    def log_prob(cls, natural: N, value: Any) -> Float[Array, "*batch"]:
        n = cls._checked(cls.Natural, natural)
        x = cls.mean(n)[0]
        return super().log_prob(n._replace(h=jnp.zeros_like(x)), jnp.asarray(value) - x)

    @classmethod
    def kl(cls, q: N, p: N) -> Float[Array, "*batch"]:
        n, m = cls._checked(cls.Natural, q), cls._checked(cls.Natural, p)
        x = cls.mean(n)[0]
        return super().kl(n._replace(h=jnp.zeros_like(x)), m._replace(h=cls._slope(m, x)))

    @classmethod
    def entropy(cls, natural: N) -> Float[Array, "*batch"]:
        n = cls._checked(cls.Natural, natural)
        return super().entropy(n._replace(h=jnp.zeros_like(n.h)))
