"""Spectral estimator of the score of an implicit distribution (Shi, Sun and Zhu, 2018)."""

from dataclasses import dataclass, field
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.scores._fields import as_queries, kernel_sums, resolved
from numpyro_ext.scores._points import as_points, matmul
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.kernels import RBF, BaseKernel, as_kernel


@pytree
@dataclass(frozen=True, eq=False)
class SpectralScore:
    r"""Score of q as a series in the first J eigenfunctions of a kernel under q.

    With the eigenpairs :math:`\lambda_1 \ge \lambda_2 \ge \dots, u_j` of the Gram matrix of the
    samples and Nystrom's eigenfunctions,

    .. math::
        \psi_j(y) = \frac{\sqrt K}{\lambda_j} \sum_m k(x^m, y)\, u_{jm}, \qquad
        \beta_j = -\frac1K \sum_n \nabla \psi_j(x^n), \qquad
        g(y) = \sum_{j \le J} \beta_j\, \psi_j(y),

    because :math:`E_q[\psi_j g] = -E_q[\nabla\psi_j]`. The bias comes from the series cut at J: J
    around 6 is right for d <= 2, more for more dimensions, and J near K overfits strongly.
    O(K^3 + K^2 d) time. A gradient does not exist where two eigenvalues coincide.

    :param int num_eigen: J, at most the number of samples.
    :param kernel: as in :class:`SteinScore`.
    :param min_ratio: terms with :math:`\lambda_j <` ``min_ratio`` :math:`\lambda_1` are left out.

    **Reference:** *A spectral approach to gradient estimation for implicit distributions*,
    algorithm 1, Shi, Sun and Zhu (ICML 2018)

    >>> noise = jax.random.normal(jax.random.key(0), (200, 1))
    >>> x = 3.0 + 2.0 * noise  # the entropy of this sampler has the gradient 1 / 2 in its scale
    >>> score = SpectralScore(num_eigen=6)(x)
    >>> bool(abs(-(score * noise).mean() - 0.5) < 0.1)
    True
    """

    num_eigen: int = field(default=6, metadata={"static": True})
    kernel: Any = None
    min_ratio: float | Array = field(default=1e-5, kw_only=True)

    def __post_init__(self) -> None:
        check_count("num_eigen", self.num_eigen)
        check_positive("min_ratio", self.min_ratio)
        kernel = RBF("median_distance") if self.kernel is None else self.kernel
        object.__setattr__(self, "kernel", as_kernel(kernel))

    def __call__(self, x: ArrayLike) -> Float[Array, "k d"]:
        """Estimates at the samples ``x`` themselves, ``(K, d)``."""
        x, _, vectors, inverse, pushed = self._expansion(x)
        return -matmul(vectors, inverse[:, None] * pushed)

    def fit(self, x: ArrayLike) -> "SpectralPrediction":
        """The estimate from the samples ``x`` as a function of ``(n, d)`` points, a pytree."""
        x, kernel, vectors, inverse, pushed = self._expansion(x)
        root = jnp.sqrt(jnp.asarray(len(x), x.dtype))
        beta = -inverse[:, None] * pushed / root
        return SpectralPrediction(x, root * inverse * vectors, beta, kernel)

    def _expansion(self, x: ArrayLike) -> tuple[Array, BaseKernel, Array, Array, Array]:
        """Samples, kernel, :math:`u` ``(K, J)``, :math:`1/\\lambda` or 0, and :math:`u^T B`."""
        x = as_points("x", x)
        if self.num_eigen > len(x):
            raise ValueError(
                f"num_eigen is {self.num_eigen}, but {len(x)} samples have {len(x)}"
                " eigenfunctions; use fewer, or more samples."
            )
        kernel = resolved(self.kernel, x)
        k, _, push = kernel_sums(kernel, x, x)
        values, vectors = jnp.linalg.eigh(k)
        values, vectors = values[::-1][: self.num_eigen], vectors[:, ::-1][:, : self.num_eigen]
        # NaN is not small: it stays NaN.
        small = values < self.min_ratio * values[0]
        inverse = jnp.where(small, 0.0, 1.0 / jnp.where(small, 1.0, values))
        return x, kernel, vectors, inverse, matmul(vectors.T, push())


@pytree
@dataclass(frozen=True, eq=False)
class SpectralPrediction:
    r"""The fitted :class:`SpectralScore`; ``weights`` are :math:`\sqrt K u_{jm} / \lambda_j`."""

    x: Float[Array, "k d"]
    weights: Float[Array, "k j"]
    beta: Float[Array, "j d"]
    kernel: BaseKernel

    def eigenfunctions(self, y: ArrayLike) -> Float[Array, "n j"]:
        r""":math:`\psi_j(y)` of ``(n, d)`` points, up to their signs."""
        return matmul(self.kernel(self.x, as_queries(self.x, y)).T, self.weights)

    def __call__(self, y: ArrayLike) -> Float[Array, "n d"]:
        return matmul(self.eigenfunctions(y), self.beta)
