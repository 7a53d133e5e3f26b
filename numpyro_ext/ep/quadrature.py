"""Moments of a factor times its cavity by the trapezoid rule, after a map by sinh."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np

from numpyro_ext._checks import check_count
from numpyro_ext.ep.projection import (
    LogFactor,
    Projected,
    Projection,
    along,
    from_either,
    smallest,
)
from numpyro_ext.expfam.linalg import matmul, outer, symmetric, transpose

REACH = 9.0  # standard deviations of the cavity to the farthest node
SEARCH, INNER = {1: (40, 4), 2: (18, 3), 3: (12, 3)}, (24, 3)
"""Intervals per axis of a search for the sharpest place, and the number of searches, each in three
intervals of the last one: by rank, and along an inner axis."""
STEP = 1e-3  # standard deviations from the sharpest place to where the gradient is compared
DIFFERENCE = 0.05  # the largest change of a moment when every second node is left out
AGREEMENT = 3e-3  # the largest difference of two forms of the covariance, over its change


@dataclass(eq=False)
class Quadrature(Projection):
    r"""Moments by a trapezoid rule with nodes that are dense where the factor is sharpest.

    .. math:: \hat S = I + K, \quad K = \operatorname{Cov}[e, \alpha \nabla l]
        \qquad\text{or}\qquad \hat S = \operatorname{Cov}[e]

    under the tilted distribution, in coordinates e in which the cavity is N(0, I). The first form
    is right to rounding for weak factors, the second for narrow ones. The first is taken if the
    smallest eigenvalue of Cov[e] is above 1/2 and the two agree, as they do not at a jump or a kink
    of l.

    The centre c of the nodes is where exp(alpha l), times the density of the cavity, changes most.
    Along the axes of :math:`I + g g^\top + |H|`, with g and H the derivatives of alpha l at c, the
    nodes are :math:`c_k + b_k \sinh \tau`, with :math:`\tau` equally spaced and :math:`b_k^{-2}`
    the eigenvalue, up to 9 standard deviations of the cavity. A factor with several sharp places
    needs more points; ``inaccurate`` is true if every second node is not enough.

    :param int num_points: number of nodes of a factor of rank 1. Each axis of rank 2 and 3 has a
        third of them, and one more.

    **Reference:** *The exponentially convergent trapezoidal rule*, Lloyd N. Trefethen and J. A. C.
    Weideman, SIAM Review 2014.

    >>> from jax.scipy.stats import norm
    >>> from numpyro_ext.ep import Quadrature
    >>> mean, cov = jnp.array([0.5]), jnp.array([[3.0]])
    >>> project = lambda *cavity: Quadrature().project(lambda u: norm.logcdf(u[0]), *cavity, 1.0)
    >>> site = jax.jit(project)(mean, cov)
    >>> exact = norm.logcdf(0.5 / jnp.sqrt(1 + 3.0))
    >>> bool(jnp.allclose(site.log_normaliser, exact, atol=1e-5))
    True
    """

    num_points: int = 91
    max_rank: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_count("num_points", self.num_points, 11)

    def tilted(self, f: LogFactor, r: int, rng_key: Array | None, local: int) -> Projected:
        e, log_w, log_f, g = self._at_nodes(f, r)
        log_tilted = log_w + log_f
        # Of all nodes, and of every second one.
        both = jnp.stack([log_tilted, log_tilted + self._every_second(r)])
        w = jax.nn.softmax(both, -1)
        points = jnp.concatenate([e, g], -1)
        means = matmul(w, points)
        d = points - means[:, None]
        cov = matmul(transpose(d), w[..., None] * d[..., :r])  # (2, 2r, r)
        (m, m_half), gbar = means[:, :r], means[0, r:]
        (S, S_half), K = cov[:, :r], symmetric(cov[0, r:])

        # The moments for narrow factors, and for jumps, which the derivatives do not see.
        eye = jnp.eye(r)
        noise = 100 * jnp.finfo(S.dtype).eps + 1e-8
        error = jnp.max(jnp.abs(eye + K - S)) - AGREEMENT * jnp.max(jnp.abs(S - eye))
        agree = (error < noise) & (jnp.max(jnp.abs(gbar - m)) < DIFFERENCE)
        by_scores = (smallest(S) > 0.5) & agree

        sd = jnp.sqrt(jnp.diagonal(S))
        moved = jnp.abs(m_half - m) / sd
        widened = jnp.abs(jnp.sqrt(jnp.diagonal(S_half)) / sd - 1) * 2
        inaccurate = ~(jnp.max(jnp.maximum(moved, widened)) < DIFFERENCE)
        # A tilted distribution beyond the last nodes is not seen at all.
        inside = jnp.sum(jnp.where(jnp.max(jnp.abs(e), -1) > REACH - 1, w[0], 0.0)) < 1e-3
        v, T = from_either(by_scores, gbar, K, m, S)
        return Projected(v, T, logsumexp(log_tilted), inside, inaccurate)

    def expected(self, f: LogFactor, r: int, rng_key: Array | None) -> Projected:
        e, log_w, log_f, g = self._at_nodes(f, r)
        is_finite = jnp.isfinite(log_f)
        w = jnp.exp(log_w)
        mean_g = jnp.tensordot(w, g, 1)
        mean_log = jnp.sum(w * jnp.where(is_finite, log_f, 0.0))
        # A point of q's mass at which l is not finite makes its mean minus infinity.
        lost = jnp.sum(jnp.where(is_finite, 0.0, w))
        half = jnp.sum(jnp.exp(log_w + self._every_second(r)))
        inaccurate = ~(jnp.abs(half - 1) < DIFFERENCE)
        H = symmetric(matmul(e.T, w[:, None] * (g - mean_g)))
        return Projected(mean_g, -H, mean_log, lost < 1e-6, inaccurate)

    def _at_nodes(self, f: LogFactor, r: int) -> tuple[Array, Array, Array, Array]:
        """Nodes e ``(n, r)``, their log weights under N(0, I), and f with its gradient; a node at
        which one of them is not finite has no weight."""
        e, log_w = nodes(f, r, self._per_axis(r), SEARCH[r])
        # Barriers, or each is computed again in all its uses. The normaliser is differentiated as
        # the sum at these nodes.
        e, log_w = lax.optimization_barrier(lax.stop_gradient((e, log_w)))
        log_f, g = lax.optimization_barrier(jax.vmap(gradient(f))(e))
        is_finite = jnp.isfinite(log_f) & jnp.all(jnp.isfinite(g), -1)
        g = jnp.where(is_finite[:, None], g, 0.0)
        return e, log_w, jnp.where(is_finite, log_f, -jnp.inf), g

    def _per_axis(self, r: int) -> int:
        return self.num_points if r == 1 else self.num_points // 3 + 1

    def _every_second(self, r: int) -> np.ndarray:
        """Added to log weights, it leaves the rule on every second node of each axis."""
        even = np.arange(self._per_axis(r)) % 2 == 0
        grid = np.stack(np.meshgrid(*[even] * r, indexing="ij"), -1).reshape(-1, r)
        return np.where(grid.all(-1), r * np.log(2.0), -np.inf).astype(np.float32)


def gradient(f: Callable[[Array], Array]) -> Callable[[Array], tuple[Array, Array]]:
    """``e -> (f, gradient)`` by forward derivatives, which compile f once."""

    def both(e: Array) -> tuple[Array, Array]:
        push = partial(jax.jvp, f, (e,))
        return jax.vmap(lambda v: push((v,)), out_axes=(None, -1))(jnp.eye(len(e), dtype=e.dtype))

    return both


def nodes(f: Callable[[Array], Array], r: int, n: int, search: tuple[int, int]) -> tuple:
    """Nodes ``(n^r, r)`` and log weights of an integral over N(0, I), for a log factor f: at each
    node of the axis along which f is flattest, the nodes of the other axes are placed anew."""
    c = sharpest_place(f, r, search)
    # A difference of gradients: second derivatives take long to compile, and these need no digits.
    around = np.concatenate([np.zeros((1, r)), STEP * np.eye(r)]).astype(c.dtype)
    gradients = lax.optimization_barrier(jax.vmap(gradient(f))(c + around)[1])
    gradients = jnp.where(jnp.isfinite(gradients), gradients, 0.0)
    g, H = gradients[0], (gradients[1:] - gradients[0]) / STEP
    if r == 1:
        y, log_w = line(c[0], g[0] ** 2 + jnp.abs(H[0, 0]), n)
        return y[:, None], log_w
    curvature, axes = jnp.linalg.eigh(symmetric(H))
    size = matmul(axes * jnp.abs(curvature), axes.T)
    curvature, Q = jnp.linalg.eigh(outer(g, g) + size)  # in ascending order
    y, log_w = line(Q[:, 0] @ c, jnp.maximum(curvature[0], 0.0), n)

    def across(y: Array) -> tuple[Array, Array]:
        def section(x: Array) -> Array:
            return f(along(Q, jnp.concatenate([y[None], x])))

        x, log_w = nodes(section, r - 1, n, INNER)
        return jnp.concatenate([jnp.full_like(x[:, :1], y), x], -1), log_w

    e, log_w_inner = jax.vmap(across)(y)
    return matmul(e.reshape(-1, r), Q.T), (log_w[:, None] + log_w_inner).ravel()


def line(c: Array, curvature: Array, n: int) -> tuple[Array, Array]:
    """Nodes and log weights ``(n,)`` of an integral over N(0, 1), dense at c."""
    b = (1 + curvature) ** -0.5
    x = (np.array([-REACH, REACH], c.dtype) - c) / b
    low, high = jnp.sign(x) * jnp.log(jnp.abs(x) + jnp.sqrt(x**2 + 1))  # arcsinh
    step = (high - low) / (n - 1)
    # Hyperbolic functions by one exponential, since the functions of the library compile slowly.
    t = jnp.exp(low + step * jnp.arange(n))
    y = c + b * (t - 1 / t) / 2
    return y, jnp.log(step * b * (t + 1 / t) / 2) - y**2 / 2 - np.log(2 * np.pi) / 2


@lru_cache
def cube(r: int, intervals: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A grid ``(n, r)`` on [-1, 1]^r, the pairs ``(2, m)`` of neighbours, and their middles."""
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, intervals + 1)] * r, indexing="ij"), -1)
    places = np.arange(grid[..., 0].size).reshape(grid.shape[:-1])
    ends = np.arange(intervals), np.arange(1, intervals + 1)
    pairs = np.array([[places.take(end, k).ravel() for k in range(r)] for end in ends])
    grid, pairs = grid.reshape(-1, r), pairs.reshape(2, -1)
    return grid, pairs, grid[pairs].mean(0)


