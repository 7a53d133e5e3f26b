"""Parts of the data that workers hold: what a worker is asked, and what is made of its answers."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
import copy
from functools import partial
from threading import RLock
from typing import Any, NamedTuple
import uuid
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.ep.factors import EPPlan, FactorGroup, map_factors
from numpyro_ext.ep.normal import Site, moments_of, zero_sites
from numpyro_ext.ep.state import EPState, Update, site_update, update_group


class Opened(NamedTuple):
    """A part whose rows this process has read."""

    plan: EPPlan
    state: EPState
    """The first state of an engine that has this part alone."""
    arrays: list[Array]


class Description(NamedTuple):
    """What a part tells of itself, which none of its rows is."""

    state: EPState
    needs_key: tuple[bool, ...]
    """Of the projection of its rows, and of each group of factors of the prior."""
    locs: dict[str, Any]
    local: list[str]
    arguments: tuple
    """The arguments of the model, with the shapes and types of the arrays in place of these."""


_OPENED: dict[tuple[str, int], Opened] = {}
"""The parts that this process holds, by their run and number."""
_ENGINES: dict[str, Any] = {}
"""The engine of a run in this process, which reads the model once for all parts of one size."""
_LOCK = RLock()
"""Models run one after the other: their handlers are one stack for all threads of a process."""


def _open(run: str, number: int, engine: Any, source: Any, key: Any) -> tuple[Opened, tuple]:
    if run not in _ENGINES:  # one that was before is over
        _OPENED.clear()
        _ENGINES.clear()
        _ENGINES[run] = copy.copy(engine)
    engine = _ENGINES[run]
    args = source() if callable(source) else source
    args = args if isinstance(args, tuple) else (args,)
    state = engine.init(random.wrap_key_data(jnp.asarray(key)), *args)
    opened = Opened(engine.plan, state, engine.arrays_of(args))
    _OPENED[run, number] = opened
    return opened, args


def describe(run: str, number: int, engine: Any, source: Any, key: Any) -> Description:
    """Open a part, and tell the engine of all parts what it has to know."""
    with _LOCK:
        (plan, state, _), args = _open(run, number, engine, source, key)
    factors = plan.reading.factors

    def shape(x: Any) -> Any:
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array else x

    return Description(
        jax.device_get(state._replace(rng_key=None)),
        tuple(spec.projection.needs_key for spec in plan.specs),
        jax.device_get(factors.info.unravel(state.table.center.mean)),
        [*factors.local, *factors.states],
        jax.tree.map(shape, args),
    )


def visit(
    run: str,
    number: int,
    engine: Any,
    source: Any,
    key: Any,
    total: Site,
    sites: tuple[Site, ...],
    keys: list[Any],
    of_prior: bool,
) -> list[Update]:
    """The update of a part, or of the factors of the prior, from the natural parameters of q."""
    with _LOCK:
        opened = _OPENED.get((run, number))
        if opened is None:  # another worker has had the part
            opened, _ = _open(run, number, engine, source, key)
        plan, state, arrays = opened
        typed = [None if k is None else random.wrap_key_data(jnp.asarray(k)) for k in keys]
        groups = state.table.groups[1:] if of_prior else state.table.groups[:1]
        return jax.device_get(_updates(plan, of_prior, total, groups, sites, typed, arrays))


@partial(jax.jit, static_argnums=(0, 1))
def _updates(
    plan: EPPlan,
    of_prior: bool,
    total: Site,
    groups: Sequence[FactorGroup],
    sites: tuple[Site, ...],
    keys: list[Any],
    arrays: list[Array],
) -> list[Update]:
    factors, q = plan.reading.factors_of(arrays), moments_of(total)
    if of_prior:
        each: Any = zip(plan.specs[1:], groups, sites, keys, strict=True)
        return [update_group(factors, spec, q, *rest) for spec, *rest in each]
    (spec, *_), (group,), (site,), (key,) = plan.specs, groups, sites, keys
    one = group.index, group.basis, site, None if key is None else key[None]
    return [map_factors(partial(site_update, spec, q, factors), one, 1)]


class Elsewhere:
    """The parts of one run, each a task of an executor.

    :param engine: an engine of one part, which the workers are given.
    :param sources: for each part a function without arguments that opens it, or its rows.
    :param executors: the executor of each part in turn.
    :param patience: seconds after which a step goes on without the parts that are late; None waits.
    :param keeps_lost: whether a step goes on without the parts that raise.
    """

    def __init__(
        self,
        engine: Any,
        sources: Sequence[Any],
        executors: Sequence[Executor],
        rng_key: Array,
        patience: float | None,
        keeps_lost: bool,
    ) -> None:
        self.engine, self.sources, self.executors = engine, sources, executors
        self.patience, self.keeps_lost = patience, keeps_lost
        self.key, self.run = np.asarray(random.key_data(rng_key)), uuid.uuid4().hex
        self.pending: dict[int, Future] = {}
        self.lost: dict[int, Exception] = {}
        self.log_z = np.full(len(sources), np.nan)
        self.needs_key: tuple[bool, ...] = ()
        self.ranks: list[int] = []

    def submit(self, task: Callable[..., Any], number: int, *rest: Any) -> Future:
        executor = self.executors[number % len(self.executors)]
        of_part = self.run, number, self.engine, self.sources[number], self.key
        try:
            return executor.submit(task, *of_part, *rest)
        except Exception as error:  # an executor whose process has died takes no tasks
            future: Future = Future()
            future.set_exception(error)
            return future

    def result(self, number: int, future: Future) -> Any:
        try:
            return future.result()
        except Exception as error:
            if self.keeps_lost:
                self.lost[number] = error
                return None
            raise RuntimeError(
                f"part {number} failed: {type(error).__name__}: {error}. With lost='keep' a run"
                " goes on with the last site of such a part."
            ) from error

    def begin(self, rng_key: Array) -> tuple[Description, EPState]:
        """The first part's description, and the first state of all parts."""
        futures = [self.submit(describe, j) for j in range(len(self.sources))]
        keeps, self.keeps_lost = self.keeps_lost, False  # a part without any site is no part
        told = [self.result(j, future) for j, future in enumerate(futures)]
        self.keeps_lost = keeps
        first = told[0]
        self.needs_key = first.needs_key
        bases = [x.state.table.groups[0].basis for x in told]
        self.ranks = [basis.shape[1] for basis in bases]
        most = max(self.ranks)
        wide = [np.pad(x, ((0, 0), (0, most - x.shape[1]), (0, 0))) for x in bases]
        basis = jnp.asarray(np.concatenate(wide))
        rows = FactorGroup(jnp.arange(len(told))[:, None], basis)
        state = jax.tree.map(jnp.asarray, first.state._replace(rng_key=None))
        site = zero_sites(basis, state.prior.precision.ndim == 1)
        table = state.table._replace(groups=(rows, *state.table.groups[1:]))
        state = state._replace(sites=(site, *state.sites[1:]), table=table, rng_key=rng_key)
        return first, state

    def updates(self, state: EPState) -> list[Update]:
        """The updates of all factors from one q, in the groups of the state."""
        J, total = len(self.sources), jax.device_get(state.total)
        rows, *prior = jax.device_get(state.sites)
        key_rows, *keys = random.split(state.rng_key, len(self.needs_key))
        each = [np.asarray(random.key_data(key)) for key in random.split(key_rows, J)]
        data = [np.asarray(random.key_data(key)) for key in keys]
        ask_prior = total, tuple(prior), data, True
        # Any part knows the prior; those that have failed are asked last.
        order = sorted(range(J), key=lambda j: j in self.lost)
        of_prior = self.submit(visit, order[0], *ask_prior) if prior else None
        sites = [jax.tree.map(lambda x, j=j: x[j : j + 1], rows) for j in range(J)]
        for j in range(J):
            if j not in self.pending:
                site = _cut(sites[j], self.ranks[j])
                key = each[j] if self.needs_key[0] else None
                self.pending[j] = self.submit(visit, j, total, (site,), [key], False)
        done, _ = wait(self.pending.values(), self.patience)
        if not done:
            done, _ = wait(self.pending.values(), return_when=FIRST_COMPLETED)
        new: list[Update] = []
        for j, site in enumerate(sites):
            answer: Any = None
            if self.pending[j] in done:
                answer = self.result(j, self.pending.pop(j))
            if answer is None:  # the site stays
                kept: Any = self.log_z[j : j + 1], np.ones(1, bool), np.zeros(1, bool)
                new.append(Update(site, *kept))
            else:
                (update,) = answer
                self.log_z[j] = update.log_z[0]
                new.append(update._replace(site=_padded(update.site, max(self.ranks))))
        together = jax.tree.map(lambda *x: jnp.concatenate(list(map(jnp.asarray, x))), *new)
        if of_prior is None:
            return [together]
        for j in order[1:]:
            if of_prior.exception() is None:
                break
            of_prior = self.submit(visit, j, *ask_prior)
        if (error := of_prior.exception()) is not None:
            raise RuntimeError(f"no worker has computed the factors of the prior: {error}")
        return [together, *jax.tree.map(jnp.asarray, of_prior.result())]

    def warn(self) -> None:
        if self.lost:
            j, error = next(iter(self.lost.items()))
            words = (
                f"the parts {sorted(self.lost)} failed, and their last sites stayed (part {j}:"
                f" {type(error).__name__}: {error})."
            )
            warnings.warn(InferenceWarning(words), stacklevel=4)


def _padded(site: Site, rank: int) -> Site:
    """A site of one factor, in more coordinates, on which it does not depend."""
    if site.precision.ndim == 2:  # a diagonal one, in all coordinates
        return site
    more = (0, rank - site.shift.shape[1])
    pad: Any = np.pad
    return Site(pad(site.shift, ((0, 0), more)), pad(site.precision, ((0, 0), more, more)))


def _cut(site: Site, rank: int) -> Site:
    """A site of one factor, in its first coordinates."""
    if site.precision.ndim == 2:
        return site
    return Site(site.shift[:, :rank], site.precision[:, :rank, :rank])
