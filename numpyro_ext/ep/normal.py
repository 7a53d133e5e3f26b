r"""Normal approximations and their sites in natural parameters, with full or diagonal precision.

.. math::

    \lambda = (\eta, \Lambda), \qquad q(x) = \exp(\eta^\top x - \tfrac12 x^\top \Lambda x
    - \Phi(\lambda)), \qquad \Phi = \tfrac12 \eta^\top \Lambda^{-1} \eta - \tfrac12 \log|\Lambda|
    + \tfrac D2 \log 2\pi.

A factor depends on :math:`u = A x` alone, where the rows of A, of shape (r, D), are orthonormal.
With a full precision its site has the parameters :math:`A^\top v` and :math:`A^\top T A`; with a
diagonal one D shifts and D precisions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.ep.projection import Projected, root, smallest, solve_any
from numpyro_ext.expfam.linalg import cholesky, half_logdet, inverse, solve, symmetric

FARTHEST, WIDEST = 3.0, 5.0
"""How far an adaptive step may move a mean, in standard deviations, and stretch one of these."""
SMALLEST = 1e-6
"""A cavity is improper if its precision is smaller, in units of the precision of q."""


class Site(NamedTuple):
    """The natural parameters of the sites of factors, or of all of them together."""

    shift: Array
    precision: Array


class Moments(NamedTuple):
    """A normal distribution in x: ``(D,)``, and ``(D, D)`` or ``(D,)`` if diagonal."""

    mean: Array
    cov: Array


class Cavity(NamedTuple):
    """q without a site to the power alpha, in u; q itself if the quotient has no density.

    - **gain** - :math:`(\\Phi_{cav} - \\Phi_q) / \\alpha`; at power 0 minus the mean of the log of
      the site under q.
    - **whole** - in x, where it has this marginal: q itself, or the cavity if diagonal.
    """

    mean: Array
    cov: Array
    proper: Array
    gain: Array
    whole: Moments


def is_finite(q: Moments) -> Array:
    """Whether q is a distribution."""
    return jnp.all(jnp.isfinite(q.mean)) & jnp.all(jnp.isfinite(q.cov))


def variances(q: Moments) -> Array:
    return q.cov if q.cov.ndim == 1 else jnp.diagonal(q.cov)


def distance(q: Moments, new: Moments, change: Site | None = None) -> Array:
    """The largest change of a mean, in standard deviations, or of a variance, relative to it; inf
    if the new q is no distribution.

    :param change: of the natural parameters, by which large means need not be subtracted.
    """
    V, V_new = variances(q), variances(new)
    if change is None:
        moved = new.mean - q.mean
    elif q.cov.ndim == 1:
        moved = new.cov * (change.shift - change.precision * q.mean)
    else:
        moved = new.cov @ (change.shift - change.precision @ q.mean)
    change_of_both = jnp.maximum(jnp.abs(moved) / jnp.sqrt(V), jnp.abs(V_new / V - 1))
    return jnp.where(is_finite(new), jnp.max(change_of_both), jnp.inf)


def within_trust_region(q: Moments, new: Moments) -> Array:
    """Whether a step stays where sites that were computed at q are a valid approximation."""
    ratio = variances(new) / variances(q)
    moved = jnp.max(jnp.abs(new.mean - q.mean) / jnp.sqrt(variances(q)))
    return (moved < FARTHEST) & (jnp.max(ratio) < WIDEST**2) & (jnp.min(ratio) > WIDEST**-2)


def plus(a: Any, b: Any, times: Any = 1.0) -> Any:
    """The sum of a tree of arrays and a multiple of another one."""
    return jax.tree.map(lambda x, y: x + times * y, a, b)


def choose(good: Array, new: Any, old: Any) -> Any:
    """One of two trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def halved(
    family: "Family",
    total: Site,
    change: Site,
    d: Array,
    is_good: Callable[[Moments], Array] = is_finite,
    most: int = 10,
) -> tuple[Array, Array]:
    """The largest of d, d/2, ... with which q after d times a change is good, or 0; and how many
    halvings."""

    def bad(carry: tuple[Array, Array]) -> Array:
        d, halvings = carry
        return (halvings <= most) & ~is_good(family.moments(plus(total, change, d)))

    start = d, jnp.zeros((), jnp.int32)
    d, halvings = lax.while_loop(bad, lambda c: (c[0] / 2, c[1] + 1), start)
    return jnp.where(halvings <= most, d, 0.0), halvings


