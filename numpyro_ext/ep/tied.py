r"""Expectation propagation with sites that several factors share.

.. math:: \lambda_q = \lambda_0 + \sum_s W_s \lambda_s, \qquad
    \lambda_s \leftarrow \lambda_s + \epsilon \sum_{n} (F_n - c \lambda_s), \qquad
    F_n = \frac 1 \alpha \left( \lambda_{\mathrm{proj}[q^{\setminus s} f_n^\alpha]}
    - \lambda_{q^{\setminus s}} \right), \qquad \lambda_{q^{\setminus s}} = \lambda_q - \alpha c
    \lambda_s

where the site s stands W times in q, and c times in place of one factor. References: Li,
Hernandez-Lobato, Turner, *Stochastic expectation propagation* (NeurIPS 2015); Li, *Approximate
inference: new visions* (2018), algorithms 5 to 8; Dehaene, Barthelme, *Expectation propagation in
the large-data limit* (JRSS B 2018).
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

from numpyro_ext._checks import check_nonnegative, check_positive
from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.base import EPEngine
from numpyro_ext.ep.factor_table import Center, Group, Kind, Plan, by_factors
from numpyro_ext.ep.normal import (
    FAMILIES,
    Family,
    Moments,
    Site,
    choose,
    distance,
    halved,
    is_finite,
    plus,
)
from numpyro_ext.ep.refresh import evidence, sites_of, total_of
from numpyro_ext.ep.state import EPState, Report, limit_of, next_state, prior_of
from numpyro_ext.ep.visit import Visit, keys_of, visit, visit_all

__all__ = ["Items", "TiedEngine", "TiedSetting", "tied_sweep"]

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
    - **multiplicity** - ``(S,)``, W of each site, :meth:`TiedEngine.times`.
    """

    slot: Array
    amount: Array
    rate: Array
    weight: Array
    index: Any  # of NumPy where they are all rows
    mask: Any
    multiplicity: Array


class TiedSetting(NamedTuple):
    """What is static in a step, beside the plan.

    - **serial** - whether each cavity is taken from the q that the one before has left.
    - **tol** - the residual below which it has converged; 0 where the factors are random.
    - **moments** - whether F of the factors is that of the mean of their moments, in place of the
      mean of their F.
    """

    family: str
    serial: bool
    tol: float
    moments: bool = False


