"""What the distribution of an observed site predicts: classes, or moments and its cdf."""

from typing import Any

from jax import Array
import jax.numpy as jnp
from numpyro.distributions import (
    BernoulliLogits,
    BernoulliProbs,
    CategoricalLogits,
    CategoricalProbs,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
)

from numpyro_ext._model.density import log_prob, row_log_prob
from numpyro_ext._model.read import Site, layers

__all__ = ["NOISE_DRAWS", "kind_of", "num_classes", "predicted"]

NOISE_DRAWS = 100
"""Draws of a distribution, where it has no cdf or no moments in closed form."""
_CLASSES = BernoulliLogits, BernoulliProbs, CategoricalLogits, CategoricalProbs
_WRAPPERS = ExpandedDistribution, Independent, MaskedDistribution


def _elementwise(fn: Any) -> Any:
    """The distribution of a single number or vector, without the wrappers of shape and mask."""
    return next(layer for layer in layers(fn) if not isinstance(layer, _WRAPPERS))


def kind_of(site: Site) -> str:
    """``"classes"``, ``"counts"`` or ``"numbers"``, by the support of a site; or an error."""
    fn = _elementwise(site["fn"])
    if isinstance(fn, _CLASSES):
        return "classes"
    if not fn.support.is_discrete:
        return "numbers"
    if fn.event_dim == 0:
        return "counts"
    raise ValueError(
        f"site '{site['name']}' is a {type(fn).__name__}, whose value is neither one class nor"
        " numbers; its score is log_predictive_density, and that of classes needs a Categorical."
    )


def num_classes(site: Site) -> int:
    """C of a site of classes."""
    return jnp.shape(_elementwise(site["fn"]).enumerate_support(expand=False))[0]


def predicted(site: Site, rng_key: Array) -> dict[str, Array]:
    """The prediction of one draw of the latent sites, at every entry of an observed site.

    * ``log_lik`` - the log density of every row, without scales.
    * ``probs`` - of classes: ``(*entries, C)``.
    * ``mean``, ``variance``, ``cdf`` - of counts and numbers: ``(*entries,)``, the cdf at the
      observation, of counts with half of its own probability.

    :param site: of a fit, or made of a distribution, whose first axis may be that of draws.
    """
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
    found = _closed_forms(inner, kind)
    if len(found) < 3:
        draws = fn.sample(rng_key, (NOISE_DRAWS, *shape[: len(shape) - len(fn.shape())]))
        below = jnp.mean((draws < value) + 0.5 * (draws == value), 0)
        found = {"mean": jnp.mean(draws, 0), "variance": jnp.var(draws, 0), "cdf": below} | found
    return out | {name: jnp.broadcast_to(x, shape) for name, x in found.items()}


def _closed_forms(site: Site, kind: str) -> dict[str, Array]:
    """Those of ``mean``, ``variance`` and ``cdf`` that the distribution has."""
    found: dict[str, Array] = {}
    fn = site["fn"]
    for name in ("mean", "variance"):
        try:
            found[name] = getattr(fn, name)
        except (NotImplementedError, AttributeError):
            continue
    try:
        cdf = fn.cdf(site["value"])
    except (NotImplementedError, AttributeError):
        return found
    half = 0.5 * jnp.exp(log_prob(site)) if kind == "counts" else 0.0
    return {**found, "cdf": cdf - half}
