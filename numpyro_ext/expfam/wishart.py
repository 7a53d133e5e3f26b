"""The Wishart distribution of a precision matrix."""

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln
import numpyro.distributions as dist

from numpyro_ext._typing import Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.fixed_point import newton
from numpyro_ext.expfam.linalg import (
    cholesky,
    half_logdet,
    inverse,
    matmul,
    solve_lower,
    symmetric,
    transpose,
)


class WishartNatural(NamedTuple):
    """Natural parameters of :class:`Wishart`; data add the sum of x x^T, and their number."""

    S: Annotated[Array, "d d symmetric"]
    nu: Annotated[Array, ""]


class WishartMean(NamedTuple):
    """Mean parameters of :class:`Wishart`: E of -P / 2, and of log det P, halved."""

    neg_half_precision: Annotated[Array, "d d symmetric"]
    half_logdet: Annotated[Array, ""]


class WishartStandard(NamedTuple):
    """Standard parameters of :class:`Wishart`: nu, above d - 1, and S, positive definite and about
    nu times the covariance."""

    df: Annotated[Array, ""]
    rate_matrix: Annotated[Array, "d d symmetric"]


class Wishart(ExponentialFamily[WishartNatural, WishartMean, WishartStandard]):
    r"""Wishart: the conjugate prior of the precision P of a normal with a known mean.

    .. math::
        p(P) &\propto |P|^{(\nu - d - 1)/2} e^{-tr(S P)/2}, \qquad
        t = (-\tfrac12 P,\; \tfrac12 \log |P|), \\
        A &= \tfrac{\nu d}{2} \log 2 + \log \Gamma_d(\tfrac{\nu}{2}) - \tfrac{\nu}{2} \log |S|,
        \qquad \mathrm{E} P = \nu S^{-1}.

    S is the rate matrix, the scale of the inverse Wishart distribution of :math:`P^{-1}`. The
    reverse map finds nu by Newton's method, in float32 to about 1e-6 nu.

    References: Murphy, *Conjugate Bayesian analysis of the Gaussian distribution* (2007), section
    8; Bishop, *Pattern recognition and machine learning* (2006), appendix B.

    >>> from numpyro_ext.expfam import Wishart, WishartNatural, multiply
    >>> prior = Wishart.from_standard(df=3.0, rate_matrix=jnp.eye(1))
    >>> print(multiply(prior, WishartNatural(jnp.array([[14.0]]), 3.0)).S)
    [[15.]]
    """

    domain = "a positive definite rate_matrix and df above d - 1"

    @classmethod
    def _from_standard(cls, standard: WishartStandard) -> WishartNatural:
        return WishartNatural(standard.rate_matrix, standard.df)

    @classmethod
    def statistics(cls, value: Any) -> WishartMean:
        P = symmetric(jnp.asarray(value))
        return WishartMean(-P / 2, half_logdet(cholesky(P)))

    @classmethod
    def _log_partition(cls, natural: WishartNatural) -> Array:
        d = natural.S.shape[-1]
        nu, S = cls._to_standard(natural)
        multigamma = d * (d - 1) / 4 * jnp.log(jnp.pi) + jnp.sum(gammaln(halves(nu, d)), axis=-1)
        return nu * d / 2 * jnp.log(2.0) - nu * half_logdet(cholesky(S)) + multigamma

    @classmethod
    def _mean(cls, natural: WishartNatural) -> WishartMean:
        d = natural.S.shape[-1]
        nu, S = cls._to_standard(natural)
        L = cholesky(S)
        logdet = jnp.sum(digamma(halves(nu, d)), axis=-1) + d * jnp.log(2.0)
        return WishartMean(-nu[..., None, None] * inverse(L) / 2, logdet / 2 - half_logdet(L))

    @classmethod
    def _natural(cls, mean: WishartMean) -> WishartNatural:
        d = mean.neg_half_precision.shape[-1]
        L = cholesky(-2 * mean.neg_half_precision)
        nu = degrees(2 * half_logdet(L) - 2 * mean.half_logdet, d)
        return WishartNatural(nu[..., None, None] * inverse(L), nu)

    @classmethod
    def _to_standard(cls, natural: WishartNatural) -> WishartStandard:
        S, nu = natural
        # The gamma function has values below too, which are no densities.
        return WishartStandard(jnp.where(nu > S.shape[-1] - 1, nu, jnp.nan), S)

    @classmethod
    def _log_base_measure(cls, mean: WishartMean) -> Array:
        return -(mean.neg_half_precision.shape[-1] + 1) * mean.half_logdet

    @classmethod
    def _sample(cls, rng_key: Array, natural: WishartNatural, sample_shape: Shape) -> Array:
        nu, S = cls._to_standard(natural)
        key_chi, key_below = random.split(rng_key)
        F = bartlett(key_chi, key_below, nu, S.shape[-1], sample_shape)
        L = jnp.broadcast_to(cholesky(S), F.shape)
        root = solve_lower(L, F, transpose=True)
        return matmul(root, transpose(root))

    @classmethod
    def _to_distribution(cls, natural: WishartNatural) -> dist.Distribution:
        nu, S = cls._to_standard(natural)
        return dist.Wishart(nu, rate_matrix=S)


def halves(nu: Array, d: int) -> Array:
    """Half of nu, nu - 1, ..., nu - d + 1."""
    return (nu[..., None] - jnp.arange(d)) / 2


def bartlett(key_chi: Array, key_below: Array, nu: Array, d: int, sample_shape: Shape) -> Array:
    """Draws of F, lower triangular, with F F^T of the Wishart distribution with S = I."""
    shape = sample_shape + nu.shape
    chi = jnp.sqrt(2 * random.gamma(key_chi, halves(nu, d), (*shape, d)))
    below = jnp.tril(random.normal(key_below, (*shape, d, d), nu.dtype), -1)
    return below + chi[..., None] * jnp.eye(d, dtype=nu.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def degrees(gap: Array, d: int) -> Array:
    """The degrees of freedom nu with log |E P| - E log |P| equal to ``gap``."""

    def step(u: Array) -> Array:
        value, slope = jax.jvp(lambda u: jnp.log(_gap(d - 1 + jnp.exp(u), d)), (u,), (1 + 0 * u,))
        # The slope is about -1 at both ends and may be flat between: hence a limit.
        return u - jnp.clip((value - jnp.log(gap)) / slope, -2, 2)

    return d - 1 + jnp.exp(newton(step, jnp.log(d * (d + 1) / (2 * gap))))


@degrees.defjvp
def _degrees_jvp(d: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    nu = degrees(*primals, d)
    slope = jax.jvp(lambda nu: _gap(nu, d), (nu,), (1 + 0 * nu,))[1]
    return nu, tangents[0] / slope


def _gap(nu: Array, d: int) -> Array:
    """d log(nu/2) - sum_i digamma((nu-i)/2), as a sum of positive terms."""
    i = jnp.arange(d)
    return jnp.sum(_log_minus_digamma(halves(nu, d)) - jnp.log1p(-i / nu[..., None]), axis=-1)


def _log_minus_digamma(x: Array) -> Array:
    y = jnp.maximum(x, 10) ** -2
    terms = 1 / 12 - y * (1 / 120 - y * (1 / 252 - y / 240))
    asymptotic = 1 / (2 * jnp.maximum(x, 10)) + y * terms
    near = jnp.minimum(x, 10)
    return jnp.where(x < 10, jnp.log(near) - digamma(near), asymptotic)
