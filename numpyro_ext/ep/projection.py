r"""The step of expectation propagation in which a factor meets its cavity.

.. math:: \mathcal N(u; m, S)\, e^{\alpha l(u)} \approx Z\, \mathcal N(u; \hat m, \hat S), \qquad
    \hat S^{-1} = S^{-1} + \alpha T, \quad \hat S^{-1} \hat m = S^{-1} m + \alpha v

in the r coordinates u that the factor depends on. (v, T) are the natural parameters of the new
site. A projection finds them in the coordinates e of the cavity, :math:`u = m + L e` with
:math:`S = L L^\top`, where the cavity is standard normal.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext.expfam.linalg import cholesky, inverse_root, matmul, matvec, symmetric, transpose

LogFactor = Callable[[Array], Array]
"""The logarithm l of a factor at u, of shape ``(r,)``: a number. It is differentiable."""


class Projected(NamedTuple):
    """The site that a projection finds, and signs of trouble.

    - **site_shift, site_precision** - v ``(r,)`` and T ``(r, r)``.
    - **log_normaliser** - log Z; NaN if it is not computed. At power 0 it is the mean of l under q.
    - **ok** - whether the moments are finite, positive definite, and computed where the mass is,
      from weights that are not uneven.
    - **inaccurate** - whether the points of a quadrature do not resolve the factor.
    """

    site_shift: Array
    site_precision: Array
    log_normaliser: Array
    ok: Array | bool = True
    inaccurate: Array | bool = False


class Projection(ABC):
    """The base of the ways to compute the moments of a factor times its cavity.

    A subclass writes :meth:`tilted`, and :meth:`expected` if it can, in coordinates in which the
    cavity is standard normal, or :meth:`project` in the coordinates of the factor.

    - **needs_key, has_normaliser** - whether it takes a random key, and gives a log normaliser.
    - **whole** - whether a factor is in all the coordinates of the model, and has its ``index``.
    - **max_rank** - the largest r; None if there is no limit.
    - **takes_local** - whether it integrates over local sites too, and draws them.
    """

    needs_key = False
    has_normaliser = True
    whole = False
    max_rank: int | None = None
    takes_local = False

    @abstractmethod
    def tilted(self, f: LogFactor, r: int, rng_key: Array | None, local: int) -> Projected:
        """The natural parameters that exp(f) adds to N(0, I), where f is the log factor times the
        power, of r coordinates and of ``local`` ones after them."""

    def expected(self, f: LogFactor, r: int, rng_key: Array | None) -> Projected:
        """Means under N(0, I) for power 0: of the gradient of f, minus its Hessian, and f."""
        raise ValueError(
            f"power is 0, and {type(self).__name__} has no expectations under q; use a power above"
            " 0, or projection=Quadrature() or ImportanceSampling()."
        )

    def draw(self, log_density: LogFactor, size: int, rng_key: Array) -> tuple[Array, Array]:
        """A draw of ``size`` local coordinates, and the logarithm of the integral over them or of
        an estimate without bias; NaN without a normaliser."""
        raise NotImplementedError(f"{type(self).__name__} draws no local sites.")

    def project(
        self,
        log_factor: LogFactor,
        mean: Array,
        cov: Array,
        power: float,
        rng_key: Array | None = None,
        index: Array | int | None = None,
        local: int = 0,
    ) -> Projected:
        r"""The site of a factor to the given power, times its cavity. Power 0 is the limit

        .. math:: T = -\mathbb E_q[\nabla^2 l], \qquad v = \mathbb E_q[\nabla l] + T m

        in which the cavity is q itself.

        :param log_factor: ``u -> l(u)``, not multiplied by the power; with local sites
            ``(u, z) -> l(u, z)``, of which the factor is the integral over z.
        :param mean, cov: ``(r,)`` and ``(r, r)``, the mean m and covariance S of the cavity.
        :param float power: alpha, at least 0.
        :param index: number of the factor.
        :param int local: number of the coordinates of z.
        """
        r, L, scale = mean.shape[0], root(cov), power or 1.0

        def f(e: Array) -> Array:
            z = [e[r:]] if local else []
            return scale * log_factor(mean + along(L, e[:r]), *z)

        site = self.tilted(f, r, rng_key, local) if power else self.expected(f, r, rng_key)
        T = site.site_precision / scale
        back = 1 / L if r == 1 else transpose(inverse_root(L))  # L^{-1}
        T = symmetric(matmul(transpose(back), matmul(T, back)))
        v = matvec(transpose(back), site.site_shift / scale) + matvec(T, mean)
        site = site._replace(site_shift=v, site_precision=T, ok=site.ok & are_finite(v, T))
        return jax.tree.map(jnp.asarray, site)


@dataclass(eq=False)
class ClosedForm(Projection):
    r"""Moments by a function of yours, in all D coordinates of the model.

    .. math:: \hat m,\ \hat S,\ \log Z \quad\text{of}\quad
        \mathcal N(\theta; m, S)\, e^{\alpha l_n(\theta)} / Z

    The site is the difference :math:`(\hat S^{-1} - S^{-1}) / \alpha`, a full matrix. A factor that
    is much weaker than its cavity therefore loses digits in single precision.

    :param fn: ``(shift, precision, index, power) -> (mean, cov, log_normaliser)``, from the natural
        parameters :math:`S^{-1} m` and :math:`S^{-1}` of the cavity, the number of the factor and
        the power alpha. It is traced, with a traced ``index``.

    >>> from numpyro_ext.ep import ClosedForm
    >>> y = jnp.array([1.0, 2.0])                                  # y_n ~ N(theta, 1)
    >>> def tilted(shift, precision, index, power):
    ...     cov = jnp.linalg.inv(precision + power)
    ...     return cov @ (shift + power * y[index]), cov, jnp.nan
    >>> site = ClosedForm(tilted).project(None, jnp.zeros(1), jnp.eye(1), 1.0, index=1)
    >>> print(site.site_shift, site.site_precision)
    [2.] [[1.]]
    """

    fn: Callable[..., Any]

    whole = True

    def tilted(self, f: LogFactor, r: int, rng_key: Array | None, local: int) -> Projected:
        raise NotImplementedError("ClosedForm has moments in all coordinates; call project.")

    def project(
        self,
        log_factor: LogFactor | None,
        mean: Array,
        cov: Array,
        power: float,
        rng_key: Array | None = None,
        index: Array | int | None = None,
        local: int = 0,
    ) -> Projected:
        if power == 0:
            self.expected(lambda u: u, len(mean), rng_key)
        precision = inverse(cov)
        shift = matvec(precision, mean)
        tilted_mean, tilted_cov, log_normaliser = self.fn(shift, precision, index, power)
        tilted = inverse(tilted_cov)
        T = symmetric(tilted - precision) / power
        v = (matvec(tilted, tilted_mean) - shift) / power
        return jax.tree.map(jnp.asarray, Projected(v, T, log_normaliser, are_finite(v, T)))


def root(cov: Array) -> Array:
    """L, lower, with ``cov = L L^T``."""
    return jnp.sqrt(cov) if cov.shape[-1] == 1 else cholesky(symmetric(cov))


def along(M: Array, x: Array) -> Array:
    """M x for a narrow M, without a product of matrices, which XLA fuses with nothing else."""
    if len(x) > 3:
        return matvec(M, x)
    return sum((M[:, k] * x[k] for k in range(1, len(x))), M[:, 0] * x[0])


def are_finite(v: Array, T: Array) -> Array:
    return jnp.all(jnp.isfinite(v)) & jnp.all(jnp.isfinite(T))


def smallest(M: Array) -> Array:
    """The smallest eigenvalue of a symmetric matrix; NaN if the matrix is not finite."""
    return M[0, 0] if M.shape[-1] == 1 else jnp.linalg.eigvalsh(symmetric(M))[0]


def solve_any(M: Array, b: Array) -> Array:
    """M^{-1} b for a small matrix M, symmetric or not."""
    if len(M) == 1:
        return b / M[0]
    if len(M) > 2:
        return jnp.linalg.solve(M, b)
    # By the adjugate: a factorisation with pivots takes long to compile.
    (p, q), (r, s) = M
    x, y = b
    return jnp.stack([s * x - q * y, p * y - r * x]) / (p * s - q * r)


def inverse(M: Array) -> Array:
    """The inverse of a positive definite matrix; NaN throughout where it is not."""
    if M.shape[-1] == 1:
        return 1 / jnp.where(M > 0, M, jnp.nan)
    L = inverse_root(cholesky(symmetric(M)))
    return matmul(L, transpose(L))


def weighted_moments(log_w: Array, x: Array) -> tuple[Array, Array]:
    """Mean and covariance of points ``(n, r)`` with unnormalised log weights ``(n,)``."""
    w = jax.nn.softmax(log_w)
    mean = jnp.tensordot(w, x, 1)
    d = x - mean
    return mean, matmul(d.T, w[:, None] * d)


def from_moments(mean: Array, cov: Array) -> tuple[Array, Array]:
    """The natural parameters of N(mean, cov) over N(0, I); NaN if cov is not positive."""
    precision = inverse(cov)
    return matvec(precision, mean), precision - jnp.eye(mean.shape[-1])


def from_either(
    by_scores: Array, g: Array, K: Array, mean: Array, cov: Array
) -> tuple[Array, Array]:
    """The same, or without a difference of nearly equal numbers, of mean g and covariance I + K."""
    eye = jnp.eye(mean.shape[-1])
    P = inverse(jnp.where(by_scores, eye + K, cov))
    T = jnp.where(by_scores, -symmetric(matmul(P, K)), P - eye)
    return matvec(P, jnp.where(by_scores, g, mean)), T