def _largest_step(least: Array, d: float | Array) -> tuple[Array, Array]:
    """d times the first power of 1/2 with ``1 + d * least`` above 0, or 0; and which power."""
    steps = d * 0.5 ** jnp.arange(11)
    good = 1 + steps * least > SMALLEST
    k = jnp.argmax(good)
    return jnp.where(jnp.any(good), steps[k], 0.0), jnp.where(jnp.any(good), k, 10)


class Full:
    """Full precision matrices: ``shift`` is ``(D,)``, ``precision`` ``(D, D)``; a site has v
    ``(r,)`` and T ``(r, r)``. A family removes, projects and includes one site."""

    def from_full(self, full: Site) -> Site:
        """A normal term with a full precision, as one of the family."""
        return full

    def zeros(self, basis: Array) -> Site:
        """Sites of zero for factors with these ``(n, r, D)`` bases."""
        n, r, _ = basis.shape
        return Site(jnp.zeros((n, r), basis.dtype), jnp.zeros((n, r, r), basis.dtype))

    def moments(self, total: Site) -> Moments:
        """Mean and covariance; NaN if the precision is not positive definite."""
        L = cholesky(total.precision)
        return Moments(solve(L, total.shift), inverse(L))

    def log_partition(self, total: Site) -> Array:
        L = cholesky(total.precision)
        square = total.shift @ solve(L, total.shift)
        return square / 2 - half_logdet(L) + len(total.shift) / 2 * np.log(2 * np.pi)

    def marginal(self, q: Moments, A: Array) -> Moments:
        """q in the coordinates u."""
        return Moments(A @ q.mean, symmetric(A @ q.cov @ A.T))

    def cavity(self, q: Moments, A: Array, site: Site, power: float) -> Cavity:
        m, S = self.marginal(q, A)
        if power == 0:
            return Cavity(m, S, jnp.array(True), -self.expected(q, A, site), q)
        v, T = site
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

    def site(self, A: Array, cavity: Cavity, projected: Projected, power: float) -> Site:
        """The site of a projection, which is in u, in the coordinates of the family."""
        return Site(projected.site_shift, symmetric(projected.site_precision))

    def expected(self, q: Moments, A: Array, site: Site) -> Array:
        """The mean of the log of a site under q."""
        m, S = self.marginal(q, A)
        v, T = site
        return v @ m - (m @ T @ m + jnp.sum(T * S)) / 2

    def total(self, A: Array, site: Site) -> Site:
        """The product of n sites in the coordinates x."""
        D = A.shape[-1]
        left = jnp.einsum("nrs,nrd->nsd", site.precision, A).reshape(-1, D)
        rows = A.reshape(-1, D)
        return Site(rows.T @ site.shift.reshape(-1), symmetric(rows.T @ left))

    def site_of_mean(self, q: Moments, A: Array, sites: Site, share: Array, power: float) -> Site:
        """The site whose tilted distribution has the mean of the moments that n sites give.

        :param share: ``(n,)`` weights of the mean.
        """
        m, V = q

        def scores(A: Array, site: Site) -> Site:
            """g, and M = G - g g^T, of a tilted mean m + V A^T g and covariance V - V A^T G A V."""
            v, T = power * site.shift, power * site.precision
            S = symmetric(A @ V @ A.T)
            eye = jnp.eye(len(v), dtype=S.dtype)
            G = symmetric(solve_any(eye + T @ S, T))
            g = (eye - G @ S) @ (v - T @ (A @ m))
            return Site(g, G - jnp.outer(g, g))

        weighted = jax.vmap(lambda w, *row: jax.tree.map(lambda x: w * x, scores(*row)))
        g, M = self.total(A, weighted(share, A, sites))
        H = M + jnp.outer(g, g)  # V - V H V is the covariance of the mixture
        P = symmetric(jnp.linalg.solve(jnp.eye(len(m), dtype=V.dtype) - H @ V, H))
        return Site((P @ (m + V @ g) + g) / power, P / power)

    def include(self, q: Moments, A: Array, change: Site, d: float | Array) -> tuple[Any, ...]:
        """q after d times a change of a site, d, and how many times d was halved so that q stays a
        distribution; d is 0 if 10 times were not enough."""
        B = q.cov @ A.T  # (D, r)
        m, S = A @ q.mean, symmetric(A @ B)
        L = root(S)
        least = S * change.precision if len(m) == 1 else L.T @ change.precision @ L
        d, halvings = _largest_step(smallest(least), d)
        v, T = d * change.shift, d * change.precision
        eye = jnp.eye(len(m), dtype=S.dtype)
        G = symmetric(solve_any(eye + T @ S, T))
        mean = q.mean + B @ (eye - G @ S) @ (v - T @ m)
        return Moments(mean, symmetric(q.cov - B @ G @ B.T)), d, halvings


