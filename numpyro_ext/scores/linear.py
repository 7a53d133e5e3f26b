"""The linear kernel (Liu and Wang, 2018)."""

from dataclasses import dataclass
from typing import Any

from jax import Array

from numpyro_ext._checks import check_nonnegative
from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_point_pair, matmul
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.kernels import BaseKernel


@pytree
@dataclass(frozen=True, eq=False)
class Linear(BaseKernel):
    r"""Linear kernel :math:`k(x, y) = x^\top y + c`.

    With it, ``SVGD`` stands still exactly where the particles have the mean and the 1/m covariance
    of a Gaussian target, for m >= d + 1 particles in general position (Liu and Wang,
    *Stein variational gradient descent as moment matching*, NeurIPS 2018, theorem 3.3). It sees no
    other moments, and the other fields of particle inference do not take it. Results depend on
    where the origin is.

    :param bias: :math:`c`, in units of length squared; positive, or 0 for a mean that stays free.

    >>> x = jnp.array([[1.0, 2.0], [3.0, 0.0]])
    >>> print(Linear()(x, x))
    [[ 6.  4.]
     [ 4. 10.]]
    """

    bias: Any = 1.0

    def __post_init__(self) -> None:
        check_nonnegative("bias", self.bias)

    def __call__(self, x: Array, y: Array) -> Float[Array, "n m"]:
        x, y = as_point_pair(x, y)
        return matmul(x, y.T) + self.bias

    def repulsion(self, x: Array, y: Array) -> Float[Array, "n d"]:
        x, y = as_point_pair(x, y)
        return len(y) * x
