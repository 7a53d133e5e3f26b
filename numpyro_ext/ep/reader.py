"""A model read on the arguments of a call, once for all of the same shapes."""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.arguments import Arguments, split_arguments
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.fingerprint import fingerprint
from numpyro_ext._model.posterior_as_prior import PosteriorAsPrior
from numpyro_ext._typing import Model
from numpyro_ext.ep.factor_table import Reading

__all__ = ["Reader"]


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
        self._known: dict[Any, tuple[str, Factors]] = {}
        self._holds = False

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Arguments, list[Array]]:
        """What is static in the arguments, and their arrays, with the floats among them."""

        def is_float(x: Any) -> bool:
            return isinstance(x, float | np.floating) and not self._holds

        whole = (*self.given, *args), kwargs
        both = jax.tree.map(lambda x: jnp.asarray(x) if is_float(x) else x, whole)
        return split_arguments(*both, hold=self._holds)

    def read(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Reading, list[Array]]:
        """The model on these arguments, after checks of their numbers, and the arrays in them."""
        arguments, arrays = self.split(args, kwargs)
        whole = (*self.given, *args), kwargs
        shapes = tuple((np.shape(x), jnp.result_type(x)) for x in arrays)
        spread = [x.sharding for x in arrays if isinstance(x, Array)]
        shapes = (*shapes, *(x for x in spread if len(x.device_set) > 1))
        known, factors = self._known.get((arguments, shapes), (None, None))
        if factors is not None:
            factors.on(*whole).check()
        else:
            factors = Factors(self.model, *whole, data_plate=self.data_plate)
            if not self._holds and not _runs_on_traced(factors, arguments, arrays):
                self._holds = True  # each data set is then compiled for itself
                return self.read(args, kwargs)
        held = fingerprint(self.model, arguments, arrays)
        if known is not None and known != held:
            factors = Factors(self.model, *whole, data_plate=self.data_plate)
        factors.on(*whole).check_masks()
        self._known[arguments, shapes] = held, factors
        return Reading(self.model, (*factors.key, held), arguments, factors), arrays

    def serves(self, reading: Reading, arguments: Arguments, arrays: list[Array]) -> bool:
        """Whether what was compiled for a reading is right for these arguments too."""
        held = reading.key[-1]
        return arguments == reading.arguments and held == fingerprint(self.model, arguments, arrays)


def _runs_on_traced(factors: Factors, arguments: Arguments, arrays: list[Array]) -> bool:
    """Return whether the model runs on arrays whose numbers it cannot see."""

    def run(arrays: list[Array]) -> Any:
        there, x = factors.on(*arguments.whole(arrays)), jnp.zeros(factors.info.size)
        return there.row(x, jnp.array(0), factors.local), there.terms(x)

    try:
        jax.eval_shape(run, arrays)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return False
    return True
