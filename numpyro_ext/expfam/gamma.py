"""The gamma distribution of a rate or of a precision."""

from typing import Annotated, Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln, xlogy
import numpyro.distributions as dist

from numpyro_ext._typing import Float, Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.wishart import degrees


class GammaNatural(NamedTuple):
    """Natural parameters of :class:`Gamma`, to which a sum of counts and their number, or half the
    number of normal data and half the sum of their squares, are added."""

    a: Annotated[Array, ""]
    b: Annotated[Array, ""]


class GammaMean(NamedTuple):
    """Mean parameters of :class:`Gamma`: E log v and -E v."""

    log_value: Annotated[Array, ""]
    neg_value: Annotated[Array, ""]


class GammaStandard(NamedTuple):
    """Concentration and rate of :class:`Gamma`, named as in NumPyro."""

    concentration: Annotated[Array, ""]
    rate: Annotated[Array, ""]


class Gamma(ExponentialFamily[GammaNatural, GammaMean, GammaStandard]):
    r"""Gamma distribution of a positive v: a rate of counts, or the precision of a normal.

    .. math::
        p(v) &= \tfrac1v \exp\{a \log v - b v - A\}, \qquad t(v) = (\log v,\; -v), \\
        A &= \log\Gamma(a) - a \log b, \qquad
        \mathrm{E}\, t = (\psi(a) - \log b,\; -a / b).

    With 1 / v as base measure the natural parameters are the concentration a and the rate b. The
    reverse map has in float32 a relative error of about 1e-7 a.

    References: Minka, *Estimating a gamma distribution* (2002); Bishop, *Pattern recognition and
    machine learning* (2006), section 2.3.6.

    >>> from numpyro_ext.expfam import Gamma, GammaNatural, multiply
    >>> prior = Gamma.from_standard(concentration=2.0, rate=1.0)
    >>> posterior = multiply(prior, GammaNatural(3.0 + 5.0 + 4.0, 3.0))  # three counts
    >>> print(posterior.a, posterior.b, -Gamma.mean(posterior).neg_value)
    14.0 4.0 3.5
    """

    domain = "a positive concentration and rate"
    distribution = dist.Gamma

    @classmethod
    def _from_standard(cls, standard: GammaStandard) -> GammaNatural:
        return GammaNatural(*standard)

    @classmethod
    def statistics(cls, value: Any) -> GammaMean:
        v = jnp.asarray(value)
        return GammaMean(jnp.log(v), -v)

    @classmethod
    def log_prob(cls, natural: GammaNatural, value: Any) -> Float[Array, "*batch"]:
        a, b = cls._checked(GammaNatural, natural)
        v = jnp.asarray(value)
        # Finite at 0 where the exponent of v there is 0.
        return xlogy(a - 1, v) - b * v - cls.log_partition(natural)

    @classmethod
    def _log_partition(cls, natural: GammaNatural) -> Array:
        a, b = cls._to_standard(natural)
        return gammaln(a) - a * jnp.log(b)

    @classmethod
    def _mean(cls, natural: GammaNatural) -> GammaMean:
        a, b = cls._to_standard(natural)
        return GammaMean(digamma(a) - jnp.log(b), -a / b)

    @classmethod
    def _natural(cls, mean: GammaMean) -> GammaNatural:
        # A Wishart matrix of one dimension with twice the concentration as degrees of freedom.
        a = degrees(jnp.log(-mean.neg_value) - mean.log_value, 1) / 2
        return GammaNatural(a, -a / mean.neg_value)

    @classmethod
    def _to_standard(cls, natural: GammaNatural) -> GammaStandard:
        # The gamma function has values at negative numbers too, which are no densities.
        return GammaStandard(*(jnp.where(x > 0, x, jnp.nan) for x in natural))

    @classmethod
    def _log_base_measure(cls, mean: GammaMean) -> Array:
        return -mean.log_value

    @classmethod
    def _sample(cls, rng_key: Array, natural: GammaNatural, sample_shape: Shape) -> Array:
        a, b = cls._to_standard(natural)
        return random.gamma(rng_key, a, sample_shape + a.shape) / b
