"""The inverse gamma distribution of a variance."""

from typing import Annotated, Any, NamedTuple

from jax import Array
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_ext._typing import Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.gamma import Gamma, GammaMean, GammaNatural, GammaStandard


class InverseGammaNatural(NamedTuple):
    """Natural parameters of :class:`InverseGamma`, to which half the number of normal data and half
    the sum of their squares are added."""

    a: Annotated[Array, ""]
    b: Annotated[Array, ""]


class InverseGammaMean(NamedTuple):
    """Mean parameters of :class:`InverseGamma`: -E log v and -E 1/v."""

    neg_log_value: Annotated[Array, ""]
    neg_inverse: Annotated[Array, ""]


InverseGammaStandard = GammaStandard


class InverseGamma(ExponentialFamily[InverseGammaNatural, InverseGammaMean, InverseGammaStandard]):
    r"""Inverse gamma distribution of a variance v, where 1 / v is :class:`Gamma`.

    .. math::
        p(v) = \tfrac1v \exp\{-a \log v - b / v - A\}, \qquad t(v) = (-\log v,\; -1 / v), \qquad
        A = \log\Gamma(a) - a \log b.

    The natural parameters are the ones of the gamma distribution of 1 / v; b, which NumPyro calls
    the rate, is the scale of v. The mean of v exists above a = 1 alone, and is :math:`b / (a - 1)`.

    References: Gelman et al., *Bayesian data analysis*, third edition (2013), appendix A and
    section 2.6.

    >>> from numpyro_ext.expfam import InverseGamma, InverseGammaNatural, multiply
    >>> prior = InverseGamma.from_standard(concentration=3.0, rate=2.0)
    >>> x = [1.0, -1.0, 2.0, 0.0]
    >>> data = InverseGammaNatural(len(x) / 2, sum(number**2 for number in x) / 2)
    >>> print(*InverseGamma.to_standard(multiply(prior, data)))
    5.0 5.0
    """

    domain = "a positive concentration and rate"
    distribution = dist.InverseGamma

    @classmethod
    def _from_standard(cls, standard: GammaStandard) -> InverseGammaNatural:
        return InverseGammaNatural(*standard)

    @classmethod
    def statistics(cls, value: Any) -> InverseGammaMean:
        v = jnp.asarray(value)
        return InverseGammaMean(-jnp.log(v), -1 / v)

    @classmethod
    def _log_partition(cls, natural: InverseGammaNatural) -> Array:
        return Gamma.log_partition(GammaNatural(*natural))

    @classmethod
    def _mean(cls, natural: InverseGammaNatural) -> InverseGammaMean:
        return InverseGammaMean(*Gamma.mean(GammaNatural(*natural)))

    @classmethod
    def _natural(cls, mean: InverseGammaMean) -> InverseGammaNatural:
        return InverseGammaNatural(*Gamma.natural(GammaMean(*mean)))

    @classmethod
    def _to_standard(cls, natural: InverseGammaNatural) -> GammaStandard:
        return Gamma.to_standard(GammaNatural(*natural))

    @classmethod
    def _log_base_measure(cls, mean: InverseGammaMean) -> Array:
        return mean.neg_log_value

    @classmethod
    def _sample(cls, rng_key: Array, natural: InverseGammaNatural, sample_shape: Shape) -> Array:
        return 1 / Gamma.sample(rng_key, GammaNatural(*natural), sample_shape)
