"""What was compiled for a fit, so that a second look at the same fit compiles nothing.

A program is the same while it is the same object, on the same arguments, and while what its
function reads from outside (closures, global variables) is the same: a model that reads a global
array is compiled anew when that array is replaced.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
import functools
import hashlib
from types import CodeType, FunctionType, MethodType
from typing import Any
import weakref

import jax
import numpy as np
from numpyro.primitives import Messenger

__all__ = ["Memo", "memo_of", "remember"]

Memo = dict[Hashable, Any]

SIZE = 8
"""Fits that are remembered; each holds the data that it was compiled for."""

_MEMOS: OrderedDict[tuple[int, Hashable], tuple[list[Any], Memo]] = OrderedDict()


class _Unknown(Exception):
    """An argument that may change without a sign of it."""


class _Reader:
    """Turns programs and arguments into keys, and keeps alive what has only an identity."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.seen: set[int] = set()

    def identity(self, value: Any) -> Hashable:
        self.kept.append(value)
        return type(value).__name__, id(value)

    def value(self, value: Any, other: Callable[[Any], Hashable]) -> Hashable:
        """Numbers and arrays by what they hold; ``other`` for anything that is no container."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, value
        if isinstance(value, jax.Array):  # never changes
            return self.identity(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
            whole = np.ascontiguousarray(value)
            digest = hashlib.blake2b(whole.view(np.uint8).data if whole.size else b"").digest()
            return str(value.dtype), value.shape, digest
        if isinstance(value, tuple | list):
            return type(value).__name__, *(self.value(x, other) for x in value)
        if type(value) is dict:
            return "dict", *((repr(k), self.value(x, other)) for k, x in value.items())
        return other(value)

    def argument(self, value: Any) -> Hashable:
        def other(value: Any) -> Hashable:
            if callable(value):
                return self.program(value)
            raise _Unknown

        return self.value(value, other)

    def program(self, fn: Any, module: dict[str, Any] | None = None) -> Hashable:
        """A callable by its identity, and by that of what it reads from outside.

        :param module: the global variables of the function that calls it; a function of another
            module is not read.
        """
        key = self.identity(fn)
        if id(fn) in self.seen:
            return key
        self.seen.add(id(fn))
        if isinstance(fn, Messenger):
            return key, self.program(fn.fn, module)
        if isinstance(fn, functools.partial):
            return key, self.program(fn.func, module), self.value(fn.args, self.identity)
        if isinstance(fn, MethodType):
            return key, self.program(fn.__func__, module), self.identity(fn.__self__)
        if not isinstance(fn, FunctionType) or (
            module is not None and fn.__globals__ is not module
        ):
            return key
        outside = {
            name: fn.__globals__[name]
            for name in sorted(_names(fn.__code__))
            if name in fn.__globals__
        }
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                outside[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        defaults = (fn.__defaults__, fn.__kwdefaults__)
        known = functools.partial(self.program, module=fn.__globals__)
        return key, self.value(defaults, known), self.value(outside, known)


def _names(code: CodeType) -> set[str]:
    """Names that a function and those inside it may read from the module."""
    inner = (_names(x) for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*inner)


def memo_of(
    obj: Any, programs: tuple[Any, ...], args: tuple, kwargs: dict[str, Any], like: Any
) -> Memo:
    """The memo of these programs on these arguments: an empty one at the first time.

    It is forgotten when ``obj`` is (a program keeps itself), or after :data:`SIZE` others.

    :param like: a tree of arrays whose shapes matter but not their numbers.
    """
    reader = _Reader()
    shapes = jax.tree.map(lambda x: (np.shape(x), str(jax.numpy.result_type(x))), like)
    try:
        programs_key = tuple(reader.program(program) for program in programs)
        rest = reader.argument((args, kwargs, shapes))
        key = id(obj), (programs_key, rest)
        known = key in _MEMOS
        if not known:
            weakref.finalize(obj, _forget, id(obj)).atexit = False
    except (_Unknown, TypeError):  # nothing to be sure of, or no weak reference
        return {}
    if known:
        _MEMOS.move_to_end(key)
    else:
        _MEMOS[key] = reader.kept, {}
        while len(_MEMOS) > SIZE:
            _MEMOS.popitem(last=False)
    return _MEMOS[key][1]


def _forget(identity: int) -> None:
    for key in [key for key in _MEMOS if key[0] == identity]:
        del _MEMOS[key]


def remember[T](memo: Memo, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` gave the first time."""
    if key not in memo:
        memo[key] = make()
    return memo[key]
