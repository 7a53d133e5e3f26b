"""Distributions in double precision, where sums of large terms in single precision are wrong.

A log density that is a difference of log gamma functions loses all of its digits where a
parameter is large, JAX's incomplete gamma and beta functions end before they have converged, and
``jax.random.poisson`` and ``jax.random.binomial`` have too large a variance.
"""

from collections.abc import Callable
import copy
from functools import partial
import math
from typing import Any, NamedTuple, cast

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.primitives import Messenger
from scipy.special import expit

from numpyro_ext._model.density import log_prob, seen
from numpyro_ext._model.read import (
    Site,
    base_distribution,
    is_data,
    latent_sites,
    layers,
    sample_sites,
)
from numpyro_ext._typing import Trace

_LARGE = 1e3
"""The number from which a parameter is large, for log densities and cdfs."""
_MANY = 1e5
"""The variance from which counts are drawn from a normal with their skewness."""
_WRONG = 0.5
"""Nats by which a log density may be wrong, over all rows together or in a row."""
_CHANCE = 4.0  # standard errors, within which errors of rows cancel


class _Family(NamedTuple):
    """The parameters of a distribution, SciPy's of the same, and what to use where they are large.

    The gradient of some log densities is right where their value is not: of these only the part of
    an error that moves with the last parameter changes a posterior.
    """

    parameters: tuple[str, ...]
    to_scipy: Callable[..., Any]  # of scipy.stats and the parameters
    instead: str
    has_gradient: bool = False


_COUNTS = "a Normal of the counts, or of their logarithm,"
_N, _GAMMA, _BETA = "total_count", ("concentration", "rate"), ("concentration1", "concentration0")
_FAMILIES: dict[type, _Family] = {
    dist.Poisson: _Family(("rate",), lambda stats, rate: stats.poisson(rate), _COUNTS, True),
    dist.BinomialProbs: _Family(
        ("total_count", "probs"),
        lambda stats, n, p: stats.binom(n, np.clip(p, 0, 1)),
        _COUNTS,
        True,
    ),
    dist.BinomialLogits: _Family(
        ("total_count", "logits"), lambda stats, n, x: stats.binom(n, expit(x)), _COUNTS, True
    ),
    dist.GammaPoisson: _Family(_GAMMA, lambda stats, a, b: stats.nbinom(a, b / (1 + b)), "Poisson"),
    dist.BetaBinomial: _Family((_N, *_BETA), lambda stats, *x: stats.betabinom(*x), "Binomial"),
    dist.StudentT: _Family(("df", "loc", "scale"), lambda stats, *x: stats.t(*x), "Normal"),
    dist.Gamma: _Family(_GAMMA, lambda stats, a, b: stats.gamma(a, scale=1 / b), "LogNormal"),
    dist.InverseGamma: _Family(_GAMMA, lambda stats, a, b: stats.invgamma(a, scale=b), "LogNormal"),
    dist.Beta: _Family(_BETA, lambda stats, a, b: stats.beta(a, b), "a Normal of the logit"),
}


def _family_of(fn: Any) -> _Family | None:
    return next((x for kind, x in _FAMILIES.items() if isinstance(fn, kind)), None)


def exact(fn: Any) -> Any:
    """The distribution with log density and cdf in double precision on the host where a parameter
    is large, and with draws that have the right variance there."""
    family = _family_of(fn)
    if family is None and getattr(fn, "base_dist", None) is None:
        return fn
    new = copy.copy(fn)
    if family is None:
        new.base_dist = exact(fn.base_dist)
        return new
    new.log_prob = partial(_on_host, fn, family, "log_prob")
    new.cdf = partial(_on_host, fn, family, "cdf")
    for kind, draw in _DRAWS.items():
        if isinstance(fn, kind):
            new.sample = partial(draw, fn)
    return new


def exact_log_prob(site: Site) -> Array:
    """The log density of a site; of data in double precision where a parameter is large."""
    return log_prob({**site, "fn": exact(site["fn"])} if is_data(site) else site)


