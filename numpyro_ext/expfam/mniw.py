"""The matrix-normal inverse-Wishart distribution: weights and noise of a linear regression."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_ext._typing import Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.linalg import (
    cholesky,
    half_logdet,
    inverse,
    inverse_root,
    matmul,
    positive,
    solve,
    solve_lower,
    symmetric,
    transpose,
)
from numpyro_ext.expfam.wishart import Wishart, WishartMean, WishartNatural, bartlett


class MNIWNatural(NamedTuple):
    """Natural parameters of :class:`MNIW`; data add the sums of x x^T, x u^T and u u^T, and their
    number."""

    A: Annotated[Array, "d d symmetric"]
    B: Annotated[Array, "d p"]
    K: Annotated[Array, "p p symmetric"]
    nu: Annotated[Array, ""]


class MNIWMean(NamedTuple):
    """Mean parameters of :class:`MNIW`: E of its statistics t, in their order."""

    neg_half_precision: Annotated[Array, "d d symmetric"]
    precision_weight: Annotated[Array, "d p"]
    neg_half_quad: Annotated[Array, "p p symmetric"]
    half_logdet: Annotated[Array, ""]


class MNIWStandard(NamedTuple):
    """Standard parameters of :class:`MNIW`: the mean M of the weight, K, positive definite, nu,
    above d - 1, and S, positive definite and about nu times Q."""

    weight: Annotated[Array, "d p"]
    precision: Annotated[Array, "p p symmetric"]
    df: Annotated[Array, ""]
    scale_matrix: Annotated[Array, "d d symmetric"]


class MNIW(ExponentialFamily[MNIWNatural, MNIWMean, MNIWStandard]):
    r"""Matrix-normal inverse-Wishart: the conjugate prior of x given u, a normal regression.

    A value is a pair (Wt, Q) of a weight ``(d, p)`` and a covariance ``(d, d)`` with
    :math:`x \mid u \sim N(Wt\, u, Q)`:

    .. math::
        Q \sim IW(\nu, S), \qquad Wt \mid Q \sim MN(M, Q, K^{-1}), \qquad
        p(Q) \propto |Q|^{-(\nu + d + 1)/2} e^{-tr(S Q^{-1})/2} .

    Natural parameters are (A, B, K, nu) with :math:`A = S + M K M^\top` and :math:`B = M K`, and

    .. math::
        t &= (-\tfrac12 Q^{-1},\; Q^{-1} Wt,\; -\tfrac12 Wt^\top Q^{-1} Wt,\;
             \tfrac12 \log |Q^{-1}|), \\
        \log Z &= \tfrac{\nu d}{2} \log 2 + \log \Gamma_d(\tfrac{\nu}{2})
             - \tfrac{\nu}{2} \log |S| - \tfrac d2 \log |K| .

    **Limits of float32.** S is the difference :math:`A - B K^{-1} B^\top`, and has an error of
    1e-7 times A; :meth:`in_domain` is False where nothing is left of it. :meth:`natural` finds nu
    to about 1e-6 nu.

    References: Johnson et al., *Composing graphical models with neural networks* (NIPS 2016),
    appendix D; Fox et al., *Bayesian nonparametric inference of switching dynamic linear models*
    (2011), section III.

    >>> from numpyro_ext.expfam import MNIW, MNIWNatural, multiply
    >>> prior = MNIW.from_standard(
    ...     weight=jnp.zeros((1, 1)), precision=jnp.eye(1), df=3.0, scale_matrix=jnp.eye(1))
    >>> u, x = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[2.0], [4.0], [6.0]])
    >>> posterior = multiply(prior, MNIWNatural(x.T @ x, x.T @ u, u.T @ u, 3.0))
    >>> print(f"{MNIW.to_standard(posterior).weight.item():.3f}")
    1.867
    """

    domain = (
        "a positive definite precision and scale_matrix, df above d - 1, and a scale_matrix that is"
        " not lost in rounding beside weight precision weight^T"
    )

    @classmethod
    def _from_standard(cls, standard: MNIWStandard) -> MNIWNatural:
        M, K, nu, S = standard
        B = matmul(M, K)
        return MNIWNatural(S + matmul(B, transpose(M)), B, K, nu)

    @classmethod
    def statistics(cls, value: Any) -> MNIWMean:
        weight, covariance = value
        L = cholesky(symmetric(covariance))
        P = inverse(L)
        PW = matmul(P, weight)
        return MNIWMean(-P / 2, PW, -matmul(transpose(weight), PW) / 2, -half_logdet(L))

    @classmethod
    def _log_partition(cls, natural: MNIWNatural) -> Array:
        _, K, nu, S = cls._to_standard(natural)
        log_z_noise = Wishart.log_partition(WishartNatural(S, nu))
        return log_z_noise - natural.A.shape[-1] * half_logdet(cholesky(K))

    @classmethod
    def _mean(cls, natural: MNIWNatural) -> MNIWMean:
        M, K, nu, S = cls._to_standard(natural)
        neg_half, half = Wishart.mean(WishartNatural(S, nu))
        PM = -2 * matmul(neg_half, M)
        quad = natural.A.shape[-1] * inverse(cholesky(K)) + matmul(transpose(M), PM)
        return MNIWMean(neg_half, PM, -quad / 2, half)

    @classmethod
    def _natural(cls, mean: MNIWMean) -> MNIWNatural:
        d = mean.neg_half_precision.shape[-1]
        L = cholesky(-2 * mean.neg_half_precision)
        M = solve(L, mean.precision_weight)
        spread = -2 * mean.neg_half_quad - matmul(transpose(M), mean.precision_weight)
        K = inverse(cholesky(symmetric(spread) / d))
        S, nu = Wishart.natural(WishartMean(mean.neg_half_precision, mean.half_logdet))
        return cls._from_standard(MNIWStandard(M, K, nu, S))

    @classmethod
    def _to_standard(cls, natural: MNIWNatural) -> MNIWStandard:
        A, B, K, nu = natural
        L = cholesky(K)
        root = solve_lower(L, transpose(B))
        S = A - matmul(transpose(root), root)
        # The gamma function has values below too, which are no densities.
        nu = jnp.where(nu > A.shape[-1] - 1, nu, jnp.nan)
        return MNIWStandard(transpose(solve_lower(L, root, transpose=True)), K, nu, S)

    @classmethod
    def _in_domain(cls, natural: MNIWNatural) -> Array:
        _, K, nu, S = cls._to_standard(natural)
        size = jnp.diagonal(natural.A, axis1=-2, axis2=-1)
        return jnp.isfinite(nu) & jnp.isfinite(half_logdet(cholesky(K))) & positive(S, size)

    @classmethod
    def _log_base_measure(cls, mean: MNIWMean) -> Array:
        d, p = mean.precision_weight.shape[-2:]
        return (d + p + 1) * mean.half_logdet - d * p / 2 * jnp.log(2 * jnp.pi)

    @classmethod
    def _sample(
        cls, rng_key: Array, natural: MNIWNatural, sample_shape: Shape
    ) -> tuple[Array, Array]:
        M, K, nu, S = cls._to_standard(natural)
        d, p = M.shape[-2:]
        shape = sample_shape + nu.shape
        key_chi, key_below, key_weight = random.split(rng_key, 3)
        # Q^{-1} is L^{-T} F F^T L^{-1}.
        F = bartlett(key_chi, key_below, nu, d, sample_shape)
        root = matmul(cholesky(S), inverse_root(F))
        eps = random.normal(key_weight, (*shape, d, p), M.dtype)
        spread = matmul(eps, transpose(inverse_root(cholesky(K))))
        return M + matmul(root, spread), matmul(root, transpose(root))

    @classmethod
    def _to_distribution(
        cls, natural: MNIWNatural
    ) -> tuple[dist.InverseWishart, Callable[[Array], dist.MatrixNormal]]:
        M, K, nu, S = cls._to_standard(natural)
        column = cholesky(inverse(cholesky(K)))
        return dist.InverseWishart(nu, scale_matrix=S), lambda Q: dist.MatrixNormal(
            M, cholesky(Q), column
        )
