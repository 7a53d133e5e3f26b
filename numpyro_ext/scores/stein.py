"""Ridge-regularised Stein estimator of the score of a sampler (Li and Turner, 2018)."""

from dataclasses import dataclass, field
from typing import Any

from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from numpyro_ext._checks import check_choice, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.scores._conjugate_gradients import stein_score_by_cg
from numpyro_ext.scores._fields import (
    KernelField,
    add_ridge,
    as_queries,
    at_itself,
    basis_weights,
    gram_of_gradients,
    kernel_sums,
    resolved,
    solve,
)
from numpyro_ext.scores._points import as_points, matmul, squared_distances
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.kernels import (
    RBF,
    BaseKernel,
    Cauchy,
    Epanechnikov,
    RadialKernel,
    as_kernel,
)

# Above this many samples the V-statistic is solved iteratively, in memory of O(K).
_DENSE_UP_TO = 4096


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
    :math:`\frac{\eta\,k(0)}{K^2} |G|_F^2`. ``statistic="u"`` minimises the U-statistic: K without
    its diagonal in the inverse. For a kernel of :math:`x - y` that is the V-statistic with
    :math:`\eta - 1` for :math:`\eta`, so below 1 the matrix is indefinite, and G explodes where
    :math:`1 - \eta` is near an eigenvalue of :math:`K / k(0)`.

    ``fit(x)`` predicts elsewhere. The nonparametric form gives at y the last row of the estimate on
    the sample with y added, at O(K^2 + K d) a point. The parametric form, for :class:`RBF` and
    :class:`Cauchy`, minimises the same discrepancy over :math:`a` in

    .. math:: g(y) = \sum_k a_k \nabla_y k(x^k, y), \qquad a = (\Lambda + \eta I)^{-1} b,

    with :math:`\Lambda, b` in units of length squared: rescale :math:`\eta` with the square of the
    samples there (the nonparametric form needs no rescaling). Its ``__call__`` is ``fit(x)(x)``.

    Every :math:`\eta > 0` shrinks. The *projected* gradient :math:`-\frac1K \sum_k G_k\, \partial
    x^k / \partial\phi` (of the entropy of a sampler) is accurate, while single rows have large
    errors for small :math:`\eta`; all forms go to 0 away from the samples. In float32 keep
    :math:`\eta \ge 10^{-5} K`; a kernel that is not positive definite gives NaN.

    O(K^3 + K^2 d) time and O(K^2) memory. More than 4096 samples with a positive definite kernel of
    the distance are solved by preconditioned conjugate gradients, at O(K^2 d) an iteration and in
    memory of O(K); see :meth:`with_residual`.

    :param float eta: the ridge, positive.
    :param kernel: defaults to ``RBF("median_distance")``; or a function of ``(n, d)`` and ``(m,
        d)`` points to ``(n, m)``. No gradient flows through a rule.
    :param str statistic: ``"v"``, or ``"u"``: at the samples alone if nonparametric.
    :param str form: ``"nonparametric"``, or ``"parametric"`` (RBF and Cauchy only).

    **Reference:** *Gradient estimators for implicit models*, equation 9, Li and Turner (ICLR 2018);
    *Approximate inference: new visions*, appendix A.3, Li (PhD thesis, 2018)

    >>> noise = jax.random.normal(jax.random.key(0), (200, 1))
    >>> x = 3.0 + 2.0 * noise  # the entropy of this sampler has the gradient 1 / 2 in its scale
    >>> score = SteinScore()(x)
    >>> bool(abs(-(score * noise).mean() - 0.5) < 0.05)
    True
    """

    eta: float | Array = 1e-2
    kernel: Any = None
    statistic: str = field(default="v", kw_only=True)
    form: str = field(default="nonparametric", kw_only=True)

    def __post_init__(self) -> None:
        check_positive("eta", self.eta)
        check_choice("statistic", self.statistic, ("v", "u"))
        check_choice("form", self.form, ("nonparametric", "parametric"))
        kernel = as_kernel(RBF("median_distance") if self.kernel is None else self.kernel)
        if self.form == "parametric" and not isinstance(kernel, RBF | Cauchy):
            raise ValueError(
                f"form is 'parametric' with the kernel {self.kernel!r}, and is for RBF and Cauchy"
                " only; use RBF() or form='nonparametric'."
            )
        object.__setattr__(self, "kernel", kernel)

    def __call__(self, x: ArrayLike) -> Float[Array, "k d"]:
        """Estimates at the samples ``x`` themselves, ``(K, d)``."""
        if self.form == "parametric":
            return self.fit(x)(x)
        return self.with_residual(x)[0]

    def with_residual(self, x: ArrayLike) -> tuple[Float[Array, "k d"], Float[Array, ""]]:
        """The nonparametric estimates at the samples, and the relative residual of the solve."""
        x = as_points("x", x)
        kernel = resolved(self.kernel, x)
        large = len(x) > _DENSE_UP_TO and self.statistic == "v"
        if large and isinstance(kernel, RadialKernel) and not isinstance(kernel, Epanechnikov):
            at_zero = kernel.phi(jnp.zeros((), x.dtype))
            return stein_score_by_cg(kernel, x, self._relative_ridge(len(x), x.dtype) * at_zero)
        k, _, push = kernel_sums(kernel, x, x)
        matrix, b = add_ridge(self._without_diagonal(k), self._ridge(k)), push()
        g = self._solve(matrix, b)
        size = jnp.maximum(jnp.linalg.norm(b), jnp.finfo(x.dtype).tiny)
        return -g, jnp.linalg.norm(lax.stop_gradient(matmul(matrix, g) - b)) / size

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
        factor = jnp.linalg.cholesky(add_ridge(k, ridge))
        return SteinPrediction(x, -solve(factor, push()), factor, ridge, kernel)

    def _without_diagonal(self, k: Array) -> Array:
        return k if self.statistic == "v" else jnp.fill_diagonal(k, 0.0, inplace=False)

    def _solve(self, matrix: Array, b: Array) -> Array:
        if self.statistic == "u":  # the matrix may be indefinite
            return jnp.linalg.solve(matrix, b)
        return solve(jnp.linalg.cholesky(matrix), b)

    def _relative_ridge(self, num: int, dtype: Any) -> Array:
        return jnp.asarray(self.eta, dtype) + num * jnp.finfo(dtype).eps

    def _ridge(self, k: Array) -> Array:
        return self._relative_ridge(len(k), k.dtype) * jnp.mean(jnp.diagonal(k))

    def _coefficients(self, x: Array, kernel: Any) -> Array:
        r"""The coefficients :math:`a = (\Lambda + \eta I)^{-1} b` of the parametric form.

        With the weights P of the basis, :math:`\Lambda` of :func:`gram_of_gradients` around K
        (without its diagonal for "u"), and elementwise products with X, the Gram matrix of centred
        x,

        .. math::
            b = (P\, \mathrm{diag}(X)\, P + (P P) \circ X - P (P \circ X) - (P \circ X) P)\, 1.
        """
        s = squared_distances(x, x)
        p = basis_weights(kernel, s)
        lam = gram_of_gradients(x, p, self._without_diagonal(kernel.phi(s)))
        x = x - jnp.mean(x, axis=0)
        gram, ones = matmul(x, x.T), p.sum(1)
        b = matmul(p, jnp.diagonal(gram) * ones) + (matmul(p, p) * gram).sum(1)
        b = b - matmul(p, (p * gram).sum(1)) - matmul(p * gram, ones)
        scale = jnp.mean(jnp.abs(jnp.diagonal(lam)))
        ridge = jnp.asarray(self.eta, x.dtype) + len(x) * jnp.finfo(x.dtype).eps * scale
        return self._solve(add_ridge(lam, ridge), b)


@pytree
@dataclass(frozen=True, eq=False)
class SteinPrediction:
    r"""The fitted nonparametric :class:`SteinScore`, a function of ``(n, d)`` points.

    With :math:`A = K + \eta I`, :math:`w = A^{-1} k_y`, :math:`k_y = k(X, y)`, block elimination of
    the sample with y added leaves

    .. math::
        g(y) = -(k(y, y) + \eta - k_y^\top w)^{-1}
               \Bigl(k_y^\top G + b_y - \sum_k w_k \nabla_y k(x^k, y)\Bigr),

    where :math:`b_y = \sum_k \nabla_{x^k} k(y, x^k) + \nabla_2 k(y, y)` is, for a kernel of
    :math:`x - y`, just :math:`-\sum_k \nabla_y k(x^k, y)`; ``score`` is G, and ``factor`` the
    Cholesky factor of A.
    """

    x: Float[Array, "k d"]
    score: Float[Array, "k d"]
    factor: Float[Array, "k k"]
    ridge: Float[Array, ""]
    kernel: BaseKernel

    def __call__(self, y: ArrayLike) -> Float[Array, "n d"]:
        y = as_queries(self.x, y)
        k_y, weighted, push = kernel_sums(self.kernel, self.x, y)
        own, own_grad = at_itself(self.kernel, y)
        v = solve_triangular(self.factor, k_y, lower=True)
        w = solve_triangular(self.factor, v, lower=True, trans=1)
        explained = jnp.sum(v**2, axis=0)  # k_y.w with fewer digits lost
        numerator = matmul(k_y.T, self.score) + push() + own_grad - weighted(w)
        return -numerator / (own + self.ridge - explained)[:, None]
