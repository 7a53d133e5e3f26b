r"""Normal approximations and their sites in natural parameters.

.. math::

    \lambda = (\eta, \Lambda), \qquad q(x) = \exp(\eta^\top x - \tfrac12 x^\top \Lambda x
    - \Phi(\lambda)), \qquad \Phi = \tfrac12 \eta^\top \Lambda^{-1} \eta - \tfrac12 \log|\Lambda|
    + \tfrac D2 \log 2\pi.

A factor depends on :math:`u = A x` alone, where the rows of A, of shape (r, D), are orthonormal.
Its site has the parameters v ``(r,)`` and T ``(r, r)`` in u, which are :math:`A^\top v` and
:math:`A^\top T A` in x. If q is diagonal, precisions and covariances are ``(D,)``, of sites too,
which are in x.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.ep.projection import root, smallest, solve_any
from numpyro_ext.expfam.linalg import cholesky, half_logdet, inverse, solve, symmetric

FARTHEST, WIDEST = 3.0, 5.0
"""How far an adaptive step may move a mean, in standard deviations, and stretch one of these."""
SMALLEST = 1e-6  # a cavity is improper if its precision is smaller, in units of the precision of q


class Site(NamedTuple):
    """The natural parameters of the sites of factors, or of all of them together."""

    shift: Array
    precision: Array


class Moments(NamedTuple):
    """Mean and covariance of a normal distribution."""

    mean: Array
    cov: Array


class Cavity(NamedTuple):
    """q without a site to the power alpha, in u; q itself if the quotient has no density."""

    mean: Array
    cov: Array
    proper: Array
    gain: Array  # (Phi_cav - Phi_q) / alpha; at power 0 minus the mean of the log of the site
    whole: Moments  # in x, where it has this marginal: q itself, or the cavity if diagonal


def is_finite(q: Moments) -> Array:
    """Whether q is a distribution."""
    return jnp.all(jnp.isfinite(q.mean)) & jnp.all(jnp.isfinite(q.cov))


def variances(q: Moments) -> Array:
    return q.cov if q.cov.ndim == 1 else jnp.diagonal(q.cov)


def distance(q: Moments, new: Moments, change: Site | None = None) -> Array:
    """The largest change of a mean, in sds, or relative one of a variance; inf if q is improper."""
    V, V_new = variances(q), variances(new)
    if change is None:
        moved = new.mean - q.mean
    else:  # without a difference of large means
        moved = apply(new.cov, change.shift - apply(change.precision, q.mean))
    change_of_both = jnp.maximum(jnp.abs(moved) / jnp.sqrt(V), jnp.abs(V_new / V - 1))
    return jnp.where(is_finite(new), jnp.max(change_of_both), jnp.inf)


def within_trust_region(q: Moments, new: Moments) -> Array:
    """Whether a step stays where sites that were computed at q are a valid approximation."""
    ratio = variances(new) / variances(q)
    moved = jnp.max(jnp.abs(new.mean - q.mean) / jnp.sqrt(variances(q)))
    return (moved < FARTHEST) & (jnp.max(ratio) < WIDEST**2) & (jnp.min(ratio) > WIDEST**-2)


def apply(M: Array, x: Array) -> Array:
    """A matrix, or a diagonal one, times a vector."""
    return M * x if M.ndim == 1 else M @ x


def plus(a: Any, b: Any, times: Any = 1.0) -> Any:
    """The sum of a tree of arrays and a multiple of another one."""
    return jax.tree.map(lambda x, y: x + times * y, a, b)


def choose(good: Array, new: Any, old: Any) -> Any:
    """One of two trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def halved(
    total: Site,
    change: Site,
    d: Array,
    is_good: Callable[[Moments], Array] = is_finite,
    most: int = 10,
) -> Array:
    """The largest of d, d/2, ... with which q after d times a change is good, or 0."""
    least = 0.75 * d * 0.5**most

    def bad(d: Array) -> Array:
        return (d > least) & ~is_good(moments_of(plus(total, change, d)))

    d = lax.while_loop(bad, lambda d: d / 2, d)
    return jnp.where(d > least, d, 0.0)


