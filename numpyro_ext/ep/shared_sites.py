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
from numpyro_ext.ep.reading import ModelReading, Prior
from numpyro_ext.ep.state import EPState, total_of
from numpyro_ext.ep.sweep import (
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


class SharedConfig(NamedTuple):
    """The static part of a step, beside the plan.

    - **serial** - whether each group of factors is visited from the q that the last one has left.
    - **tol** - the residual below which a fit has converged; 0 where the factors are random.
    - **moments** - whether a shared site has the mean of the moments of its factors, in place of
      the mean of their sites.
    - **step** - epsilon, or a function of the number of the step; None for the share of its factors
      that a step visits.
    - **batch_size** - how many factors of each shared site are drawn; None for all of them.
    """

    family: Family
    serial: bool = False
    tol: float = 0.0
    moments: bool = False
    step: float | Callable[[Array], Array] | None = None
    batch_size: int | None = None


class Parts(NamedTuple):
    """The factors of the data in G groups that share a site each.

    - **slot** - ``(G,)``, the site s of each group.
    - **amount** - ``(G,)``, c.
    - **number** - ``(G,)``, the number of factors in each.
    - **rows** - ``(G, M)``, these factors, filled up with -1; None for one group of all.
    """

    slot: np.ndarray
    amount: np.ndarray
    number: np.ndarray
    rows: np.ndarray | None


class Items(NamedTuple):
    """The visits of one step: G cavities, and M factors from each.

    - **slot, amount** - as in :class:`Parts`.
    - **rate** - ``(G,)``, epsilon over the number of factors that count.
    - **weight** - ``(G,)``, the number of factors for which each of the M counts in the evidence.
    - **index, mask** - ``(G, M)``, the factors, and which of them count.
    """

    slot: Any
    amount: Any
    rate: Array
    weight: Array
    index: Any  # of NumPy where they are all rows
    mask: Any


def items_of(
    config: SharedConfig, parts: Parts, size: int, i: Array, rng_key: Any, indices: Any = None
) -> Items:
    """The factors that step i visits.

    :param size: the number of all rows.
    :param indices: factors to take in place of random ones, or None.
    """
    G, M = len(parts.slot), config.batch_size
    if indices is not None:
        index: Any = jnp.reshape(jnp.asarray(indices), (G, -1))
    elif M in (None, size if parts.rows is None else parts.rows.shape[1]):
        index = np.arange(size)[None] if parts.rows is None else parts.rows
    else:
        index = random.randint(rng_key, (G, M), 0, jnp.asarray(parts.number)[:, None])
        if parts.rows is not None:
            index = jnp.take_along_axis(jnp.asarray(parts.rows), index, 1)
    mask = index >= 0
    count = mask.sum(1)
    epsilon = config.step(i) if callable(config.step) else config.step
    epsilon = count / parts.number if epsilon is None else epsilon
    rate = jnp.broadcast_to(epsilon, G).astype(float) / count
    weight = jnp.asarray(parts.number / count, float)
    return Items(parts.slot, parts.amount, rate, weight, index * mask, mask)


@dataclass(kw_only=True, eq=False, repr=False)
class SharedSitesEngine(EPEngine):
    r"""The base of engines whose factors share sites.

    **Evidence.** The estimate of :class:`EP` is stationary at its own sites, and off to first order
    with a shared site in place of each. ``log_evidence`` therefore visits all rows once, and is
    EP's estimate with the site :math:`F_n` of each row. The loss of a step is a monitor, and no
    estimate of the evidence.

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
            self.step = float(self.step)

    @abstractmethod
    def parts(self, size: int) -> Parts:
        """The factors of ``size`` rows by the site that they share."""

    @abstractmethod
    def config(self, size: int) -> SharedConfig:
        """The static part of a step on ``size`` rows."""

    def sweep(
        self, plan: EPPlan, state: EPState, arrays: list[Array], indices: Any = None
    ) -> tuple[EPState, Array]:
        size = plan.reading.factors.size
        return shared_step(plan, self.config(size), state, arrays, self.parts(size), indices)[:2]

    def table_of(
        self, reading: ModelReading, arrays: list[Array], prior: Prior
    ) -> tuple[EPPlan, FactorTable]:
        plan, table = super().table_of(reading, arrays, prior)
        parts = self.parts(reading.factors.size)
        times = np.bincount(parts.slot, parts.number * parts.amount)
        return plan, table._replace(times=jnp.asarray(times, float))

    def evidence_of(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[Array, Array]:
        size = plan.reading.factors.size
        items = items_of(SharedConfig(self.normals), self.parts(size), size, state.i, None)
        plan, state = with_own_sites(plan, self.normals, state, arrays, items)
        return evidence(plan, self.normals, state, arrays)


def _update_rows(
    plan: EPPlan,
    config: SharedConfig,
    factors: Factors,
    table: FactorTable,
    total: Site,
    shared: Site,
    item: Items,
    rng_key: Array,
) -> tuple[Site, Array, Update, Array]:
    """The rows of one item from its cavity, q without a share of the site: the sum of F over the
    good rows, their number, and the updates and bases of all."""
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

    def update(n: Array, key: Array | None, read: Any) -> tuple[Update, Array, Site]:
        number = spec.number(group, n)
        here = factors.with_row(number, read)
        A = spec.basis(here, group, table.center, n)
        none = jax.tree.map(lambda x: x[0], family.zeros(A[None]))
        at_center = none
        if taylor is not None:
            at_center = site_of_row(family, here, spec, number, A, taylor.center)
        return site_update(family, spec, cavity, here, number, A, none, key), A, at_center

    read = factors.read_rows(jnp.asarray(item.index)) if spec.rank is not None else None
    rows = item.index, keys_of(spec, rng_key, len(item.index)), read
    updates, A, at_center = map_factors(update, rows, spec.batch_size)
    mask = item.mask
    good = mask & proper & ~(updates.improper | updates.skipped | updates.low_ess)

    def of_good(x: Array) -> Array:
        return jnp.where(good.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)

    sites = jax.tree.map(of_good, updates.site)
    F = family.total(A, sites)
    if taylor is not None:
        F = family.total(A, jax.tree.map(of_good, plus(updates.site, at_center, -1.0)))
        F = plus(F, taylor.mean, jnp.sum(good))
    if config.moments and power > 0:  # at power 0 both are the same
        share = good / jnp.maximum(jnp.sum(good), 1)
        mean = family.site_of_mean(cavity, A, sites, share, power)
        F = jax.tree.map(lambda x: jnp.sum(good) * x, mean)
    names = "skipped", "low_ess", "inaccurate"
    updates = updates._replace(
        log_z=jnp.where(mask, updates.log_z + jnp.where(proper, gain, 0.0), 0.0),
        improper=mask & (updates.improper | ~proper),
        **{name: mask & proper & getattr(updates, name) for name in names},
    )
    return F, jnp.sum(good), updates, A


def with_own_sites(
    plan: EPPlan, family: Family, state: EPState, arrays: list[Array], items: Items
) -> tuple[EPPlan, EPState]:
    """A state of EP, in which each factor has the site that it has from the shared cavity."""
    sites, bases = _own_sites(plan, family, lax.stop_gradient(state), arrays, items)
    some, index = np.flatnonzero(items.mask), items.index
    if plan.specs[0].rank is None:
        index = state.table.groups[0].index[index]
    index, basis, *own = (x.reshape(-1, *x.shape[2:])[some] for x in (index, bases, *sites))
    plan = replace(plan, specs=(replace(plan.specs[0], rank=None, blocks=False), *plan.specs[1:]))
    groups = FactorGroup(index, basis), *state.table.groups[1:]
    table, sites = state.table._replace(groups=groups, times=None), (Site(*own), *state.sites[1:])
    total = total_of(family, state.prior, table, sites)
    return plan, state.with_sites(total, sites, table=table)


@partial(jax.jit, static_argnums=(0, 1))
def _own_sites(
    plan: EPPlan, family: Family, state: EPState, arrays: list[Array], items: Items
) -> tuple[Site, Array]:
    """``(G, M, ...)``, the site F of each factor, zero where it is not found, and its basis."""
    factors = plan.reading.factors_of(lax.stop_gradient(arrays))

    def sites_of(xs: tuple[Items, Array]) -> tuple[Site, Array]:
        item, key = xs
        shared = jax.tree.map(lambda x: x[item.slot], state.sites[0])
        q = SharedConfig(family), factors, state.table, state.total
        _, _, updates, bases = _update_rows(plan, *q, shared, item, key)
        return updates.site, bases

    return lax.map(sites_of, (items, random.split(state.rng_key, len(items.slot))))


@partial(jax.jit, static_argnums=(0, 1))
def shared_step(
    plan: EPPlan,
    config: SharedConfig,
    state: EPState,
    arrays: list[Array],
    parts: Parts,
    indices: Any = None,
) -> tuple[EPState, Array, Items]:
    """One step, first of the shared sites and then of the factors of the prior: the state, the loss
    and the visits."""
    key_rows, rng_key = None, state.rng_key
    if config.batch_size is not None:
        key_rows, rng_key = random.split(rng_key)
    items = items_of(config, parts, plan.reading.factors.size, state.i, key_rows, indices)
    family, factors, table = config.family, plan.reading.factors_of(arrays), state.table
    shared, *prior_sites = state.sites
    total, W = state.total, table.times
    assert W is not None
    rng_key, key_items, *keys = random.split(rng_key, len(plan.specs) + 1)
    whole = jnp.ones((), total.shift.dtype)

    def change_of(shared: Site, total: Site, item: Items, key: Array) -> tuple[Site, Update]:
        site = jax.tree.map(lambda x: x[item.slot], shared)
        rows = plan, config, factors, table, total, site, item, key
        F, good, updates, _ = _update_rows(*rows)
        # The mean over the good rows, with the rate of all of them.
        scale = item.rate * jnp.sum(item.mask) / jnp.maximum(good, 1)
        taken = good * item.amount
        return jax.tree.map(lambda f, x: scale * (f - taken * x), F, site), updates

    def serial(carry: Any, xs: Any) -> tuple[Any, Any]:
        shared, total = carry
        item, key = xs
        change, updates = change_of(shared, total, item, key)
        in_q = jax.tree.map(lambda x: W[item.slot] * x, change)
        d, halvings = halved(family, total, in_q, whole)
        total = plus(total, in_q, d)
        shared = jax.tree.map(lambda x, c: x.at[item.slot].add(d * c), shared, change)
        return (shared, total), (updates, halvings)

    each = items, random.split(key_items, len(items.slot))
    if config.serial:
        (shared, after), (of_rows, halvings) = lax.scan(serial, (shared, total), each)
        base, halvings = after, jnp.sum(halvings)
    else:
        change, of_rows = lax.map(lambda xs: change_of(shared, total, *xs), each)
        by_slot = jax.tree.map(lambda x, c: jnp.zeros_like(x).at[items.slot].add(c), shared, change)
        in_q = jax.tree.map(lambda x: jnp.tensordot(W, x, 1), by_slot)
        d, halvings = halved(family, total, in_q, whole)
        shared, after, base = plus(shared, by_slot, d), plus(total, in_q, d), total
    log_z = jnp.sum(items.weight[:, None] * of_rows.log_z)

    updates, sites = [of_rows], [shared]
    rest = zip(plan.specs[1:], table.groups[1:], prior_sites, keys, strict=True)
    for spec, group, site, key in rest:
        update = update_group(family, factors, spec, family.moments(base), group, site, key)
        change = plus(update.site, site, -1.0)
        change = jax.tree.map(lambda x: _PRIOR_DAMPING * x, change)
        in_q = family.total(group.basis, change)
        d, more = halved(family, after, in_q, whole)
        after, halvings = plus(after, in_q, d), halvings + more
        sites.append(plus(site, change, d))
        updates.append(update)
        log_z = log_z + jnp.sum(update.log_z)
    log_z = log_z + table.constant + family.log_partition(base)

    new = total_of(family, state.prior, table, sites)
    residual = distance(family.moments(total), family.moments(new))
    result = SweepResult(tuple(sites), updates, log_z, residual, halvings)
    state = next_state(plan, family, state, result, config.tol, early=state.i == 0)
    return state._replace(rng_key=rng_key), -log_z, items
