"""The derivative of a gradient, the operations of a program, compilation without optimisation, maps
by blocks, and progress bars."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
import hashlib
import math
from threading import Lock
from typing import Any

import jax
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from numpyro_ext._model.arguments import is_traced

FEW = 10**9
"""Numbers up to which a program is run in the time that it takes to optimise it."""

_CUBIC = {
    "cholesky": 1,
    "lu": 1,
    "geqrf": 2,
    "householder_product": 2,
    "eigh": 10,
    "svd": 20,
}
"""Operations on an ``(n, n)`` matrix, in units of n^3, roughly."""


STEP = 0.1
"""Half of the difference by which a derivative is taken where there is no other, in standard
deviations: its error is a sixtieth of the fourth derivative of the potential, and in float32 ten
times the rounding of a gradient."""


def on_numbers() -> AbstractContextManager[None]:
    """Operations on numbers are computed at once inside, also where a program is traced around it.
    Only there, because JAX then takes the operations on a model's data out of programs that are
    traced inside, too, and compiles each of them by itself."""
    is_traced = isinstance(jax.device_put(np.zeros(())), Tracer)  # which compiles nothing
    return jax.ensure_compile_time_eval() if is_traced else nullcontext()


NO_FORWARD_MODE = TypeError, ValueError, NotImplementedError
"""The errors of JAX where a function has no derivative along a direction."""


def has_forward_mode(fn: Callable[[Array], Any], x: Array | np.ndarray) -> bool:
    """Whether ``fn`` has a derivative along a direction; it has none where a part of it is a
    ``jax.custom_vjp``, as ``odeint`` is, or a function of the host behind one."""
    try:
        # Under vmap, because otherwise it fails no earlier than where it is compiled.
        jax.eval_shape(lambda x: jax.vmap(jax.linearize(fn, x)[1])(x[None]), x)
    except NO_FORWARD_MODE:
        return False
    return True


def linearized(
    fn: Callable[[Array], tuple[Array, Any]],
    x: Array,
    *,
    forward: bool,
    length: Callable[[Array], Any] = lambda v: 1.0,
) -> tuple[Array, Any, Callable[[Array], Array]]:
    """``(y, aux, along)`` of ``fn(x) = (y, aux)``, where ``along(v)`` is the derivative of y along
    v: in forward mode, or by the difference of two values, a part of v to either side.

    :param length: how long a direction is, in standard deviations.
    """
    if forward:
        y, along, aux = jax.linearize(fn, x, has_aux=True)
        return y, aux, along
    y, aux = fn(x)

    def difference(v: Array) -> Array:
        h = STEP / length(v)
        return (fn(x + h * v)[0] - fn(x - h * v)[0]) / (2 * h)

    return y, aux, difference


def quick_options(operations: float = 0.0, few: float = FEW) -> dict[str, int] | None:
    """Options of the compiler for a program that computes so many numbers in all its runs."""
    quick = jax.default_backend() == "cpu" and operations <= few
    return {"xla_backend_optimization_level": 0} if quick else None


def run_once(fn: Callable[..., Any], rng_key: Array, *args: Any) -> Any:
    """``fn(rng_key, *args)``, compiled without optimisation, which takes longer than one run; the
    key must be traced inside another program, where options of the compiler are an error."""
    if isinstance(rng_key, Tracer):
        return jax.jit(fn)(rng_key, *args)
    return jit_on_data(fn, quick_options())(rng_key, *args)


def in_either_mode[T](differentiate: Callable[[bool], T], forward: bool = False) -> T:
    """``differentiate(forward)``, in forward mode also where a primitive, such as ``while_loop``,
    has no derivative in reverse."""
    try:
        return differentiate(forward)
    except ValueError as error:
        if forward or "Reverse-mode" not in str(error):
            raise
        return differentiate(True)


def gradient(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """``jax.grad(fn)``, :func:`in_either_mode`."""
    return lambda x: in_either_mode(lambda forward: (jax.jacfwd if forward else jax.grad)(fn)(x))


def jacobian(fn: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """``jax.jacrev(fn)``, :func:`in_either_mode`."""
    return lambda x: in_either_mode(lambda forward: (jax.jacfwd if forward else jax.jacrev)(fn)(x))


def hessian(fn: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """``jax.hessian(fn)``, :func:`in_either_mode`."""
    return jax.jacfwd(jacobian(fn))


_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def settings() -> tuple:
    """The settings of JAX that change what a program is when it is traced."""
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


def shapes_of(arrays: Sequence[Any]) -> tuple:
    """The shape and the dtype of each array or number."""
    return tuple((jnp.shape(x), jnp.result_type(x)) for x in arrays)


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function for several programs of JAX, of which Python runs ``fn`` in the first one alone,
    for each set of shapes; it must not close over what one of them computes."""

    def trace(args: tuple) -> tuple[Callable[[list[Array]], list[Array]], Any]:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), args)
        closed, of_result = jax.make_jaxpr(fn, return_shape=True)(*like)
        return lambda leaves: jaxpr_as_fun(closed)(*leaves), of_result

    return _kept_by_shapes(trace)


