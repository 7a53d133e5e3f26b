"""The state of a fit: q as the product of the prior and the sites, on the data of a call."""

from collections import namedtuple
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.factors import (
    EPPlan,
    FactorGroup,
    FactorGroupSpec,
    FactorTable,
    device_put_rows,
    map_rows,
)
from numpyro_ext.ep.normal import Family, Moments, Site, plus, variances
from numpyro_ext.ep.reading import ONCE, Prior, normal_part
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
    - **num_improper** - factors left out because their cavity was improper. The prior's, whose
      cavities are flat at first, count once there was a step without such.
    - **num_skipped** - factors left out because the moments were not finite, not positive definite,
      or not reached by the nodes.
    - **num_low_ess** - factors left out because the importance weights were uneven.
    - **num_inaccurate** - factors that the nodes of the quadrature do not resolve.
    - **num_halvings** - how often a step was halved so that q stays a distribution.
    - **noise** - after a run on random rows, the largest standard error of the result: in standard
      deviations for a mean, relative for a standard deviation; NaN elsewhere.
    """

    residual: Array
    skipped: Array
    converged: Array
    num_improper: Array
    num_skipped: Array
    num_low_ess: Array
    num_inaccurate: Array
    num_halvings: Array
    visited: Array
    noise: Array


class EPState(NamedTuple):
    """A state of an engine, with these entries:

    - **i** - number of steps so far.
    - **shift, precision** - natural parameters of q in the flat order: ``(D,)`` and ``(D, D)``, or
      ``(D,)`` for the diagonal family; ``shift = precision @ mean``.
    - **site_shift, site_precision** - of the sites, by groups of factors, the rows of the data
      first: ``(n, r)`` and ``(n, r, r)`` in the r coordinates ``basis @ x`` of each factor, or
      ``(n, D)`` for the diagonal family.
    - **prior_shift, prior_precision** - of the normal terms of the prior.
    - **report** - a :class:`Report`.
    - **log_evidence** - the estimate of the last step.
    - **damping** - the d of the next step.
    - **table** - the factors: ``groups``, each with the ``index`` of its factors and their
      ``basis`` ``(n, r, D)``, and the constant of the prior.
    - **rng_key** - random number generator seed of the next steps.
    """

    i: Array
    shift: Array
    precision: Array
    site_shift: tuple[Array, ...]
    site_precision: tuple[Array, ...]
    prior_shift: Array
    prior_precision: Array
    report: Report
    log_evidence: Array
    damping: Array
    table: FactorTable
    rng_key: Array

    @property
    def total(self) -> Site:
        """Natural parameters of q."""
        return Site(self.shift, self.precision)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(map(Site, self.site_shift, self.site_precision))

    @property
    def prior(self) -> Site:
        return Site(self.prior_shift, self.prior_precision)

    def with_sites(
        self, total: Site, sites: Sequence[Site], prior: Site | None = None, **others: Any
    ) -> "EPState":
        """The state with another q, and the sites and the prior that it is made of."""
        prior = self.prior if prior is None else prior
        return self._replace(
            shift=total.shift,
            precision=total.precision,
            site_shift=tuple(site.shift for site in sites),
            site_precision=tuple(site.precision for site in sites),
            prior_shift=prior.shift,
            prior_precision=prior.precision,
            **others,
        )


def limit_of(tol: float, q: Moments) -> Array:
    """The residual below which a fit has converged: what rounding leaves of it is more.

    A mean of M standard deviations from 0 is rounded by half of eps M of them.
    """
    if tol == 0:
        return jnp.zeros(())
    sds = jnp.max(jnp.abs(q.mean) / jnp.sqrt(variances(q)))
    least = 0.0 if q.mean.dtype == np.float64 else 3e-5
    return jnp.maximum(jnp.maximum(tol, least), 0.5 * jnp.finfo(q.mean.dtype).eps * sds)


def zeros_of(family: Family, table: FactorTable) -> tuple[Site, ...]:
    """Sites of zero, in all coordinates if rows share them; with a proxy, its mean Taylor site."""
    sites = [family.zeros(group.basis) for group in table.groups]
    if table.times is not None:
        whole = jnp.eye(len(table.center.mean), dtype=table.groups[0].basis.dtype)
        sites[0] = family.zeros(jnp.broadcast_to(whole, (len(table.times), *whole.shape)))
    if table.taylor is not None:
        sites[0] = jax.tree.map(lambda x: x[None], table.taylor.mean)
    return tuple(sites)


@partial(jax.jit, static_argnums=0)
def total_of(family: Family, prior: Site, table: FactorTable, sites: Sequence[Site]) -> Site:
    """Natural parameters of the prior and all sites, from scratch."""
    parts = [prior]
    if table.times is not None:
        parts.append(jax.tree.map(partial(jnp.tensordot, table.times, axes=1), sites[0]))
    own = list(zip(table.groups, sites, strict=True))[len(parts) - 1 :]
    return reduce(plus, parts + [family.total(group.basis, site) for group, site in own])


def change_of(family: Family, table: FactorTable, new: Sequence[Site], old: Sequence[Site]) -> Site:
    """The change of q's natural parameters by new sites, without a difference of large sums."""
    parts = [
        family.total(group.basis, plus(a, b, -1.0))
        for group, a, b in zip(table.groups, new, old, strict=True)
    ]
    return reduce(plus, parts)


