"""The state of a fit, q as the product of the prior and the sites, and the parts of a step."""

from collections import namedtuple
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.factors import Factors
from numpyro_ext._model.operations import gradient
from numpyro_ext.ep.factors import EPPlan, FactorGroup, FactorGroupSpec, FactorTable, map_factors
from numpyro_ext.ep.normal import (
    Moments,
    Site,
    cavity_of,
    choose,
    distance,
    expected_log,
    is_finite,
    log_partition,
    marginal_of,
    moments_of,
    plus,
    product_of,
    site_of,
    variances,
    zero_sites,
)
from numpyro_ext.ep.projection import along, are_finite, solve_any
from numpyro_ext.ep.reading import Prior, normal_part, spread_of
from numpyro_ext.expfam.linalg import positive

_OFF = 1e-2
"""The part of a factor's gradient outside its basis above which the basis belongs to other data."""

EPRunResult = namedtuple("EPRunResult", ["params", "state", "losses"])
"""
A :func:`~collections.namedtuple` with the entries of ``SVIRunResult``:

 - **params** - the parameters of the engine's guide.
 - **state** - the last :class:`EPState`.
 - **losses** - the loss of each step.
"""


class Report(NamedTuple):
    """How a fit goes; counts with ``num_`` are over all steps.

    - **residual** - the change of q by one full undamped sweep, the largest over the coordinates: a
      change of the mean in standard deviations, or a relative change of the variance; inf before
      the first sweep and where the undamped q is improper.
    - **skipped, visited** - factors that the last step left out, of those that it visited.
    - **converged** - whether the residual is below ``tol``, or what rounding leaves of it, and no
      factor was skipped.
    - **num_skipped** - factors left out because their cavity was improper, as of the prior's in a
      first step, or because the moments were not found.
    - **num_inaccurate** - factors that the nodes of the quadrature do not resolve.
    - **noise** - after a run on random rows, the largest standard error of the result: in standard
      deviations for a mean, relative for a standard deviation; NaN elsewhere.
    """

    residual: Array
    skipped: Array
    converged: Array
    num_skipped: Array
    num_inaccurate: Array
    visited: Array
    noise: Array


class EPState(NamedTuple):
    """A state of an engine after i steps.

    - **total** - natural parameters of q in the flat order: ``precision`` ``(D, D)``, or ``(D,)``
      if diagonal, and ``shift`` ``(D,)``, which is ``precision @ mean``.
    - **sites** - the same of the sites, by groups of factors, the rows of the data first: ``(n,
      r)`` and ``(n, r, r)`` in the r coordinates ``basis @ x`` of a factor, or ``(n, D)`` in x.
    - **prior** - the same of the normal terms of the prior.
    - **report** - a :class:`Report`.
    - **log_evidence** - the estimate of the last step.
    - **damping** - the d of the next step.
    - **table** - the factors: ``groups``, each with the ``index`` of its factors and their
      ``basis`` ``(n, r, D)``, and the constant of the prior.
    """

    i: Array
    total: Site
    sites: tuple[Site, ...]
    prior: Site
    report: Report
    log_evidence: Array
    damping: Array
    table: FactorTable
    rng_key: Array


def limit_of(tol: float, q: Moments) -> Array:
    """The residual below which a fit has converged. Rounding leaves half of eps M standard
    deviations of a mean that is M of them from 0."""
    if tol == 0:
        return jnp.zeros(())
    sds = jnp.max(jnp.abs(q.mean) / jnp.sqrt(variances(q)))
    least = 0.0 if q.mean.dtype == np.float64 else 3e-5
    return jnp.maximum(jnp.maximum(tol, least), 0.5 * jnp.finfo(q.mean.dtype).eps * sds)


def zeros_of(table: FactorTable, diagonal: bool) -> tuple[Site, ...]:
    """Sites of zero, in all coordinates if rows share them; with a proxy, its mean Taylor site."""
    sites = [zero_sites(group.basis, diagonal) for group in table.groups]
    if table.times is not None:
        whole = jnp.eye(len(table.center.mean), dtype=table.groups[0].basis.dtype)
        whole = jnp.broadcast_to(whole, (len(table.times), *whole.shape))
        sites[0] = zero_sites(whole, diagonal)
    if table.taylor is not None:
        sites[0] = jax.tree.map(lambda x: x[None], table.taylor.mean)
    return tuple(sites)


