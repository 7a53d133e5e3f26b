"""Whether a program would be read as it was before, so that it need not be read again.

A run on shapes depends on the functions, on what they hold and name, and on the arguments. A mark
has all of it. It holds the objects that are in it, so that none is taken for another one that came
into its place; and what can be changed in place is in it by its contents, or there is no mark.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
import sys
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution
from numpyro.distributions.transforms import Transform

from numpyro_ext._numpyro import handlers_around
from numpyro_ext.data._rows import Same

_VALUES = type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype
_LIBRARIES = {"jax", "jaxlib", "numpy", "numpyro", "numpyro_ext", "optax", "scipy"}
"""Packages of which functions and classes stay as they are."""
_BYTES, _MOST = 2**16, 2000
"""The most bytes of an array on the host, and the most objects, that are compared."""


class _Unseen(Exception):
    """Something may change unseen."""


def mark_of(params: Any, *things: Any) -> Any:
    """What equals the mark of other things only if a run on shapes is the same, or None: under
    handlers, and with arrays that are traced, or large on the host, or objects of a user's class.
    ``params`` are marked by their shapes."""
    if handlers_around():
        return None
    leaves, tree = jax.tree.flatten(params)
    shapes = [(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    try:
        return tree, shapes, jax.config.jax_enable_x64, _mark(things, {})
    except _Unseen:
        return None


def _mark(x: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    if isinstance(x, _VALUES):
        return type(x), x
    if isinstance(x, np.ndarray):
        if x.nbytes > _BYTES or x.dtype.hasobject:
            raise _Unseen
        return x.shape, x.dtype.str, x.tobytes()
    if id(x) in seen:  # which holds x, so that no other object has its id meanwhile
        return seen[id(x)][0]
    seen[id(x)] = len(seen), x
    if isinstance(x, tuple | list | dict):
        parts = [*x, *x.values()] if isinstance(x, dict) else x
        return type(x), [_mark(part, seen) for part in parts]
    if isinstance(x, Tracer) or len(seen) > _MOST:
        raise _Unseen
    return Same(x), [] if _is_fixed(x) else [_mark(part, seen) for part in _parts(x)]


def _root(x: Any) -> str:
    """The package of a module, a function, a class or an object."""
    if isinstance(x, ModuleType):
        name = x.__name__
    else:
        is_named = isinstance(x, FunctionType | BuiltinFunctionType | type)
        name = (x if is_named else type(x)).__module__ or ""
    return name.split(".")[0]


def _is_fixed(x: Any) -> bool:
    """Whether what a program does with an object is the same as long as it is that object."""
    root = _root(x)
    if isinstance(x, ModuleType | BuiltinFunctionType | type):
        return root in _LIBRARIES or root in sys.stdlib_module_names
    if isinstance(x, FunctionType | Distribution | Transform) or not callable(x):
        return root in _LIBRARIES and "data" not in type(x).__module__
    return root in {"jax", "jaxlib"}


def _parts(x: Any) -> Iterator[Any]:
    """What a function, a guide or a handler holds and names."""
    if isinstance(x, partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, MethodType):
        yield from (x.__func__, x.__self__)
    elif isinstance(x, CellType):
        yield x.cell_contents
    elif isinstance(x, FunctionType):
        yield from (x.__defaults__, x.__kwdefaults__, x.__closure__)
        yield from (x.__globals__[n] for n in _names(x.__code__) if n in x.__globals__)
    elif _root(x) in _LIBRARIES and hasattr(x, "__dict__"):
        yield vars(x)
    else:
        raise _Unseen


@lru_cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that a function and the functions inside it may look up in their module."""
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))
