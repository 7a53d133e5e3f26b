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
from numpyro_ext.ep.factors import EPPlan, FactorGroup, FactorTable, map_factors
from numpyro_ext.ep.normal import Site, moments_of
from numpyro_ext.ep.state import EPState, Update, site_update, update_group


class Opened(NamedTuple):
    """A part with rows that this process has read."""

    plan: EPPlan
    state: EPState
    """The first state of an engine that has this part alone."""
    arrays: list[Array]


class Description(NamedTuple):
    """What a part tells of itself, which none of its rows is."""

    state: EPState
    size: int
    """The number of its rows."""
    needs_key: tuple[bool, ...]
    """Of the projection of its rows, and of each group of factors of the prior."""
    angles: dict[str, slice]
    """The places of the sites on circles."""
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
        plan.size,
        plan.needs_key,
        plan.angles,
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
    keys: list[Any],
    asked: tuple,
    of_prior: bool,
) -> Any:
    """The answer of a part to what it is asked, from the natural parameters of q; or the updates of
    the factors of the prior."""
    with _LOCK:
        opened = _OPENED.get((run, number))
        if opened is None:  # another worker has had the part
            opened, _ = _open(run, number, engine, source, key)
        plan, state, arrays = opened
        typed = [None if k is None else random.wrap_key_data(jnp.asarray(k)) for k in keys]
        if of_prior:
            answer: Any = _of_prior(plan, arrays, state.table.groups[1:], *asked, typed)
        else:
            answer = engine.visit(plan, arrays, state.table, *asked, *typed)
        return jax.device_get(answer)


@partial(jax.jit, static_argnums=0)
def _of_prior(
    plan: EPPlan,
    arrays: list[Array],
    groups: Sequence[FactorGroup],
    total: Site,
    sites: Sequence[Site],
    keys: list[Any],
) -> list[Update]:
    factors, q = plan.reading.factors_of(arrays), moments_of(total)
    each: Any = zip(plan.specs[1:], groups, sites, keys, strict=True)
    return [update_group(factors, spec, q, *rest) for spec, *rest in each]


@partial(jax.jit, static_argnums=0)
def update_part(
    plan: EPPlan,
    arrays: list[Array],
    table: FactorTable,
    total: Site,
    site: Site,
    key: Array | None,
) -> Update:
    """The update of a part that is one factor."""
    factors, (spec, *_), (group, *_) = plan.reading.factors_of(arrays), plan.specs, table.groups
    one = group.index, group.basis, site, None if key is None else key[None]
    return map_factors(partial(site_update, spec, moments_of(total), factors), one, 1)


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
        self.key, self.run = _data(rng_key), uuid.uuid4().hex
        self.pending: dict[int, Future] = {}
        self.lost: dict[int, Exception] = {}
        self.log_z = np.full(len(sources), np.nan)
        self.sizes = np.zeros(len(sources), int)
        self.size = 0
        self.needs_key: tuple[bool, ...] = ()
        self.angles: dict[str, slice] = {}

    def submit(self, task: Callable[..., Any], number: int, *rest: Any) -> Future:
        executor = self.executors[number % len(self.executors)]
        of_part = self.run, number, self.engine, self.sources[number], self.key
        try:
            return executor.submit(task, *of_part, *rest)
        except Exception as error:  # an executor takes no tasks once its process has died
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

    def open(self) -> list[Description]:
        """What each part tells of itself."""
        futures = [self.submit(describe, j) for j in range(len(self.sources))]
        keeps, self.keeps_lost = self.keeps_lost, False  # a part without any site is no part
        told = [self.result(j, future) for j, future in enumerate(futures)]
        self.keeps_lost = keeps
        self.sizes = np.array([x.size for x in told])
        self.size, self.needs_key = int(self.sizes.sum()), told[0].needs_key
        self.angles = told[0].angles
        return told

    def visit(self, asked: dict[int, tuple], keys: Array) -> dict[int, Any]:
        """The answers of these parts, with the keys of all; None of one that is late or lost."""
        for j, question in asked.items():
            if j not in self.pending:
                key = _data(keys[j]) if self.needs_key[0] else None
                self.pending[j] = self.submit(visit, j, [key], jax.device_get(question), False)
        waited = [self.pending[j] for j in asked]
        done, _ = wait(waited, self.patience)
        if not done:
            done, _ = wait(waited, return_when=FIRST_COMPLETED)
        return {
            j: self.result(j, self.pending.pop(j)) if self.pending[j] in done else None
            for j in asked
        }

    def ask_prior(
        self, total: Site, sites: Sequence[Site], keys: Sequence[Array]
    ) -> Callable[[], list[Update]]:
        """Have the factors of the prior updated, by a function that waits for it."""
        if not sites:
            return lambda: []
        # Any part knows the prior; those that have failed are asked last.
        order = sorted(range(len(self.sources)), key=lambda j: j in self.lost)
        rest = list(map(_data, keys)), jax.device_get((total, tuple(sites))), True
        first = self.submit(visit, order[0], *rest)

        def answer() -> list[Update]:
            future = first
            for j in order[1:]:
                if future.exception() is None:
                    break
                future = self.submit(visit, j, *rest)
            if (error := future.exception()) is not None:
                raise RuntimeError(f"no worker has computed the factors of the prior: {error}")
            return jax.tree.map(jnp.asarray, future.result())

        return answer

    def warn(self) -> None:
        if self.lost:
            j, error = next(iter(self.lost.items()))
            words = (
                f"the parts {sorted(self.lost)} failed, and their last sites stayed (part {j}:"
                f" {type(error).__name__}: {error})."
            )
            warnings.warn(InferenceWarning(words), stacklevel=4)


def _data(key: Array) -> np.ndarray:
    return np.asarray(random.key_data(key))
