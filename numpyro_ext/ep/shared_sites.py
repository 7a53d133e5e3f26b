r"""Expectation propagation with sites that several factors share.

.. math:: \lambda_q = \lambda_0 + \sum_s W_s \lambda_s, \qquad
    \lambda_s \leftarrow \lambda_s + \epsilon \sum_{n} (F_n - c \lambda_s), \qquad
    F_n = \frac 1 \alpha \left( \lambda_{\mathrm{proj}[q^{\setminus s} f_n^\alpha]}
    - \lambda_{q^{\setminus s}} \right), \quad
    \lambda_{q^{\setminus s}} = \lambda_q - \alpha c \lambda_s

where the site s, which has all coordinates, stands W times in q, and c times in place of a factor.

References: Li, *Approximate inference: new visions* (2018), algorithms 5 to 8.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_nonnegative, check_rate
from numpyro_ext._model.circles import recut
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.operations import gradient, hessian
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext.ep.base import EPEngine
from numpyro_ext.ep.factors import EPPlan, FactorTable, map_factors
from numpyro_ext.ep.normal import (
    Site,
    choose,
    distance,
    expected_log,
    halved,
    is_finite,
    log_partition,
    moments_of,
    plus,
    product_of,
    site_of_mean,
    zero_sites,
)
from numpyro_ext.ep.reading import ModelReading, Prior
from numpyro_ext.ep.state import (
    EPState,
    Update,
    keys_of,
    next_state,
    site_update,
    total_of,
    update_group,
)
from numpyro_ext.expfam.linalg import symmetric

_PRIOR_DAMPING = 0.8  # the d of the factors of the prior, which are updated from one q


class SharedConfig(NamedTuple):
    """The static part of a step."""

    serial: bool = False  # whether each group is visited from the q that the last one has left
    tol: float = 0.0  # the residual below which a fit has converged
    moments: bool = False  # whether moments of factors are averaged, in place of their sites
    step: float | Callable[[Array], Array] | None = None  # epsilon
    batch_size: int | None = None  # factors of each site that are drawn; None for all of them


class Parts(NamedTuple):
    """The factors of the data in G groups: ``(G,)`` the site s that each shares, c, and its number
    of factors; and ``(G, M)`` these factors, filled up with -1, or None for one group of all."""

    slot: np.ndarray
    amount: np.ndarray
    number: np.ndarray
    rows: np.ndarray | None


class Items(NamedTuple):
    """The visits of one step: G cavities, as in :class:`Parts`, and M factors from each."""

    slot: Any
    amount: Any
    rate: Array  # (G,), epsilon over the number of factors that count
    weight: Array  # (G,), the number of factors for which each of the M counts in the evidence
    index: Any  # (G, M), the factors, of NumPy where they are all rows
    mask: Any  # (G, M), which of them count


def items_of(
    config: SharedConfig, parts: Parts, size: int, i: Array, rng_key: Any, indices: Any = None
) -> Items:
    """The factors that step i visits, of ``size`` rows: these ``indices`` or random ones."""
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
    rate, weight = rates_of(config, parts, i, mask.sum(1))
    return Items(parts.slot, parts.amount, rate, weight, index * mask, mask)


def rates_of(config: SharedConfig, parts: Parts, i: Array, count: Any) -> tuple[Array, Array]:
    """The rate and the weight of groups of which ``count`` factors are visited in step i."""
    epsilon = config.step(i) if callable(config.step) else config.step
    epsilon = count / parts.number if epsilon is None else epsilon
    rate = jnp.broadcast_to(epsilon, len(parts.slot)).astype(float) / count
    return rate, jnp.asarray(parts.number / count, float)


class TaylorSites(NamedTuple):
    """The center c, and the mean of the sites tau of all rows, as in :class:`StochasticEP`."""

    center: Array
    mean: Site


def sites_of_proxy(proxy: TaylorProxy, factors: Factors, diagonal: bool) -> TaylorSites:
    assert isinstance(proxy.hessian, Array)
    info = factors.info
    proxy.check_sites(info.shapes, {factors.plate: factors.size})
    order = np.asarray(info.ravel(proxy.unravel(jnp.arange(info.size))))
    c = center = proxy.normal.center
    circles, g, H = proxy.normal.circles, proxy.grad, proxy.hessian
    if circles is not None:  # the factors have them cut at pi

        def log_lik(x: Array) -> Array:
            v = recut(x, None, circles) - center
            return proxy.grad @ v + v @ H @ v / 2

        c = recut(center, circles, None)
        g, H = jax.grad(log_lik)(c), jax.hessian(log_lik)(c)
    c, g, H = c[order], g[order], H[np.ix_(order, order)]
    whole = jnp.eye(len(c), dtype=c.dtype)
    return TaylorSites(c, _taylor(whole, c, g / proxy.size, H / proxy.size, diagonal))


def site_of_row(factors: Factors, spec: Any, n: Array, A: Array, taylor: TaylorSites) -> Site:
    """The Taylor site of row n, which depends on A x alone."""
    center, diagonal = taylor.center, taylor.mean.precision.ndim == 1
    u = A @ center

    def log_factor(v: Array) -> Array:
        return spec.log_factor(factors, n, center + (v - u) @ A)

    return _taylor(A, center, gradient(log_factor)(u), hessian(log_factor)(u), diagonal)


def _taylor(A: Array, center: Array, g: Array, H: Array, diagonal: bool) -> Site:
    """The site by the derivatives of its log density at u = A c."""
    if diagonal:
        t = -jnp.sum((symmetric(H) @ A) * A, 0)
        return Site(t * center + g @ A, t)
    return Site(g - H @ (A @ center), symmetric(-H))


@dataclass(kw_only=True, eq=False, repr=False)
class SharedSitesEngine(EPEngine):
    r"""The base of engines in which factors share sites.

    The loss of a step is a monitor, and no estimate of the evidence.

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
        size = plan.size
        return shared_step(plan, self.config(size), state, arrays, self.parts(size), indices)[:2]

    def table_of(
        self, reading: ModelReading, arrays: list[Array], prior: Prior
    ) -> tuple[EPPlan, FactorTable]:
        plan, table = super().table_of(reading, arrays, prior)
        return plan, table._replace(times=self.times(plan.size))

    def times(self, size: int) -> Array:
        """How often q has each site."""
        parts = self.parts(size)
        return jnp.asarray(np.bincount(parts.slot, parts.number * parts.amount), float)

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        """None: EP's estimate is off to first order with a shared site in place of each."""
        raise NotImplementedError(
            f"{type(self).__name__} has no estimate of the evidence; use EP(model).log_evidence, or"
            " numpyro_ext.diagnostics.evidence_bounds(engine, result, model_args=args)."
        )


