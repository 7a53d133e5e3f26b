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
from numpyro.handlers import block, seed

from numpyro_ext._model.arguments import Arguments
from numpyro_ext._model.density import log_prob, scaled
from numpyro_ext._model.handlers import every_row
from numpyro_ext._model.read import plate_sizes, sample_sites, trace_of
from numpyro_ext._numpyro import default_key
from numpyro_ext._typing import Model

__all__ = ["fingerprint"]


def fingerprint(model: Model, arguments: Arguments, arrays: list[Any]) -> str:
    """What a program compiled of a model holds beside the arrays among its arguments.

    These are its operations, and the numbers that it reads from globals, closures and attributes.
    With equal fingerprints, a program compiled for one serves for the other.
    """

    def run(arrays: list[Any], rng_key: Array) -> Any:
        fn = seed(every_row(default_key(model)), rng_key)
        with block():
            trace = trace_of(fn, *arguments.whole(arrays))
        sites = {x["name"]: (x["value"], scaled(x, log_prob(x))) for x in sample_sites(trace)}
        return sites, plate_sizes(trace)

    shapes = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in arrays]
    jaxpr, names = jax.make_jaxpr(run, return_shape=True)(shapes, random.key(0))
    # Functions are printed with their addresses, which say nothing.
    text = re.sub(r"0x[0-9a-f]+", "", f"{jaxpr} {names}")
    found = hashlib.sha256(text.encode())
    for value in _constants(jaxpr):
        if isinstance(value, Tracer):
            raise ValueError(
                "the model reads a value from outside that is traced, as under jax.grad or"
                " jax.jit; pass it as an argument of the model."
            )
        is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key)
        value = np.asarray(random.key_data(value) if is_key else value)
        found.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    return found.hexdigest()


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The arrays in a program, and in those inside it."""
    if isinstance(jaxpr, ClosedJaxpr):
        yield from jaxpr.consts
        jaxpr = jaxpr.jaxpr
    for eqn in jaxpr.eqns:
        yield from (x.val for x in eqn.invars if isinstance(x, Literal))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _constants(inner)


def _is_program(x: Any) -> bool:
    return isinstance(x, ClosedJaxpr | Jaxpr)