def is_positive(total: Site) -> bool:
    """Whether a precision is positive definite beyond rounding."""
    P = total.precision
    return bool(jnp.all(P > 0) if P.ndim == 1 else positive(P, jnp.diagonal(P)))


def start_state(
    family: Family, plan: EPPlan, table: FactorTable, prior: Prior, damping: float, rng_key: Array
) -> EPState:
    """The state before the first step: q is the normal part of the prior.

    Where that is no distribution, each latent site whose prior is not normal has the spread of its
    draws.
    """
    normal, sites = family.from_full(prior.normal), list(zeros_of(family, table))
    if not is_positive(normal):
        start = _start_full if normal.precision.ndim == 2 else _start_diagonal
        start = jax.jit(jax.vmap(partial(start, draws=jnp.asarray(prior.draws))))
        for k, (spec, group) in enumerate(zip(plan.specs, table.groups, strict=True)):
            if spec.names is not None:
                sites[k] = start(group.basis, jnp.asarray(prior.owners)[group.index])
        if not is_positive(total_of(family, normal, table, sites)):
            raise ValueError(
                "some direction of the latent sites has no proper prior; give each latent site a"
                " proper prior."
            )
    # With their types: a weak one would have the next step compiled anew.
    zero, nan = jnp.zeros((), jnp.int32), jnp.asarray(jnp.nan, float)
    counts = [zero] * 6
    state = EPState(
        i=zero,
        shift=normal.shift,
        precision=normal.precision,
        site_shift=(),
        site_precision=(),
        prior_shift=normal.shift,
        prior_precision=normal.precision,
        report=Report(jnp.asarray(jnp.inf, float), zero, jnp.zeros((), bool), *counts, noise=nan),
        log_evidence=nan,
        damping=jnp.asarray(damping, float),
        table=table,
        rng_key=rng_key,
    ).with_sites(total_of(family, normal, table, sites), sites)
    # A site is where the rows of its factor are.
    size = len(table.groups[0].index) if plan.specs[0].blocks else -1
    return device_put_rows(state, size, plan.reading.factors.sharding)


def _spread(s: Array) -> tuple[Array, Array]:
    """Median and precision by the quartiles, over the first axis; 0 where nothing is spread."""
    low, middle, high = jnp.nanquantile(s, jnp.array([0.25, 0.5, 0.75]), axis=0)
    variance = ((high - low) / 1.349) ** 2
    return middle, jnp.where(variance > 0, 1 / jnp.where(variance > 0, variance, 1), 0)


def _start_full(A: Array, owners: Array, draws: Array) -> Site:
    """The site of a term of the prior: the spread of its value in the directions A."""
    W = jnp.where(owners >= 0, A[:, owners], 0)  # (r, e)
    length = jnp.sum(W**2, 0)
    visible = length > 1e-4
    W = W / jnp.where(visible, length, 1)
    mean, tau = _spread(draws @ A.T @ W)
    tau = jnp.where(visible, tau, 0)
    return Site(W @ (tau * mean), W * tau @ W.T)