def jit_on_data(
    fn: Callable[..., Any], options: dict[str, int] | None = None
) -> Callable[..., Any]:
    """``jax.jit`` of a function that is called with few sets of shapes. The arrays that it closes
    over, such as a model's data, are arguments of the program, which would hold copies of them; so
    the same function of other data, of another fit for example, is not compiled again."""

    def trace(args: tuple) -> tuple[Callable[[list[Array]], list[Array]], Any]:
        closed, of_result = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr = closed.jaxpr  # alone, so that a program which is kept holds no data

        def run(consts: list[Array], leaves: list[Array]) -> list[Array]:
            # JAX leaves out of the text what is not used: so all stay, in their places, or none.
            consts, leaves = lax.optimization_barrier((consts, leaves))
            return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*leaves)

        own = program = jax.jit(run, compiler_options=options)
        if not closed.effects:
            program = _compiled_before(own, options, closed, jax.tree.leaves(args))

        def call(leaves: list[Array]) -> list[Array]:
            # Inside of another program the rules of derivatives count, which the text has not.
            return (own if is_traced(leaves) else program)(closed.consts, leaves)

        return call, of_result

    return _kept_by_shapes(trace)


_PROGRAMS: dict[tuple, Any] = {}
"""Programs by their text and by options of the compiler, the last :data:`_MOST_PROGRAMS`."""

_MOST_PROGRAMS = 64
"""A program takes some fifty of the 65,530 mappings that Linux gives a process."""

_LOCK = Lock()
"""Fits may run in several threads."""


def _compiled_before(
    program: Any, options: dict[str, int] | None, closed: ClosedJaxpr, leaves: list[Array]
) -> Any:
    """A jitted program, or the one with the same text that an earlier call has compiled."""
    args = closed.consts, leaves
    if is_traced(args):
        return program
    text = program.lower(*args).as_text()  # the call does not trace and lower it again
    # The text says that a function of the host is called, by any operation, but not which one.
    if "callback" in text or "host_transfer" in text:
        return program
    types = *shapes_of(jax.tree.leaves(args)), *closed.out_avals  # which may be weak
    key = hashlib.sha256(text.encode()).digest(), types, *(options or {}).items()
    with _LOCK:
        _PROGRAMS[key] = program = _PROGRAMS.pop(key, program)
        if len(_PROGRAMS) > _MOST_PROGRAMS:
            del _PROGRAMS[next(iter(_PROGRAMS))]
    return program


