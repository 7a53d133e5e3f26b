"""The Poisson distribution, with the logarithm of its rate."""

from typing import Annotated, Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp
from jax.scipy.special import gammaln
import numpyro.distributions as dist

from numpyro_ext._typing import Float, Shape
from numpyro_ext.expfam.base import ExponentialFamily


class PoissonNatural(NamedTuple):
    """Natural parameters of :class:`Poisson`."""

    log_rate: Annotated[Array, ""]


class PoissonMean(NamedTuple):
    """Mean parameters of :class:`Poisson`: E v."""

    rate: Annotated[Array, ""]


PoissonStandard = PoissonMean


class Poisson(ExponentialFamily[PoissonNatural, PoissonMean, PoissonStandard]):
    r"""Poisson distribution of counts v = 0, 1, 2, ...

    .. math::
        t(v) = v, \qquad h(v) = 1 / v!, \qquad A(n) = e^n, \qquad \mathrm{E}\, t = e^n.

    The entropy has no closed form: it is a sum of 256 terms for rates up to 100, and a series in
    the inverse rate above, to 1e-10.

    References: Wainwright and Jordan (2008), table 3.1, as in :class:`ExponentialFamily`; Evans and
    Boersma, *The entropy of a Poisson distribution* (SIAM Review, 1988).

    >>> from numpyro_ext.expfam import Poisson
    >>> natural = Poisson.from_standard(rate=2.0)
    >>> print(f"{Poisson.log_prob(natural, 3):.4f} {Poisson.entropy(natural):.4f}")
    -1.7123 1.7049
    """

    domain = "a positive rate"
    distribution = dist.Poisson

    @classmethod
    def statistics(cls, value: Any) -> PoissonMean:
        return PoissonMean(jnp.asarray(value, jnp.result_type(float)))

    @classmethod
    def entropy(cls, natural: PoissonNatural) -> Float[Array, "*batch"]:
        (n,) = cls._checked(PoissonNatural, natural)
        limit = jnp.log(100.0)
        few, many = jnp.minimum(n, limit)[..., None], jnp.exp(-jnp.maximum(n, limit))
        v = jnp.arange(256.0)
        log_p = v * few - jnp.exp(few) - gammaln(v + 1)
        total = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        series = many * (1 / 12 + many * (1 / 24 + many * (19 / 360 + many * 9 / 80)))
        return jnp.where(n < limit, total, (jnp.log(2 * jnp.pi) + 1 + n) / 2 - series)

    @classmethod
    def _log_partition(cls, natural: PoissonNatural) -> Array:
        return jnp.exp(natural.log_rate)

    @classmethod
    def _mean(cls, natural: PoissonNatural) -> PoissonMean:
        return PoissonMean(jnp.exp(natural.log_rate))

    @classmethod
    def _natural(cls, mean: PoissonMean) -> PoissonNatural:
        return PoissonNatural(jnp.log(mean.rate))

    @classmethod
    def _log_base_measure(cls, mean: PoissonMean) -> Array:
        return -gammaln(mean.rate + 1)

    @classmethod
    def _sample(cls, rng_key: Array, natural: PoissonNatural, sample_shape: Shape) -> Array:
        rate = jnp.exp(natural.log_rate)
        return random.poisson(rng_key, rate, sample_shape + rate.shape)