def _largest_step(least: Array, d: float | Array) -> Array:
    """d times the first power of 1/2 with ``1 + d * least`` above 0, or 0."""
    steps = d * 0.5 ** jnp.arange(11)
    good = 1 + steps * least > SMALLEST
    return jnp.where(jnp.any(good), steps[jnp.argmax(good)], 0.0)


def zero_sites(basis: Array, diagonal: bool) -> Site:
    """Sites of zero for factors with these ``(n, r, D)`` bases."""
    n, r, D = basis.shape
    shapes = ((n, D), (n, D)) if diagonal else ((n, r), (n, r, r))
    return Site(*(jnp.asarray(np.zeros(shape, basis.dtype)) for shape in shapes))


def moments_of(total: Site) -> Moments:
    """Mean and covariance; NaN if the precision is not positive definite."""
    if total.precision.ndim == 1:
        V = 1 / jnp.where(total.precision > 0, total.precision, jnp.nan)
        return Moments(V * total.shift, V)
    L = cholesky(total.precision)
    return Moments(solve(L, total.shift), inverse(L))


def log_partition(total: Site) -> Array:
    if total.precision.ndim == 1:
        m, V = moments_of(total)
        return jnp.sum(total.shift * m + jnp.log(V) + np.log(2 * np.pi)) / 2
    L = cholesky(total.precision)
    square = total.shift @ solve(L, total.shift)
    return square / 2 - half_logdet(L) + len(total.shift) / 2 * np.log(2 * np.pi)


def marginal_of(q: Moments, A: Array) -> Moments:
    """q in the coordinates u."""
    return Moments(A @ q.mean, symmetric((A * q.cov if q.cov.ndim == 1 else A @ q.cov) @ A.T))


def cavity_of(q: Moments, A: Array, site: Site, power: float) -> Cavity:
    m, S = marginal_of(q, A)
    if power == 0:
        return Cavity(m, S, jnp.array(True), -expected_log(q, A, site), q)
    v, T = site
    if q.cov.ndim == 1:
        w = 1 - power * q.cov * T
        proper = jnp.min(w) > SMALLEST
        w = jnp.where(proper, w, 1)
        V_c = q.cov / w
        m_c = q.mean + power * V_c * (T * q.mean - v)
        gain = jnp.sum((T * m_c - v) * q.mean - m_c * v - jnp.log(w) / power) / 2
        whole = choose(proper, Moments(m_c, V_c), q)
        return Cavity(*marginal_of(whole, A), proper, gain, whole)
    if len(m) == 1:
        w, R = 1 - power * S[0] * T[0], None
    else:
        L = root(S)
        w, Q = jnp.linalg.eigh(jnp.eye(len(m), dtype=S.dtype) - power * L.T @ T @ L)
        R = L @ Q
    proper = w[0] > SMALLEST
    w = jnp.where(proper, w, 1)
    S_c = S / w if R is None else symmetric(R / w @ R.T)
    # Without a difference of precisions: (S^-1 - power T)^-1 (S^-1 m - power v).
    m_c = m + power * S_c @ (T @ m - v)
    gain = (T @ m_c - v) @ m - m_c @ v - jnp.sum(jnp.log(w)) / power
    m_c, S_c = choose(proper, (m_c, S_c), (m, S))
    return Cavity(m_c, S_c, proper, gain / 2, q)


