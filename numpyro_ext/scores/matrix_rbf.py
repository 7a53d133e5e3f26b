"""A Gaussian kernel in the geometry of a constant metric (Wang, Tang, Bajaj and Liu, *Stein
variational gradient descent with matrix-valued kernels*, NeurIPS 2019, section 4)."""

from dataclasses import dataclass, field, replace
from typing import Any

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
import numpy as np

from numpyro_ext._checks import check_choice
from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_point_pair, as_points, matmul
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.bandwidth import BANDWIDTH_RULES
from numpyro_ext.scores.kernels import RBF, BaseKernel, RadialKernel


@pytree
@dataclass(frozen=True, eq=False)
class MatrixRBF(BaseKernel):
    r"""Matrix-valued Gaussian kernel :math:`Q^{-1} \exp(-r^\top Q r / (2 h^2))`, :math:`r = x - y`.

    ``SVGD`` with it is ``SVGD`` with an :class:`RBF` in the coordinates :math:`Q^{1/2} x`, mapped
    back; the other fields do not take it. Where Q is not known, let the particles estimate it
    (``precondition="covariance"`` of a field). Called on points, it gives the scalar factor, of
    which ``grad_x``, ``grad_y`` and ``cross_trace`` are the derivatives; ``stein`` is the Stein
    kernel of the matrix-valued kernel.

    :param metric: Q, ``(d, d)``, symmetric and positive definite.
    :param bandwidth: as in :class:`RadialKernel`, of the points :math:`Q^{1/2} x`.
    :param float factor: multiplies the bandwidth, also a rule's.

    >>> kernel = MatrixRBF(jnp.diag(jnp.array([4.0, 1.0])), 1.0)
    >>> print(f"{kernel(jnp.zeros((1, 2)), jnp.array([[0.5, 1.0]]))[0, 0]:.4f}")
    0.3679
    """

    metric: Any
    bandwidth: Any = "median"
    factor: Any = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.bandwidth, str):
            check_choice("bandwidth", self.bandwidth, BANDWIDTH_RULES)
        RBF(self.bandwidth, factor=self.factor)  # the same checks
        if isinstance(self.metric, Tracer):
            return
        q = np.asarray(self.metric, float)
        symmetric = np.all(np.isfinite(q)) and np.allclose(q, q.T, rtol=1e-4)
        if not symmetric or not np.all(np.linalg.eigvalsh(q) > 0):
            raise ValueError(
                "metric is not symmetric and positive definite, as the inverse of a covariance is."
            )

    def _root(self, dtype: Any) -> Array:
        """Lower factor L of Q: distances between rows of x L are distances of x in the metric."""
        return jnp.linalg.cholesky(jnp.asarray(self.metric, dtype))

    def _in_metric(self, x: Array, y: Array) -> tuple[RadialKernel, Array, Array, Array]:
        x, y = as_point_pair(x, y)
        root = self._root(x.dtype)
        # Products lose the digits of differences unless both are measured from the middle.
        u, v = (matmul(z - x.mean(0), root) for z in (x, y))
        return RBF(self.bandwidth, factor=self.factor).resolve(u), u, v, root

    def resolve(self, x: Array, state: Any = None) -> "MatrixRBF":
        """The kernel with the bandwidth that its rule gives on ``x``, with distances in Q."""
        if not (isinstance(self.bandwidth, str) or callable(self.bandwidth)):
            return self
        x = as_points("x", x)
        return replace(self, bandwidth=self._in_metric(x, x)[0].length, factor=1.0)

    def __call__(self, x: Array, y: Array) -> Float[Array, "n m"]:
        rbf, u, v, _ = self._in_metric(x, y)
        return rbf(u, v)

    def repulsion(self, x: Array, y: Array) -> Float[Array, "n d"]:
        r"""The sums :math:`\sum_j k_{ij} Q r_{ij} / h^2`, without an (n, m, d) array."""
        rbf, u, v, root = self._in_metric(x, y)
        return matmul(rbf.repulsion(u, v), root.T)

    def to_velocity(self, v: Array) -> Float[Array, "n d"]:
        r"""The sum over particles times :math:`Q^{-1}`."""
        return cho_solve((self._root(v.dtype), True), v.T).T

    def stein(self, x: Array, y: Array, a: Array, b: Array) -> Float[Array, "n m"]:
        """The Stein kernel of the matrix-valued kernel, by an RBF in the coordinates of Q."""
        rbf, u, v, root = self._in_metric(x, y)
        a, b = (solve_triangular(root, s.T, lower=True).T for s in (a, b))
        return rbf.stein(u, v, a, b)
