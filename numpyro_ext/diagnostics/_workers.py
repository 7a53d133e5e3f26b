"""Fits that workers make: one function of many keys and data sets, as tasks of an executor."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from threading import RLock
from typing import Any
import uuid

_KEPT: dict[str, tuple[Callable[..., Any], tuple]] = {}
"""The function and the first arguments of the last run in this process."""
_LOCK = RLock()
"""Models run one after the other: their handlers are one stack for all threads of a process."""


def _task(run: str, fn: Callable[..., Any], kept: tuple, one: tuple) -> Any:
    with _LOCK:
        if run not in _KEPT:
            _KEPT.clear()
            _KEPT[run] = fn, kept
        fn, kept = _KEPT[run]  # what is compiled belongs to the objects of the first task
        return fn(*kept, *one)


def of_each(
    executor: Executor | None, fn: Callable[..., Any], kept: tuple, each: Iterable[tuple]
) -> Iterator[Any]:
    """``fn(*kept, *one)`` of each, in their order."""
    if executor is None:
        return (fn(*kept, *one) for one in each)
    run = uuid.uuid4().hex
    futures = [executor.submit(_task, run, fn, kept, one) for one in each]
    return (future.result() for future in futures)