@jax.jit
def total_of(prior: Site, table: FactorTable, sites: Sequence[Site]) -> Site:
    """Natural parameters of the prior and all sites, from scratch."""
    parts = [prior]
    if table.times is not None:
        parts.append(jax.tree.map(partial(jnp.tensordot, table.times, axes=1), sites[0]))
    own = list(zip(table.groups, sites, strict=True))[len(parts) - 1 :]
    return reduce(plus, parts + [product_of(group.basis, site) for group, site in own])


def change_of(table: FactorTable, new: Sequence[Site], old: Sequence[Site]) -> Site:
    """The change of q's natural parameters by new sites, without a difference of large sums."""
    parts = [
        product_of(group.basis, plus(a, b, -1.0))
        for group, a, b in zip(table.groups, new, old, strict=True)
    ]
    return reduce(plus, parts)


@jax.jit
def is_positive(total: Site) -> Array:
    """Whether a precision is positive definite beyond rounding."""
    P = total.precision
    return jnp.all(P > 0) if P.ndim == 1 else positive(P, jnp.diagonal(P))


def start_state(
    plan: EPPlan, table: FactorTable, prior: Prior, damping: float, rng_key: Array
) -> EPState:
    """The state before the first step: q is the normal part of the prior, with the spread of draws
    for the other terms where that is no distribution."""
    normal = prior.normal
    diagonal = normal.precision.ndim == 1
    sites = list(zeros_of(table, diagonal))
    if not is_positive(normal):
        for k, (spec, group) in enumerate(zip(plan.specs, table.groups, strict=True)):
            if spec.names is not None:
                index, A = jax.device_get(group)
                sites[k] = _starts_of(A, prior.owners[index], diagonal, prior.draws)
        if not is_positive(total_of(normal, table, sites)):
            raise ValueError("some direction of the latent sites has no proper prior.")
    # With their types: a weak one would have the next step compiled anew.
    number: Any = normal.shift.dtype.type
    zero: Any = np.int32(0)
    never: Any = np.False_
    nan, far = number(np.nan), number(np.inf)
    state = EPState(
        i=zero,
        total=total_of(normal, table, sites),
        sites=tuple(sites),
        prior=normal,
        report=Report(far, zero, never, zero, zero, zero, noise=nan),
        log_evidence=nan,
        damping=number(damping),
        table=table,
        rng_key=rng_key,
    )
    return jax.tree.map(jnp.asarray, state)  # some of it is of NumPy, which compiles nothing


def _starts_of(A: np.ndarray, owners: np.ndarray, diagonal: bool, draws: np.ndarray) -> Site:
    """The sites of n terms of the prior: the spread of the own value of each, at the places
    ``owners`` ``(n, e)`` of x or -1, in its directions A."""
    n, _, D = A.shape
    if diagonal:
        visible, projected = owners >= 0, draws[:, owners]
    else:
        W = np.where(owners[:, None] >= 0, np.take_along_axis(A, owners[:, None], 2), 0)
        length = np.sum(W**2, 1)  # (n, e)
        visible = length > 1e-4
        W = W / np.where(visible, length, 1)[:, None]
        projected = np.tensordot(draws, np.einsum("nrd,nre->nde", A, W), (1, 1))
    mean, sd = spread_of(projected)
    with np.errstate(over="ignore"):
        known = visible & (sd**2 > 0)
        tau = np.where(known, 1 / np.where(known, sd**2, 1), 0)
    if diagonal:
        both: Any = np.zeros((2, n, D), A.dtype)
        for x, part in zip(both, (tau * mean, tau), strict=True):
            np.add.at(x, (np.arange(n)[:, None], owners), part)
        return Site(*both)
    return Site(np.einsum("nre,ne->nr", W, tau * mean), np.einsum("nre,ne,nse->nrs", W, tau, W))