def _on_host(fn: Any, family: _Family, what: str, value: Any, intermediates: Any = None) -> Array:
    parameters = [getattr(fn, name) for name in family.parameters]
    *parameters, value = jnp.broadcast_arrays(*parameters, value)
    try:
        quick = jnp.broadcast_to(getattr(fn, what)(value), jnp.shape(value))
    except NotImplementedError:  # it has no cdf
        quick = jnp.full(jnp.shape(value), jnp.nan)

    def compute(quick: Any, value: Any, *parameters: Any) -> np.ndarray:
        every = [np.asarray(x, np.float64) for x in (value, *parameters)]
        out = np.array(quick)
        where = np.isnan(out) | np.any([np.abs(x) > _LARGE for x in every], 0)
        value, *there = (x[where] for x in every)
        out[where] = _by_scipy(family, there, what, value)
        return out

    shape = jax.ShapeDtypeStruct(quick.shape, quick.dtype)
    return jax.pure_callback(compute, shape, quick, value, *parameters, vmap_method="broadcast_all")


def _by_scipy(family: _Family, parameters: list[np.ndarray], what: str, value: Any) -> np.ndarray:
    from scipy import stats  # which takes long to import

    frozen = family.to_scipy(stats, *parameters)
    if what == "cdf":
        return frozen.cdf(value)
    return frozen.logpmf(value) if hasattr(frozen.dist, "logpmf") else frozen.logpdf(value)


def _near_normal(key: Array, drawn: Array, mean: Array, variance: Array, skewness: Array) -> Array:
    """Draws; where the variance is large, of a normal with this skewness (Cornish-Fisher)."""
    xi = random.normal(random.fold_in(key, 1), drawn.shape)
    many = mean + jnp.sqrt(variance) * (xi + skewness * (xi**2 - 1) / 6)
    return jnp.where(variance > _MANY, jnp.round(many).astype(drawn.dtype), drawn)


