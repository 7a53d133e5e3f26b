"""A model read on the arguments of a call, once for all of the same shapes, and its prior."""

from dataclasses import dataclass, field
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.arguments import Arguments, split_arguments
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.posterior_as_prior import PosteriorAsPrior
from numpyro_ext._typing import Model
from numpyro_ext.ep.fingerprint import fingerprint
from numpyro_ext.ep.normal import Site

__all__ = ["ONCE", "Center", "Prior", "Reader", "Reading", "normal_part", "read_prior"]

ONCE = {"xla_backend_optimization_level": 0}
"""Options of programs that run once, in which compilation takes nearly all of the time."""
_DRAWS, _LOOKED_AT = 1024, 64


@dataclass(frozen=True)
class Reading:
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


class Center(NamedTuple):
    """Where the prior is, and how wide: ``(D,)`` each."""

    mean: Array
    sd: Array


class Prior(NamedTuple):
    """The prior in unconstrained space.

    - **normal** - shift and precision of all its terms with a constant Hessian.
    - **draws** - ``(1024, D)``; **center** - their medians, and interquartile ranges over 1.349.
    - **normal_names, names** - the sites of these terms, and of the others.
    - **owners** - for each other term, the places in x of the site's own value, or -1.
    """

    normal: Site
    constant: Array
    draws: Array
    center: Center
    normal_names: tuple[str, ...]
    names: tuple[str, ...]
    owners: np.ndarray


@partial(jax.jit, static_argnums=0, compiler_options=ONCE)
def _terms_of_prior(reading: Reading, arrays: list[Array], rng_key: Array) -> tuple[Any, ...]:
    """Draws, and of the sum of the terms of each site value and gradient at the center, values at
    some draws, and Hessians at three points."""
    factors = reading.on(arrays)
    key_draws, key_points = random.split(rng_key)
    x = factors.draw_prior(key_draws, _DRAWS)
    low, mean, high = jnp.nanquantile(x, jnp.array([0.25, 0.5, 0.75]), axis=0)
    sd = (high - low) / 1.349
    sd = jnp.where((sd > 0) & jnp.isfinite(sd), sd, 1.0)
    mean = jnp.where(jnp.isfinite(mean), mean, 0.0)

    def sums(x: Array) -> dict[str, Array]:
        return {name: jnp.sum(term) for name, term in factors.terms(x).items()}

    points = mean + sd * random.normal(key_points, (3, len(mean)), mean.dtype)
    there = jax.vmap(sums)(x[:_LOOKED_AT]), jax.vmap(jax.hessian(sums))(points)
    return x, mean, sd, sums(mean), jax.jacrev(sums)(mean), *there


def read_prior(
    reading: Reading, arrays: list[Array], rng_key: Array, diagonal: bool = False
) -> Prior:
    """The normal part of the prior, and what the start needs of the rest.

    :param bool diagonal: whether a term must have a diagonal Hessian to be part of it.
    """
    factors = reading.on(arrays)
    found = jax.device_get(_terms_of_prior(reading, arrays, rng_key))
    draws, mean, sd, value, grad, values, hessian = found
    x64 = mean.dtype == np.float64

    def is_normal(name: str) -> bool:
        H = hessian[name] * sd * sd[:, None]
        target = np.diag(np.diag(H[0])) if diagonal else H[0]
        close = np.abs(H - target) <= (1e-8 if x64 else 1e-4) * np.max(np.abs(H), initial=1e-3)
        # A term with a kink, such as Laplace's, has a constant Hessian beside it.
        z = (draws[:_LOOKED_AT] - mean) / sd
        expected = value[name] + z @ (sd * grad[name]) + np.sum(z @ H[0] * z, -1) / 2
        off = np.abs(values[name] - expected) > 1e-2 * (1 + np.abs(expected))
        return bool(np.all(np.isfinite(H)) and np.all(close) and not np.any(off))

    normal = [name for name in hessian if is_normal(name)]
    zeros = mean.dtype.type(0), np.zeros_like(mean), np.zeros((len(mean),) * 2, mean.dtype)
    parts = [(value[name], grad[name], hessian[name][0]) for name in normal]
    log_p, gradient, curvature = map(sum, zip(zeros, *parts, strict=True))
    normal_part, constant = _expand(log_p, gradient, curvature, mean)
    shapes = jax.eval_shape(factors.terms, mean)
    names = tuple(name for name in shapes if name not in normal)
    places = [factors.owners(name, math.prod(shapes[name].shape)) for name in names]
    width = max((x.shape[1] for x in places), default=0)
    padded = [np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-1) for x in places]
    owners = np.concatenate([np.zeros((0, width), int), *padded])
    normal_part = Site(*map(jnp.asarray, normal_part))
    return Prior(normal_part, constant, draws, Center(mean, sd), tuple(normal), names, owners)


def normal_part(
    reading: Reading, names: tuple[str, ...], arrays: list[Array], mean: Array
) -> tuple[Site, Array]:
    """The terms of these sites, which are normal, on given arrays, and their log at 0."""
    factors = reading.on(arrays)

    def log_p(x: Array) -> Array:
        terms = factors.terms(x)
        return sum((jnp.sum(terms[name]) for name in names), jnp.zeros((), x.dtype))

    return _expand(*jax.value_and_grad(log_p)(mean), jax.hessian(log_p)(mean), mean)


def _expand(value: Any, gradient: Any, hessian: Any, mean: Any) -> tuple[Site, Any]:
    """The natural parameters of a normal term and its log at 0, by its derivatives at a point."""
    Lam = -(hessian + hessian.T) / 2
    eta = gradient + Lam @ mean
    return Site(eta, Lam), value - eta @ mean + mean @ Lam @ mean / 2
