r"""Expectation propagation with sites that several factors share.

.. math:: \lambda_q = \lambda_0 + \sum_s W_s \lambda_s, \qquad
    \lambda_s \leftarrow \lambda_s + \epsilon \sum_{n} (F_n - c \lambda_s), \qquad
    F_n = \frac 1 \alpha \left( \lambda_{\mathrm{proj}[q^{\setminus s} f_n^\alpha]}
    - \lambda_{q^{\setminus s}} \right), \qquad \lambda_{q^{\setminus s}} = \lambda_q - \alpha c
    \lambda_s

where the site s, which has all coordinates, stands W times in q, and c times in place of a factor.

References: Li, *Approximate inference: new visions* (2018), algorithms 5 to 8.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_nonnegative, check_rate
from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.base import EPEngine
from numpyro_ext.ep.factors import EPPlan, FactorGroup, FactorTable, map_factors
from numpyro_ext.ep.normal import Family, Site, choose, distance, halved, is_finite, plus
from numpyro_ext.ep.prior import Prior
from numpyro_ext.ep.reader import ModelReading
from numpyro_ext.ep.sites import EPState, total_of
from numpyro_ext.ep.sweep import (
    SweepConfig,
    SweepResult,
    Update,
    evidence,
    keys_of,
    next_state,
    site_update,
    update_group,
)
from numpyro_ext.ep.taylor_sites import site_of_row

_PRIOR_DAMPING = 0.8
"""The d of the factors of the prior, which are updated from one q."""


class Items(NamedTuple):
    """What one step visits: G cavities, and M factors from each.

    - **slot** - ``(G,)``, the site s that is taken out.
    - **amount** - ``(G,)``, c.
    - **rate** - ``(G,)``, epsilon; it is raised where factors are left out, so that they are out of
      the mean.
    - **weight** - ``(G,)``, how many factors each of the M stands for in the evidence.
    - **index, mask** - ``(G, M)``, the factors, and which of them count.
    """

    slot: Array
    amount: Array
    rate: Array
    weight: Array
    index: Any  # of NumPy where they are all rows
    mask: Any


@dataclass(kw_only=True, eq=False, repr=False)
class SharedSitesEngine(EPEngine):
    r"""The base of engines whose factors share sites.

    **Evidence.** The estimate of :class:`EP` is stationary at its own sites, and off to first order
    if a shared site stands for each of them. ``log_evidence`` therefore visits all rows once, and
    is EP's estimate with the site :math:`F_n` of each. The loss of a step, with the shared sites,
    is a monitor and no estimate of the evidence.

    :param float power: alpha, at least 0.
    :param step: epsilon in (0, 1], or a function of the number of the step; None for the inverse of
        the number of factors that share a site.
    """

    largest_share: ClassVar[float] = 0.0

    power: float = 1.0
    step: float | Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative("power", self.power)
        if self.step is not None and not callable(self.step):
            check_rate("step", self.step)

    @abstractmethod
    def times(self, size: int) -> Array:
        """``(S,)``, how often each of the shared sites stands in q, for ``size`` rows."""

    @abstractmethod
    def all_rows(self, size: int) -> Items:
        """All factors of the data, each once, with the site that they share."""

    def table_of(
        self, reading: ModelReading, arrays: list[Array], prior: Prior
    ) -> tuple[EPPlan, FactorTable]:
        plan, table = super().table_of(reading, arrays, prior)
        return plan, table._replace(times=self.times(reading.factors.size))

    def evidence_of(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[Array, Array]:
        items = self.all_rows(plan.reading.factors.size)
        plan, state = with_own_sites(plan, self.normals, state, arrays, items)
        return evidence(plan, self.normals, state, arrays)


def rate_of(step: float | Callable[[Array], Array] | None, i: Array, default: Any) -> Any:
    """epsilon of step ``i``."""
    if step is None:
        return default
    return step(i) if callable(step) else step


def _settled(family: Family, total: Site, change: Site) -> tuple[Array, Array]:
    """The share of a change of q by which it stays a distribution, and how many halvings."""
    whole = jnp.ones((), total.shift.dtype)
    return halved(family, lambda d: plus(total, change, d), whole)


class _Rows(NamedTuple):
    """Of rows that share a cavity: the sum of F over the good ones, how many these are, the update
    of each, and its basis."""

    F: Site
    good: Array
    updates: Update
    bases: Array


def _update_rows(
    plan: EPPlan,
    config: SweepConfig,
    factors: Factors,
    table: FactorTable,
    total: Site,
    shared: Site,
    item: Items,
    rng_key: Array,
) -> _Rows:
    """The rows of one item, whose cavity is q without its share of a site."""
    family, spec, group = config.family, plan.specs[0], table.groups[0]
    q, taylor = family.moments(total), table.taylor
    power = spec.power
    left = plus(total, shared, -power * item.amount)
    cavity = family.moments(left)
    proper = is_finite(cavity)
    cavity = choose(proper, cavity, q)
    if power == 0:
        D = q.mean.shape[0]
        gain = -item.amount * family.expected(q, jnp.eye(D, dtype=q.mean.dtype), shared)
    else:
        gain = (family.log_partition(left) - family.log_partition(total)) / power

    def one(n: Array, key: Array | None, read: Any) -> tuple[Update, Array, Site]:
        number = spec.number(group, n)
        here = factors.with_row(number, read)
        A = spec.basis(here, group, table.center, n)
        none = jax.tree.map(lambda x: x[0], family.zeros(A[None]))
        at_center = none
        if taylor is not None:
            at_center = site_of_row(family, here, spec, number, A, taylor.center)
        return site_update(family, here, spec, cavity, number, A, none, key), A, at_center

    read = factors.read_rows(jnp.asarray(item.index)) if spec.rank is not None else None
    each = item.index, keys_of(spec, rng_key, len(item.index)), read
    found, A, at_center = map_factors(one, each, spec.batch_size)
    mask = item.mask
    good = mask & proper & ~(found.improper | found.skipped | found.low_ess)

    def of_good(x: Array) -> Array:
        return jnp.where(good.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)

    sites = jax.tree.map(of_good, found.site)
    F = family.total(A, sites)
    if taylor is not None:
        F = family.total(A, jax.tree.map(of_good, plus(found.site, at_center, -1.0)))
        F = plus(F, taylor.mean, jnp.sum(good))
    if config.moments and power > 0:  # the limit at power 0 is that of the sites
        mean = family.of_mean(cavity, A, sites, good, power)
        F = jax.tree.map(lambda x: jnp.sum(good) * x, mean)
    names = "skipped", "low_ess", "inaccurate"
    updates = found._replace(
        log_z=jnp.where(mask, found.log_z + jnp.where(proper, gain, 0.0), 0.0),
        improper=mask & (found.improper | ~proper),
        **{name: mask & proper & getattr(found, name) for name in names},
    )
    return _Rows(F, jnp.sum(good), updates, A)


def with_own_sites(
    plan: EPPlan, family: Family, state: EPState, arrays: list[Array], items: Items
) -> tuple[EPPlan, EPState]:
    """A state of EP with the site that each factor has in the cavity of the shared one."""
    sites, bases = _own_sites(plan, family, lax.stop_gradient(state), arrays, items)
    some, index = np.flatnonzero(items.mask), items.index
    if plan.specs[0].rank is None:
        index = state.table.groups[0].index[index]
    index, basis, *own = (x.reshape(-1, *x.shape[2:])[some] for x in (index, bases, *sites))
    plan = replace(plan, specs=(replace(plan.specs[0], rank=None, blocks=False), *plan.specs[1:]))
    groups = FactorGroup(index, basis), *state.table.groups[1:]
    table, sites = state.table._replace(groups=groups, times=None), (Site(*own), *state.sites[1:])
    total = total_of(family, state.prior, table, sites)
    return plan, state.holding(total, sites, table=table)


@partial(jax.jit, static_argnums=(0, 1))
def _own_sites(
    plan: EPPlan, family: Family, state: EPState, arrays: list[Array], items: Items
) -> tuple[Site, Array]:
    """``(G, M, ...)``, the site F of each factor, zero where it is not found, and its basis."""
    factors = plan.reading.on(lax.stop_gradient(arrays))

    def of(xs: tuple[Items, Array]) -> tuple[Site, Array]:
        item, key = xs
        shared = jax.tree.map(lambda x: x[item.slot], state.sites[0])
        given = SweepConfig(family), factors, state.table, state.total, shared
        rows = _update_rows(plan, *given, item, key)
        return rows.updates.site, rows.bases

    return lax.map(of, (items, random.split(state.rng_key, len(items.slot))))


@partial(jax.jit, static_argnums=(0, 1))
def shared_sweep(
    plan: EPPlan, config: SweepConfig, state: EPState, arrays: list[Array], items: Items
) -> tuple[EPState, Array]:
    """One step: the sites that the items share, and then the factors of the prior."""
    family, factors, table = config.family, plan.reading.on(arrays), state.table
    shared, *prior_sites = state.sites
    total, W = state.total, table.times
    assert W is not None
    rng_key, key_items, *keys = random.split(state.rng_key, len(plan.specs) + 1)

    def change_of(shared: Site, total: Site, item: Items, key: Array) -> tuple[Site, Update]:
        site = jax.tree.map(lambda x: x[item.slot], shared)
        rows = _update_rows(plan, config, factors, table, total, site, item, key)
        # The mean over the good rows, with the rate of all of them.
        scale = item.rate * jnp.sum(item.mask) / jnp.maximum(rows.good, 1)
        taken = rows.good * item.amount
        return jax.tree.map(lambda f, x: scale * (f - taken * x), rows.F, site), rows.updates

    def serial(carry: Any, xs: Any) -> tuple[Any, Any]:
        shared, total = carry
        item, key = xs
        change, found = change_of(shared, total, item, key)
        times = W[item.slot]
        d, halvings = _settled(family, total, jax.tree.map(lambda x: times * x, change))
        total = plus(total, change, d * times)
        shared = jax.tree.map(lambda x, c: x.at[item.slot].add(d * c), shared, change)
        return (shared, total), (found, halvings)

    each = items, random.split(key_items, len(items.slot))
    if config.serial:
        (shared, after), (found, halvings) = lax.scan(serial, (shared, total), each)
        base, halvings = after, jnp.sum(halvings)
    else:
        change, found = lax.map(lambda xs: change_of(shared, total, *xs), each)
        by_slot = jax.tree.map(lambda x, c: jnp.zeros_like(x).at[items.slot].add(c), shared, change)
        in_q = jax.tree.map(lambda x: jnp.tensordot(W, x, 1), by_slot)
        d, halvings = _settled(family, total, in_q)
        shared, after, base = plus(shared, by_slot, d), plus(total, in_q, d), total
    log_z = jnp.sum(items.weight[:, None] * found.log_z)

    updates, sites = [found], [shared]
    rest = zip(plan.specs[1:], table.groups[1:], prior_sites, keys, strict=True)
    for spec, group, site, key in rest:
        update = update_group(family, factors, spec, family.moments(base), group, site, key)
        change = plus(update.site, site, -1.0)
        change = jax.tree.map(lambda x: _PRIOR_DAMPING * x, change)
        in_q = family.total(group.basis, change)
        d, more = _settled(family, after, in_q)
        after, halvings = plus(after, in_q, d), halvings + more
        sites.append(plus(site, change, d))
        updates.append(update)
        log_z = log_z + jnp.sum(update.log_z)
    log_z = log_z + table.constant + family.log_partition(base)

    new = total_of(family, state.prior, table, sites)
    residual = distance(family.moments(total), family.moments(new))
    result = SweepResult(new, tuple(sites), log_z, updates, residual, halvings)
    early = state.i == 0
    return next_state(plan, config, state, result, early, rng_key=rng_key), -log_z
