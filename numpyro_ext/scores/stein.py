"""Ridge-regularised Stein estimator of the score of an implicit distribution.

Reference: Li and Turner, *Gradient estimators for implicit models* (ICLR 2018).
"""

from dataclasses import dataclass, field
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.typing import ArrayLike

from numpyro_ext._checks import check_choice, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.scores._fields import (
    KernelField,
    as_queries,
    at_itself,
    kernel_sums,
    matmul,
    resolved,
)
from numpyro_ext.scores._points import as_points
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.base import BaseKernel, as_kernel
from numpyro_ext.scores.kernels import RBF

__all__ = ["SteinScore"]


@pytree
@dataclass(frozen=True, eq=False)
class SteinScore:
    r"""Score :math:`g = \nabla \log q` from samples :math:`x^1, \dots, x^K`, by Stein's identity.

    The identity :math:`E_q[k(x, \cdot)\, g(x)^\top + \nabla k] = 0` with averages for expectations
    and a ridge gives the estimates at the samples, the rows of

    .. math::

        G = -(K + \eta\, k(0) I)^{-1} B, \qquad K_{ij} = k(x^i, x^j), \qquad
        B_i = \sum_j \nabla_{x^j} k(x^i, x^j),

    ``(K, d)`` in units of 1/length; :math:`k(0)` is the mean of the diagonal of K. They minimise
    the V-statistic of the squared kernel Stein discrepancy between q and the estimate plus
    :math:`\frac{\eta\,k(0)}{K^2} |G|_F^2`. ``statistic="u"`` minimises the U-statistic, with K
    without its diagonal. For a kernel of :math:`x - y` that is nothing but the V-statistic with
    :math:`\eta - 1` for :math:`\eta`: below 1 the matrix is indefinite and G explodes where
    :math:`1 - \eta` is near an eigenvalue of :math:`K / k(0)`; at 1 there is no ridge at all.

    ``fit(x)`` predicts elsewhere. The nonparametric form gives at y the last row of the estimate on
    the sample with y added, at O(K^2 + K d) a point; so at a sample it is not what ``__call__``
    gives. The parametric form, for RBF, minimises the same discrepancy over :math:`a` in

    .. math:: g(y) = \sum_k a_k \nabla_y k(x^k, y), \qquad a = (\Lambda + \eta I)^{-1} b,

    with :math:`\Lambda, b` in units of length squared: rescale :math:`\eta` with the square of the
    samples there (the nonparametric form needs no rescaling). Its ``__call__`` is ``fit(x)(x)``.

    Every :math:`\eta > 0` shrinks. The *projected* gradient
    :math:`-\frac1K \sum_k G_k\, \partial x^k / \partial\phi` (that of the entropy of a sampler) is
    accurate, while single rows have large errors for small :math:`\eta`; all forms go to 0 away
    from the samples. In float32 keep :math:`\eta \ge 10^{-5} K` (the condition number is about
    :math:`K / \eta`). The diagonal also gets K times the machine epsilon, relative to its mean;
    where that does not suffice, the answer is NaN, as it is for a kernel that is not positive
    definite. O(K^3 + K^2 d) time, O(K^2) memory for the kernels of this package.

    :param float eta: the ridge, positive.
    :param kernel: defaults to ``RBF("median_distance")``; or a function of ``(n, d)`` and
        ``(m, d)`` points to ``(n, m)``. A rule is resolved on the samples, without a gradient; a
        gradient does flow through the samples.
    :param str statistic: ``"v"`` or ``"u"``.
    :param str form: ``"nonparametric"``, or ``"parametric"`` (RBF only).

    **References:**

    1. *Gradient estimators for implicit models*, Yingzhen Li and Richard E. Turner, ICLR 2018
       (equation 9; the predictive and the parametric estimators).

    .. doctest::

        >>> import jax
        >>> from numpyro_ext.scores import SteinScore
        >>> noise = jax.random.normal(jax.random.key(0), (200, 1))
        >>> x = 3.0 + 2.0 * noise  # the entropy of this sampler has the gradient 1 / 2 in its scale
        >>> score = SteinScore()(x)
        >>> print(f"{-(score * noise).mean():.2f}")
        0.50
    """

    eta: float | Array = 1e-2
    kernel: Any = None
    statistic: str = field(default="v", kw_only=True)
    form: str = field(default="nonparametric", kw_only=True)

    def __post_init__(self) -> None:
        check_positive("eta", self.eta)
        check_choice("statistic", self.statistic, ("u", "v"))
        check_choice("form", self.form, ("nonparametric", "parametric"))
        kernel = as_kernel(RBF("median_distance") if self.kernel is None else self.kernel)
        if self.form == "parametric" and not isinstance(kernel, RBF):
            raise ValueError(
                f"form is 'parametric' with the kernel {self.kernel!r}, but it has a formula for"
                " RBF only; use RBF() or form='nonparametric'."
            )
        object.__setattr__(self, "kernel", kernel)

    def __call__(self, x: ArrayLike) -> Float[Array, "k d"]:
        """Estimates at the samples ``x`` themselves, ``(K, d)``."""
        if self.form == "parametric":
            return self.fit(x)(x)
        x = as_points("x", x)
        k, _, push = kernel_sums(resolved(self.kernel, x), x, x)
        if self.statistic == "u":
            off_diagonal = jnp.fill_diagonal(k, 0.0, inplace=False)
            return -jnp.linalg.solve(_add_ridge(off_diagonal, self._ridge(k)), push())
        return -cho_solve((jnp.linalg.cholesky(_add_ridge(k, self._ridge(k))), True), push())

    def fit(self, x: ArrayLike) -> "KernelField | SteinPrediction":
        """The estimate from the samples ``x`` as a function of ``(n, d)`` points, a pytree."""
        if self.statistic == "u" and self.form == "nonparametric":
            raise ValueError(
                "statistic is 'u' and form 'nonparametric', which gives no estimates away from the"
                " samples; use statistic='v' or form='parametric'."
            )
        x = as_points("x", x)
        kernel = resolved(self.kernel, x)
        if self.form == "parametric":
            return KernelField(x, self._coefficients(x, kernel), kernel)
        k, _, push = kernel_sums(kernel, x, x)
        ridge = self._ridge(k)
        cholesky = jnp.linalg.cholesky(_add_ridge(k, ridge))
        return SteinPrediction(x, -cho_solve((cholesky, True), push()), cholesky, ridge, kernel)

    def _ridge(self, k: Array) -> Array:
        eta = jnp.asarray(self.eta, k.dtype)
        return (eta + len(k) * jnp.finfo(k.dtype).eps) * jnp.mean(jnp.diagonal(k))

    def _coefficients(self, x: Array, kernel: BaseKernel) -> Array:
        r"""Products with K first, elementwise products (``o``) with the Gram matrix X of centred x:

        .. math::

            \Lambda = X \circ (K \tilde K K) + K (\tilde K \circ X) K
                      - ((K \tilde K) \circ X) K - K ((\tilde K K) \circ X), \\
            b = (K\, \mathrm{diag}(X)\, K + (K K) \circ X - K (K \circ X) - (K \circ X) K)\, 1,

        where :math:`\tilde K` is K for "v", K without its diagonal for "u".
        """
        k = kernel(x, x)
        x = x - jnp.mean(x, axis=0)
        gram = matmul(x, x.T)
        k_mid = k if self.statistic == "v" else jnp.fill_diagonal(k, 0.0, inplace=False)
        half = matmul(k, k_mid)
        mixed = matmul(half * gram, k)
        lam = gram * matmul(half, k) + matmul(k, matmul(k_mid * gram, k)) - mixed - mixed.T
        ones = k.sum(1)
        b = matmul(k, jnp.diagonal(gram) * ones) + (matmul(k, k) * gram).sum(1)
        b = b - matmul(k, (k * gram).sum(1)) - matmul(k * gram, ones)
        scale = jnp.mean(jnp.abs(jnp.diagonal(lam)))
        ridge = jnp.asarray(self.eta, x.dtype) + len(x) * jnp.finfo(x.dtype).eps * scale
        if self.statistic == "u":
            return jnp.linalg.solve(_add_ridge(lam, ridge), b)
        return cho_solve((jnp.linalg.cholesky(_add_ridge(lam, ridge)), True), b)


