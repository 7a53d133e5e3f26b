"""The Bernoulli distribution, with log odds."""

from typing import Annotated, Any, NamedTuple

from jax import Array, nn, random
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_ext._typing import Shape
from numpyro_ext.expfam.base import ExponentialFamily


class BernoulliNatural(NamedTuple):
    """Natural parameters of :class:`Bernoulli`: log(p / (1 - p))."""

    log_odds: Annotated[Array, ""]


class BernoulliMean(NamedTuple):
    """Mean parameters of :class:`Bernoulli`: the probability of 1."""

    prob: Annotated[Array, ""]


BernoulliStandard = BernoulliMean


class Bernoulli(ExponentialFamily[BernoulliNatural, BernoulliMean, BernoulliStandard]):
    r"""Bernoulli distribution of z in 0, 1.

    .. math:: t(z) = z, \qquad A(n) = \log(1 + e^n), \qquad \mathrm{E}\, t = 1 / (1 + e^{-n}).

    References: Wainwright and Jordan (2008), table 3.1, as in :class:`ExponentialFamily`.

    >>> from numpyro_ext.expfam import Bernoulli
    >>> natural = Bernoulli.from_standard(prob=0.75)
    >>> print(f"{natural.log_odds:.4f} {Bernoulli.log_partition(natural):.4f}")
    1.0986 1.3863
    """

    domain = "a prob between 0 and 1, both excluded"

    @classmethod
    def statistics(cls, value: Any) -> BernoulliMean:
        return BernoulliMean(jnp.asarray(value, jnp.result_type(float)))

    @classmethod
    def _log_partition(cls, natural: BernoulliNatural) -> Array:
        return nn.softplus(natural.log_odds)

    @classmethod
    def _mean(cls, natural: BernoulliNatural) -> BernoulliMean:
        return BernoulliMean(nn.sigmoid(natural.log_odds))

    @classmethod
    def _natural(cls, mean: BernoulliMean) -> BernoulliNatural:
        return BernoulliNatural(jnp.log(mean.prob) - jnp.log1p(-mean.prob))

    @classmethod
    def _sample(cls, rng_key: Array, natural: BernoulliNatural, sample_shape: Shape) -> Array:
        prob = nn.sigmoid(natural.log_odds)
        drawn = random.bernoulli(rng_key, prob, sample_shape + prob.shape)
        return drawn.astype(jnp.result_type(int))

    @classmethod
    def _to_distribution(cls, natural: BernoulliNatural) -> dist.Distribution:
        return dist.Bernoulli(logits=natural.log_odds)