class Diagonal:
    """The same for diagonal precisions: ``shift`` and ``precision`` are ``(D,)``, of a site too."""

    def from_full(self, full: Site) -> Site:
        return Site(full.shift, jnp.diagonal(full.precision))

    def zeros(self, basis: Array) -> Site:
        n, _, D = basis.shape
        return Site(jnp.zeros((n, D), basis.dtype), jnp.zeros((n, D), basis.dtype))

    def moments(self, total: Site) -> Moments:
        V = 1 / jnp.where(total.precision > 0, total.precision, jnp.nan)
        return Moments(V * total.shift, V)

    def log_partition(self, total: Site) -> Array:
        m, V = self.moments(total)
        return jnp.sum(total.shift * m + jnp.log(V) + np.log(2 * np.pi)) / 2

    def marginal(self, q: Moments, A: Array) -> Moments:
        return Moments(A @ q.mean, symmetric(A * q.cov @ A.T))

    def cavity(self, q: Moments, A: Array, site: Site, power: float) -> Cavity:
        if power == 0:
            return Cavity(*self.marginal(q, A), jnp.array(True), -self.expected(q, A, site), q)
        m, V = q
        s, t = site
        w = 1 - power * V * t
        proper = jnp.min(w) > SMALLEST
        w = jnp.where(proper, w, 1)
        V_c = V / w
        m_c = m + power * V_c * (t * m - s)
        gain = jnp.sum((t * m_c - s) * m - m_c * s - jnp.log(w) / power) / 2
        whole = choose(proper, Moments(m_c, V_c), q)
        return Cavity(*self.marginal(whole, A), proper, gain, whole)

    def site(self, A: Array, cavity: Cavity, projected: Projected, power: float) -> Site:
        m, V = cavity.whole
        v, T = projected.site_shift, symmetric(projected.site_precision)
        # Moments of the tilted distribution in x: m + V A^T g, and V + V^2 diag(A^T K A).
        E = jnp.eye(len(v), dtype=T.dtype) + power * T @ cavity.cov
        g, K = solve_any(E, v - T @ cavity.mean), -solve_any(E, T)
        k = jnp.sum((K @ A) * A, 0)
        t = -k / (1 + power * V * k)
        return Site(t * (m + power * V * (g @ A)) + g @ A, t)

    def expected(self, q: Moments, A: Array, site: Site) -> Array:
        return jnp.sum(site.shift * q.mean - site.precision * (q.mean**2 + q.cov) / 2)

    def total(self, A: Array, site: Site) -> Site:
        return Site(jnp.sum(site.shift, 0), jnp.sum(site.precision, 0))

    def site_of_mean(self, q: Moments, A: Array, sites: Site, share: Array, power: float) -> Site:
        m, V = q
        s, t = power * sites.shift, power * sites.precision
        V_n = V / (1 + V * t)
        moved = V_n * (s - t * m)
        g = share @ moved
        # V minus the variance of the mixture.
        less = share @ (V * V_n * t) - share @ (moved - g) ** 2
        P = less / V / (V - less)
        return Site((P * (m + g) + g / V) / power, P / power)

    def include(self, q: Moments, A: Array, change: Site, d: float | Array) -> tuple[Any, ...]:
        m, V = q
        d, halvings = _largest_step(jnp.min(V * change.precision), d)
        s, t = d * change.shift, d * change.precision
        V_new = V / (1 + V * t)
        return Moments(m + V_new * (s - t * m), V_new), d, halvings


Family = Full | Diagonal
FAMILIES: dict[str, Family] = {"full": Full(), "diagonal": Diagonal()}