def _start_diagonal(A: Array, owners: Array, draws: Array) -> Site:
    mean, tau = _spread(draws[:, owners])
    tau = jnp.where(owners >= 0, tau, 0)
    zero = jnp.zeros(A.shape[1], A.dtype)
    return Site(zero.at[owners].add(tau * mean), zero.at[owners].add(tau))


def on_arguments(
    plan: EPPlan, family: Family, forgets: bool, state: EPState, arrays: list[Array]
) -> tuple[EPState, Array]:
    """The state with the prior of these arguments, and whether its bases fit the data."""
    prior, constant = normal_part(plan.reading, plan.normal, arrays, state.table.center.mean)
    prior, table = family.from_full(prior), state.table._replace(constant=constant)
    total = total_of(family, prior, table, state.sites)
    if forgets:
        total = with_forgotten(family, state, total)
    fit = _bases_fit(plan, family.moments(total), table, lax.stop_gradient(arrays))
    return state.with_sites(total, state.sites, prior, table=table), fit


on_arguments_once = jax.jit(on_arguments, static_argnums=(0, 1, 2), compiler_options=ONCE)
"""The same for a single call, in which compilation would take nearly all of the time."""


def with_forgotten(family: Family, state: EPState, total: Site) -> Site:
    """A total with what q of a state has beside its own prior and sites."""
    inside = total_of(family, state.prior, state.table, state.sites)
    return jax.tree.map(lambda a, q, b: q + (a - b), total, state.total, inside)


def _bases_fit(plan: EPPlan, q: Moments, table: FactorTable, arrays: list[Array]) -> Array:
    """Whether no factor changes outside its basis, to first order around q."""
    q = lax.stop_gradient(q)
    sd = jnp.sqrt(variances(q))
    moves = np.random.default_rng(0).standard_normal((2, len(sd)))
    points = q.mean + sd * jnp.concatenate([jnp.zeros((1, len(sd))), jnp.asarray(moves, float)])

    def fits(spec: FactorGroupSpec, factors: Factors, index: Array, A: Array) -> Array:
        """Whether the gradient of a factor at these points is in the rows of A."""
        g = sd * jax.vmap(jax.grad(partial(spec.log_factor, factors, index)))(points)
        g = jnp.where(jnp.all(jnp.isfinite(g), -1, keepdims=True), g, 0.0)
        Q, _ = jnp.linalg.qr((A * sd).T)
        outside, size = (jnp.max(jnp.linalg.norm(x, axis=-1)) for x in (g - (g @ Q) @ Q.T, g))
        return outside <= _OFF * size + 1e-5  # in nats by a standard deviation of q

    fit = jnp.ones((), bool)
    for spec, group in zip(plan.specs, table.groups, strict=True):
        n, r, D = group.basis.shape
        if n > 0 and r < D:
            rows = group.index, (group.basis,)
            fit &= jnp.all(
                map_rows(partial(fits, spec), plan.reading.factors_of(arrays), spec, *rows)
            )
    return fit


def transfer_sites(old: EPState, new: EPState) -> tuple[Site, ...]:
    """The sites of an old state in the bases of a new one; the new sites for other factors."""
    if len(old.sites) != len(new.sites):
        return new.sites
    sites = []
    groups = zip(old.table.groups, new.table.groups, old.sites, new.sites, strict=True)
    for k, (a, b, kept, fresh) in enumerate(groups):
        same = jnp.shape(kept.shift)[:1] == jnp.shape(fresh.shift)[:1]
        if same and (k > 0 or new.table.times is None):
            same = np.array_equal(a.index, b.index)
            kept = _moved(a, b, kept) if same else fresh
        sites.append(kept if same else fresh)
    return tuple(sites)


def _moved(a: FactorGroup, b: FactorGroup, site: Site) -> Site:
    """Sites of group a in the bases of group b: the same sites if both span the same."""
    if site.precision.ndim == 2:  # diagonal sites are in x
        return site
    M = jnp.einsum("nsd,nrd->nsr", b.basis, a.basis)
    v = jnp.einsum("nsr,nr->ns", M, site.shift)
    return Site(v, jnp.einsum("nsr,nrq,ntq->nst", M, site.precision, M))
