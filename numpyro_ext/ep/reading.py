"""A model read on the arguments of a call: its factors, and its prior in unconstrained space.

It is read once for all arguments of the same shapes.
"""

from dataclasses import dataclass, field
from functools import partial
import math
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_ext._model.arguments import Arguments, split_arguments
from numpyro_ext._model.checks import check_rows
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.operations import gradient, hessian, jacobian
from numpyro_ext._model.posterior_as_prior import PosteriorAsPrior
from numpyro_ext._model.same import fingerprint, mark_of
from numpyro_ext._typing import Kwargs, Model, Sites
from numpyro_ext.ep.normal import Site

ONCE = {"xla_backend_optimization_level": 0}
"""Options of programs that run once, in which compilation takes nearly all of the time."""
_DRAWS, _LOOKED_AT = 1024, 64


@dataclass(frozen=True)
class ModelReading:
    """A model read on given arguments: static, and equal for other data of the same shapes."""

    model: Model
    key: tuple
    arguments: Arguments
    factors: Factors = field(compare=False)

    def factors_of(self, arrays: list[Array]) -> Any:
        """The :class:`Factors` on these arrays, which may be traced."""
        return _FactorsRead(self, arrays)


class _FactorsRead:
    """Factors on given arrays, for which the model is traced once for all programs."""

    def __init__(self, reading: ModelReading, arrays: list[Array]) -> None:
        self.of = reading, arrays
        self.factors = reading.factors.on(*reading.arguments.whole(arrays))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.factors, name)

    def row(self, x: Array, n: Array, local: Sites) -> Array:
        return _row(*self.of, x, n, local)

    def elements(self, x: Array, names: tuple[str, ...]) -> Array:
        return _elements(*self.of, names, x)

    def with_row(self, n: Array, read: Any) -> Any:
        return self if read is None else self.factors.with_row(n, read)


@partial(jax.jit, static_argnums=0, inline=True)
def _row(reading: ModelReading, arrays: list[Array], x: Array, n: Array, local: Sites) -> Array:
    return reading.factors.on(*reading.arguments.whole(arrays)).row(x, n, local)


@partial(jax.jit, static_argnums=(0, 2), inline=True)
def _elements(
    reading: ModelReading, arrays: list[Array], names: tuple[str, ...], x: Array
) -> Array:
    return reading.factors.on(*reading.arguments.whole(arrays)).elements(x, names)


class Reader:
    """Reads a model, and compares a reading with other arguments."""

    def __init__(self, model: Model, data_plate: str | None) -> None:
        self.leading: tuple = ()  # the numbers of a prior, which no program is to hold
        if isinstance(model, PosteriorAsPrior):
            self.leading, model = (model.numbers,), model.of_numbers
        self.model = model
        self.data_plate = data_plate
        self._factors: dict[Any, Factors] = {}
        self._holds = False  # whether programs hold the data, because the model looks at them
        self._last: tuple[Any, tuple] = None, ()  # a mark of the model, and its fingerprint there

    def split(self, args: tuple, kwargs: Kwargs) -> tuple[Arguments, list[Array]]:
        """The static part of the arguments, and their arrays, with the floats among them."""

        def is_float(x: Any) -> bool:
            return isinstance(x, float | np.floating) and not self._holds

        whole = (*self.leading, *args), kwargs
        both = jax.tree.map(lambda x: jnp.asarray(x) if is_float(x) else x, whole)
        return split_arguments(*both, hold=self._holds)

    def read(self, args: tuple, kwargs: Kwargs) -> tuple[ModelReading, list[Array]]:
        """The model on these arguments, after checks of their numbers, and the arrays in them."""
        arguments, arrays = self.split(args, kwargs)
        whole = (*self.leading, *args), kwargs
        check_rows(self.model, *whole, init_to_uniform, bounded=False)
        try:
            now = self._fingerprint(arguments, arrays)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            if self._holds:
                raise
            self._holds = True  # each data set is then compiled for itself
            return self.read(args, kwargs)
        factors = self._factors.get((arguments, now))
        if factors is None:
            factors = Factors(self.model, *whole, data_plate=self.data_plate)
            self._factors[arguments, now] = factors
        else:
            factors.on(*whole).check()
        factors.on(*whole).check_masks()
        return ModelReading(self.model, (*factors.key, now), arguments, factors), arrays

    def serves(self, reading: ModelReading, arguments: Arguments, arrays: list[Array]) -> bool:
        """Whether what was compiled for a reading is right for these arguments too."""
        is_same = arguments == reading.arguments
        return is_same and reading.key[-1] == self._fingerprint(arguments, arrays)

    def _fingerprint(self, arguments: Arguments, arrays: list[Array]) -> tuple:
        """The fingerprint of the model, which is traced for it only if its mark is another."""
        mark = mark_of(arrays, self.model, arguments.fixed)
        if mark is None or (arguments, mark) != self._last[0]:
            self._last = (arguments, mark), fingerprint(self.model, arguments, arrays)
        return self._last[1]


class Center(NamedTuple):
    """Where the prior is, and how wide: ``(D,)`` each."""

    mean: Array
    sd: Array


class Prior(NamedTuple):
    """The prior in unconstrained space."""

    normal: Site  # all its terms with a constant Hessian
    constant: Array  # their log at 0
    draws: np.ndarray  # (1024, D)
    center: Center  # medians of the draws, and interquartile ranges over 1.349
    normal_names: tuple[str, ...]  # the sites of the normal terms
    names: tuple[str, ...]  # the sites of the other terms
    owners: np.ndarray  # for each other term, the places in x of the site's own value, or -1


