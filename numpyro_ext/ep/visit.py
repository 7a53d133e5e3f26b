r"""What one factor asks for: its cavity, its tilted moments, its site, its part of the evidence."""

from typing import NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.factor_table import Group, Kind, by_rows
from numpyro_ext.ep.normal import Family, Moments, Site

__all__ = ["Visit", "visit", "visit_all"]


class Visit(NamedTuple):
    r"""The result for one factor, or for n of them.

    - **site** - its new site; the old one where it could not be computed.
    - **log_z** - its part of the log evidence,
      :math:`\frac1\alpha[\log \mathbb E_{cav}\, e^{\alpha l} + \Phi_{cav} - \Phi_q]`, which is
      :math:`\mathbb E_q[l] - \mathbb E_q[\log f]` at power 0, f being the site. Where the cavity is
      improper or the moments are not found, l and f are taken at the mean of q, and it is NaN where
      l is not known there: with local sites that the projection integrates over.
    - **improper, skipped, low_ess, inaccurate** - what went wrong, if anything.
    """

    site: Site
    log_z: Array
    improper: Array
    skipped: Array
    low_ess: Array
    inaccurate: Array


def visit(
    family: Family,
    factors: Factors,
    kind: Kind,
    q: Moments,
    index: Array,
    A: Array,
    site: Site,
    rng_key: Array | None,
) -> Visit:
    """One factor, given q and the site that is in q.

    A point u is looked at where the cavity's mean of x given u is. Where only u differed from the
    mean of q, a coordinate in small units would be moved by the rounding of A in large ones. And
    derivatives by arguments of the model, which may change the directions A, have the right mean.
    """
    power, projection = kind.power, kind.projection
    cavity = family.cavity(q, A, site, power)
    whole = q if cavity.whole is None else cavity.whole
    m, B = lax.stop_gradient(_lift(family, whole, A))
    mean = lax.stop_gradient(whole.mean)

    def log_factor(u: Array, z: Array | None = None) -> Array:
        return kind.log_factor(factors, index, mean + (u - m) @ B, z)

    number = index if projection.whole else None
    if power == 0:
        found = projection.project_exclusive(
            log_factor, cavity.mean, cavity.cov, rng_key=rng_key, index=number
        )
        log_z = found.log_normaliser - family.expected(q, A, site)
    else:
        local = {"local": kind.local} if kind.local else {}
        found = projection.project(
            log_factor, cavity.mean, cavity.cov, power, rng_key=rng_key, index=number, **local
        )
        log_z = (found.log_normaliser + cavity.gain) / power
    new = family.site(A, cavity, found, power)
    finite = jnp.all(jnp.isfinite(new.shift)) & jnp.all(jnp.isfinite(new.precision))
    good = cavity.proper & found.ok & ~found.low_ess & finite
    new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, site)
    if kind.local or not projection.has_normaliser:
        at_mean = jnp.full_like(log_z, jnp.nan)
    else:
        place = Moments(q.mean, jnp.zeros_like(q.cov))
        at_mean = log_factor(A @ q.mean) - family.expected(place, A, site)
        if power > 1:  # there is no evidence without its cavities
            at_mean = jnp.where(cavity.proper, at_mean, jnp.nan)
    return Visit(
        new,
        jnp.where(good, log_z, at_mean),
        ~cavity.proper,
        cavity.proper & ~(found.ok & finite),
        cavity.proper & found.low_ess,
        cavity.proper & found.inaccurate,
    )


def _lift(family: Family, q: Moments, A: Array) -> tuple[Array, Array]:
    """The mean of u, and ``(r, D)`` B by which the mean of x given u changes, so that A B^T = I."""
    m, S = family.marginal(q, A)
    if A.shape[0] == A.shape[1]:
        return m, A
    sd = jnp.sqrt(jnp.diagonal(S))
    C = (A * q.cov if q.cov.ndim == 1 else A @ q.cov) / sd[:, None]
    if len(m) > 1:
        C = jnp.linalg.solve(S / sd / sd[:, None], C)
    C = C / sd[:, None]
    # What the solution lacks, in units of u; rows without directions, and nearly dependent ones,
    # are moved by A itself.
    left = jnp.eye(len(m), dtype=S.dtype) - C @ A.T
    near = jnp.max(jnp.abs(left * sd[:, None] / sd)) < 0.1
    return m, jnp.where(near, C + left @ C, A)


def visit_all(
    family: Family,
    factors: Factors,
    kind: Kind,
    q: Moments,
    group: Group,
    sites: Site,
    rng_key: Array,
) -> Visit:
    """All factors of a group, from one q."""
    keys = keys_of(kind, rng_key, len(group.basis))

    def one(factors: Factors, index: Array, A: Array, site: Site, key: Array | None) -> Visit:
        return visit(family, factors, kind, q, index, A, site, key)

    return by_rows(one, factors, kind, group.index, (group.basis, sites, keys))


def keys_of(kind: Kind, rng_key: Array, n: int) -> Array | None:
    """A key for each factor, where the projection takes one."""
    return random.split(rng_key, n) if kind.projection.needs_key else None