@dataclass(kw_only=True, eq=False, repr=False)
class TiedEngine(EPEngine):
    r"""The base of engines whose factors share sites.

    **Evidence.** The estimate of :class:`EP`, which is stationary at its own sites, is off to first
    order if the shared site stands for each of them: by 1 to 2 nats where rows differ. Therefore
    ``log_evidence`` visits all rows once, and is EP's estimate with the site :math:`F_n` of each,
    which is off to second order. The loss of a step has the shared sites: it is a monitor, and no
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
        if self.step is None or callable(self.step):
            return
        check_positive("step", self.step)
        if self.step > 1:
            raise ValueError(
                f"step is {self.step!r}; it must be in (0, 1], a function of the number of the"
                " step, or None."
            )

    def num_slots(self, size: int) -> int:
        """The number S of sites that are shared, for ``size`` rows."""
        return 1

    def init(self, rng_key: Array, *args: Any, **kwargs: Any) -> EPState:
        state = super().init(rng_key, *args, **kwargs)
        assert self._plan is not None
        S, zero = self.num_slots(self._plan.reading.factors.size), jnp.zeros_like
        tied = Site(*(jnp.stack([zero(x)] * S) for x in (state.shift, state.precision)))
        first = sum(kind.names is None for kind in self._plan.kinds)
        return state._replace(
            site_shift=(tied.shift, *state.site_shift[first:]),
            site_precision=(tied.precision, *state.site_precision[first:]),
        )

    def times(self, size: int) -> Array:
        return jnp.full(1, size, float)

    @abstractmethod
    def all_rows(self, size: int) -> Items:
        """All factors of the data, each once, with the site that they share."""

    def rate(self, i: Array, default: Any) -> Any:
        """epsilon of step ``i``."""
        return rate_of(self.step, i, default)

    def _evidence(self, plan: Plan, state: EPState, arrays: list[Array]) -> tuple[Array, Array]:
        items = self.all_rows(plan.reading.factors.size)
        plan, state = untied(plan, self.family, state, arrays, items)
        return evidence(plan, self.family, state, arrays)


def rate_of(step: float | Callable[[Array], Array] | None, i: Array, default: Any) -> Any:
    """epsilon of step ``i``."""
    if step is None:
        return default
    return step(i) if callable(step) else step


def _at(tied: Site, s: Array) -> Site:
    return jax.tree.map(lambda x: x[s], tied)


def _settle(family: Family, total: Site, change: Site) -> tuple[Array, Array]:
    """The share of a change of q by which it stays a distribution, and how many halvings."""
    whole = jnp.ones((), total.shift.dtype)
    return halved(family, lambda d: plus(total, change, d), whole)


def _visit_rows(
    family: Family,
    factors: Factors,
    kind: Kind,
    group: Group,
    center: Center,
    total: Site,
    shared: Site,
    amount: Array,
    index: Array,
    mask: Array,
    rng_key: Array,
    moments: bool = False,
) -> tuple[Site, Array, Visit, Array]:
    """The sum of F over rows with one cavity, the number of good rows, what was seen, the bases."""
    q = family.moments(total)
    power = kind.power
    left = plus(total, shared, -power * amount)
    cavity = family.moments(left)
    proper = is_finite(cavity)
    cavity = choose(proper, cavity, q)
    if power == 0:
        D = q.mean.shape[0]
        gain = -amount * family.expected(q, jnp.eye(D, dtype=q.mean.dtype), shared)
    else:
        gain = (family.log_partition(left) - family.log_partition(total)) / power

    def one(n: Array, key: Array | None) -> tuple[Visit, Array]:
        A = kind.basis(factors, group, center, n)
        none = jax.tree.map(lambda x: x[0], family.zeros(A[None]))
        found = visit(family, factors, kind, cavity, kind.number(group, n), A, none, key)
        return found, A

    found, A = by_factors(one, (index, keys_of(kind, rng_key, len(index))), kind.batch_size)
    good = mask & proper & ~(found.improper | found.skipped | found.low_ess)

    def of_good(x: Array) -> Array:
        return jnp.where(good.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)

    sites = jax.tree.map(of_good, found.site)
    F = family.total(A, sites)
    if moments and power > 0:  # the limit at power 0 is that of the sites
        mean = family.of_mean(cavity, A, sites, good, power)
        F = jax.tree.map(lambda x: jnp.sum(good) * x, mean)
    flags = Visit(
        found.site,
        jnp.where(mask, found.log_z + jnp.where(proper, gain, 0.0), 0.0),
        mask & (found.improper | ~proper),
        mask & proper & found.skipped,
        mask & proper & found.low_ess,
        mask & proper & found.inaccurate,
    )
    return F, jnp.sum(good), flags, A


def untied(
    plan: Plan, family: str, state: EPState, arrays: list[Array], items: Items
) -> tuple[Plan, EPState]:
    """A state of EP with the site that each factor has in the cavity of the shared one."""
    sites, bases = _own_sites(plan, family, lax.stop_gradient(state), arrays, items)
    some, index = np.flatnonzero(items.mask), items.index
    if plan.kinds[0].rank is None:
        index = state.table.groups[0].index[index]
    index, basis, shift, precision = (
        x.reshape(-1, *x.shape[2:])[some] for x in (index, bases, *sites)
    )
    plan = replace(plan, kinds=(replace(plan.kinds[0], rank=None, blocks=False), *plan.kinds[1:]))
    table = state.table._replace(groups=(Group(index, basis), *state.table.groups[1:]))
    own = Site(shift, precision), *sites_of(state)[1:]
    total = total_of(FAMILIES[family], prior_of(state), table, own, None)
    return plan, state._replace(
        shift=total.shift,
        precision=total.precision,
        site_shift=(shift, *state.site_shift[1:]),
        site_precision=(precision, *state.site_precision[1:]),
        table=table,
    )


@partial(jax.jit, static_argnums=(0, 1))
def _own_sites(
    plan: Plan, family_name: str, state: EPState, arrays: list[Array], items: Items
) -> tuple[Site, Array]:
    """``(G, M, ...)``, the site F of each factor, zero where it is not found, and its basis."""
    family, factors = FAMILIES[family_name], plan.reading.on(lax.stop_gradient(arrays))
    kind, group, tied = plan.kinds[0], state.table.groups[0], sites_of(state)[0]
    total = Site(state.shift, state.precision)

    def of(xs: tuple[Items, Array]) -> tuple[Site, Array]:
        item, key = xs
        *_, found, A = _visit_rows(
            *(family, factors, kind, group, state.table.center, total, _at(tied, item.slot)),
            *(item.amount, item.index, item.mask, key),
        )
        return found.site, A

    G = len(items.slot)
    each = items._replace(multiplicity=jnp.zeros(G))
    return lax.map(of, (each, random.split(state.rng_key, G)))


@partial(jax.jit, static_argnums=(0, 1))
def tied_sweep(
    plan: Plan, setting: TiedSetting, state: EPState, arrays: list[Array], items: Items
) -> tuple[EPState, Array]:
    """One step: the sites that the items share, and then the factors of the prior."""
    family, factors = FAMILIES[setting.family], plan.reading.on(arrays)
    kind, group = plan.kinds[0], state.table.groups[0]
    tied, *prior_sites = sites_of(state)
    total = Site(state.shift, state.precision)
    start = family.moments(total)
    rng_key, key_items, *keys = random.split(state.rng_key, len(plan.kinds) + 1)
    W = items.multiplicity

    def change_of(tied: Site, total: Site, item: Items, key: Array) -> tuple[Site, Visit]:
        shared = _at(tied, item.slot)
        F, good, found, _ = _visit_rows(
            *(family, factors, kind, group, state.table.center, total, shared),
            *(item.amount, item.index, item.mask, key, setting.moments),
        )
        # The mean over the good rows, with the rate of all of them.
        scale = item.rate * jnp.sum(item.mask) / jnp.maximum(good, 1)
        change = jax.tree.map(lambda f, x: scale * (f - good * item.amount * x), F, shared)
        return change, found

    def serial(carry: Any, xs: Any) -> tuple[Any, Any]:
        tied, total = carry
        item, key = xs
        change, found = change_of(tied, total, item, key)
        times = W[item.slot]
        d, halvings = _settle(family, total, jax.tree.map(lambda x: times * x, change))
        total = plus(total, change, d * times)
        tied = jax.tree.map(lambda x, c: x.at[item.slot].add(d * c), tied, change)
        return (tied, total), (found, halvings)

    def parallel(xs: Any) -> Any:
        item, key = xs
        return change_of(tied, total, item, key)

    G = len(items.slot)
    each = items._replace(multiplicity=jnp.zeros(G)), random.split(key_items, G)
    if setting.serial:
        (tied, after), (found, halvings) = lax.scan(serial, (tied, total), each)
        halvings = jnp.sum(halvings)
    else:
        change, found = lax.map(parallel, each)
        by_slot = jax.tree.map(lambda x, c: jnp.zeros_like(x).at[items.slot].add(c), tied, change)
        in_q = jax.tree.map(lambda x: jnp.tensordot(W, x, 1), by_slot)
        d, halvings = _settle(family, total, in_q)
        tied, after = plus(tied, by_slot, d), plus(total, in_q, d)
    log_z = jnp.sum(items.weight[:, None] * found.log_z)

    base = after if setting.serial else total
    visits, sites = [], []
    for number, (k, site, key) in enumerate(zip(plan.kinds[1:], prior_sites, keys, strict=True)):
        part = state.table.groups[number + 1]
        seen = visit_all(family, factors, k, family.moments(base), part, site, key)
        change = plus(seen.site, site, -1.0)
        change = jax.tree.map(lambda x: _PRIOR_DAMPING * x, change)
        d, more = _settle(family, after, family.total(part.basis, change))
        site = plus(site, change, d)
        after = plus(after, family.total(part.basis, change), d)
        halvings = halvings + more
        sites.append(site)
        visits.append(seen)
        log_z = log_z + jnp.sum(seen.log_z)
    log_z = log_z + state.table.constant + family.log_partition(base)

    new = total_of(family, prior_of(state), state.table, (tied, *sites), W)
    good = is_finite(family.moments(new))
    sites = choose(good, (tied, *sites), sites_of(state))
    new = choose(good, new, total)
    report = _report(setting, state, [found, *visits], start, family.moments(new), halvings, good)
    return next_state(state, new, sites, report, log_z, rng_key), -log_z


def _report(
    setting: TiedSetting,
    state: EPState,
    visits: list[Visit],
    start: Moments,
    new: Moments,
    halvings: Array,
    good: Array,
) -> Report:
    before = state.report
    residual = distance(start, new)

    def count(name: str) -> Array:
        return sum(
            (jnp.sum(getattr(v, name), dtype=jnp.int32) for v in visits), jnp.zeros((), jnp.int32)
        )

    left = count("improper") + count("skipped") + count("low_ess")
    converged = good & (residual < limit_of(setting.tol, start)) & (left == 0)
    # The cavity of what makes q proper is flat until the data have spoken.
    early = state.i == 0
    of_rows = jnp.sum(visits[0].improper, dtype=jnp.int32)
    return Report(
        residual,
        left,
        converged,
        before.num_improper + jnp.where(early, of_rows, count("improper")),
        before.num_skipped + count("skipped"),
        before.num_low_ess + count("low_ess"),
        before.num_inaccurate + count("inaccurate"),
        before.num_halvings + halvings.astype(jnp.int32),
        jnp.asarray(sum(v.log_z.size for v in visits), jnp.int32),
        before.noise,
    )
