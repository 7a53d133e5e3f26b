"""The Dirichlet distribution of probabilities."""

from typing import Annotated, Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln, logsumexp, polygamma, xlogy
import numpyro.distributions as dist

from numpyro_ext._typing import Float, Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.fixed_point import newton


class DirichletNatural(NamedTuple):
    """Natural parameters of :class:`Dirichlet`: the concentration minus 1."""

    a: Annotated[Array, "K"]


class DirichletMean(NamedTuple):
    """Mean parameters of :class:`Dirichlet`: E log pi."""

    log_prob: Annotated[Array, "K"]


class DirichletStandard(NamedTuple):
    """Concentration of :class:`Dirichlet`."""

    concentration: Annotated[Array, "K"]


class Dirichlet(ExponentialFamily[DirichletNatural, DirichletMean, DirichletStandard]):
    r"""Dirichlet distribution of probabilities :math:`\pi_1, \dots, \pi_K`.

    .. math::
        t(\pi) &= \log \pi, \qquad
        A(a) = \sum_k \log\Gamma(a_k + 1) - \log\Gamma\Big(\sum_k (a_k + 1)\Big), \\
        \mathrm{E} \log \pi_k &= \psi(a_k + 1) - \psi\Big(\sum_j (a_j + 1)\Big).

    **The natural parameter is not the concentration**, which is a + 1: counts of data are added to
    either, and a uniform prior has a = 0.

    **Limits of float32.** A concentration below 6e-8 cannot be told from 0 in a, and is refused.
    The reverse map loses digits in proportion to the sum of the concentrations, and gives NaN where
    they are as unequal as 1e-3 and 50; double precision resolves 1e-3 beside 1e6.

    References: Minka, *Estimating a Dirichlet distribution* (2000), equations 13 to 18; Nesterov
    and Nemirovskii, *Interior-point polynomial algorithms* (1994), section 2.2.

    >>> from numpyro_ext.expfam import Dirichlet
    >>> natural = Dirichlet.from_standard(concentration=jnp.array([2.0, 3.0, 5.0]))
    >>> print(natural.a, f"{Dirichlet.log_partition(natural):.4f}")
    [1. 2. 4.] -8.9306
    """

    domain = "a concentration of positive numbers, in float32 above 6e-8"
    distribution = dist.Dirichlet

    @classmethod
    def _from_standard(cls, standard: DirichletStandard) -> DirichletNatural:
        return DirichletNatural(standard.concentration - 1)

    @classmethod
    def statistics(cls, value: Any) -> DirichletMean:
        return DirichletMean(jnp.log(jnp.asarray(value)))

    @classmethod
    def log_prob(cls, natural: DirichletNatural, value: Any) -> Float[Array, "*batch"]:
        (a,) = cls._checked(DirichletNatural, natural)
        # A probability of 0 has a finite density where a is 0, and 0 times -inf would be NaN.
        return jnp.sum(xlogy(a, jnp.asarray(value)), axis=-1) - cls.log_partition(natural)

    @classmethod
    def _log_partition(cls, natural: DirichletNatural) -> Array:
        (alpha,) = cls._to_standard(natural)
        return jnp.sum(gammaln(alpha), axis=-1) - gammaln(jnp.sum(alpha, axis=-1))

    @classmethod
    def _mean(cls, natural: DirichletNatural) -> DirichletMean:
        (alpha,) = cls._to_standard(natural)
        return DirichletMean(_mean_log(alpha))

    @classmethod
    def _natural(cls, mean: DirichletMean) -> DirichletNatural:
        return DirichletNatural(_concentration(mean.log_prob) - 1)

    @classmethod
    def _to_standard(cls, natural: DirichletNatural) -> DirichletStandard:
        # The gamma function has values at negative numbers too, which are no densities.
        return DirichletStandard(jnp.where(natural.a > -1, natural.a + 1, jnp.nan))

    @classmethod
    def _sample(cls, rng_key: Array, natural: DirichletNatural, sample_shape: Shape) -> Array:
        (alpha,) = cls._to_standard(natural)
        return random.dirichlet(rng_key, alpha, sample_shape + alpha.shape[:-1])


def _mean_log(alpha: Array) -> Array:
    return digamma(alpha) - digamma(jnp.sum(alpha, axis=-1, keepdims=True))


@jax.custom_jvp
def _concentration(log_prob: Array) -> Array:
    """The concentration with ``log_prob`` as E log pi."""
    # For large concentrations; K - 1 over twice what is missing to 1 in the sum of exp(E log pi).
    missing = -jnp.expm1(logsumexp(log_prob, axis=-1, keepdims=True))
    total = (log_prob.shape[-1] - 1) / (2 * missing)
    # Minka's approximation of the inverse of the digamma function.
    y = digamma(total) + log_prob
    start = jnp.where(y > -2.22, jnp.exp(y) + 0.5, -1 / (y - digamma(1.0)))
    start = jnp.where(missing > 0, start, jnp.nan)

    def step(alpha: Array) -> Array:
        gradient = _mean_log(alpha) - log_prob
        delta = _solve_hessian(alpha, gradient)
        decrement = jnp.sum(gradient * delta, axis=-1, keepdims=True)
        delta = delta / (1 + jnp.sqrt(jnp.maximum(decrement, 0)))
        return jnp.maximum(alpha - delta, alpha / 10)

    return newton(step, lax.stop_gradient(start))


@_concentration.defjvp
def _concentration_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    alpha = _concentration(*primals)
    return alpha, _solve_hessian(alpha, *tangents)


def _solve_hessian(alpha: Array, g: Array) -> Array:
    """The inverse of the Hessian of A, a diagonal matrix minus a constant one, times g."""
    q = 1 / polygamma(1, alpha)
    slack = 1 / polygamma(1, jnp.sum(alpha, axis=-1)) - jnp.sum(q, axis=-1)
    return q * (g + (jnp.sum(q * g, axis=-1) / slack)[..., None])
