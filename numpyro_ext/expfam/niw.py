"""The normal-inverse-Wishart distribution: mean and covariance of a normal."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from jax import Array
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_ext._typing import Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.linalg import outer
from numpyro_ext.expfam.mniw import MNIW, MNIWMean, MNIWNatural


class NIWNatural(NamedTuple):
    """Natural parameters of :class:`NIW`, to which the sums of x x^T and of x, and the number of
    data, to both kappa and nu, are added."""

    A: Annotated[Array, "d d symmetric"]
    b: Annotated[Array, "d"]
    kappa: Annotated[Array, ""]
    nu: Annotated[Array, ""]


class NIWMean(NamedTuple):
    """Mean parameters of :class:`NIW`: E of its statistics t, in their order."""

    neg_half_precision: Annotated[Array, "d d symmetric"]
    precision_loc: Annotated[Array, "d"]
    neg_half_quad: Annotated[Array, ""]
    half_logdet: Annotated[Array, ""]


class NIWStandard(NamedTuple):
    """Standard parameters of :class:`NIW`: the mean of the mean, the number kappa of its prior
    observations, nu, above d - 1, and S, positive definite and about nu times Sigma."""

    loc: Annotated[Array, "d"]
    kappa: Annotated[Array, ""]
    df: Annotated[Array, ""]
    scale_matrix: Annotated[Array, "d d symmetric"]


class NIW(ExponentialFamily[NIWNatural, NIWMean, NIWStandard]):
    r"""Normal-inverse-Wishart: the conjugate prior of mean and covariance of a normal.

    A value is a pair (loc, Sigma), with

    .. math::
        \Sigma \sim IW(\nu, S), \qquad loc \mid \Sigma \sim N(m, \Sigma / \kappa), \qquad
        p(\Sigma) \propto |\Sigma|^{-(\nu + d + 1)/2} e^{-tr(S \Sigma^{-1})/2} .

    Natural parameters are (A, b, kappa, nu) with :math:`A = S + \kappa m m^\top` and
    :math:`b = \kappa m`, and

    .. math::
        t &= (-\tfrac12 \Sigma^{-1},\; \Sigma^{-1} loc,\; -\tfrac12 loc^\top \Sigma^{-1} loc,\;
             \tfrac12 \log |\Sigma^{-1}|), \\
        \log Z &= \tfrac{\nu d}{2} \log 2 + \log \Gamma_d(\tfrac{\nu}{2})
             - \tfrac{\nu}{2} \log |S| - \tfrac d2 \log \kappa .

    It is the :class:`MNIW` with a single input that is 1, and is computed as such.

    References: Johnson et al., *Composing graphical models with neural networks* (NIPS 2016),
    appendix D; Murphy, *Conjugate Bayesian analysis of the Gaussian distribution* (2007), section
    9.

    >>> from numpyro_ext.expfam import NIW, NIWNatural, multiply
    >>> prior = NIW.from_standard(
    ...     loc=jnp.zeros(1), kappa=1.0, df=3.0, scale_matrix=jnp.eye(1))
    >>> x = jnp.array([[1.0], [2.0], [3.0]])
    >>> posterior = NIW.to_standard(multiply(prior, NIWNatural(x.T @ x, x.sum(0), 3.0, 3.0)))
    >>> print(posterior.loc, posterior.scale_matrix[0], posterior.kappa, posterior.df)
    [1.5] [6.] 4.0 6.0
    """

    domain = (
        "a positive kappa, a positive definite scale_matrix, df above d - 1, and a scale_matrix"
        " that is not lost in rounding beside kappa loc loc^T"
    )

    @classmethod
    def _from_standard(cls, standard: NIWStandard) -> NIWNatural:
        m, kappa, nu, S = standard
        b = kappa[..., None] * m
        return NIWNatural(S + outer(b, m), b, kappa, nu)

    @classmethod
    def statistics(cls, value: Any) -> NIWMean:
        loc, covariance = value
        return _mean_of(MNIW.statistics((loc[..., None], covariance)))

    @classmethod
    def _log_partition(cls, natural: NIWNatural) -> Array:
        return MNIW.log_partition(_as_mniw(natural))

    @classmethod
    def _mean(cls, natural: NIWNatural) -> NIWMean:
        return _mean_of(MNIW.mean(_as_mniw(natural)))

    @classmethod
    def _natural(cls, mean: NIWMean) -> NIWNatural:
        P, Pm, quad, logdet = mean
        A, B, K, nu = MNIW.natural(MNIWMean(P, Pm[..., None], quad[..., None, None], logdet))
        return NIWNatural(A, B[..., 0], K[..., 0, 0], nu)

    @classmethod
    def _to_standard(cls, natural: NIWNatural) -> NIWStandard:
        M, K, nu, S = MNIW.to_standard(_as_mniw(natural))
        return NIWStandard(M[..., 0], K[..., 0, 0], nu, S)

    @classmethod
    def _in_domain(cls, natural: NIWNatural) -> Array:
        return MNIW.in_domain(_as_mniw(natural))

    @classmethod
    def _log_base_measure(cls, mean: NIWMean) -> Array:
        d = mean.precision_loc.shape[-1]
        return (d + 2) * mean.half_logdet - d / 2 * jnp.log(2 * jnp.pi)

    @classmethod
    def _sample(
        cls, rng_key: Array, natural: NIWNatural, sample_shape: Shape
    ) -> tuple[Array, Array]:
        weight, covariance = MNIW.sample(rng_key, _as_mniw(natural), sample_shape)
        return weight[..., 0], covariance

    @classmethod
    def _to_distribution(
        cls, natural: NIWNatural
    ) -> tuple[dist.InverseWishart, Callable[[Array], dist.MultivariateNormal]]:
        m, kappa, nu, S = cls._to_standard(natural)
        return dist.InverseWishart(nu, scale_matrix=S), lambda Sigma: dist.MultivariateNormal(
            m, Sigma / kappa[..., None, None]
        )


def _as_mniw(natural: NIWNatural) -> MNIWNatural:
    A, b, kappa, nu = natural
    return MNIWNatural(A, b[..., None], kappa[..., None, None], nu)


def _mean_of(mean: MNIWMean) -> NIWMean:
    P, PM, quad, logdet = mean
    return NIWMean(P, PM[..., 0], quad[..., 0, 0], logdet)
