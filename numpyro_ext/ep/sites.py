"""The state of a fit: q as the product of sites and the prior, on the data of a call."""

from collections import namedtuple
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.factors import EPPlan, FactorGroup, FactorGroupSpec, FactorTable, map_rows
from numpyro_ext.ep.normal import Family, Moments, Site, plus, variances
from numpyro_ext.ep.prior import Prior, normal_part
from numpyro_ext.ep.reader import ONCE

_OFF = 1e-2
"""The part of a factor's gradient outside its basis, at which the basis is that of other data."""

EPRunResult = namedtuple("EPRunResult", ["params", "state", "losses"])
"""
A :func:`~collections.namedtuple` with these entries, those of ``SVIRunResult``:

 - **params** - the parameters of the engine's guide.
 - **state** - the last :class:`EPState`.
 - **losses** - the loss of each step that was taken.
"""


class Report(NamedTuple):
    """How a fit goes; counts with ``num_`` are over all steps.

    - **residual** - the change of q by one full undamped sweep: the largest over the coordinates of
      the change of the mean in standard deviations and of the relative change of the variance; inf
      before the first sweep and where the undamped q is improper.
    - **skipped** - factors that were left as they were in the last step.
    - **converged** - whether the residual is below ``tol``, or what rounding leaves of it, and no
      factor was skipped.
    - **num_improper** - factors left out because their cavity was improper; those of the prior,
      whose cavities are flat at first, are counted once there was a step without.
    - **num_skipped** - factors left out because the moments were not finite, not positive definite,
      or not reached by the nodes.
    - **num_low_ess** - factors left out because the importance weights were uneven.
    - **num_inaccurate** - factors that the nodes of the quadrature do not resolve.
    - **num_halvings** - how many times a step was halved so that q stays a distribution.
    - **visited** - factors visited in the last step.
    - **noise** - of the last run of an engine with random rows: the largest standard error of the
      result, in standard deviations for the mean and relative for a standard deviation; NaN
      elsewhere.
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
    - **site_shift, site_precision** - those of the sites, a tuple with an entry for each group of
      factors, the rows of the data first: ``(n, r)`` and ``(n, r, r)`` in the r coordinates
      ``basis @ x`` of each factor, or ``(n, D)`` for the diagonal family.
    - **prior_shift, prior_precision** - those of the terms of the prior that are normal, for the
      arguments of the last call.
    - **report** - a :class:`Report`.
    - **log_evidence** - the estimate that went with the last step.
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

    def holding(
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
    """Sites of zero, those that are shared in all coordinates; with a proxy the mean of its Taylor
    sites for all rows."""
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
    total = prior
    for k, (group, site) in enumerate(zip(table.groups, sites, strict=True)):
        if k == 0 and table.times is not None:
            times = table.times
            part = jax.tree.map(lambda x, W=times: jnp.tensordot(W, x, 1), site)
        else:
            part = family.total(group.basis, site)
        total = plus(total, part)
    return total


def change_of(family: Family, table: FactorTable, new: Sequence[Site], old: Sequence[Site]) -> Site:
    """The change of q's natural parameters by new sites, for which no large sums are subtracted."""
    parts = [
        family.total(group.basis, jax.tree.map(jnp.subtract, a, b))
        for group, a, b in zip(table.groups, new, old, strict=True)
    ]
    return reduce(partial(jax.tree.map, jnp.add), parts)


def is_positive(total: Site) -> bool:
    """Return whether a precision is positive definite beyond rounding."""
    P = np.asarray(total.precision, np.float64)
    if P.ndim == 1:
        return bool(np.all(P > 0))
    scale = np.sqrt(np.maximum(np.diag(P), 0))
    if not np.all(scale > 0):
        return False
    smallest = np.linalg.eigvalsh(P / scale / scale[:, None])[0]
    return bool(smallest > 100 * np.finfo(np.asarray(total.precision).dtype).eps)


def start_sites(
    family: str, plan: EPPlan, table: FactorTable, prior: Prior, sites: Sequence[Site]
) -> tuple[Site, ...]:
    """Sites by which each latent site whose prior is not normal has the spread of its draws."""
    start = _start_full if family == "full" else _start_diagonal
    start = jax.jit(jax.vmap(partial(start, draws=jnp.asarray(prior.draws))))
    return tuple(
        site if spec.names is None else start(group.basis, jnp.asarray(prior.owners)[group.index])
        for spec, group, site in zip(plan.specs, table.groups, sites, strict=True)
    )


def _spread(s: Array) -> tuple[Array, Array]:
    """Median and variance by the quartiles, over the first axis."""
    low, middle, high = jnp.nanquantile(s, jnp.array([0.25, 0.5, 0.75]), axis=0)
    return middle, ((high - low) / 1.349) ** 2