def _kept_by_shapes(
    trace: Callable[[tuple], tuple[Callable[[list[Array]], list[Array]], Any]],
) -> Callable[..., Any]:
    """A function that is traced once for each set of shapes and settings: ``trace(args)`` gives a
    program of the leaves of its arguments, and a tree of the structure of its result."""
    programs: dict[tuple, tuple] = {}

    def call(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        shapes = tree, shapes_of(leaves), settings()
        if shapes not in programs:
            program, of_result = trace(args)
            programs[shapes] = program, jax.tree.structure(of_result)
        program, structure = programs[shapes]
        return jax.tree.unflatten(structure, program(leaves))

    return call


_CALLS = {
    "checkpoint",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "pjit",
    "remat2",
}
"""Operations that run another program once, on inputs of their own."""


def follow[T](
    program: Any,
    inputs: Sequence[T],
    rule: Callable[[Any, list[T]], Sequence[T]],
    constant: Callable[[Any], T],
) -> list[T]:
    """What is known of the results of a program of JAX, closed or not, by what is known of its
    inputs, through all the programs that it calls.

    :param rule: ``rule(equation, inputs)``, the same of the results of one operation. Loops and
        branches are operations, too.
    :param constant: the same of a number or array that the program holds.
    """
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    facts = dict(zip(jaxpr.invars, inputs, strict=True))
    facts |= dict(zip(jaxpr.constvars, map(constant, consts), strict=True))

    def of(x: Any) -> T:
        return constant(x.val) if hasattr(x, "val") else facts[x]

    for equation in jaxpr.eqns:
        params, values = equation.params, [of(x) for x in equation.invars]
        if equation.primitive.name in _CALLS:
            called = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            made = follow(called, values, rule, constant)
        else:
            made = rule(equation, values)
        facts.update(zip(equation.outvars, made, strict=True))
    return [of(x) for x in jaxpr.outvars]


def count_operations(fn: Callable[..., Any], *args: Any, fixed: int = 0) -> float:
    """Numbers that ``fn(*args)`` computes, and the products in its matrix arithmetic; a loop of
    unknown length counts once, and of two branches the longer one. What depends on the first
    ``fixed`` arguments alone, which are the same in all calls, does not count."""
    program, constant = jax.make_jaxpr(fn)(*args), len(jax.tree.leaves(args[:fixed]))
    return _count(program, [k >= constant for k in range(len(program.in_avals))])


def _count(program: Any, vary: list[bool]) -> float:
    """The numbers that depend on the inputs that vary."""
    total = 0.0

    def rule(equation: Any, inputs: list[bool]) -> list[bool]:
        nonlocal total
        total += _count_equation(equation) if any(inputs) else 0
        return [any(inputs)] * len(equation.outvars)

    follow(program, vary, rule, lambda x: False)
    return total


def programs_in(equation: Any) -> list[Any]:
    """The programs inside of an operation, as the body of a loop or what ``jax.jit`` has made."""
    leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns"))
    return [x for x in leaves if hasattr(x, "eqns")]


def _count_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if programs := programs_in(equation):
        inner = [_count(x, [True] * len(getattr(x, "jaxpr", x).invars)) for x in programs]
        length = params.get("length", 1) if name == "scan" else 1
        return max(inner) if name == "cond" else length * sum(inner)
    size = float(sum(math.prod(jnp.shape(out.aval)) for out in equation.outvars))
    shape = list(equation.invars[0].aval.shape) if equation.invars else []
    if name == "dot_general":
        (summed, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(shape[axis] for axis in summed)
    if name == "triangular_solve":  # a row of the factor for each number
        return size * shape[-1]
    return size + _CUBIC[name] * math.prod(shape) * shape[-1] if name in _CUBIC else size


_MOVED = {"broadcast_in_dim", "convert_element_type", "gather", "reshape", "slice", "squeeze"}
"""Operations that only move the numbers of their first operand."""


def is_part_of(fn: Callable[[Array], Array], x: Array) -> bool:
    """Return whether ``fn(x)`` is x, or some of its numbers, with nothing computed on the way."""

    def rule(equation: Any, are_of_x: list[bool]) -> list[bool]:
        return [equation.primitive.name in _MOVED and are_of_x[0]] * len(equation.outvars)

    return follow(jax.make_jaxpr(fn)(x), [True], rule, lambda x: False)[0]


def map_blocks(fn: Callable[[Array], Any], size: int, most: int) -> Any:
    """``fn`` of 0 to ``size - 1``, of at most so many at once, in blocks of one size."""
    blocks = -(-size // most)
    if blocks == 1:
        return jax.vmap(fn)(jnp.arange(size))
    length = -(-size // blocks)
    places = jnp.minimum(jnp.arange(blocks * length), size - 1)
    return jax.tree.map(lambda x: x[:size], jax.lax.map(fn, places, batch_size=length))


@contextmanager
def progress_bar(total: int, description: str) -> Iterator[Callable[..., Any]]:
    """A progress bar that appears after a second, and only on a terminal."""
    with tqdm(total=total, desc=description, delay=1.0, disable=None, leave=False) as bar:
        yield bar.update


def pieces(size: int, piece_size: int, description: str) -> Iterator[Array]:
    """The row numbers of a pass in pieces, with a progress bar where it is long."""
    with progress_bar(size, description) as advance:
        for begin in range(0, size, piece_size):
            idx = jnp.arange(begin, min(begin + piece_size, size))
            yield idx
            advance(len(idx))
