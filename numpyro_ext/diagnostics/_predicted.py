"""The predictions of a fit at given data, draw by draw, from which all scores are computed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import (
    BernoulliLogits,
    BernoulliProbs,
    CategoricalLogits,
    CategoricalProbs,
    Distribution,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
)
from numpyro.handlers import condition
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.density import log_prob, row_log_prob, seen
from numpyro_ext._model.exact import exact
from numpyro_ext._model.read import Site, frames, is_data, latent_sites, layers
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._fit import BLOCK, Fit, concatenate, over_draws
from numpyro_ext.diagnostics._fit_of import check_key, predicting_fit

LARGEST = 1e9
"""The largest predictions, in bytes, that are computed."""
NOISE_DRAWS = 100
"""Draws of a distribution, where it has no cdf or no moments in closed form."""
CLASSES = BernoulliLogits, BernoulliProbs, CategoricalLogits, CategoricalProbs
_WRAPPERS = ExpandedDistribution, Independent, MaskedDistribution


class Predicted(NamedTuple):
    """Predictions of S draws at n entries of an observed site; a row may have several entries."""

    title: str
    site: str
    kind: str
    """``"numbers"``, ``"counts"`` or ``"classes"``."""
    y: np.ndarray
    """``(n,)``."""
    log_lik: np.ndarray
    """``(S, rows)``."""
    mean: np.ndarray | None = None
    """``(S, n)``, as is the variance; for numbers and counts alone."""
    variance: np.ndarray | None = None
    pit: np.ndarray | None = None
    """``(n,)``, the predictive probability of a value below y."""
    probs: np.ndarray | None = None
    """``(S, n, C)``, of classes."""


def predictions_of_fit(
    obj: Any, result: Any = None, *, site: str | None = None, labelled: bool = True, **asked: Any
) -> Predicted:
    """The predictions of a fit for the observed site; if not labelled, labels may be missing."""
    fit = predicting_fit(obj, result, **asked)
    fit = fit if labelled else _any_labels(fit)
    proto = fit.proto
    name = _site_of(proto.trace, site)
    if name in proto.left_out:
        raise ValueError(
            f"the prediction of '{name}' needs {proto.marginalized}, which the run summed out."
        )
    observed = proto.trace[name]
    _refuse_local(proto.trace, observed)
    kind = kind_of(observed)
    size = fit.num_draws
    shape = np.broadcast_shapes(np.shape(observed["value"]), observed["fn"].shape())
    numbers = math.prod(shape) * (num_classes(observed) if kind == "classes" else 4)
    run = _compile(fit, name, numbers)
    if not fit.existing and not _is_random(fit, name):
        size = 1  # a point, as each member of a deep ensemble is
    refuse_large(numbers, size * len(fit.params), shape)
    pieces, data = zip(*run(fit.keys[1], size), strict=True)
    predictions = concatenate(pieces)
    several = f"{len(pieces)} x " if len(pieces) > 1 else ""
    draws = f"{several}{size:,} draw{'s' * (size > 1)}"
    draws += " of the linearised network" * (fit.linearised is not None)
    return _assemble(fit.title_of(draws), name, kind, data[-1], predictions)


def _any_labels(fit: Fit) -> Fit:
    """The fit with a label of 0 in place of each that the arguments leave out."""

    def look() -> Sites:
        params, key, first = fit.params[0], random.key(0), None
        if fit.existing:
            first = {name: jnp.asarray(x[0]) for name, x in fit.existing[0].items()}
        draw = fit.draw(params, first, key)[1]
        sites = latent_sites(fit.model_trace(params, draw, key))
        labels = [x for x in sites if isinstance(_elementwise(x["fn"]), CLASSES)]
        return {x["name"]: jnp.zeros_like(x["value"]) for x in labels if x["name"] not in draw}

    labels: Any = {n: jnp.zeros(x.shape, x.dtype) for n, x in jax.eval_shape(look).items()}
    return replace(fit, model=condition(fit.model, labels)) if labels else fit


def _elementwise(fn: Any) -> Any:
    """The distribution without the wrappers of shape and mask."""
    return next(layer for layer in layers(fn) if not isinstance(layer, _WRAPPERS))


def kind_of(site: Site) -> str:
    """``"classes"``, ``"counts"`` or ``"numbers"``, by the support of a site; or an error."""
    fn = _elementwise(site["fn"])
    if isinstance(fn, CLASSES):
        return "classes"
    if not fn.support.is_discrete:
        return "numbers"
    if fn.event_dim == 0:
        return "counts"
    raise ValueError(
        f"site '{site['name']}' is a {type(fn).__name__}, whose value is neither one class nor"
        " numbers; score it by log_predictive_density."
    )


def num_classes(site: Site) -> int:
    """C of a site of classes."""
    return jnp.shape(_elementwise(site["fn"]).enumerate_support(expand=False))[0]


def predicted(site: Site, rng_key: Array) -> dict[str, Array]:
    """The prediction of one draw at every entry of an observed site: ``log_lik``; ``probs`` of
    classes ``(*entries, C)``; of numbers and counts ``mean``, ``variance`` and ``cdf`` there."""
    site = {**site, "fn": exact(site["fn"])}
    value, fn = jnp.asarray(site["value"]), _elementwise(site["fn"])
    shape = jnp.broadcast_shapes(value.shape, site["fn"].shape())
    kind, inner = kind_of(site), {**site, "fn": fn, "value": value, "intermediates": []}
    whole = log_prob(site)
    # Without a plate, `to_event` may have declared all rows one event.
    log_lik = row_log_prob(site) if whole.ndim == 0 and fn.event_dim == 0 else whole
    out = {"log_lik": log_lik}
    if kind == "classes":
        support = jnp.reshape(fn.enumerate_support(expand=False), (-1,) + (1,) * len(shape))
        each = jnp.broadcast_to(support, (support.shape[0], *shape))
        probs = jnp.exp(log_prob({**inner, "value": each}))
        # Of logits that are NaN, NumPyro's Bernoulli makes the probabilities 1 and 0.
        own = jnp.isnan(fn.probs)
        own = jnp.any(own, -1) if own.ndim > len(fn.batch_shape) else own
        return {**out, "probs": jnp.moveaxis(jnp.where(own, jnp.nan, probs), 0, -1)}
    if (drawn_shape := jax.eval_shape(fn.sample, rng_key).shape) != tuple(fn.shape()):
        raise ValueError(
            f"the data of '{site['name']}' have shape {fn.shape()} and its draws {drawn_shape}, as"
            " where a datum is an interval, so that densities alone can be compared; take az.loo of"
            " to_arviz."
        )
    moments = _closed_forms(inner, kind)
    if len(moments) < 3:
        draws = fn.sample(rng_key, (NOISE_DRAWS, *shape[: len(shape) - len(fn.shape())]))
        below = jnp.mean((draws < value) + 0.5 * (draws == value), 0)
        drawn = {"mean": jnp.mean(draws, 0), "variance": jnp.var(draws, 0), "cdf": below}
        moments = drawn | moments
    return out | {name: jnp.broadcast_to(x, shape) for name, x in moments.items()}


def _closed_forms(site: Site, kind: str) -> dict[str, Array]:
    """``mean``, ``variance`` and ``cdf``, as far as the distribution has them."""
    moments: dict[str, Array] = {}
    fn = site["fn"]
    for name in ("mean", "variance"):
        try:
            moments[name] = getattr(fn, name)
        except (NotImplementedError, AttributeError):
            continue
    try:
        cdf = fn.cdf(site["value"])
    except (NotImplementedError, AttributeError):
        return moments
    half = 0.5 * jnp.exp(log_prob(site)) if kind == "counts" else 0.0
    return {**moments, "cdf": cdf - half}


def _site_of(trace: Trace, name: str | None) -> str:
    observed = [site["name"] for site in trace.values() if is_data(site)]
    if not observed:
        raise ValueError("the model has no observed site here; pass model_args=(X_test, y_test).")
    if name is None and len(observed) == 1:
        return observed[0]
    if name is None or name not in observed:
        raise ValueError(f"site is {name!r}; it must be one of the observed sites {observed}.")
    return name


def _refuse_local(trace: Trace, observed: Site) -> None:
    """An error where a latent site of a row would be inferred from the observation itself."""
    plates = set(frames(observed))
    for site in latent_sites(trace):
        if plates and plates <= set(frames(site)):
            raise ValueError(
                f"latent site '{site['name']}' belongs to one row of '{observed['name']}', whose"
                " prediction would use the observation itself; use held_out_log_likelihood."
            )


def refuse_large(numbers: int, num_draws: int, shape: tuple[int, ...]) -> None:
    """An error if so many numbers of each draw would not fit into a small memory."""
    size = 4.0 * numbers * num_draws
    if size > LARGEST:
        raise ValueError(
            f"the predictions of {num_draws:,} draws at entries {shape} would take"
            f" {size / 1e9:.1f} GB; pass a smaller num_samples, or fewer rows at a time."
        )


def _predict_draw(fit: Fit, name: str, params: Params, draw: Sites | None, keys: Array) -> Site:
    if fit.linearised is not None:
        return fit.linearised.linearised_site(keys[0], params, name, fit.args, fit.kwargs)
    return fit.model_trace(params, fit.draw(params, draw, keys[0])[1], keys[1])[name]


def _compile(fit: Fit, name: str, numbers: int) -> Callable[..., Iterator[Any]]:
    """The compiled predictions of draws, each ``(S, ...)``, and the data of the site."""

    def prepare(params: Params, first: Sites | None, keys: Array) -> tuple[Any, Any]:
        def predict(draw: Sites | None, keys: Array) -> dict[str, Array]:
            return predicted(_predict_draw(fit, name, params, draw, keys), keys[2])

        site = _predict_draw(fit, name, params, first, keys)
        return predict, {"y": jnp.asarray(site["value"]), "seen": seen(site)}

    return over_draws(fit, prepare, max(1, BLOCK // max(1, numbers)), 3)


def _is_random(fit: Fit, name: str) -> bool:
    """Whether draws of the guide, or runs of the model, may predict different things."""

    def prediction(data: Array) -> dict[str, Array]:
        keys = random.wrap_key_data(data)
        return predicted(_predict_draw(fit, name, fit.params[0], None, keys), random.key(0))

    data = random.key_data(random.split(random.key(0), 3))
    return any(eval_provenance(prediction, data=data).values())


def predictions_of_distribution(fn: Distribution, y: Any, rng_key: Any = None) -> Predicted:
    """The predictions of a distribution with the draws on its first axis, or of a single draw."""
    y = np.asarray(y)
    if bad := int(np.sum(~np.isfinite(y))):
        raise ValueError(f"y has {bad} NaN or inf among {y.size} numbers; drop these rows.")
    if len(fn.shape()) == y.ndim:
        fn = fn.expand((1, *fn.batch_shape))
    if fn.shape()[1:] != y.shape:
        raise ValueError(
            f"the distribution has shape {fn.shape()} and y {y.shape}; it must be (S, *shape of y)."
        )
    site = {"name": "y", "fn": fn, "value": jnp.asarray(y), "intermediates": []}
    kind = kind_of(site)
    if kind == "classes":
        labels_of("y", y, num_classes(site))
    predictions = jax.device_get(predicted(site, check_key(rng_key)))
    data = {"y": y, "seen": jax.device_get(seen(site))[0]}
    title = f"{type(fn).__name__}, {fn.shape()[0]:,} draws"
    return _assemble(title, "y", kind, data, predictions)


def labels_of(name: str, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Labels as integers in ``0 .. num_classes - 1``, or an error."""
    wrong = labels[(labels < 0) | (labels >= num_classes) | (labels != np.round(labels))]
    if wrong.size:
        raise ValueError(
            f"{name} has the value {wrong[0]}; it must hold integers from 0 to {num_classes - 1}."
        )
    return labels.astype(int)


