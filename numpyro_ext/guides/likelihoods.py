r"""The linear predictors of likelihoods, and a root of the Fisher information in them.

With the parameters :math:`\theta` of the distribution of a number, of Fisher information :math:`F =
R^\top R`, the square of the Jacobian of the whitened parameters :math:`R(\theta_0)\,\theta` in the
latent sites is the generalised Gauss-Newton matrix :math:`J^\top F J`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.lax import stop_gradient
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.util import clamp_probs

from numpyro_ext._model.density import seen
from numpyro_ext._model.read import Site, layers
from numpyro_ext._numpyro import mask_of

_WITH_LOGITS = (dist.BernoulliLogits, dist.BinomialLogits, dist.CategoricalLogits)


class _Family(NamedTuple):
    """A distribution's linear predictor eta, its whitened parameters, and a copy with other eta."""

    read: Callable[[Any], Array]
    whiten: Callable[[Any, Array], Array]
    make: Callable[[Any, Array], Any]


def _normal(fn: Any, eta: Array) -> Array:
    # The Fisher information of (loc, scale) is diag(1, 2) / scale^2; scale may be a latent site.
    eta, scale = jnp.broadcast_arrays(eta, fn.scale)
    both = jnp.stack([eta, jnp.sqrt(2.0) * scale], axis=-1)
    return both / stop_gradient(scale)[..., None]


def _by_variance(variance: Callable[[Any, Array], Array]) -> Callable[[Any, Array], Array]:
    """Of a family with the canonical link: the information is the variance of a draw."""
    return lambda fn, eta: (jnp.sqrt(stop_gradient(variance(fn, eta))) * eta)[..., None]


def _binary_variance(fn: Any, eta: Array) -> Array:
    p = jax.nn.sigmoid(eta)
    return getattr(fn, "total_count", 1) * p * (1 - p)


def _categorical(fn: Any, eta: Array) -> Array:
    p = stop_gradient(jax.nn.softmax(eta, axis=-1))
    return jnp.sqrt(p) * (eta - jnp.sum(p * eta, axis=-1, keepdims=True))


def _log_odds(fn: Any) -> Array:
    if type(fn) in _WITH_LOGITS:
        return fn.logits
    p = clamp_probs(fn.probs)
    return jnp.log(p) - jnp.log1p(-p)


def _log_probs(fn: Any) -> Array:
    return fn.logits if type(fn) in _WITH_LOGITS else jnp.log(clamp_probs(fn.probs))


def _binary(fn: Any, eta: Array) -> Any:
    count = getattr(fn, "total_count", None)
    return dist.Bernoulli(logits=eta) if count is None else dist.Binomial(count, logits=eta)


_NORMAL = _Family(lambda fn: fn.loc, _normal, lambda fn, eta: dist.Normal(eta, fn.scale))
_POISSON = _Family(
    lambda fn: jnp.log(fn.rate),
    _by_variance(lambda fn, eta: jnp.exp(eta)),
    lambda fn, eta: dist.Poisson(jnp.exp(eta)),
)
_BINARY = _Family(_log_odds, _by_variance(_binary_variance), _binary)
_CATEGORICAL = _Family(_log_probs, _categorical, lambda fn, eta: dist.Categorical(logits=eta))
_FAMILIES: dict[type, _Family] = {
    dist.Normal: _NORMAL,
    dist.BernoulliLogits: _BINARY,
    dist.BernoulliProbs: _BINARY,
    dist.BinomialLogits: _BINARY,
    dist.BinomialProbs: _BINARY,
    dist.CategoricalLogits: _CATEGORICAL,
    dist.CategoricalProbs: _CATEGORICAL,
    dist.Poisson: _POISSON,
}
_WRAPPERS = (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)


def _read(site: Site) -> tuple[Any, _Family, Array]:
    """The innermost distribution of an observed site, its family, and a mask in its shape."""
    fn = next(fn for fn in layers(site["fn"]) if not isinstance(fn, _WRAPPERS))
    if type(fn) not in _FAMILIES:
        what = "a numpyro.factor" if isinstance(fn, dist.Unit) else f"{type(fn).__name__}"
        raise ValueError(
            f"the observed site '{site['name']}' is {what}; it must be Normal, Bernoulli, Binomial,"
            " Categorical or Poisson. Use AutoLaplaceApproximation, which takes the Hessian."
        )
    return fn, _FAMILIES[type(fn)], seen(site)


def predictor(site: Site) -> Array:
    """The linear predictor of a site, in its shape and for categories with a last axis: a mean, log
    odds, log probabilities up to a constant, or a log rate."""
    fn, family, mask = _read(site)
    eta = family.read(fn)
    return jnp.broadcast_to(eta, mask.shape + eta.shape[len(fn.batch_shape) :])


def with_predictor(site: Site, eta: Array) -> Any:
    """The distribution of a site of another :func:`predictor`, with its mask and its events."""
    base, family, mask = _read(site)
    fn = family.make(base, eta)
    if any(mask_of(layer) is not None for layer in layers(site["fn"])):
        fn = fn.mask(mask)
    return fn.to_event(site["fn"].event_dim - fn.event_dim)


def whitened(site: Site) -> Array:
    """``(*shape, k)``, the whitened parameters of a site of this shape; 0 where it is masked."""
    fn, family, mask = _read(site)
    theta = family.whiten(fn, family.read(fn))
    theta = jnp.broadcast_to(theta, (*mask.shape, theta.shape[-1]))
    return jnp.where(mask[..., None], theta, 0.0)
