"""Whether a model, its guide and its data are the same as before.

There are four answers, from the cheapest to the surest. :func:`is_same`: the arguments are the very
same objects. :func:`mark_of`: so are the functions, and what they hold and name. :func:`digest` and
:func:`fingerprint`: the numbers of the arguments, as a word that another process can compare, and
the operations of a model with the numbers that it reads from outside. :func:`agree`: what a model
gives has the same values, whatever it was computed from, up to rounding.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
import hashlib
import operator
import re
import sys
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution
from numpyro.distributions.transforms import Transform
from numpyro.handlers import block

from numpyro_ext._model.arguments import Arguments, is_traced
from numpyro_ext._model.checks import valid_data
from numpyro_ext._model.density import log_prob, scaled
from numpyro_ext._model.handlers import every_row
from numpyro_ext._model.operations import programs_in, settings, shapes_of
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import plate_sizes, sample_sites
from numpyro_ext._numpyro import default_key, handlers_around
from numpyro_ext._typing import Model
from numpyro_ext.data._rows import Same, is_rows

SAME = 1e-3
"""The root mean square by which numbers l that a model gives on the same data may differ, in units
of 1 + |l|. Rounding leaves about eps times the root of N of a sum over N rows that cancel, such as
a whitened gradient near a mode: 2e-4 of ten million rows in single precision."""

_VALUES = type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype
_LIBRARIES = {"jax", "jaxlib", "numpy", "numpyro", "numpyro_ext", "optax", "scipy"}
"""Packages with functions and classes that stay as they are."""
_KNOWN = _LIBRARIES | sys.stdlib_module_names
_BYTES, _MOST = 2**16, 2000
"""The most bytes of an array on the host, and the most objects, that are compared."""
_EMPTY = CellType()
_ROWS = 256
"""Rows on the host that are in a digest."""


def is_same(before: Any, now: Any) -> bool:
    """Return whether two trees have the very same leaves."""
    (old, structure), (new, same) = map(jax.tree.flatten, (before, now))
    return structure == same and all(map(operator.is_, old, new))


def digest(tree: Any) -> str:
    """A hash of the numbers in a tree, and of its structure; of rows on the host of some."""

    def numbers(x: Any) -> Any:
        if is_rows(x):
            some = np.linspace(0, len(x) - 1, min(len(x), _ROWS)).astype(int)
            return len(x), None if x.is_stream else x[some]
        if not getattr(x, "is_fully_addressable", True):  # rows of several processes
            return x.shape, [part.data for part in x.addressable_shards]
        is_key = isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return random.key_data(x) if is_key else x

    leaves, structure = jax.tree.flatten(tree, is_leaf=is_rows)
    whole = hashlib.sha256(str(structure).encode())
    with jax.ensure_compile_time_eval():  # also where a program is traced
        parts = jax.tree.leaves([numbers(x) for x in leaves])
    for x in map(np.asarray, parts):
        whole.update(f"{x.dtype}{x.shape}".encode())
        if x.dtype.kind != "O":  # an object has no numbers of its own
            whole.update(np.ascontiguousarray(x).tobytes())
    return whole.hexdigest()


class _Unseen(Exception):
    """Something may change unseen."""


def mark_of(params: Any, *things: Any) -> Any:
    """What equals the mark of other things only if a run on shapes is the same, or None: under
    handlers, and with arrays that are traced, or large on the host, or objects of a user's class.
    ``params`` are marked by their shapes."""
    if handlers_around():
        return None
    leaves, tree = jax.tree.flatten(params)
    try:
        return tree, shapes_of(leaves), settings(), _mark(things, {})
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
        return x.__name__.split(".")[0]
    named = x if isinstance(x, FunctionType | BuiltinFunctionType | type) else type(x)
    return (named.__module__ or "").split(".")[0]


def is_of_libraries(x: Any, seen: tuple[int, ...] = ()) -> bool:
    """Whether the code of a function with all that it closes over, or of the class of an object,
    stays as it is; ``partial`` and methods hold what may be a user's."""
    if isinstance(x, list | tuple):
        return all(is_of_libraries(part, seen) for part in x)
    root, seen = _root(x), (*seen, id(x))
    if isinstance(x, MethodType | partial) or root not in _KNOWN:
        return False
    held = [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
    held += [x.__wrapped__] if hasattr(x, "__wrapped__") else []  # as by custom_jvp, or jit
    return all(is_of_libraries(part, seen) for part in held if id(part) not in seen)


def _is_fixed(x: Any) -> bool:
    """Whether what a program does with an object is the same as long as it is that object."""
    root = _root(x)
    if isinstance(x, ModuleType | BuiltinFunctionType | type):
        return root in _KNOWN
    if isinstance(x, FunctionType):
        return root in _LIBRARIES and is_of_libraries(x)
    if isinstance(x, Distribution | Transform) or not callable(x):
        return root in _LIBRARIES and "data" not in type(x).__module__
    return root in {"jax", "jaxlib"} and not isinstance(x, partial) and is_of_libraries(x)


def _parts(x: Any) -> Iterator[Any]:
    """What a function, a guide or a handler holds and names."""
    if isinstance(x, partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, MethodType):
        yield from (x.__func__, x.__self__)
    elif isinstance(x, CellType):
        yield from (x.cell_contents for _ in range(x != _EMPTY))
    elif isinstance(x, FunctionType):
        yield from (x.__defaults__, x.__kwdefaults__, x.__closure__)
        yield from (x.__globals__[n] for n in _names(x.__code__) if n in x.__globals__)
    elif _root(x) == "jaxlib" and hasattr(x, "__wrapped__"):  # jit
        yield x.__wrapped__
    elif _root(x) in _LIBRARIES and hasattr(x, "__dict__"):
        yield vars(x)
    else:
        raise _Unseen


@lru_cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that a function and the functions inside it may look up in their module."""
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def fingerprint(model: Model, arguments: Arguments, arrays: list[Any]) -> tuple:
    """A hash of a model's operations, and of the numbers that it reads from outside; and the
    functions of the host that it calls, which the text of the operations does not tell apart."""

    def run(arrays: list[Any], rng_key: Array) -> Any:
        checked = valid_data(every_row(default_key(model)))
        program = Program(checked, *arguments.whole(arrays))
        with block():
            trace = program.trace(rng_key=rng_key)
        sites = {x["name"]: (x["value"], scaled(x, log_prob(x))) for x in sample_sites(trace)}
        return sites, plate_sizes(trace)

    shapes = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in arrays]
    closed, names = jax.make_jaxpr(run, return_shape=True)(shapes, random.key(0))
    consts = list(_held(closed))
    if is_traced(consts):
        raise ValueError(
            "the model reads a value from outside that is traced, as under jax.grad or jax.jit;"
            " pass it as an argument of the model."
        )
    text = re.sub("0x[0-9a-f]+", "", f"{names}{closed}")  # without addresses of functions
    return digest([text, *consts]), *map(_on_host, _called(closed))


def _called(program: Any) -> Iterator[Any]:
    """The functions of Python that a program calls when it runs."""
    for equation in program.eqns:
        # Rules of derivatives are no operations of the program.
        if not equation.primitive.name.startswith("custom_"):
            yield from filter(callable, jax.tree.leaves(equation.params))
        for inner in programs_in(equation):
            yield from _called(inner)


def _on_host(x: Any, seen: tuple[int, ...] = ()) -> Any:
    """What equals the same of another function only if it does the same on the host. Each trace of
    a model makes such a function anew, of one code, and often what it holds; an object of a class,
    and an array that is large on the host, has to be the same, for it may change unseen."""
    if isinstance(x, _VALUES):
        return type(x), x
    if id(x) in seen:
        return seen.index(id(x))
    inside = partial(_on_host, seen=(*seen, id(x)))
    if isinstance(x, FunctionType):
        held = x.__defaults__, x.__kwdefaults__, x.__closure__
        return x.__code__, Same(x.__globals__), inside(held)
    is_wrapped = _root(x) in {"jax", "jaxlib"} and hasattr(x, "__wrapped__")
    if is_wrapped or isinstance(x, CellType | partial | MethodType):
        return type(x), *map(inside, _parts(x))
    if isinstance(x, tuple | list):
        return type(x), *map(inside, x)
    if isinstance(x, dict):
        return dict, *map(inside, x.items())
    if isinstance(x, Array | np.ndarray) and not is_traced(x):
        return digest([x]) if isinstance(x, Array) or x.nbytes <= _BYTES else Same(x)
    if is_dataclass(x) and _root(x) == "jax":  # around a function that is called
        return type(x), *(inside(getattr(x, field.name)) for field in fields(x))
    is_fixed = is_rows(x) or (_root(x) in {"jax", "jaxlib"} and type(x).__hash__ is not None)
    return x if is_fixed else Same(x)


def _held(program: Any) -> Iterator[Any]:
    """The arrays that a program holds, and the programs inside it, as one of ``jax.jit``."""
    yield from getattr(program, "consts", ())
    for equation in program.eqns:
        for inner in programs_in(equation):
            yield from _held(inner)


def difference(now: Any, before: Any) -> Any:
    """How far numbers that a model gives are from others, in units of 1 + |l|."""
    return (now - before) / (1 + abs(before))


def agree(now: Any, before: Any) -> Any:
    """Whether a model can have given both numbers on the same data."""
    return (difference(now, before) ** 2).mean() <= SAME**2
