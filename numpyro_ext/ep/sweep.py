r"""The parts of a sweep: a factor's new site, all factors from one q, and the next state.

The sweeps are in ``ep.py``, and the steps with sites that factors share in ``shared_sites.py``.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.factors import EPPlan, FactorGroup, FactorGroupSpec, map_rows
from numpyro_ext.ep.normal import (
    Family,
    Moments,
    Site,
    choose,
    distance,
    is_finite,
    plus,
)
from numpyro_ext.ep.projection import are_finite
from numpyro_ext.ep.state import EPState, change_of, limit_of, total_of


class Update(NamedTuple):
    r"""The result for one factor, or for n of them.

    - **site** - its new site; the old one where it could not be computed.
    - **log_z** - its part of the log evidence,
      :math:`\frac1\alpha[\log \mathbb E_{cav}\, e^{\alpha l} + \Phi_{cav} - \Phi_q]`, which is
      :math:`\mathbb E_q[l] - \mathbb E_q[\log f]` at power 0, f being the site. Where the cavity is
      improper or the moments are not found, l and f are taken at the mean of q, or it is NaN.
    - **improper, skipped, low_ess, inaccurate** - what went wrong, if anything.
    """

    site: Site
    log_z: Array
    improper: Array
    skipped: Array
    low_ess: Array
    inaccurate: Array


def site_update(
    family: Family,
    spec: FactorGroupSpec,
    q: Moments,
    factors: Factors,
    index: Array,
    A: Array,
    site: Site,
    rng_key: Array | None,
) -> Update:
    """One factor, given q and the site that is in q.

    l(u) is taken at the cavity's mean of x given u, so that units do not matter, and derivatives by
    arguments that change the directions A have the right mean.
    """
    power, projection = spec.power, spec.projection
    cavity = family.cavity(q, A, site, power)
    m, B = lax.stop_gradient(_lift(family, cavity.whole, A))
    mean = lax.stop_gradient(cavity.whole.mean)

    def log_factor(u: Array, z: Array | None = None) -> Array:
        return spec.log_factor(factors, index, mean + (u - m) @ B, z)

    tilted = projection.project(
        log_factor, cavity.mean, cavity.cov, power, rng_key, index, spec.local
    )
    log_z = tilted.log_normaliser / (power or 1.0) + cavity.gain
    new = family.site(A, cavity, tilted, power)
    computed = tilted.ok & are_finite(*new)
    good = cavity.proper & computed & ~tilted.low_ess
    if spec.local or not projection.has_normaliser:
        at_mean = jnp.full_like(log_z, jnp.nan)
    else:
        place = Moments(q.mean, jnp.zeros_like(q.cov))
        at_mean = log_factor(A @ q.mean) - family.expected(place, A, site)
        if power > 1:  # there is no evidence without its cavities
            at_mean = jnp.where(cavity.proper, at_mean, jnp.nan)
    return Update(
        choose(good, new, site),
        jnp.where(good, log_z, at_mean),
        ~cavity.proper,
        cavity.proper & ~computed,
        cavity.proper & tilted.low_ess,
        cavity.proper & tilted.inaccurate,
    )


def _lift(family: Family, q: Moments, A: Array) -> tuple[Array, Array]:
    """The mean of u, and ``(r, D)`` B by which the mean of x given u changes, so that A B^T = I."""
    m, S = family.marginal(q, A)
    if A.shape[0] == A.shape[1]:
        return m, A
    sd = jnp.sqrt(jnp.diagonal(S))[:, None]
    C = (A * q.cov if q.cov.ndim == 1 else A @ q.cov) / sd
    C = (C if len(m) == 1 else jnp.linalg.solve(S / sd.T / sd, C)) / sd
    # The error of the solution, in units of u. For rows without directions, and nearly dependent
    # ones, B is A itself.
    left = jnp.eye(len(m), dtype=S.dtype) - C @ A.T
    near = jnp.max(jnp.abs(left * sd / sd.T)) < 0.1
    return m, jnp.where(near, C + left @ C, A)


def update_group(
    family: Family,
    factors: Factors,
    spec: FactorGroupSpec,
    q: Moments,
    group: FactorGroup,
    sites: Site,
    rng_key: Array,
) -> Update:
    """All factors of a group, from one q."""
    arrays = group.basis, sites, keys_of(spec, rng_key, len(group.basis))
    return map_rows(partial(site_update, family, spec, q), factors, spec, group.index, arrays)


def keys_of(spec: FactorGroupSpec, rng_key: Array, n: int) -> Array | None:
    """A key for each factor, where the projection takes one."""
    return random.split(rng_key, n) if spec.projection.needs_key else None


def from_one_q(
    plan: EPPlan, family: Family, state: EPState, arrays: list[Array]
) -> tuple[list[Update], Site, Array, Array]:
    """All factors from one q: their updates, the change of q, the evidence and the residual."""
    factors, table, total = plan.reading.factors_of(arrays), state.table, state.total
    q = family.moments(total)
    # The same draws in every sweep, so that there is a fixed point.
    keys = random.split(state.rng_key, len(plan.specs))
    updates = [
        update_group(family, factors, spec, q, group, site, key)
        for spec, group, site, key in zip(plan.specs, table.groups, state.sites, keys, strict=True)
    ]
    log_z = table.constant + family.log_partition(total) + sum(jnp.sum(v.log_z) for v in updates)
    change = change_of(family, table, [v.site for v in updates], state.sites)
    residual = distance(q, family.moments(plus(total, change)), change)
    return updates, change, log_z, residual


@partial(jax.jit, static_argnums=(0, 1))
def evidence(
    plan: EPPlan, family: Family, state: EPState, arrays: list[Array]
) -> tuple[Array, Array]:
    """The estimate of log p(y) with the sites of a state, and the residual of a sweep from it."""
    *_, log_z, residual = from_one_q(plan, family, state, arrays)
    return log_z, lax.stop_gradient(residual)


def mix(d: Array, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, b: (1 - d) * a + d * b, old, new)


class SweepResult(NamedTuple):
    """New sites, the update of each factor, the evidence, the residual, the number of halvings,
    whether the step was not halved away, and what q has beside the sites; None for the prior."""

    sites: tuple[Site, ...]
    updates: list[Update]
    log_z: Array
    residual: Array
    halvings: Array
    good: Array | bool = True
    rest: Site | None = None


def next_state(
    plan: EPPlan,
    family: Family,
    state: EPState,
    result: SweepResult,
    tol: float = 0.0,
    early: Array | None = None,
) -> EPState:
    """The state after a step: with its sites, if they are good and their q is a distribution.

    :param tol: the residual below which a fit has converged; 0 where the factors are random.
    :param early: whether improper cavities of the prior are expected, because other factors have
        not been updated yet; None for as long as factors are skipped.
    """
    report, rest = state.report, state.prior if result.rest is None else result.rest
    total = total_of(family, rest, state.table, result.sites)
    good = result.good & is_finite(family.moments(total))
    early = (state.i == 0) | (report.skipped > 0) if early is None else early
    names = "improper", "skipped", "low_ess", "inaccurate"
    counts = {name: getattr(report, f"num_{name}") for name in names}
    left = visited = jnp.zeros((), jnp.int32)
    for spec, update in zip(plan.specs, result.updates, strict=True):
        left += jnp.sum(update.improper | update.skipped | update.low_ess, dtype=jnp.int32)
        visited += update.log_z.size
        for name in names:
            count = jnp.sum(getattr(update, name), dtype=jnp.int32)
            flat = name == "improper" and spec.names is not None
            counts[name] += jnp.where(early, 0, count) if flat else count
    limit = limit_of(tol, family.moments(state.total))
    report = report._replace(
        residual=result.residual,
        skipped=left,
        converged=good & (result.residual < limit) & (left == 0),
        num_halvings=report.num_halvings + result.halvings.astype(jnp.int32),
        visited=visited,
        **{f"num_{name}": count for name, count in counts.items()},
    )
    sites, total = choose(good, (result.sites, total), (state.sites, state.total))
    return state.with_sites(total, sites, report=report, log_evidence=result.log_z, i=state.i + 1)
