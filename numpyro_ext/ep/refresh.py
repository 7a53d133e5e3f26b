"""A state on the data of a call: its prior, its bases, its sites, its evidence.

A state holds numbers that were read off a model on some data. These functions tell whether they are
those of the data of a call, and make them so.
"""

from functools import partial

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.factor_table import ONCE, Group, Kind, Plan, Table, by_rows
from numpyro_ext.ep.normal import FAMILIES, Family, Moments, Site, distance, variances
from numpyro_ext.ep.start import change_of, natural
from numpyro_ext.ep.state import EPState, prior_of
from numpyro_ext.ep.visit import visit_all

__all__ = ["carried", "evidence", "on_arguments", "on_arguments_once", "sites_of", "total_of"]

_OFF = 1e-2
"""The part of a factor's gradient outside its basis, at which the basis is that of other data."""


def sites_of(state: EPState) -> tuple[Site, ...]:
    return tuple(map(Site, state.site_shift, state.site_precision))


def total_of(
    family: Family, normal: Site, table: Table, sites: tuple[Site, ...], times: Array | None
) -> Site:
    """Natural parameters of q.

    :param times: how often each of the shared sites, which are the first, stands in q; None if
        each factor has a site of its own.
    """
    if times is None:
        return natural(family, normal, table, sites)
    rest = jax.tree.map(lambda a, x: a + jnp.tensordot(times, x, 1), normal, sites[0])
    return natural(family, rest, table._replace(groups=table.groups[1:]), sites[1:])


def on_arguments(
    plan: Plan,
    family_name: str,
    forgets: bool,
    state: EPState,
    arrays: list[Array],
    times: Array | None,
) -> tuple[EPState, Array]:
    """The state with the prior of these arguments, and whether its bases are those of the data.

    :param bool forgets: whether q holds more than the prior and the sites.
    """
    family = FAMILIES[family_name]
    normal, constant = _prior(plan, arrays, state.table.center.mean)
    if state.prior_precision.ndim == 1:
        normal = Site(normal.shift, jnp.diagonal(normal.precision))
    table, sites = state.table._replace(constant=constant), sites_of(state)
    total = total_of(family, normal, table, sites, times)
    if forgets:
        before = total_of(family, prior_of(state), table, sites, times)
        total = jax.tree.map(lambda q, a, b: q + (a - b), _q_of(state), total, before)
    fit = _bases_fit(plan, family.moments(total), table, lax.stop_gradient(arrays))
    new = state._replace(
        shift=total.shift,
        precision=total.precision,
        prior_shift=normal.shift,
        prior_precision=normal.precision,
        table=table,
    )
    return new, fit


on_arguments_once = jax.jit(on_arguments, static_argnums=(0, 1, 2), compiler_options=ONCE)
"""The same for one call, of which compilation would be all of the time."""


def _q_of(state: EPState) -> Site:
    return Site(state.shift, state.precision)


def _prior(plan: Plan, arrays: list[Array], mean: Array) -> tuple[Site, Array]:
    """The normal part of the prior, and its log at 0."""
    factors = plan.reading.on(arrays)

    def log_p(x: Array) -> Array:
        terms = factors.terms(x)
        return sum((jnp.sum(terms[name]) for name in plan.normal), jnp.zeros((), x.dtype))

    value, eta = jax.value_and_grad(log_p)(mean)
    Lam = -jax.hessian(log_p)(mean)
    Lam = (Lam + Lam.T) / 2
    eta = eta + Lam @ mean
    return Site(eta, Lam), value - eta @ mean + mean @ Lam @ mean / 2


def _bases_fit(plan: Plan, q: Moments, table: Table, arrays: list[Array]) -> Array:
    """Whether no factor changes outside its basis, to first order around q."""
    factors, q = plan.reading.on(arrays), lax.stop_gradient(q)
    sd = jnp.sqrt(variances(q))
    moves = np.random.default_rng(0).standard_normal((2, len(sd)))
    points = q.mean + sd * jnp.concatenate([jnp.zeros((1, len(sd))), jnp.asarray(moves, float)])
    fit = jnp.ones((), bool)
    for kind, group in zip(plan.kinds, table.groups, strict=True):
        n, r, D = group.basis.shape
        if n == 0 or r == D:
            continue
        one = partial(_fits, kind, points, sd)
        fit &= jnp.all(by_rows(one, factors, kind, group.index, (group.basis,)))
    return fit


def _fits(kind: Kind, points: Array, sd: Array, factors: Factors, index: Array, A: Array) -> Array:
    """Whether the gradient of a factor at these points is in the rows of A."""
    g = sd * jax.vmap(jax.grad(partial(kind.log_factor, factors, index)))(points)
    known = jnp.all(jnp.isfinite(g), -1)
    g = jnp.where(known[:, None], g, 0.0)
    Q, _ = jnp.linalg.qr((A * sd).T)
    outside, size = (jnp.max(jnp.linalg.norm(x, axis=-1)) for x in (g - (g @ Q) @ Q.T, g))
    return outside <= _OFF * size + 1e-5  # in nats by a standard deviation of q


def carried(old: EPState, new: EPState, shared: bool) -> tuple[Site, ...]:
    """The sites of an old state in the bases of a new one, and those of the new one where the
    factors are others.

    :param bool shared: whether the first sites are shared, and so have no bases.
    """
    kept, fresh = sites_of(old), sites_of(new)
    if len(kept) != len(fresh):
        return fresh
    found = []
    groups = zip(old.table.groups, new.table.groups, strict=True)
    for k, (a, b) in enumerate(groups):
        same = jnp.shape(kept[k].shift)[:1] == jnp.shape(fresh[k].shift)[:1]
        if shared and k == 0:
            found.append(kept[k] if same else fresh[k])
        elif same and a.index.shape == b.index.shape and bool(jnp.all(a.index == b.index)):
            found.append(_moved(a, b, kept[k]))
        else:
            found.append(fresh[k])
    return tuple(found)


def _moved(a: Group, b: Group, site: Site) -> Site:
    """Sites in other bases: as they were where these span the same."""
    if site.precision.ndim == 2:  # diagonal sites are in x
        return site
    M = jnp.einsum("nsd,nrd->nsr", b.basis, a.basis)
    v = jnp.einsum("nsr,nr->ns", M, site.shift)
    return Site(v, jnp.einsum("nsr,nrq,ntq->nst", M, site.precision, M))


@partial(jax.jit, static_argnums=(0, 1))
def evidence(
    plan: Plan, family_name: str, state: EPState, arrays: list[Array]
) -> tuple[Array, Array]:
    """The estimate of log p(y) with the sites of a state, and the residual of a sweep from it."""
    family, factors = FAMILIES[family_name], plan.reading.on(arrays)
    table, total, sites = state.table, _q_of(state), sites_of(state)
    q = family.moments(total)
    keys = random.split(state.rng_key, len(plan.kinds))
    visits = [
        visit_all(family, factors, kind, q, group, site, key)
        for kind, group, site, key in zip(plan.kinds, table.groups, sites, keys, strict=True)
    ]
    log_z = table.constant + family.log_partition(total) + sum(jnp.sum(v.log_z) for v in visits)
    change = change_of(family, table, [v.site for v in visits], sites)
    new = family.moments(jax.tree.map(jnp.add, total, change))
    return log_z, lax.stop_gradient(distance(q, new, change))
