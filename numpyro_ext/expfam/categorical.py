"""The categorical distribution, with one log weight for each category."""

from typing import Annotated, Any, NamedTuple

from jax import Array, nn, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpyro.distributions as dist

from numpyro_ext._checks import check_count
from numpyro_ext._typing import Float, Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.leaves import canonical


class CategoricalNatural(NamedTuple):
    """Natural parameters of :class:`Categorical`: log weights, which need not be normalised."""

    logits: Annotated[Array, "K"]


class CategoricalMean(NamedTuple):
    """Mean parameters of :class:`Categorical`: probabilities."""

    probs: Annotated[Array, "K"]


CategoricalStandard = CategoricalMean


class Categorical(ExponentialFamily[CategoricalNatural, CategoricalMean, CategoricalStandard]):
    r"""Categorical distribution of integers z in 0, ..., K - 1.

    .. math:: t(z) = e_z, \qquad A(n) = \log \sum_k e^{n_k}, \qquad \mathrm{E}\, t = softmax(n).

    The representation is overcomplete: adding a number to all logits changes nothing but A. A
    category of probability exactly 0 has no finite natural parameter.

    References: Wainwright and Jordan (2008), example 3, as in :class:`ExponentialFamily`.

    >>> from numpyro_ext.expfam import Categorical
    >>> natural = Categorical.from_standard(probs=jnp.array([0.2, 0.5, 0.3]))
    >>> print(f"{Categorical.log_prob(natural, 2):.4f} {Categorical.entropy(natural):.4f}")
    -1.2040 1.0297
    """

    domain = "positive probs that sum to 1"

    @classmethod
    def from_standard(cls, probs: Any) -> CategoricalNatural:
        (probs,) = canonical(CategoricalStandard(probs))
        normalised = jnp.abs(jnp.sum(probs, axis=-1) - 1) < 1e-4
        return cls._constructed(CategoricalNatural(jnp.log(probs)), normalised)

    @classmethod
    def statistics(cls, value: Any, num_categories: int | None = None) -> CategoricalMean:
        """The unit vectors of the values in ``num_categories`` dimensions."""
        K = check_count("num_categories", num_categories)
        return CategoricalMean(nn.one_hot(jnp.asarray(value), K))

    @classmethod
    def log_base_measure(cls, value: Any) -> Float[Array, "*batch"]:
        return jnp.zeros(jnp.shape(value))

    @classmethod
    def log_prob(cls, natural: CategoricalNatural, value: Any) -> Float[Array, "*batch"]:
        (logits,) = cls._checked(CategoricalNatural, natural)
        t = cls.statistics(value, logits.shape[-1])
        return cls.inner(CategoricalNatural(nn.log_softmax(logits)), t)

    @classmethod
    def entropy(cls, natural: CategoricalNatural) -> Float[Array, "*batch"]:
        (logits,) = cls._checked(CategoricalNatural, natural)
        return super().entropy(CategoricalNatural(nn.log_softmax(logits)))

    @classmethod
    def _log_partition(cls, natural: CategoricalNatural) -> Array:
        return logsumexp(natural.logits, axis=-1)

    @classmethod
    def _mean(cls, natural: CategoricalNatural) -> CategoricalMean:
        return CategoricalMean(nn.softmax(natural.logits))

    @classmethod
    def _natural(cls, mean: CategoricalMean) -> CategoricalNatural:
        return CategoricalNatural(jnp.log(mean.probs))

    @classmethod
    def _sample(cls, rng_key: Array, natural: CategoricalNatural, sample_shape: Shape) -> Array:
        shape = sample_shape + natural.logits.shape[:-1]
        return random.categorical(rng_key, natural.logits, shape=shape)

    @classmethod
    def _to_distribution(cls, natural: CategoricalNatural) -> Any:
        return dist.Categorical(logits=natural.logits)