def site_of(A: Array, cavity: Cavity, v: Array, T: Array, power: float) -> Site:
    """The site of a projection (v, T), which is in u."""
    T, (m, V) = symmetric(T), cavity.whole
    if V.ndim > 1:
        return Site(v, T)
    # Moments of the tilted distribution in x: m + V A^T g, and V + V^2 diag(A^T K A).
    E = jnp.eye(len(v), dtype=T.dtype) + power * T @ cavity.cov
    g, K = solve_any(E, v - T @ cavity.mean), -solve_any(E, T)
    k = jnp.sum((K @ A) * A, 0)
    t = -k / (1 + power * V * k)
    return Site(t * (m + power * V * (g @ A)) + g @ A, t)


def expected_log(q: Moments, A: Array, site: Site) -> Array:
    """The mean of the log of a site under q."""
    if q.cov.ndim == 1:
        return jnp.sum(site.shift * q.mean - site.precision * (q.mean**2 + q.cov) / 2)
    m, S = marginal_of(q, A)
    v, T = site
    return v @ m - (m @ T @ m + jnp.sum(T * S)) / 2


def product_of(A: Array, site: Site) -> Site:
    """The product of n sites in the coordinates x."""
    if site.precision.ndim == 2:
        return Site(jnp.sum(site.shift, 0), jnp.sum(site.precision, 0))
    D = A.shape[-1]
    left = jnp.einsum("nrs,nrd->nsd", site.precision, A).reshape(-1, D)
    rows = A.reshape(-1, D)
    return Site(rows.T @ site.shift.reshape(-1), symmetric(rows.T @ left))


def site_of_mean(q: Moments, A: Array, sites: Site, share: Array, power: float) -> Site:
    """The site that gives the mean, of weights ``share``, of the moments that n sites give."""
    m, V = q
    if V.ndim == 1:
        s, t = power * sites.shift, power * sites.precision
        V_n = V / (1 + V * t)
        moved = V_n * (s - t * m)
        g = share @ moved
        less = share @ (V * V_n * t) - share @ (moved - g) ** 2  # V minus the mixture's variance
        P = less / V / (V - less)
        return Site((P * (m + g) + g / V) / power, P / power)

    def scores(A: Array, site: Site) -> Site:
        """g, and M = G - g g^T, of a tilted mean m + V A^T g and covariance V - V A^T G A V."""
        v, T = power * site.shift, power * site.precision
        S = symmetric(A @ V @ A.T)
        eye = jnp.eye(len(v), dtype=S.dtype)
        G = symmetric(solve_any(eye + T @ S, T))
        g = (eye - G @ S) @ (v - T @ (A @ m))
        return Site(g, G - jnp.outer(g, g))

    weighted = jax.vmap(lambda w, *row: jax.tree.map(lambda x: w * x, scores(*row)))
    g, M = product_of(A, weighted(share, A, sites))
    H = M + jnp.outer(g, g)  # V - V H V is the covariance of the mixture
    P = symmetric(jnp.linalg.solve(jnp.eye(len(m), dtype=V.dtype) - H @ V, H))
    return Site((P @ (m + V @ g) + g) / power, P / power)


def include(q: Moments, A: Array, change: Site, d: Array) -> tuple[Moments, Array]:
    """q after d times a change of a site, and d, halved until q stays a distribution, or 0."""
    if q.cov.ndim == 1:
        d = _largest_step(jnp.min(q.cov * change.precision), d)
        V = q.cov / (1 + d * q.cov * change.precision)
        return Moments(q.mean + d * V * (change.shift - change.precision * q.mean), V), d
    B = q.cov @ A.T  # (D, r)
    m, S = A @ q.mean, symmetric(A @ B)
    L = root(S)
    least = S * change.precision if len(m) == 1 else L.T @ change.precision @ L
    d = _largest_step(smallest(least), d)
    v, T = d * change.shift, d * change.precision
    eye = jnp.eye(len(m), dtype=S.dtype)
    G = symmetric(solve_any(eye + T @ S, T))
    mean = q.mean + B @ (eye - G @ S) @ (v - T @ m)
    return Moments(mean, symmetric(q.cov - B @ G @ B.T)), d
