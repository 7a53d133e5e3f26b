"""The prior of a model in unconstrained space: its normal part, its draws and its other terms."""

from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext.ep.normal import Site
from numpyro_ext.ep.reader import ONCE, ModelReading

_DRAWS, _LOOKED_AT = 1024, 64


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
def _terms_of_prior(reading: ModelReading, arrays: list[Array], rng_key: Array) -> tuple[Any, ...]:
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
    reading: ModelReading, arrays: list[Array], rng_key: Array, diagonal: bool = False
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
    reading: ModelReading, names: tuple[str, ...], arrays: list[Array], mean: Array
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
