"""What a program that is compiled of a model holds beside the arrays among its arguments."""

from collections.abc import Iterator
import hashlib
import re
from typing import Any

import jax
from jax import Array, random
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block

from numpyro_ext._model.arguments import Arguments
from numpyro_ext._model.density import log_prob, scaled
from numpyro_ext._model.handlers import every_row
from numpyro_ext._model.program import Program
from numpyro_ext._model.read import plate_sizes, sample_sites
from numpyro_ext._numpyro import default_key
from numpyro_ext._typing import Model

__all__ = ["fingerprint"]


def fingerprint(model: Model, arguments: Arguments, arrays: list[Any]) -> str:
    """What a program compiled of a model holds beside the arrays among its arguments.

    These are its operations, and the numbers that it reads from globals, closures and attributes.
    With equal fingerprints, a program compiled for one serves for the other.
    """

    def run(arrays: list[Any], rng_key: Array) -> Any:
        program = Program(every_row(default_key(model)), *arguments.whole(arrays))
        with block():
            trace = program.trace(rng_key=rng_key)
        sites = {x["name"]: (x["value"], scaled(x, log_prob(x))) for x in sample_sites(trace)}
        return sites, plate_sizes(trace)

    shapes = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in arrays]
    jaxpr, names = jax.make_jaxpr(run, return_shape=True)(shapes, random.key(0))
    found = hashlib.sha256(str(names).encode())
    for piece in _pieces(jaxpr):
        found.update(piece)
    return found.hexdigest()


def _pieces(jaxpr: Any) -> Iterator[bytes]:
    """A program piece by piece: its operations with their variables, and the numbers in it.

    The text of a jaxpr would not do: how it is printed depends on what was traced before.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        yield from map(_bytes, jaxpr.consts)
        jaxpr = jaxpr.jaxpr
    number = {x: i for i, x in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    yield str([x.aval for x in number]).encode()
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name.encode()
        for x in eqn.invars:
            yield _bytes(x.val) if isinstance(x, Literal) else f"v{number[x]}".encode()
        for x in eqn.outvars:
            number.setdefault(x, len(number))
            yield str(x.aval).encode()
        for name, value in sorted(eqn.params.items()):
            yield name.encode()
            for part in jax.tree.leaves(value, is_leaf=_is_program):
                if _is_program(part):
                    yield from _pieces(part)
                elif not callable(part):  # rules of derivatives, which follow from the program
                    yield re.sub(r"0x[0-9a-f]+", "", str(part)).encode()
    for x in jaxpr.outvars:
        yield _bytes(x.val) if isinstance(x, Literal) else f"v{number[x]}".encode()


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tracer):
        raise ValueError(
            "the model reads a value from outside that is traced, as under jax.grad or"
            " jax.jit; pass it as an argument of the model."
        )
    is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key)
    value = np.asarray(random.key_data(value) if is_key else value)
    return f"{value.dtype} {value.shape}".encode() + value.tobytes()


def _is_program(x: Any) -> bool:
    return isinstance(x, ClosedJaxpr | Jaxpr)
