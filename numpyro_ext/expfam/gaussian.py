"""The normal distribution of vectors, in information form."""

from typing import Annotated, Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_ext._typing import Shape
from numpyro_ext.expfam.base import LocationFamily
from numpyro_ext.expfam.linalg import (
    cholesky,
    half_logdet,
    inverse,
    inverse_root,
    matvec,
    outer,
    solve,
    solve_lower,
)


class GaussianNatural(NamedTuple):
    """Natural parameters of :class:`Gaussian`: precision times mean, and -1/2 the precision."""

    h: Annotated[Array, "d"]
    W: Annotated[Array, "d d symmetric"]


class GaussianMean(NamedTuple):
    """Mean parameters of :class:`Gaussian`: E x and E x x^T."""

    x: Annotated[Array, "d"]
    xx: Annotated[Array, "d d symmetric"]


class GaussianStandard(NamedTuple):
    """Mean and covariance of :class:`Gaussian`."""

    loc: Annotated[Array, "d"]
    covariance_matrix: Annotated[Array, "d d symmetric"]


class Gaussian(LocationFamily[GaussianNatural, GaussianMean, GaussianStandard]):
    r"""Normal distribution of vectors :math:`x` with natural parameters (h, W).

    With the precision :math:`J = -2 W` and the base measure :math:`(2\pi)^{-d/2}`,

    .. math::
        t(x) = (x,\; x x^\top), \qquad
        A = \tfrac12 h^\top J^{-1} h - \tfrac12 \log |J|, \qquad
        \mathrm{E} x = J^{-1} h, \quad
        \mathrm{E} x x^\top = J^{-1} + \mathrm{E} x\, \mathrm{E} x^\top .

    **Limits of float32.** The covariance that :meth:`natural` finds from a mean is the difference
    :math:`\mathrm{E} x x^\top - \mathrm{E} x\, \mathrm{E} x^\top`, which loses all digits where
    the mean is 1e3 standard deviations or more.

    References: Johnson et al., *Composing graphical models with neural networks* (NIPS 2016),
    appendix B.

    >>> from numpyro_ext.expfam import Gaussian
    >>> natural = Gaussian.from_standard(loc=jnp.array([1.0]), covariance_matrix=jnp.eye(1) / 4)
    >>> print(natural.h, natural.W[0], Gaussian.mean(natural).xx[0])
    [4.] [-2.] [1.25]
    """

    domain = "a finite loc and a positive definite covariance_matrix"
    distribution = dist.MultivariateNormal

    @classmethod
    def _from_standard(cls, standard: GaussianStandard) -> GaussianNatural:
        J = inverse(cholesky(standard.covariance_matrix))
        return GaussianNatural(matvec(J, standard.loc), -J / 2)

    @classmethod
    def statistics(cls, value: Any) -> GaussianMean:
        x = jnp.asarray(value)
        return GaussianMean(x, outer(x, x))

    @classmethod
    def _log_partition(cls, natural: GaussianNatural) -> Array:
        L = cholesky(-2 * natural.W)
        root = solve_lower(L, natural.h[..., None])[..., 0]
        return jnp.sum(root**2, axis=-1) / 2 - half_logdet(L)

    @classmethod
    def _mean(cls, natural: GaussianNatural) -> GaussianMean:
        loc, covariance = cls._to_standard(natural)
        return GaussianMean(loc, covariance + outer(loc, loc))

    @classmethod
    def _natural(cls, mean: GaussianMean) -> GaussianNatural:
        return cls._from_standard(GaussianStandard(mean.x, mean.xx - outer(mean.x, mean.x)))

    @classmethod
    def _to_standard(cls, natural: GaussianNatural) -> GaussianStandard:
        L = cholesky(-2 * natural.W)
        return GaussianStandard(solve(L, natural.h), inverse(L))

    @classmethod
    def _log_base_measure(cls, mean: GaussianMean) -> Array:
        d = mean.x.shape[-1]
        return -d / 2 * jnp.log(2 * jnp.pi)

    @classmethod
    def _slope(cls, natural: GaussianNatural, x: Array) -> Array:
        return natural.h + 2 * matvec(natural.W, x)

    @classmethod
    def _sample(cls, rng_key: Array, natural: GaussianNatural, sample_shape: Shape) -> Array:
        L = cholesky(-2 * natural.W)
        eps = random.normal(rng_key, sample_shape + natural.h.shape, natural.h.dtype)
        return solve(L, natural.h) + matvec(inverse_root(L), eps)
