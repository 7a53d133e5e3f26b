"""The inverse gamma distribution of a variance."""

from typing import Annotated, Any, NamedTuple

from jax import Array
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.gamma import Gamma, GammaMean, GammaNatural
from numpyro_ext.expfam.leaves import canonical


class InverseGammaNatural(NamedTuple):
    """Natural parameters of :class:`InverseGamma`."""

    a: Annotated[Array, ""]
    """Concentration: half the number of normal data is added here."""
    b: Annotated[Array, ""]
    """Half a sum of squares is added here."""


class InverseGammaMean(NamedTuple):
    """Mean parameters of :class:`InverseGamma`."""

    neg_log_value: Annotated[Array, ""]
    """-E log v."""
    neg_inverse: Annotated[Array, ""]
    """-E 1/v."""


class InverseGammaStandard(NamedTuple):
    """Concentration and rate of :class:`InverseGamma`, named as in NumPyro."""

    concentration: Annotated[Array, ""]
    rate: Annotated[Array, ""]


class InverseGamma(ExponentialFamily[InverseGammaNatural, InverseGammaMean, InverseGammaStandard]):
    r"""Inverse gamma distribution of a variance v, where 1 / v is :class:`Gamma`.

    .. math::
        p(v) = \tfrac1v \exp\{-a \log v - b / v - A\}, \qquad t(v) = (-\log v,\; -1 / v), \qquad
        A = \log\Gamma(a) - a \log b.

    The natural parameters are those of the gamma distribution of 1 / v; b, which NumPyro calls the
    rate, is the scale of v. :math:`\log N(x \mid m, v) = \langle t, (\tfrac12, \tfrac12 (x - m)^2)
    \rangle - \tfrac12 \log 2\pi`, so that a conjugate update adds these sums. The mean of v exists
    above a = 1 alone, and is :math:`b / (a - 1)`. The limits of float32 are those of
    :class:`Gamma`.

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

    @classmethod
    def from_standard(cls, concentration: Any, rate: Any) -> InverseGammaNatural:
        """Natural parameters from the concentration a and the rate b, which is the scale of v."""
        standard = canonical(InverseGammaStandard(concentration, rate))
        return cls._constructed(InverseGammaNatural(*standard))

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
    def _to_standard(cls, natural: InverseGammaNatural) -> InverseGammaStandard:
        return InverseGammaStandard(*Gamma.to_standard(GammaNatural(*natural)))

    @classmethod
    def _in_domain(cls, natural: InverseGammaNatural) -> Array:
        return Gamma.in_domain(GammaNatural(*natural))

    @classmethod
    def _log_base_measure(cls, mean: InverseGammaMean) -> Array:
        return mean.neg_log_value

    @classmethod
    def _sample(
        cls, rng_key: Array, natural: InverseGammaNatural, sample_shape: tuple[int, ...]
    ) -> Array:
        return 1 / Gamma.sample(rng_key, GammaNatural(*natural), sample_shape)

    @classmethod
    def _to_distribution(cls, natural: InverseGammaNatural) -> dist.Distribution:
        return dist.InverseGamma(*cls._to_standard(natural))