@partial(jax.jit, static_argnums=0, compiler_options=ONCE)
def _draws_of_prior(reading: ModelReading, arrays: list[Array], rng_key: Array) -> Array:
    return reading.factors_of(arrays).draw_prior(random.split(rng_key)[0], _DRAWS)


@partial(jax.jit, static_argnums=0, compiler_options=ONCE)
def _terms_of_prior(
    reading: ModelReading, arrays: list[Array], mean: Array, points: Array, draws: Array
) -> tuple[Any, ...]:
    """Of the terms of each site value and gradient at the mean, Hessians, and values at draws."""
    factors = reading.factors_of(arrays)

    @partial(jax.jit, inline=True)  # traced once for all uses
    def sums(x: Array) -> dict[str, Array]:
        return {name: jnp.sum(term) for name, term in factors.terms(x).items()}

    at = jax.vmap(sums)(jnp.concatenate([mean[None], draws]))
    value, values = ({name: x[k] for name, x in at.items()} for k in (0, slice(1, None)))
    return value, jacobian(sums)(mean), jax.vmap(hessian(sums))(points), values


def spread_of(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Median and standard deviation by the quartiles, over the first axis."""
    if draws.size == 0:
        return np.zeros(draws.shape[1:], draws.dtype), np.zeros(draws.shape[1:], draws.dtype)
    with warnings.catch_warnings():  # of a column that is NaN throughout, or infinite
        warnings.simplefilter("ignore", RuntimeWarning)
        low, middle, high = np.nanquantile(draws, [0.25, 0.5, 0.75], axis=0).astype(draws.dtype)
        return middle, (high - low) / draws.dtype.type(1.349)


def read_prior(reading: ModelReading, arrays: list[Array], rng_key: Array, diagonal: bool) -> Prior:
    """The normal part of the prior, diagonal or not, and the draws and sites of the rest."""
    factors = reading.factors_of(arrays)
    draws = jax.device_get(_draws_of_prior(reading, arrays, rng_key))
    middle, width = spread_of(draws)
    sd: Any = np.where((width > 0) & np.isfinite(width), width, width.dtype.type(1))
    mean: Any = np.where(np.isfinite(middle), middle, middle.dtype.type(0))
    moves = np.random.default_rng(0).standard_normal((3, len(mean))).astype(mean.dtype)
    terms = _terms_of_prior(reading, arrays, mean, mean + sd * moves, draws[:_LOOKED_AT])
    value, grad, H_of, values = jax.device_get(terms)
    x64 = mean.dtype == np.float64

    def is_normal(name: str) -> bool:
        H = H_of[name] * sd * sd[:, None]
        target = np.diag(np.diag(H[0])) if diagonal else H[0]
        close = np.abs(H - target) <= (1e-8 if x64 else 1e-4) * np.max(np.abs(H), initial=1e-3)
        # A term with a kink, such as Laplace's, has a constant Hessian beside it.
        z = (draws[:_LOOKED_AT] - mean) / sd
        expected = value[name] + z @ (sd * grad[name]) + np.sum(z @ H[0] * z, -1) / 2
        off = np.abs(values[name] - expected) > 1e-2 * (1 + np.abs(expected))
        return bool(np.all(np.isfinite(H)) and np.all(close) and not np.any(off))

    normal = [name for name in H_of if is_normal(name)]
    zeros = mean.dtype.type(0), np.zeros_like(mean), np.zeros((len(mean),) * 2, mean.dtype)
    parts = [(value[name], grad[name], H_of[name][0]) for name in normal]
    log_p, slope, curvature = map(sum, zip(zeros, *parts, strict=True))
    term, constant = _expand(log_p, slope, curvature, mean, diagonal)
    shapes = jax.eval_shape(factors.terms, mean)
    names = tuple(name for name in shapes if name not in normal)
    places = [factors.owners(name, math.prod(shapes[name].shape)) for name in names]
    width = max((x.shape[1] for x in places), default=0)
    padded = [np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-1) for x in places]
    owners = np.concatenate([np.zeros((0, width), int), *padded])
    term = jax.tree.map(jnp.asarray, term)
    return Prior(term, constant, draws, Center(mean, sd), tuple(normal), names, owners)


def normal_part(
    reading: ModelReading, names: tuple[str, ...], arrays: list[Array], mean: Array, diagonal: bool
) -> tuple[Site, Array]:
    """The terms of these sites, which are normal, on given arrays, and their log at 0."""
    factors = reading.factors_of(arrays)

    def log_p(x: Array) -> Array:
        terms = factors.terms(x)
        return sum((jnp.sum(terms[name]) for name in names), jnp.zeros((), x.dtype))

    derivatives = gradient(log_p)(mean), hessian(log_p)(mean)
    return _expand(log_p(mean), *derivatives, mean, diagonal)


def _expand(value: Any, slope: Any, H: Any, mean: Any, diagonal: bool) -> tuple[Site, Any]:
    """The natural parameters of a normal term and its log at 0, by its derivatives at a point."""
    Lam = -(H + H.T) / 2
    eta = slope + Lam @ mean
    at_zero = value - eta @ mean + mean @ Lam @ mean / 2
    return Site(eta, Lam.diagonal() if diagonal else Lam), at_zero