def _start_full(A: Array, owners: Array, draws: Array) -> Site:
    """The site of a term of the prior: the spread of its own value, as far as A sees it."""
    W = jnp.where(owners >= 0, A[:, owners], 0)  # (r, e)
    length = jnp.sum(W**2, 0)
    visible = length > 1e-4
    s = draws @ A.T @ (W / jnp.where(visible, length, 1))
    mean, variance = _spread(s)
    tau = jnp.where(visible & (variance > 0), 1 / jnp.where(variance > 0, variance, 1), 0)
    W = W / jnp.where(visible, length, 1)
    return Site(W @ (tau * mean), W * tau @ W.T)


def _start_diagonal(A: Array, owners: Array, draws: Array) -> Site:
    mean, variance = _spread(draws[:, owners])
    tau = jnp.where((owners >= 0) & (variance > 0), 1 / jnp.where(variance > 0, variance, 1), 0)
    zero = jnp.zeros(A.shape[1], A.dtype)
    return Site(zero.at[owners].add(tau * mean), zero.at[owners].add(tau))


def on_arguments(
    plan: EPPlan, family: Family, forgets: bool, state: EPState, arrays: list[Array]
) -> tuple[EPState, Array]:
    """The state with the prior of these arguments, and whether its bases are those of the data.

    :param bool forgets: whether q holds more than the prior and the sites.
    """
    prior, constant = normal_part(plan.reading, plan.normal, arrays, state.table.center.mean)
    if state.prior_precision.ndim == 1:
        prior = Site(prior.shift, jnp.diagonal(prior.precision))
    table = state.table._replace(constant=constant)
    total = total_of(family, prior, table, state.sites)
    if forgets:
        total = with_forgotten(family, state, total)
    fit = _bases_fit(plan, family.moments(total), table, lax.stop_gradient(arrays))
    return state.holding(total, state.sites, prior, table=table), fit


on_arguments_once = jax.jit(on_arguments, static_argnums=(0, 1, 2), compiler_options=ONCE)
"""The same for a single call, in which compilation would take nearly all of the time."""


def with_forgotten(family: Family, state: EPState, total: Site) -> Site:
    """Prior and sites with what q of a state holds beside its own."""
    inside = total_of(family, state.prior, state.table, state.sites)
    return jax.tree.map(lambda a, q, b: q + (a - b), total, state.total, inside)


def _bases_fit(plan: EPPlan, q: Moments, table: FactorTable, arrays: list[Array]) -> Array:
    """Whether no factor changes outside its basis, to first order around q."""
    factors, q = plan.reading.on(arrays), lax.stop_gradient(q)
    sd = jnp.sqrt(variances(q))
    moves = np.random.default_rng(0).standard_normal((2, len(sd)))
    points = q.mean + sd * jnp.concatenate([jnp.zeros((1, len(sd))), jnp.asarray(moves, float)])
    fit = jnp.ones((), bool)
    for spec, group in zip(plan.specs, table.groups, strict=True):
        n, r, D = group.basis.shape
        if n == 0 or r == D:
            continue
        fits = partial(_fits, spec, points, sd)
        fit &= jnp.all(map_rows(fits, factors, spec, group.index, (group.basis,)))
    return fit


def _fits(
    spec: FactorGroupSpec, points: Array, sd: Array, factors: Factors, index: Array, A: Array
) -> Array:
    """Whether the gradient of a factor at these points is in the rows of A."""
    g = sd * jax.vmap(jax.grad(partial(spec.log_factor, factors, index)))(points)
    finite = jnp.all(jnp.isfinite(g), -1)
    g = jnp.where(finite[:, None], g, 0.0)
    Q, _ = jnp.linalg.qr((A * sd).T)
    outside, size = (jnp.max(jnp.linalg.norm(x, axis=-1)) for x in (g - (g @ Q) @ Q.T, g))
    return outside <= _OFF * size + 1e-5  # in nats by a standard deviation of q


def carried(old: EPState, new: EPState) -> tuple[Site, ...]:
    """The sites of an old state in the bases of a new one; new ones for other factors."""
    if len(old.sites) != len(new.sites):
        return new.sites
    sites = []
    groups = zip(old.table.groups, new.table.groups, old.sites, new.sites, strict=True)
    for k, (a, b, kept, fresh) in enumerate(groups):
        same = jnp.shape(kept.shift)[:1] == jnp.shape(fresh.shift)[:1]
        if k > 0 or new.table.times is None:
            same = same and a.index.shape == b.index.shape and bool(jnp.all(a.index == b.index))
            kept = _moved(a, b, kept) if same else fresh
        sites.append(kept if same else fresh)
    return tuple(sites)


def _moved(a: FactorGroup, b: FactorGroup, site: Site) -> Site:
    """Sites in other bases: as they were where these span the same."""
    if site.precision.ndim == 2:  # diagonal sites are in x
        return site
    M = jnp.einsum("nsd,nrd->nsr", b.basis, a.basis)
    v = jnp.einsum("nsr,nr->ns", M, site.shift)
    return Site(v, jnp.einsum("nsr,nrq,ntq->nst", M, site.precision, M))