def sharpest_place(f: Callable[[Array], Array], r: int, search: tuple[int, int]) -> Array:
    """Where exp(f), times the density of N(0, I), changes most between neighbours on a grid."""
    intervals, times = search
    grid, pairs, middles = cube(r, intervals)
    middles = jnp.asarray(middles, float)

    def narrowed(c: Array, half: Array) -> tuple[Array, None]:
        # A barrier, or f is compiled again in each of its uses.
        e = c + half * grid.astype(c.dtype)
        e, log_f = lax.optimization_barrier((e, jax.vmap(f)(e)))
        log_f = jnp.where(log_f < jnp.inf, log_f, -jnp.inf)  # NaN too
        log_p = -jnp.sum(e**2, -1) / 2
        top = jnp.max(log_f + log_p)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        (low, high), log_p = log_f[pairs], jnp.max(log_p[pairs], 0) - top
        change = jnp.abs(jnp.exp(high + log_p) - jnp.exp(low + log_p))
        sharpest = jnp.argmax(change)
        return jnp.where(change[sharpest] > 0, c + half * middles[sharpest], c), None

    # The neighbours too, since a narrow factor may hide there.
    halves = jnp.asarray(REACH * (3 / intervals) ** np.arange(times), float)
    return lax.scan(narrowed, jnp.zeros(r), halves)[0]
