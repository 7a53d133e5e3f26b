"""The cost of a program in operations, read off the program; programs that run once; and the bar of
long work."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
import hashlib
import math
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
import jax.numpy as jnp
from tqdm.auto import tqdm

from numpyro_ext._model.arguments import is_traced

__all__ = ["FEW", "compile_ahead", "count_operations", "progress_bar", "quick_options"]
__all__ += ["run_once", "traced_once"]

FEW = 10**9
"""Numbers up to which a program is run in the time that it takes to optimise it."""

_CUBIC = {
    "cholesky": 1,
    "lu": 1,
    "triangular_solve": 1,
    "geqrf": 2,
    "householder_product": 2,
    "eigh": 10,
    "svd": 20,
}
"""Operations on an ``(n, n)`` matrix, in units of n^3, roughly."""


def count_operations(fn: Callable[..., Any], *args: Any) -> float:
    """Numbers that ``fn(*args)`` computes, and the products in its matrix arithmetic.

    It is read off the program without running it, so the same on every machine. A loop of unknown
    length counts once, and of two branches the longer one.
    """
    return _count_program(jax.make_jaxpr(fn)(*args).jaxpr)


def quick_options(operations: float = 0.0, few: float = FEW) -> dict[str, int] | None:
    """Options of the compiler for a program that computes so many numbers in all its runs."""
    quick = jax.default_backend() == "cpu" and operations <= few
    return {"xla_backend_optimization_level": 0} if quick else None


def run_once(fn: Callable[..., Any], rng_key: Array, *args: Any) -> Any:
    """``fn(rng_key, *args)``, compiled without optimisation, which takes longer than one run.

    :param rng_key: a key that was split off or folded in, so that it is traced where a program
        inside another one is: there, options of the compiler are an error.
    """
    options = None if isinstance(rng_key, Tracer) else quick_options()
    return jax.jit(fn, compiler_options=options)(rng_key, *args)


def compile_ahead(
    fn: Callable[..., Any], *args: Any, options: dict[str, int] | None = None
) -> Callable[..., Any]:
    """
    ``fn``, compiled while the caller goes on; a call of it waits until that is done.

    It is traced here, because NumPyro's handlers belong to the whole process. Only the compiler
    runs beside what comes next. The arrays that it closes over, such as a model's data, become
    arguments of the program, so that the same program on other data of the same shapes is compiled
    once: programs are known by all that they compute, and can be mistaken for no other.

    :param args: arrays, or shapes and types, as those of the calls.
    :param options: of the compiler.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)
    consts = [jnp.asarray(x) for x in closed.consts]

    program = jax.jit(_unwrap(closed), compiler_options=options)
    lowered = program.lower(consts, jax.tree.leaves(args))
    text = f"{lowered.as_text()}{options}{[x.sharding for x in consts]}{jax.default_backend()}"
    known = hashlib.sha256(text.encode()).digest()
    compiled = _COMPILED.pop(known, None)
    if compiled is None or (compiled.done() and compiled.exception()):
        compiled = _compilers().submit(lowered.compile)
    _COMPILED[known] = compiled
    while len(_COMPILED) > _MOST_COMPILED:
        _COMPILED.popitem(last=False)

    def call(*args: Any) -> Any:
        found = compiled.result()(consts, jax.tree.leaves(args))
        return jax.tree.unflatten(structure, found)

    return call


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` of arrays, traced once for each of their shapes, for programs that call it often.

    Unlike ``jax.jit`` it leaves the arrays that it closes over to the program around it.
    """
    known: dict[Any, tuple[Any, Any, Callable[..., Any]]] = {}

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        like = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        if (tree, like) not in known:
            shapes = [jax.ShapeDtypeStruct(*one) for one in like]
            closed, out = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.unflatten(tree, shapes))
            if is_traced(closed.consts):  # they die with the program around this one
                return fn(*args)
            known[tree, like] = closed.consts, jax.tree.structure(out), jax.jit(_unwrap(closed))
        consts, structure, program = known[tree, like]
        return jax.tree.unflatten(structure, program(consts, leaves))

    return call


def _unwrap(closed: Any) -> Callable[[list[Any], list[Any]], list[Any]]:
    """A traced program whose constants are arguments."""
    return lambda consts, leaves: jaxpr_as_fun(closed.replace(consts=consts))(*leaves)


_MOST_COMPILED = 64
_COMPILED: OrderedDict[bytes, Future[Any]] = OrderedDict()


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "compile")


def _count_program(jaxpr: Any) -> float:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return max(_count_program(branch.jaxpr) for branch in params["branches"])
    inner = [_inner(value) for value in jax.tree.leaves(params, is_leaf=_is_program)]
    if any(one is not None for one in inner):
        repeats = params.get("length", 1) if name == "scan" else 1
        return repeats * sum(_count_program(one) for one in inner if one is not None)
    size = float(sum(math.prod(jnp.shape(out.aval)) for out in equation.outvars))
    shape = list(equation.invars[0].aval.shape) if equation.invars else []
    if name == "dot_general":
        (summed, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(shape[axis] for axis in summed)
    if name in _CUBIC:
        return size + _CUBIC[name] * math.prod(shape) * shape[-1]
    return size


def _is_program(value: Any) -> bool:
    return _inner(value) is not None


def _inner(value: Any) -> Any:
    """The program in a parameter of an equation, if it holds one."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


@contextmanager
def progress_bar(total: int, description: str) -> Iterator[Callable[[], Any]]:
    """A progress bar that appears after a second, and only on a terminal."""
    with tqdm(total=total, desc=description, delay=1.0, disable=None, leave=False) as bar:
        yield bar.update