@partial(jax.jit, static_argnums=(0, 1))
def visit_item(
    plan: EPPlan,
    config: SharedConfig,
    arrays: list[Array],
    table: FactorTable,
    total: Site,
    shared: Site,
    item: Items,
    rng_key: Array,
) -> Update:
    """The change of a site by the factors of one item, given q, and sums over these."""
    factors = plan.reading.factors_of(arrays)
    spec, group = plan.specs[0], table.groups[0]
    q, taylor = moments_of(total), table.taylor
    power = spec.power
    left = plus(total, shared, -power * item.amount)
    cavity = moments_of(left)
    proper = is_finite(cavity)
    cavity = choose(proper, cavity, q)
    if power == 0:
        D = q.mean.shape[0]
        gain = -item.amount * expected_log(q, jnp.eye(D, dtype=q.mean.dtype), shared)
    else:
        gain = (log_partition(left) - log_partition(total)) / power

    def update(n: Array, key: Array | None, read: Any) -> tuple[Update, Array, Site]:
        number = group.index[n] if spec.rank is None else n
        here = factors.with_row(number, read)
        A = spec.basis(here, group, table.center, n)
        none = jax.tree.map(lambda x: x[0], zero_sites(A[None], q.cov.ndim == 1))
        at_center = none if taylor is None else site_of_row(here, spec, number, A, taylor)
        return site_update(spec, cavity, here, number, A, none, key), A, at_center

    read = factors.read_rows(jnp.asarray(item.index)) if spec.rank is not None else None
    rows = item.index, keys_of(spec, rng_key, len(item.index)), read
    updates, A, at_center = map_factors(update, rows, spec.batch_size)
    mask = item.mask
    good = mask & proper & ~updates.skipped

    def of_good(x: Array) -> Array:
        return jnp.where(good.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)

    sites = jax.tree.map(of_good, updates.site)
    F = product_of(A, sites)
    if taylor is not None:
        F = product_of(A, jax.tree.map(of_good, plus(updates.site, at_center, -1.0)))
        F = plus(F, taylor.mean, jnp.sum(good))
    if config.moments and power > 0:  # at power 0 both are the same
        share = good / jnp.maximum(jnp.sum(good), 1)
        mean = site_of_mean(cavity, A, sites, share, power)
        F = jax.tree.map(lambda x: jnp.sum(good) * x, mean)
    number = jnp.sum(good)
    # The mean over the good rows, with the rate of all of them.
    scale, taken = item.rate * jnp.sum(mask) / jnp.maximum(number, 1), number * item.amount
    log_z = jnp.where(mask, updates.log_z + jnp.where(proper, gain, 0.0), 0.0)
    return Update(
        jax.tree.map(lambda f, x: scale * (f - taken * x), F, shared),
        jnp.sum(log_z),
        jnp.sum(mask & ~good, dtype=jnp.int32),
        jnp.sum(mask & proper & updates.inaccurate, dtype=jnp.int32),
    )


