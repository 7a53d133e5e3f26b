r"""The step of expectation propagation in which a factor meets its cavity.

.. math:: \mathcal N(u; m, S)\, e^{\alpha l(u)} \approx Z\, \mathcal N(u; \hat m, \hat S), \qquad
    \hat S^{-1} = S^{-1} + \alpha T, \quad \hat S^{-1} \hat m = S^{-1} m + \alpha v

in the r coordinates u that the factor depends on. (v, T) are the natural parameters of the new
site. A projection finds the moments in the coordinates e of the cavity, :math:`u = m + L e` with
:math:`S = L L^\top`, where the cavity is standard normal.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext.expfam.linalg import cholesky, inverse_root, matmul, matvec, symmetric, transpose

LogFactor = Callable[[Array], Array]
"""The logarithm l of a factor at u, of shape ``(r,)``: a number. It is differentiable."""


class Projected(NamedTuple):
    """What a projection returns.

    - **site_shift, site_precision** - v ``(r,)`` and T ``(r, r)``.
    - **log_normaliser** - log Z; NaN if it is not computed. At power 0 it is the mean of l under q.
    - **ok** - whether the moments are finite, positive definite, and computed where the mass is.
    - **inaccurate** - whether the points of a quadrature do not resolve the factor.
    - **low_ess** - whether the importance weights are uneven, so that the site is not to be used.
    """

    site_shift: Array
    site_precision: Array
    log_normaliser: Array
    ok: Array
    inaccurate: Array
    low_ess: Array


class Tilted(NamedTuple):
    """The tilted distribution in coordinates e; the rest is as in :class:`Projected`.

    - **scores** - the arguments g and K of :func:`from_scores`, and whether the site is to be that
      of these; None for that of the moments.
    """

    mean: Array
    cov: Array
    log_normaliser: Array
    scores: tuple[Array, Array, Array] | None = None
    ok: Array | bool = True
    inaccurate: Array | bool = False
    low_ess: Array | bool = False


class Expected(NamedTuple):
    """Means under N(0, I): of l, of its gradient and its Hessian; and as in :class:`Projected`."""

    log_factor: Array
    gradient: Array
    hessian: Array
    ok: Array | bool = True
    inaccurate: Array | bool = False


class Projection(ABC):
    """The base of the ways to compute the moments of a factor times its cavity.

    A subclass supplies :meth:`tilted`, and :meth:`expected` if it can, in coordinates in which the
    cavity is standard normal; one that works in those of the factor replaces :meth:`project`.
    """

    needs_key = False
    """Whether ``rng_key`` is needed."""
    has_normaliser = True
    """Whether ``log_normaliser`` is computed."""
    exclusive = True
    """Whether there is :meth:`expected`."""
    whole = False
    """Whether a factor is in all the coordinates of the model, and ``index`` is needed."""
    max_rank: int | None = None
    """The largest r; None if there is no limit."""
    takes_local = False
    """Whether it integrates over local sites too, so that ``local`` may be positive; it then has
    :meth:`draw`."""

    @abstractmethod
    def tilted(self, f: LogFactor, r: int, rng_key: Array | None, local: int) -> Tilted:
        """Moments of N(0, I) times exp(f), for f of r coordinates and of ``local`` ones after them.

        :param f: the log factor times the power.
        """

    def expected(self, f: LogFactor, r: int, rng_key: Array | None) -> Expected:
        """Means under N(0, I), for power 0."""
        self.refuse_power_0()

    def refuse_power_0(self) -> NoReturn:
        """An error for a projection without :meth:`expected`."""
        raise ValueError(
            f"power is 0, and {type(self).__name__} has no expectations under the approximation"
            " itself; use a power above 0, or projection=Quadrature() or ImportanceSampling()."
        )

    def draw(self, log_density: LogFactor, size: int, rng_key: Array) -> tuple[Array, Array]:
        """A draw of local sites, and the logarithm of the integral over them, or an estimate whose
        exponential has no bias; NaN without :attr:`has_normaliser`.

        :param log_density: of ``(size,)`` coordinates, up to a constant.
        """
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
        """The site of a factor to the given power, times its cavity.

        :param log_factor: ``u -> l(u)``, not multiplied by the power; with local sites
            ``(u, z) -> l(u, z)``, of which the factor is the integral over z.
        :param mean: ``(r,)``, the mean m of the cavity.
        :param cov: ``(r, r)``, its covariance S.
        :param float power: alpha, positive.
        :param rng_key: random key, where :attr:`needs_key`.
        :param index: number of the factor, where :attr:`whole`.
        :param int local: number of the coordinates of z, where :attr:`takes_local`.
        """
        self._check_key(rng_key)
        r, L = mean.shape[0], root(cov)

        def f(e: Array) -> Array:
            z = [e[r:]] if local else []
            return power * log_factor(mean + matvec(L, e[:r]), *z)

        found = self.tilted(f, r, rng_key, local)
        v, T = from_moments(found.mean, inverse(found.cov), power)
        if found.scores is not None:
            g, K, by_scores = found.scores
            scores = from_scores(g, K, power)
            v, T = (jnp.where(by_scores, a, b) for a, b in zip(scores, (v, T), strict=True))
        v, T = in_factor(v, T, mean, L)
        ok = are_finite(v, T) & (smallest(found.cov) > 0) & found.ok
        flags = jnp.asarray(found.inaccurate), jnp.asarray(found.low_ess)
        return Projected(v, T, found.log_normaliser, ok, *flags)

    def project_exclusive(
        self,
        log_factor: LogFactor,
        mean: Array,
        cov: Array,
        rng_key: Array | None = None,
        index: Array | None = None,
    ) -> Projected:
        r"""The site in the limit of power 0, from :math:`\mathcal N(m, S)`, which is q itself.

        .. math:: T = -\mathbb E_q[\nabla^2 l], \qquad v = \mathbb E_q[\nabla l] + T m
        """
        if self.exclusive:
            self._check_key(rng_key)
        L = root(cov)
        found = self.expected(lambda e: log_factor(mean + matvec(L, e)), mean.shape[0], rng_key)
        v, T = in_factor(found.gradient, -found.hessian, mean, L)
        flags = are_finite(v, T) & found.ok, jnp.asarray(found.inaccurate), jnp.array(False)
        return Projected(v, T, found.log_factor, *flags)

    def _check_key(self, rng_key: Array | None) -> None:
        if self.needs_key and rng_key is None:
            name = type(self).__name__
            raise ValueError(f"{name} draws at random; give it a random key, rng_key=.")


def root(cov: Array) -> Array:
    """L, lower, with ``cov = L L^T``."""
    return jnp.sqrt(cov) if cov.shape[-1] == 1 else cholesky(symmetric(cov))


def are_finite(v: Array, T: Array) -> Array:
    return jnp.all(jnp.isfinite(v)) & jnp.all(jnp.isfinite(T))


def smallest(M: Array) -> Array:
    """The smallest eigenvalue of a symmetric matrix; NaN if the matrix is not finite."""
    return M[0, 0] if M.shape[-1] == 1 else jnp.linalg.eigvalsh(symmetric(M))[0]


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


def from_moments(mean: Array, precision: Array, power: float) -> tuple[Array, Array]:
    """(v, T) in coordinates e, as differences of the natural parameters of tilted and cavity."""
    return matvec(precision, mean) / power, (precision - jnp.eye(mean.shape[-1])) / power


def from_scores(g: Array, K: Array, power: float) -> tuple[Array, Array]:
    r"""(v, T) in coordinates e, without a difference of nearly equal numbers.

    By parts, the mean is :math:`\bar g = \mathbb E[\alpha \nabla l]` and the covariance I + K with
    :math:`K = \mathbb E[\alpha \nabla^2 l] + \operatorname{Cov}[\alpha \nabla l]`, under the tilted
    distribution.
    """
    P = inverse(jnp.eye(g.shape[-1]) + K)
    return matvec(P, g) / power, -symmetric(matmul(P, K)) / power


def in_factor(v: Array, T: Array, mean: Array, L: Array) -> tuple[Array, Array]:
    """(v, T) of coordinates e in those of the factor, u = mean + L e."""
    back = 1 / L if L.shape[-1] == 1 else transpose(inverse_root(L))  # L^{-1}
    T = symmetric(matmul(transpose(back), matmul(T, back)))
    return matvec(transpose(back), v) + matvec(T, mean), T