@partial(jax.jit, static_argnums=0)
def on_arguments(plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
    """The state with the prior of these arguments, and whether its bases fit the data."""
    diagonal = state.prior.precision.ndim == 1
    center = state.table.center.mean
    prior, constant = normal_part(plan.reading, plan.normal, arrays, center, diagonal)
    table = state.table._replace(constant=constant)
    total = plus(state.total, plus(prior, state.prior, -1.0))
    fit = _bases_fit(plan, moments_of(total), table, lax.stop_gradient(arrays))
    return state._replace(total=total, prior=prior, table=table), fit


def _bases_fit(plan: EPPlan, q: Moments, table: FactorTable, arrays: list[Array]) -> Array:
    """Whether no factor changes outside its basis, to first order around q."""
    q, factors = lax.stop_gradient(q), plan.reading.factors_of(arrays)
    sd = jnp.sqrt(variances(q))
    moves = np.random.default_rng(0).standard_normal((2, len(sd)))
    points = q.mean + sd * jnp.concatenate([jnp.zeros((1, len(sd))), jnp.asarray(moves, float)])
    fit = jnp.ones((), bool)
    for spec, group in zip(plan.specs, table.groups, strict=True):

        def fits(index: Array, A: Array, spec: Any = spec) -> Array:
            """Whether the gradient of a factor at these points is in the rows of A."""
            g = sd * jax.vmap(gradient(partial(spec.log_factor, factors, index)))(points)
            g = jnp.where(jnp.all(jnp.isfinite(g), -1, keepdims=True), g, 0.0)
            Q, _ = jnp.linalg.qr((A * sd).T)
            outside, size = (jnp.max(jnp.linalg.norm(x, axis=-1)) for x in (g - (g @ Q) @ Q.T, g))
            return outside <= _OFF * size + 1e-5  # in nats by a standard deviation of q

        n, r, D = group.basis.shape
        if n > 0 and r < D:
            fit &= jnp.all(map_factors(fits, tuple(group), spec.batch_size))
    return fit


class Update(NamedTuple):
    """The result for one factor or for n of them, or sums over factors that share a site."""

    site: Site  # the old one where it could not be computed; of a shared one the change
    log_z: Array  # the part of the log evidence, of l and the site at q's mean where it is skipped
    skipped: Array
    inaccurate: Array


def site_update(
    spec: FactorGroupSpec,
    q: Moments,
    factors: Factors,
    index: Array,
    A: Array,
    site: Site,
    rng_key: Array | None,
) -> Update:
    """One factor, given q and the site that is in q."""
    # l(u) is at the mean of x given u, for derivatives by arguments that change the directions A.
    power, projection = spec.power, spec.projection
    cavity = cavity_of(q, A, site, power)
    m, B = lax.stop_gradient(_lift(cavity.whole, A))
    mean = lax.stop_gradient(cavity.whole.mean)

    def log_factor(u: Array, z: Array | None = None) -> Array:
        return spec.log_factor(factors, index, mean + along(B.T, u - m), z)

    tilted = projection.project(
        log_factor, cavity.mean, cavity.cov, power, rng_key, index, spec.local
    )
    log_z = tilted.log_normaliser / (power or 1.0) + cavity.gain
    new = site_of(A, cavity, tilted.site_shift, tilted.site_precision, power)
    good = cavity.proper & tilted.ok & are_finite(*new)
    if spec.local or not projection.has_normaliser:
        at_mean = jnp.full_like(log_z, jnp.nan)
    else:
        place = Moments(q.mean, jnp.zeros_like(q.cov))
        at_mean = log_factor(A @ q.mean) - expected_log(place, A, site)
        if power > 1:  # there is no evidence without its cavities
            at_mean = jnp.where(cavity.proper, at_mean, jnp.nan)
    return Update(
        choose(good, new, site),
        jnp.where(good, log_z, at_mean),
        ~good,
        cavity.proper & tilted.inaccurate,
    )


def _lift(q: Moments, A: Array) -> tuple[Array, Array]:
    """The mean of u, and ``(r, D)`` B by which the mean of x given u changes, so that A B^T = I."""
    m, S = marginal_of(q, A)
    if A.shape[0] == A.shape[1]:
        return m, A
    sd = jnp.sqrt(jnp.diagonal(S))[:, None]
    C = (A * q.cov if q.cov.ndim == 1 else A @ q.cov) / sd
    C = (C if len(m) == 1 else solve_any(S / sd.T / sd, C)) / sd
    # The error of the solution, in units of u. For rows without directions, and nearly dependent
    # ones, B is A itself.
    left = jnp.eye(len(m), dtype=S.dtype) - C @ A.T
    near = jnp.max(jnp.abs(left * sd / sd.T)) < 0.1
    return m, jnp.where(near, C + left @ C, A)


def update_group(
    factors: Factors,
    spec: FactorGroupSpec,
    q: Moments,
    group: FactorGroup,
    sites: Site,
    rng_key: Array,
) -> Update:
    """All factors of a group, from one q."""
    arrays = group.index, group.basis, sites, keys_of(spec, rng_key, len(group.basis))
    return map_factors(partial(site_update, spec, q, factors), arrays, spec.batch_size)


def keys_of(spec: FactorGroupSpec, rng_key: Array, n: int) -> Array | None:
    """A key for each factor, where the projection takes one."""
    return random.split(rng_key, n) if spec.projection.needs_key else None


def from_one_q(
    plan: EPPlan, state: EPState, arrays: list[Array]
) -> tuple[list[Update], Site, Array, Array]:
    """All factors from one q: their updates, the change of q, the evidence and the residual."""
    factors, table, q = plan.reading.factors_of(arrays), state.table, moments_of(state.total)
    # The same draws in every sweep, so that there is a fixed point.
    keys = random.split(state.rng_key, len(plan.specs))
    updates = [
        update_group(factors, spec, q, group, site, key)
        for spec, group, site, key in zip(plan.specs, table.groups, state.sites, keys, strict=True)
    ]
    return updates, *outcome_of(state, updates)


def outcome_of(state: EPState, updates: list[Update]) -> tuple[Site, Array, Array]:
    """The change of q by the updates of all factors, the evidence and the residual."""
    table, total = state.table, state.total
    log_z = table.constant + log_partition(total) + sum(jnp.sum(v.log_z) for v in updates)
    change = change_of(table, [v.site for v in updates], state.sites)
    residual = distance(moments_of(total), moments_of(plus(total, change)), change)
    return change, log_z, residual


@partial(jax.jit, static_argnums=0)
def evidence(plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[Array, Array]:
    """The estimate of log p(y) with the sites of a state, and the residual of a sweep from it."""
    *_, log_z, residual = from_one_q(plan, state, arrays)
    return log_z, lax.stop_gradient(residual)


def mix(d: Array, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, b: (1 - d) * a + d * b, old, new)


def next_state(
    state: EPState,
    sites: Sequence[Site],
    updates: Sequence[Update],
    log_z: Array,
    residual: Array,
    tol: float = 0.0,
    good: Array | bool = True,
    rest: Site | None = None,
) -> EPState:
    """The state after a step: with its sites, if they are good and their q is a distribution.

    :param rest: what q has beside the sites; None for the prior.
    """
    report, sites = state.report, tuple(sites)
    total = total_of(state.prior if rest is None else rest, state.table, sites)
    good &= is_finite(moments_of(total))
    skipped, inaccurate = (
        sum(jnp.sum(getattr(update, name), dtype=jnp.int32) for update in updates)
        for name in ("skipped", "inaccurate")
    )
    limit = limit_of(tol, moments_of(state.total))
    report = report._replace(
        residual=residual,
        skipped=skipped,
        converged=good & (residual < limit) & (skipped == 0),
        num_skipped=report.num_skipped + skipped,
        num_inaccurate=report.num_inaccurate + inaccurate,
        visited=jnp.asarray(sum(update.log_z.size for update in updates), jnp.int32),
    )
    sites, total = choose(good, (sites, total), (state.sites, state.total))
    step = {"report": report, "log_evidence": log_z, "i": state.i + 1}
    return state._replace(total=total, sites=sites, **step)
