"""A model read on the arguments of a call, once for all of the same shapes."""

from dataclasses import dataclass, field
import hashlib
import re
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block

from numpyro_ext._model.arguments import Arguments, is_traced, split_arguments
from numpyro_ext._model.density import log_prob, scaled
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.handlers import every_row
from numpyro_ext._model.posterior_as_prior import PosteriorAsPrior
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import plate_sizes, sample_sites
from numpyro_ext._numpyro import default_key
from numpyro_ext._typing import Model

ONCE = {"xla_backend_optimization_level": 0}
"""Options of programs that run once, in which compilation takes nearly all of the time."""


@dataclass(frozen=True)
class ModelReading:
    """A model read on given arguments: static, and equal for other data of the same shapes."""

    model: Model
    key: tuple
    arguments: Arguments
    factors: Factors = field(compare=False)

    def on(self, arrays: list[Array]) -> Factors:
        """The factors on these arrays, which may be traced."""
        return self.factors.on(*self.arguments.whole(arrays))


class Reader:
    """Reads a model, and tells whether a reading serves for other arguments.

    :param model: Python callable with NumPyro primitives.
    :param str data_plate: the plate whose rows are the factors.
    """

    def __init__(self, model: Model, data_plate: str | None) -> None:
        self.given: tuple = ()
        """What the arguments of the model that is read begin with: the numbers of a prior, which
        change with every fit, so that no program holds them."""
        if isinstance(model, PosteriorAsPrior):
            self.given, model = (model.numbers,), model.of_numbers
        self.model = model
        self.data_plate = data_plate
        self._factors: dict[Any, tuple[str, Factors]] = {}
        self._holds = False  # whether the model looks at its data, so that programs hold them

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Arguments, list[Array]]:
        """What is static in the arguments, and their arrays, with the floats among them."""

        def is_float(x: Any) -> bool:
            return isinstance(x, float | np.floating) and not self._holds

        whole = (*self.given, *args), kwargs
        both = jax.tree.map(lambda x: jnp.asarray(x) if is_float(x) else x, whole)
        return split_arguments(*both, hold=self._holds)

    def read(self, args: tuple, kwargs: dict[str, Any]) -> tuple[ModelReading, list[Array]]:
        """The model on these arguments, after checks of their numbers, and the arrays in them."""
        arguments, arrays = self.split(args, kwargs)
        whole = (*self.given, *args), kwargs
        shapes = tuple((np.shape(x), jnp.result_type(x)) for x in arrays)
        spread = [x.sharding for x in arrays if isinstance(x, Array)]
        shapes = (*shapes, *(x for x in spread if len(x.device_set) > 1))
        before, factors = self._factors.get((arguments, shapes), (None, None))
        if factors is None:
            factors = Factors(self.model, *whole, data_plate=self.data_plate)
        else:
            factors.on(*whole).check()
        try:
            now = fingerprint(self.model, arguments, arrays)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            if self._holds:
                raise
            self._holds = True  # each data set is then compiled for itself
            return self.read(args, kwargs)
        if before not in (None, now):
            factors = Factors(self.model, *whole, data_plate=self.data_plate)
        factors.on(*whole).check_masks()
        self._factors[arguments, shapes] = now, factors
        return ModelReading(self.model, (*factors.key, now), arguments, factors), arrays

    def serves(self, reading: ModelReading, arguments: Arguments, arrays: list[Array]) -> bool:
        """Whether what was compiled for a reading is right for these arguments too."""
        now = fingerprint(self.model, arguments, arrays)
        return arguments == reading.arguments and reading.key[-1] == now


def fingerprint(model: Model, arguments: Arguments, arrays: list[Any]) -> str:
    """A hash of what a program compiled of a model holds beside the arrays among its arguments.

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
    closed, names = jax.make_jaxpr(run, return_shape=True)(shapes, random.key(0))
    if is_traced(closed.consts):
        raise ValueError(
            "the model reads a value from outside that is traced, as under jax.grad or jax.jit;"
            " pass it as an argument of the model."
        )
    text = re.sub("0x[0-9a-f]+", "", f"{names}{closed}")  # without addresses of functions
    digest = hashlib.sha256(text.encode())
    for x in closed.consts:
        is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
        digest.update(np.asarray(random.key_data(x) if is_key else x).tobytes())
    return digest.hexdigest()
