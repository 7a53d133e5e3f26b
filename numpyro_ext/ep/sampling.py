"""Moments of a factor times its cavity from draws: by importance sampling, and by NUTS."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
import numpy as np
from numpyro.infer.hmc import hmc

from numpyro_ext._checks import check_count, check_positive, check_share
from numpyro_ext._model.operations import gradient, hessian
from numpyro_ext.ep.projection import (
    LogFactor,
    Projected,
    Projection,
    from_either,
    from_moments,
    root,
    smallest,
    weighted_moments,
)
from numpyro_ext.expfam.linalg import half_logdet, inverse_root, matmul, matvec, outer, symmetric

LARGEST_HESSIAN = 50  # the rank up to which second derivatives are taken
FLATTEST = 1e-3  # the least curvature in the coordinates of local sites, where a cavity has 1
FEWEST = 20  # the least effective number of points from which a draw is taken
INFLATION = 1.5  # the covariance of the second proposal relative to Laplace's approximation


@dataclass(eq=False)
class ImportanceSampling(Projection):
    r"""Moments by weighted quasi-random points, for a factor of any rank.

    .. math:: \hat S = I + \mathbb E[\alpha \nabla^2 l] + \operatorname{Cov}[\alpha \nabla l],
        \qquad w_i \propto e^{\alpha l(e_i)} N(e_i; 0, I) / h(e_i)

    in coordinates e in which the cavity is N(0, I). The points are a scrambled Sobol sequence,
    shifted at random for each key, with the density h of the cavity. If the effective sample size
    :math:`1 / \sum_i w_i^2` falls below ``min_ess`` times the number of points, h is normal at the
    mode of the tilted distribution, with 1.5 times the covariance of its Laplace approximation. If
    it is still below, ``ok`` is false, and the site is left out. A factor that leaves less than
    half the variance of the cavity in some direction, or of a rank above 50, has the covariance of
    the weighted points. Local sites z of a row are drawn around their mode given e. The error falls
    as about 1 / num_samples, and the result depends on the key.

    **It fails** in silence where the points around one mode do not reach parts of the tilted
    distribution, such as another mode or the rest of a thin ring: their weights are even.

    :param int num_samples: number of points.
    :param float min_ess: least effective sample size, as a share of the points, in (0, 1).

    >>> from numpyro_ext.ep import ImportanceSampling
    >>> factor = lambda u: -jnp.sum(u**2) / 2                       # a precision of I
    >>> site = jax.jit(lambda mean, cov, key: ImportanceSampling().project(
    ...     factor, mean, cov, 1.0, key))(jnp.zeros(4), jnp.eye(4) / 2, jax.random.key(0))
    >>> bool(jnp.allclose(site.site_precision, jnp.eye(4), atol=0.05))
    True
    """

    num_samples: int = 512
    min_ess: float = 0.1

    needs_key = True
    takes_local = True

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples, 2)
        check_positive("min_ess", self.min_ess)
        check_share("min_ess", self.min_ess)

    def tilted(self, f: LogFactor, r: int, rng_key: Array | None, local: int) -> Projected:
        points = self._normal_points(rng_key, r + local)
        if local:
            first = with_local(f, points, jnp.zeros(r), jnp.eye(r))
            m, S = weighted_moments(first[1], first[0][:, :r])
            second = with_local(f, points, m, INFLATION * S)
        else:
            first = points, finite(jax.vmap(f)(points))
            second = at_mode(f, *first)
        enough = ess(first[1]) >= self.min_ess
        # The normaliser is differentiated through the factor, at points that stay.
        e, log_w = lax.stop_gradient(
            [jnp.where(enough, a, b) for a, b in zip(first, second, strict=True)]
        )
        log_f = jax.vmap(f)(e)
        log_w += jnp.where(jnp.isfinite(log_f), log_f - lax.stop_gradient(log_f), 0.0)

        m, S = weighted_moments(log_w, e[:, :r])
        if r > LARGEST_HESSIAN:
            v, T = from_moments(m, S)
        else:
            g, H = jax.vmap(gradient(f))(e), jax.vmap(hessian(f))(e)
            # With local sites, too, these give the derivatives of the integral over them.
            g, H = g[:, :r], H[:, :r, :r]
            g, H = (jnp.where(jnp.isfinite(x), x, 0.0) for x in (g, H))
            gbar, cov_g = weighted_moments(log_w, g)
            K = jnp.tensordot(jax.nn.softmax(log_w), H, 1) + cov_g
            v, T = from_either(smallest(S) > 0.5, gbar, K, m, S)
        log_normaliser = logsumexp(log_w) - jnp.log(self.num_samples)
        return Projected(v, T, log_normaliser, ess(log_w) >= self.min_ess)

    def expected(self, f: LogFactor, r: int, rng_key: Array | None) -> Projected:
        e = self._normal_points(rng_key, r)
        mean_log = jnp.mean(jax.vmap(f)(e))
        g, H = (jnp.mean(jax.vmap(D(f))(e), 0) for D in (gradient, hessian))
        return Projected(g, -H, mean_log, jnp.isfinite(mean_log))

    def draw(self, log_density: LogFactor, size: int, rng_key: Array) -> tuple[Array, Array]:
        """One of the points around a mode, by their weights; NaN if these are too uneven."""
        key_points, key_chosen = random.split(rng_key)
        points = self._normal_points(key_points, size)
        z, log_h = around(log_density, jnp.zeros(size, points.dtype), points, FLATTEST)
        log_w = finite(jax.vmap(log_density)(z) - log_h) + size / 2 * np.log(2 * np.pi)
        chosen = z[random.categorical(key_chosen, log_w)]
        enough = ess(log_w) * self.num_samples >= FEWEST
        return jnp.where(enough, chosen, jnp.nan), logsumexp(log_w) - jnp.log(self.num_samples)

    def _normal_points(self, rng_key: Array | None, r: int) -> Array:
        """``(num_samples, r)`` standard normal points."""
        assert rng_key is not None
        u = sobol(self.num_samples, r) + random.uniform(rng_key, (r,))
        u = u - jnp.floor(u)
        eps = jnp.finfo(u.dtype).eps
        return norm.ppf(jnp.clip(u, eps, 1 - eps))


@dataclass(eq=False)
class NUTSProjection(Projection):
    r"""Moments by NUTS on the tilted distribution, for parts of many data or coordinates.

    .. math:: \hat S^{-1} = \frac{S - r - 2}{S - 1}\, \widehat{\operatorname{Cov}}^{-1}

    from S draws, where the covariance is divided by S - 1, which has no bias for independent draws
    of a normal distribution. Draws of a chain depend on each other, so S should be many times r.
    Sites do not settle below their noise, so a factor should be a part of the data, not one datum.
    There is no log evidence, and no form for power 0.

    :param int num_warmup, num_samples: steps of a chain that adapt the sampler, and its draws.

    **Reference:** *Expectation propagation as a way of life*, Andrew Gelman et al., JMLR 2020
    (section 4.3).

    >>> from numpyro_ext.ep import NUTSProjection
    >>> factor = lambda u: -3 * (u[0] - 1)**2 / 2                   # a precision of 3
    >>> site = NUTSProjection(num_warmup=100, num_samples=2000).project(
    ...     factor, jnp.zeros(1), jnp.eye(1), 1.0, jax.random.key(0))
    >>> bool(abs(site.site_precision[0, 0] - 3) < 1)
    True
    """

    num_warmup: int = 200
    num_samples: int = 400

    needs_key = True
    has_normaliser = False
    takes_local = True

    def __post_init__(self) -> None:
        check_count("num_warmup", self.num_warmup)
        check_count("num_samples", self.num_samples, 2)

    def tilted(self, f: LogFactor, r: int, rng_key: Array | None, local: int) -> Projected:
        S = self.num_samples
        if S <= r + 2:
            raise ValueError(
                f"NUTSProjection takes {S} draws of {r} coordinates; it needs more than {r + 2}."
            )
        assert rng_key is not None

        def log_density(w: Array) -> Array:
            return f(w) - jnp.sum(w[:r] ** 2) / 2

        draws = self._chain(log_density, r + local, S, rng_key)[:, :r]
        m, C = weighted_moments(jnp.zeros(S), draws)
        return Projected(*from_moments(m, C * S / (S - r - 2)), jnp.array(jnp.nan))

    def draw(self, log_density: LogFactor, size: int, rng_key: Array) -> tuple[Array, Array]:
        """The last state of a new chain."""
        return self._chain(log_density, size, 1, rng_key)[-1], jnp.array(jnp.nan)

    def _chain(self, log_density: LogFactor, size: int, num_samples: int, rng_key: Array) -> Array:
        """``(num_samples, size)`` draws after the warmup, from 0."""
        init, step = hmc(lambda w: -log_density(w), algo="NUTS")

        def draw(state: Any, _: None) -> tuple[Any, Array]:
            state = step(state)
            return state, state.z

        state = init(jnp.zeros(size), self.num_warmup, rng_key=rng_key)
        state = lax.fori_loop(0, self.num_warmup, lambda _, state: step(state), state)
        return lax.scan(draw, state, length=num_samples)[1]


def at_mode(f: Callable[[Array], Array], points: Array, log_w: Array) -> tuple[Array, Array]:
    """Points around the mode of the tilted distribution, and their log weights."""

    def log_tilted(e: Array) -> Array:
        return f(e) - jnp.sum(e**2) / 2

    best = points[jnp.argmax(log_w - jnp.sum(points**2, -1) / 2)]
    e, log_h = around(log_tilted, best, points, least=1.0)
    return e, finite(jax.vmap(f)(e) - jnp.sum(e**2, -1) / 2 - log_h)


def with_local(
    f: Callable[[Array], Array], points: Array, mean: Array, cov: Array
) -> tuple[Array, Array]:
    """Points (e, z) and their log weights: e is normal, and z is around its mode given e, because
    the joint density may have no bound where the scale of z is small."""
    r = len(mean)
    L = root(cov)
    e = mean + matvec(L, points[:, :r])

    def beside(e: Array, point: Array) -> tuple[Array, Array]:
        z, log_h = around(
            lambda z: f(jnp.concatenate([e, z])), jnp.zeros_like(point), point[None], FLATTEST
        )
        return z[0], log_h[0] - len(point) / 2 * np.log(2 * np.pi)

    z, log_h = jax.vmap(beside)(e, points[:, r:])
    both = jnp.concatenate([e, z], -1)
    log_h += -jnp.sum(points[:, :r] ** 2, -1) / 2 - jnp.sum(jnp.log(jnp.diagonal(L)))
    return both, finite(jax.vmap(f)(both) - jnp.sum(e**2, -1) / 2 - log_h)


def around(
    log_p: Callable[[Array], Array], start: Array, points: Array, least: float
) -> tuple[Array, Array]:
    """Points of a normal at a mode of ``log_p``, and its log density, but for (2 pi)^(-size/2)."""
    mode = newton(log_p, start, least)
    curvature, Q = floored(-hessian(log_p)(mode), least)
    L = jnp.linalg.cholesky(matmul(Q * curvature / INFLATION, Q.T))
    return mode + matvec(inverse_root(L), points), half_logdet(L) - jnp.sum(points**2, -1) / 2


@lru_cache(maxsize=32)
def sobol(n: int, r: int) -> np.ndarray:
    """The first n points of a scrambled Sobol sequence, always the same."""
    from scipy.stats import qmc  # takes longer to import than this package

    return qmc.Sobol(r, scramble=True, rng=0).random_base2((n - 1).bit_length())[:n]


def finite(log_w: Array) -> Array:
    """Log weights, minus infinity where there is no value."""
    return jnp.where(log_w < jnp.inf, log_w, -jnp.inf)


def ess(log_w: Array) -> Array:
    """The effective sample size, as a share of the points."""
    return jnp.exp(2 * logsumexp(log_w) - logsumexp(2 * log_w)) / log_w.shape[0]


def floored(precision: Array, least: float) -> tuple[Array, Array]:
    """The eigenvalues of a symmetric matrix, raised to at least this, and the eigenvectors."""
    precision = jnp.where(jnp.isfinite(precision), precision, 0.0)
    curvature, Q = jnp.linalg.eigh(symmetric(precision))
    return jnp.maximum(curvature, least), Q


def newton(f: Callable[[Array], Array], e: Array, least: float, num_steps: int = 15) -> Array:
    """A mode of f: Newton's steps, each cut to the best of some lengths, none among them."""
    lengths = jnp.array([0.0, 1.0, 0.5, 0.25, 0.05, 0.01])

    def step(_: int, e: Array) -> Array:
        g = gradient(f)(e)
        curvature, Q = floored(-hessian(f)(e), least)
        direction = matvec(Q, matvec(Q.T, jnp.where(jnp.isfinite(g), g, 0)) / curvature)
        places = e + outer(lengths, direction)
        return places[jnp.argmax(finite(jax.vmap(f)(places)))]

    return lax.fori_loop(0, num_steps, step, e)
