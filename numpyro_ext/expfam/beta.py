"""The beta distribution of a probability."""

from typing import Annotated, Any, NamedTuple

from jax import Array
import jax.numpy as jnp
from jax.scipy.special import xlog1py, xlogy
import numpyro.distributions as dist

from numpyro_ext._typing import Float, Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.dirichlet import Dirichlet, DirichletMean, DirichletNatural


class BetaNatural(NamedTuple):
    """Natural parameters of :class:`Beta`: the concentrations minus 1; data add their counts of
    ones and of zeros."""

    a: Annotated[Array, ""]
    b: Annotated[Array, ""]


class BetaMean(NamedTuple):
    """Mean parameters of :class:`Beta`: E log p and E log(1 - p)."""

    log_p: Annotated[Array, ""]
    log_1mp: Annotated[Array, ""]


class BetaStandard(NamedTuple):
    """Concentrations of :class:`Beta`, named as in NumPyro."""

    concentration1: Annotated[Array, ""]
    concentration0: Annotated[Array, ""]


class Beta(ExponentialFamily[BetaNatural, BetaMean, BetaStandard]):
    r"""Beta distribution of a probability p: the :class:`Dirichlet` of (p, 1 - p).

    .. math::
        t(p) = (\log p,\; \log(1 - p)), \qquad
        A = \log\Gamma(a + 1) + \log\Gamma(b + 1) - \log\Gamma(a + b + 2).

    **The natural parameters are not the concentrations**, which are a + 1 and b + 1. Float32 has
    the limits that it has for :class:`Dirichlet`.

    References: Minka, *Estimating a Dirichlet distribution* (2000), equations 13 to 18.

    >>> from numpyro_ext.expfam import Beta
    >>> prior = Beta.from_standard(concentration1=10.0, concentration0=10.0)
    >>> print(prior.a, prior.b, f"{Beta.entropy(prior):.4f}")
    9.0 9.0 -0.7983
    """

    domain = "a positive concentration1 and concentration0, in float32 above 6e-8"
    distribution = dist.Beta

    @classmethod
    def _from_standard(cls, standard: BetaStandard) -> BetaNatural:
        return BetaNatural(*(concentration - 1 for concentration in standard))

    @classmethod
    def statistics(cls, value: Any) -> BetaMean:
        p = jnp.asarray(value)
        return BetaMean(jnp.log(p), jnp.log1p(-p))

    @classmethod
    def log_prob(cls, natural: BetaNatural, value: Any) -> Float[Array, "*batch"]:
        a, b = cls._checked(BetaNatural, natural)
        p = jnp.asarray(value)
        # As of Dirichlet: finite at 0 and 1 where the exponent there is 0.
        return xlogy(a, p) + xlog1py(b, -p) - cls.log_partition(natural)

    @classmethod
    def _log_partition(cls, natural: BetaNatural) -> Array:
        return Dirichlet.log_partition(_as_dirichlet(natural))

    @classmethod
    def _mean(cls, natural: BetaNatural) -> BetaMean:
        (both,) = Dirichlet.mean(_as_dirichlet(natural))
        return BetaMean(both[..., 0], both[..., 1])

    @classmethod
    def _natural(cls, mean: BetaMean) -> BetaNatural:
        (both,) = Dirichlet.natural(DirichletMean(jnp.stack(mean, axis=-1)))
        return BetaNatural(both[..., 0], both[..., 1])

    @classmethod
    def _to_standard(cls, natural: BetaNatural) -> BetaStandard:
        (both,) = Dirichlet.to_standard(_as_dirichlet(natural))
        return BetaStandard(both[..., 0], both[..., 1])

    @classmethod
    def _sample(cls, rng_key: Array, natural: BetaNatural, sample_shape: Shape) -> Array:
        return Dirichlet.sample(rng_key, _as_dirichlet(natural), sample_shape)[..., 0]


def _as_dirichlet(natural: BetaNatural) -> DirichletNatural:
    return DirichletNatural(jnp.stack(natural, axis=-1))