def _refuse_nan(site: str, x: np.ndarray) -> None:
    """An error if a draw has a prediction, or a log density, that is NaN or +inf."""
    bad = int(np.sum((np.isnan(x) | (x == np.inf)).any(1)))
    if bad:
        raise ValueError(
            f"the prediction of '{site}' is NaN or +inf in {bad} of {len(x)} draws; leave out the"
            " chains or restarts that diverged, and look whether the new rows hold NaN."
        )


def _assemble(
    title: str, site: str, kind: str, data: dict[str, Any], predictions: dict[str, np.ndarray]
) -> Predicted:
    """Everything in double precision, without the entries that a mask leaves out."""
    kept = data["seen"]
    log_lik = predictions["log_lik"]
    rows = kept.reshape(*log_lik.shape[1:], -1).any(-1) if kept.ndim else kept
    if not rows.any():
        raise ValueError(f"every row of '{site}' is masked; pass rows with observations.")
    y = np.broadcast_to(data["y"], kept.shape)[kept].astype(np.float64)
    log_lik = log_lik.astype(np.float64)[:, rows]
    _refuse_nan(site, log_lik)
    there = Predicted(title, site, kind, y, log_lik)
    if kind == "classes":
        probs = predictions["probs"].astype(np.float64)[:, kept]
        _refuse_nan(site, probs.reshape(len(probs), -1))
        return there._replace(probs=probs)
    mean, variance, cdf = (
        predictions[name][:, kept].astype(np.float64) for name in ("mean", "variance", "cdf")
    )
    return there._replace(mean=mean, variance=variance, pit=cdf.mean(0))