@jax.jit
def moved(times: Array, shared: Site, total: Site, slot: Any, change: Site) -> tuple[Site, Site]:
    """The shared sites and q after changes of some sites, halved until q is a distribution."""
    by_slot = jax.tree.map(lambda x, c: jnp.zeros_like(x).at[slot].add(c), shared, change)
    in_q = jax.tree.map(lambda x: jnp.tensordot(times, x, 1), by_slot)
    d = halved(total, in_q, jnp.ones((), total.shift.dtype))
    return plus(shared, by_slot, d), plus(total, in_q, d)


@partial(jax.jit, static_argnums=0)
def after_visits(
    tol: float,
    state: EPState,
    shared: Site,
    base: Site,
    after: Site,
    visits: Update,
    weight: Array,
    visited: Array,
    of_prior: list[Update],
) -> tuple[EPState, Array]:
    """The state and the loss with new shared sites, by which q is ``after``, and updates of the
    factors of the prior from ``base``."""
    table, sites, log_z = state.table, [shared], jnp.sum(weight * visits.log_z)
    for group, site, update in zip(table.groups[1:], state.sites[1:], of_prior, strict=True):
        change = jax.tree.map(lambda x: _PRIOR_DAMPING * x, plus(update.site, site, -1.0))
        in_q = product_of(group.basis, change)
        d = halved(after, in_q, jnp.ones((), after.shift.dtype))
        after = plus(after, in_q, d)
        sites.append(plus(site, change, d))
        log_z = log_z + jnp.sum(update.log_z)
    log_z = log_z + table.constant + log_partition(base)
    new = total_of(state.prior, table, sites)
    residual = distance(moments_of(state.total), moments_of(new))
    state = next_state(state, sites, [visits, *of_prior], log_z, residual, tol)
    visited = visited + sum(x.log_z.size for x in of_prior)
    return state._replace(report=state.report._replace(visited=visited)), -log_z


@partial(jax.jit, static_argnums=(0, 1))
def shared_step(
    plan: EPPlan,
    config: SharedConfig,
    state: EPState,
    arrays: list[Array],
    parts: Parts,
    indices: Any = None,
) -> tuple[EPState, Array, Array]:
    """One step of the shared sites, then of the factors of the prior: the state, the loss, and the
    share by which the step forgets."""
    key_rows, rng_key = None, state.rng_key
    if config.batch_size is not None:
        key_rows, rng_key = random.split(rng_key)
    items = items_of(config, parts, plan.size, state.i, key_rows, indices)
    factors, table = plan.reading.factors_of(arrays), state.table
    shared, *prior_sites = state.sites
    total, W = state.total, table.times
    assert W is not None
    rng_key, key_items, *keys = random.split(rng_key, len(plan.specs) + 1)

    def visit(shared: Site, total: Site, item: Items, key: Array) -> Update:
        site = jax.tree.map(lambda x: x[item.slot], shared)
        return visit_item(plan, config, arrays, table, total, site, item, key)

    def serial(carry: Any, xs: Any) -> tuple[Any, Any]:
        shared, total = carry
        item, key = xs
        result = visit(shared, total, item, key)
        in_q = jax.tree.map(lambda x: W[item.slot] * x, result.site)
        d = halved(total, in_q, jnp.ones((), total.shift.dtype))
        total = plus(total, in_q, d)
        shared = jax.tree.map(lambda x, c: x.at[item.slot].add(d * c), shared, result.site)
        return (shared, total), result

    each = items, random.split(key_items, len(items.slot))
    if config.serial:
        (shared, after), visits = lax.scan(serial, (shared, total), each)
        base = after
    else:
        visits = lax.map(lambda xs: visit(shared, total, *xs), each)
        (shared, after), base = moved(W, shared, total, items.slot, visits.site), total
    q = moments_of(base)
    rest: Any = zip(plan.specs[1:], table.groups[1:], prior_sites, keys, strict=True)
    of_prior = [update_group(factors, spec, q, *x) for spec, *x in rest]
    visited = jnp.sum(items.mask, dtype=jnp.int32)
    rows = shared, base, after, visits, items.weight, visited
    state, loss = after_visits(config.tol, state, *rows, of_prior)
    epsilon = jnp.min(items.rate * jnp.sum(items.mask, -1))
    return state._replace(rng_key=rng_key), loss, epsilon
