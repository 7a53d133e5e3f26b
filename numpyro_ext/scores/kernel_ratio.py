"""Ratio of two densities that are known by their samples only, by least squares."""

from dataclasses import dataclass
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import check_positive
from numpyro_ext._typing import Float
from numpyro_ext.scores._fields import add_ridge, as_queries, resolved, solve
from numpyro_ext.scores._points import as_point_pair, matmul
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.kernels import RBF, BaseKernel, as_kernel

FLOOR = 1e-6  # the least ratio of which a log is taken


@pytree
@dataclass(frozen=True, eq=False)
class KernelRatio:
    r"""Ratio :math:`r = p_{num} / p_{den}` of two densities, by kernel least squares on samples.

    The minimiser of :math:`\frac12 E_{den}[(\hat r - r)^2] + \frac\lambda2 |\hat r|_H^2` over the
    space H of the kernel, with averages over :math:`N_n` samples :math:`z^n` of the numerator and
    :math:`N_d` samples :math:`z^d` of the denominator:

    .. math::
        \hat r(z) = \frac{1}{\lambda N_n} 1^\top k(z^n, z) - \frac{1}{\lambda N_d N_n} 1^\top
        k(z^n, z^d) \Bigl(\frac{k(z^d, z^d)}{N_d} + \lambda I\Bigr)^{-1} k(z^d, z).

    It is accurate where the denominator has mass, shrunk to 0, and can be negative: :math:`\log
    \hat r` is the log of ``max(r, 1e-6)``. So for KL(q || p) estimate p/q, with q as the
    denominator, and use its negative log. Where the densities differ much, take :func:`whiten`
    first (adaptive contrast). O(N_d^3 + N_d (N_n + n) d) for n points.

    :param lam: :math:`\lambda`, positive.
    :param kernel: as in :class:`SteinScore`; a rule is resolved on the samples of the denominator.

    **References:** *A least-squares approach to direct importance estimation*, Kanamori, Hido and
    Sugiyama (JMLR 2009); *Kernel implicit variational inference*, Shi, Sun and Zhu (ICLR 2018),
    with the *reverse* ratio

    >>> e = jax.random.normal(jax.random.key(0), (500, 1))
    >>> ratio = KernelRatio(1e-3).fit(0.5 + e, e)
    >>> bool(abs(ratio(jnp.ones((1, 1)))[0] - 1.45) < 0.5)  # the truth is exp(0.5 - 0.125)
    True
    """

    lam: float | Array = 1e-2
    kernel: Any = None

    def __post_init__(self) -> None:
        check_positive("lam", self.lam)
        kernel = RBF("median_distance") if self.kernel is None else self.kernel
        object.__setattr__(self, "kernel", as_kernel(kernel))

    def fit(self, x_num: ArrayLike, x_den: ArrayLike) -> "FittedKernelRatio":
        """The ratio as a function of ``(n, d)`` points, from two sets of samples."""
        num, den = as_point_pair(x_num, x_den, ("x_num", "x_den"))
        num = num.astype(den.dtype)
        kernel = resolved(self.kernel, den)
        lam = jnp.asarray(self.lam, den.dtype)
        within = kernel(den, den) / len(den)
        jitter = len(den) * jnp.finfo(den.dtype).eps * jnp.mean(jnp.diagonal(within))
        factor = jnp.linalg.cholesky(add_ridge(within, lam + jitter))
        weights = solve(factor, kernel(num, den).mean(0)) / (lam * len(den))
        return FittedKernelRatio(num, den, weights, lam, kernel)


@pytree
@dataclass(frozen=True, eq=False)
class FittedKernelRatio:
    """The fitted ratio of :class:`KernelRatio`; its second term has the ``weights``."""

    num: Float[Array, "n d"]
    den: Float[Array, "m d"]
    weights: Float[Array, " m"]
    lam: Float[Array, ""]
    kernel: BaseKernel

    def __call__(self, z: ArrayLike) -> Float[Array, " n"]:
        z = as_queries(self.den, z)
        attraction = self.kernel(self.num, z).mean(0) / self.lam
        return attraction - matmul(self.weights, self.kernel(self.den, z))

    def log_ratio(self, z: ArrayLike) -> Float[Array, " n"]:
        """Log of the ratio, or of the floor where the ratio is below it."""
        return jnp.log(jnp.maximum(self(z), FLOOR))