def _poisson(fn: Any, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
    rate = jnp.asarray(fn.rate, jnp.result_type(float))
    drawn = dist.Poisson.sample(fn, key, sample_shape)
    return _near_normal(key, drawn, rate, rate, rate**-0.5)


def _binomial(fn: Any, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
    n, p = jnp.asarray(fn.total_count, jnp.result_type(float)), fn.probs
    variance = n * p * (1 - p)
    drawn = type(fn).sample(fn, key, sample_shape)
    return _near_normal(key, drawn, n * p, variance, (1 - 2 * p) * variance**-0.5)


def _gamma_poisson(fn: Any, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
    key_gamma, key_poisson = random.split(key)  # as NumPyro
    rate = dist.Gamma(fn.concentration, fn.rate).expand(fn.batch_shape)
    return _poisson(dist.Poisson(rate.sample(key_gamma, sample_shape)), key_poisson)


_DRAWS: dict[type, Callable[..., Array]] = {
    dist.Poisson: _poisson,
    dist.BinomialProbs: _binomial,
    dist.BinomialLogits: _binomial,
    dist.GammaPoisson: _gamma_poisson,
}


class exact_draws(Messenger):
    """Draw counts of a large mean with the right variance."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            msg["fn"] = exact(msg["fn"])


def _inside(fn: Any) -> tuple[Any, _Family] | None:
    """The layer of a distribution of these families, if the value of a site is its value."""
    for layer in layers(fn):
        if family := _family_of(layer):
            return layer, family
        if getattr(layer, "transforms", ()):
            break
    return None


def may_be_imprecise(trace: Trace) -> bool:
    """Whether a site has a distribution of these families, in single precision."""
    if jnp.result_type(float) == jnp.float64:
        return False
    return any(_inside(site["fn"]) is not None for site in sample_sites(trace))


def has_large(trace: Trace) -> Array:
    """Whether a parameter or a value is so large that :func:`imprecise` may have something to say,
    which a much smaller program computes."""
    is_large = jnp.zeros((), bool)
    for site in sample_sites(trace):
        if inside := _inside(site["fn"]):
            fn, family = inside
            numbers = site["value"], *(getattr(fn, name) for name in family.parameters)
            for x in numbers:
                is_large |= jnp.any(jnp.abs(x) > _LARGE)
    return is_large


def numbers_of(trace: Trace) -> dict[str, Any]:
    """What :func:`imprecise` takes of a trace, which a compiled function can return."""
    out: dict[str, Any] = {}
    for site in sample_sites(trace):
        inside, is_seen = _inside(site["fn"]), seen(site)
        if inside is None:
            continue
        fn, family = inside
        parameters = [getattr(fn, name) for name in family.parameters]
        arrays = jnp.broadcast_arrays(site["value"], *parameters)
        if arrays[0].shape == is_seen.shape:
            beside, moved = _beside(fn, family)
            moved = jnp.broadcast_to(moved, is_seen.shape)
            quick = fn.log_prob(arrays[0]), beside.log_prob(arrays[0])
            out[site["name"]] = (*arrays, moved, *quick, is_seen)
    return out


def _beside(fn: Any, family: _Family) -> tuple[Any, Any]:
    """The distribution with a last parameter that is a thousandth less, where its gradient is
    right, and this parameter."""
    beside, name = copy.copy(fn), family.parameters[-1]
    if not family.has_gradient:
        return fn, getattr(fn, name)
    moved = getattr(fn, name) * 0.999 - (1e-3 if name == "logits" else 0.0)
    object.__setattr__(beside, name, moved)
    return beside, moved


def imprecise(trace: Trace, numbers: dict[str, Any], share: float = 1.0) -> list[str]:
    """A sentence on each site that has another log density in single precision than in double.

    :param numbers: the result of :func:`numbers_of` at some values, on the host.
    :param share: the share of all rows that is in it.
    """
    sentences = []
    for name, (value, *parameters, moved, quick, quick_beside, is_seen) in numbers.items():
        fn, family = cast(Any, _inside(trace[name]["fn"]))
        every = [np.asarray(x, np.float64) for x in parameters]
        where = np.asarray(is_seen) & np.any([np.abs(x) > _LARGE for x in (value, *every)], 0)
        if not where.any():
            continue
        there, value = [x[where] for x in every], np.asarray(value)[where]
        errors = np.asarray(quick, np.float64)[where] - _by_scipy(family, there, "log_prob", value)
        if family.has_gradient:
            there[-1] = np.asarray(moved, np.float64)[where]
            right = _by_scipy(family, there, "log_prob", value)
            errors -= np.asarray(quick_beside, np.float64)[where] - right
        errors = errors[np.isfinite(errors)]
        total, noise = float(errors.sum()) / share, math.sqrt(float(np.sum(errors**2)) / share)
        # Errors of rounding cancel, and a climb has an error in common.
        in_common = abs(total) > max(_WRONG, _CHANCE * noise) and not family.has_gradient
        if not (errors.size and (in_common or np.mean(np.abs(errors)) > _WRONG)):
            continue
        largest = {n: float(x.max()) for n, x in zip(family.parameters, every, strict=True)}
        which = max(largest, key=lambda n: largest[n])
        kind, sign = type(fn).__name__, "above" if total > 0 else "below"
        sentences.append(
            f"single precision has the log density of site '{name}', a {kind} with {which} up to"
            f" {largest[which]:.2g}, {abs(total):.2g} nats {sign} its value; use {family.instead}"
            f" there, a prior that keeps {which} small, or numpyro.enable_x64()."
        )
    return sentences


def least_concentrations(trace: Trace) -> dict[str, Any]:
    """The least concentration of each latent site with a gamma, beta or Dirichlet distribution."""
    out: dict[str, Any] = {}
    for site in latent_sites(trace):
        fn = base_distribution(site["fn"])
        for name in _CONCENTRATIONS.get(type(fn), ()):
            x = jnp.min(jnp.asarray(getattr(fn, name)))
            out[site["name"]] = jnp.minimum(x, out.get(site["name"], x))
    return out


_CONCENTRATIONS = {dist.Gamma: _GAMMA[:1], dist.Beta: _BETA, dist.Dirichlet: _GAMMA[:1]}
_SMALL = 0.05
"""The concentration below which single precision loses a part of the gradient of a draw: 6 % at
0.03, and two fifths at 0.01."""


def lost_gradients(least: dict[str, Any]) -> list[str]:
    """A sentence on each site of a guide with draws that have too small a gradient."""
    return [
        f"the guide draws '{name}' with a concentration of {float(x):.2g}, and below {_SMALL}"
        " the gradient of such a draw is too near to 0 in single precision, so that its parameters"
        " stop too early; draw the logarithm or the logits from a Normal, or use"
        " numpyro.enable_x64()."
        for name, x in least.items()
        if x < _SMALL and jnp.result_type(float) == jnp.float32
    ]