def _add_ridge(matrix: Array, ridge: Array) -> Array:
    return matrix + ridge * jnp.eye(len(matrix), dtype=matrix.dtype)


@pytree
@dataclass(frozen=True, eq=False)
class SteinPrediction:
    r"""What the nonparametric :meth:`SteinScore.fit` returns: call it on ``(n, d)`` points.

    With :math:`A = K + \eta I`, :math:`w = A^{-1} k_y`, :math:`k_y = k(X, y)`, block elimination of
    the sample with y added leaves

    .. math::

        g(y) = -(k(y, y) + \eta - k_y^\top w)^{-1}
               \Bigl(k_y^\top G + b_y - \sum_k w_k \nabla_y k(x^k, y)\Bigr),

    where :math:`b_y = \sum_k \nabla_{x^k} k(y, x^k) + \nabla_2 k(y, y)` is, for a kernel of
    :math:`x - y`, just :math:`-\sum_k \nabla_y k(x^k, y)`.

    :param x: ``(K, d)`` samples.
    :param score: :math:`G`, ``(K, d)``, the estimates at the samples.
    :param cholesky: lower factor of :math:`A`, ``(K, K)``.
    :param ridge: what was added to the diagonal.
    :param kernel: a resolved kernel.
    """

    x: Float[Array, "k d"]
    score: Float[Array, "k d"]
    cholesky: Float[Array, "k k"]
    ridge: Float[Array, ""]
    kernel: BaseKernel

    def __call__(self, y: ArrayLike) -> Float[Array, "n d"]:
        y = as_queries(self.x, y)
        k_y, weighted, push = kernel_sums(self.kernel, self.x, y)
        v = solve_triangular(self.cholesky, k_y, lower=True)
        w = solve_triangular(self.cholesky, v, lower=True, trans=1)
        own, own_grad = at_itself(self.kernel, y)
        rest = own + self.ridge - jnp.sum(v**2, axis=0)  # |v|^2 is k_y.w with fewer digits lost
        numerator = matmul(k_y.T, self.score) + push() + own_grad - weighted(w)
        return -numerator / rest[:, None]
