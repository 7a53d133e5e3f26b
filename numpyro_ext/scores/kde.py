"""Score of a kernel density estimate."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._typing import Float
from numpyro_ext.scores._fields import as_queries, kernel_sums, resolved
from numpyro_ext.scores._points import as_points, matmul, squared_distances
from numpyro_ext.scores._pytree import pytree
from numpyro_ext.scores.kernels import RBF, BaseKernel, Epanechnikov, as_kernel


@pytree
@dataclass(frozen=True, eq=False)
class KDEScore:
    r"""Score of the kernel density estimate of the samples :math:`x^1, \dots, x^K`.

    .. math:: g(y) = \frac{\sum_k \nabla_y k(x^k, y)}{\sum_k k(x^k, y)},

    in units of 1/length. With an :class:`RBF` it is computed as :math:`(\sum_k w_k x^k - y) / h^2`
    with the weights :math:`w = \mathrm{softmax}_k(-|x^k - y|^2 / (2 h^2))`, which is finite however
    far y is from all samples: there it is the pull of the nearest sample.

    It is biased for every h > 0: with an RBF its limit for many samples is the score of q convolved
    with :math:`N(0, h^2 I)`. So it is too small, and entropy gradients made of it are badly shrunk
    at either median rule; take :class:`SteinScore` for them. O(K^2 d) at the samples.

    :param kernel: defaults to ``RBF("median_distance")``; any kernel that is positive everywhere,
        or a function ``(n, d), (m, d) -> (n, m)``.

    **Reference:** *Gradient estimators for implicit models*, section 3.4, Li and Turner (ICLR 2018)

    >>> x = 2.0 * jax.random.normal(jax.random.key(0), (1000, 1))
    >>> score = KDEScore(RBF(1.0)).fit(x)  # of N(0, 2^2 + 1), nearly
    >>> bool(abs(score(jnp.ones((1, 1)))[0, 0] + 1 / 5) < 0.15)
    True
    """

    kernel: Any = None

    def __post_init__(self) -> None:
        kernel = as_kernel(RBF("median_distance") if self.kernel is None else self.kernel)
        if isinstance(kernel, Epanechnikov):
            raise ValueError(
                f"kernel is {kernel!r}, which gives no density; use RBF, IMQ or Cauchy."
            )
        object.__setattr__(self, "kernel", kernel)

    def __call__(self, x: ArrayLike) -> Float[Array, "k d"]:
        """Estimates at the samples ``x`` themselves, ``(K, d)``."""
        return self.fit(x)(x)

    def fit(self, x: ArrayLike) -> "KernelDensityScore":
        """The estimate from the samples ``x`` as a function of ``(n, d)`` points, a pytree."""
        x = as_points("x", x)
        return KernelDensityScore(x, resolved(self.kernel, x))


@pytree
@dataclass(frozen=True, eq=False)
class KernelDensityScore:
    """The fitted estimate of :class:`KDEScore`, a function of ``(n, d)`` points."""

    x: Float[Array, "k d"]
    kernel: BaseKernel

    def __call__(self, y: ArrayLike) -> Float[Array, "n d"]:
        y = as_queries(self.x, y)
        if isinstance(self.kernel, RBF):
            h2 = self.kernel.length**2
            w = jax.nn.softmax(-squared_distances(y, self.x) / (2.0 * h2), axis=1)
            middle = jnp.mean(self.x, axis=0)
            return (matmul(w, self.x - middle) - (y - middle)) / h2
        k_y, weighted, _ = kernel_sums(self.kernel, self.x, y)
        return weighted(jnp.ones_like(k_y)) / k_y.sum(0)[:, None]
