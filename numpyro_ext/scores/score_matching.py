"""Score matching (Hyvarinen, 2005) with a log density that is a sum of kernels."""

from dataclasses import dataclass
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import check_nonnegative
from numpyro_ext._typing import Float
from numpyro_ext.scores._fields import (
    KernelField,
    add_ridge,
    basis_weights,
    gram_of_gradients,
    resolved,
    solve,
)
from numpyro_ext.scores._points import as_points, squared_distances
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.kernels import RBF, Cauchy, Epanechnikov, as_kernel


@pytree
@dataclass(frozen=True, eq=False)
class ScoreMatchingScore:
    r"""Score of :math:`\log \hat q(y) = \sum_k a_k k(x^k, y) + \text{const}`, by score matching.

    The coefficients minimise the sum over the samples of :math:`|\hat g|^2 + 2\, \mathrm{div}\,
    \hat g`, with the expectation of :math:`|\hat g - g|^2` and a constant (Hyvarinen), and a ridge:

    .. math::
        \hat g(y) &= \sum_k a_k \nabla_y k(x^k, y), \qquad a = (\Lambda + \eta I)^{-1} b, \\
        \Lambda_{kl} &= h^4 \sum_n \nabla k(x^k, x^n)^\top \nabla k(x^l, x^n), \qquad
        b_k = h^4 \sum_n \mathrm{tr}\, \partial_x \partial_y k(x^k, x^n).

    :math:`\Lambda, b` and :math:`\eta` are in units of length squared: rescale :math:`\eta` with
    the square of the samples. With :class:`Epanechnikov` both are divided by :math:`4K`; that
    estimate is the score of an isotropic Gaussian. Small :math:`\eta` overfits: the samples are its
    training points. O(K^3 + K^2 d) time.

    :param eta: the ridge, at least 0.
    :param kernel: :class:`RBF`, :class:`Cauchy` or :class:`Epanechnikov`; defaults to
        ``RBF("median_distance")``.

    **References:** *Estimation of non-normalized statistical models by score matching*, theorem 1,
    Hyvarinen (JMLR 2005); *Gradient estimators for implicit models*, appendix, Li and Turner (ICLR
    2018); *Gradient-free Hamiltonian Monte Carlo with efficient kernel exponential families*,
    section 3, Strathmann et al. (NIPS 2015)

    >>> x = 2.0 * jax.random.normal(jax.random.key(0), (500, 1))
    >>> score = ScoreMatchingScore(1.0, RBF(4.0)).fit(x)  # the truth at 1 is -1 / 4
    >>> bool(abs(score(jnp.ones((1, 1)))[0, 0] + 1 / 4) < 0.15)
    True
    """

    eta: float | Array = 1e-2
    kernel: Any = None

    def __post_init__(self) -> None:
        check_nonnegative("eta", self.eta)
        kernel = as_kernel(RBF("median_distance") if self.kernel is None else self.kernel)
        if not isinstance(kernel, RBF | Cauchy | Epanechnikov):
            raise ValueError(
                f"kernel is {kernel!r}; it must be RBF, Cauchy or Epanechnikov, or use SteinScore."
            )
        object.__setattr__(self, "kernel", kernel)

    def __call__(self, x: ArrayLike) -> Float[Array, "k d"]:
        """Estimates at the samples ``x`` themselves, ``(K, d)``."""
        return self.fit(x)(x)

    def fit(self, x: ArrayLike) -> KernelField:
        """The estimate from the samples ``x`` as a function of ``(n, d)`` points, a pytree."""
        x = as_points("x", x)
        kernel: Any = resolved(self.kernel, x)
        p = basis_weights(kernel, squared_distances(x, x))
        lam = gram_of_gradients(x, p)
        b = kernel.length**4 * kernel.cross_trace(x, x).sum(1)
        eta = jnp.asarray(self.eta, x.dtype)
        if isinstance(kernel, Epanechnikov):
            eta = 4.0 * len(x) * eta
        ridge = eta + len(x) * jnp.finfo(x.dtype).eps * jnp.mean(jnp.diagonal(lam))
        factor = jnp.linalg.cholesky(add_ridge(lam, ridge))  # a Gram matrix for every kernel
        return KernelField(x, solve(factor, b), kernel)
