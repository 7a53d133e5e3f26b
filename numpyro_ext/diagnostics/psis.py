"""Whether the importance weights of a guide may be used, by the shape of their tail."""

import math
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.implicit import IntractableDensityError
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext.diagnostics._density import declare
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._fit_of import fit_of
from numpyro_ext.diagnostics._target import by_proxy, proxy_of
from numpyro_ext.diagnostics.limits import NO_DENSITY

INSTEAD = (
    "judge its draws with kernel_stein_discrepancy or, against draws of the posterior, with"
    " maximum_mean_discrepancy"
)
FEWEST = 25
"""The least number of weights from which a shape of their tail is fitted."""
_EQUAL, _DIFFERENT = 1e-5, 0.1
"""Differences of log weights that are always, or never, taken for rounding."""


class ParetoKhat(NamedTuple):
    """The result of :func:`pareto_khat`."""

    khat: Any
    """The shape: a number, or an array ``(*units)``."""
    threshold: float
    """Largest khat at which the weights of this many draws are of use."""
    log_weights: np.ndarray
    """``(S, *units)`` smoothed weights as logs; the weights of a unit sum to 1."""

    def __repr__(self) -> str:
        khat = np.asarray(self.khat)
        of_units = f" at most, {np.median(khat):.3f} in the median" if khat.ndim else ""
        return (
            f"ParetoKhat(khat={np.max(khat):.3f}{of_units}, threshold={self.threshold:.2f},"
            f" {len(self.log_weights)} draws)"
        )


def pareto_khat(
    obj: Any,
    result: Any = None,
    *,
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int = 1000,
    rng_key: Any = None,
    proxy: TaylorProxy | None = None,
) -> ParetoKhat:
    r"""Pareto shape :math:`\hat k` of importance weights, and the smoothed weights.

    The largest of the S weights

    .. math:: w_s = \frac{p(x, z_s)}{q(z_s)}, \qquad z_s \sim q,

    are fitted by a generalised Pareto distribution with moments of all orders below :math:`1/k`.

    - :math:`\hat k < 0.5`: the weights have a finite variance.
    - :math:`\hat k <` ``threshold`` :math:`= \min(1 - 1/\log_{10} S,\ 0.7)`: importance sampling
      with ``log_weights`` works. The guide may still be too narrow, or miss a mode.
    - above: do not use the weights. The guide may still be good; in high dimension a large value
      is the rule.

    If plates enclose every site of model and guide, their elements are independent units, and each
    unit has its own weights and its own :math:`\hat k`. It is reliable from S of about 500. If most
    weights of the tail are equal, as for a discrete guide, it has no shape: then it is ``-inf``, or
    ``inf`` if a single draw has more than :math:`1 / \\sqrt S` of the weight. Draws of weight 0 do
    not enter, with an ``InferenceWarning`` if they are more than a tenth.

    :param obj: ``(S,)`` or ``(S, *units)`` log weights, *not negated*; or a ``DataTree`` of
        :func:`to_arviz`; or an ``SVI`` or engine. Chains are put one after the other.
    :param result: for an ``SVI`` or engine: what its ``run`` returned.
    :param tuple model_args: the model's arguments, for an ``SVI`` or engine.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: draws from the guide.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :param proxy: as in :func:`diagnose`.
    :return: :class:`ParetoKhat`.
    :raises IntractableDensityError: for guides without a density and for ``MCMC``.

    **References**

    1. *Pareto Smoothed Importance Sampling*, A. Vehtari et al. (JMLR 2024), sections 2.3 and 3.
    2. *Yes, but Did It Work?*, Y. Yao et al. (ICML 2018), Algorithm 1.
    3. *Truncated Importance Sampling*, E. L. Ionides (JCGS 2008): the bound of a single weight.

    >>> from jax.scipy.stats import norm, t
    >>> from numpyro_ext.diagnostics import pareto_khat
    >>> z = jax.random.normal(jax.random.key(0), (2000,))
    >>> narrow = pareto_khat(t.logpdf(z, 3) - norm.logpdf(z))
    >>> wide = pareto_khat(norm.logpdf(2 * z) - norm.logpdf(z))
    >>> narrow.khat > narrow.threshold, wide.khat < 0
    (True, True)
    """
    of_a_fit = (result, model_args, model_kwargs, num_samples, rng_key)
    log_w = log_weights_of(obj, *of_a_fit, proxy=proxy_of(obj, proxy))
    size = log_w.shape[0] if log_w.ndim else 1
    if size < FEWEST:
        raise ValueError(f"there are {size} log weights; the tail fit needs at least {FEWEST}.")
    if np.any(np.isnan(log_w) | (log_w == np.inf)):
        raise ValueError("a log weight is NaN or +inf; the fit may have diverged.")
    if not np.all(np.any(log_w > -np.inf, 0)):
        raise ValueError("every log weight is -inf; no draw has a density under the model.")
    there = np.min(np.sum(log_w > -np.inf, 0))
    if there < (1 - NO_DENSITY) * size:
        message = (
            f"{size - there:,} of {size:,} draws have weight 0, and khat describes the others; use"
            " a guide on the support of the model."
        )
        warnings.warn(InferenceWarning(message), stacklevel=2)
    return fit_tails(log_w)


def fit_tails(log_w: np.ndarray) -> ParetoKhat:
    """The shapes of the tails of ``(S, *units)`` log weights, which are finite or -inf."""
    if not np.issubdtype(log_w.dtype, np.floating):
        log_w = log_w.astype(float)
    precision = np.finfo(log_w.dtype).eps
    log_w = log_w.astype(np.float64)
    smoothed, khat = np.full_like(log_w, -np.inf), np.empty(log_w.shape[1:])
    for unit in np.ndindex(khat.shape):
        column = log_w[(slice(None), *unit)]
        there = column > -np.inf
        khat[unit], smoothed[(there, *unit)] = _fit_tail(column[there], precision)
    fewest = max(np.min(np.sum(log_w > -np.inf, 0)), FEWEST)
    threshold = float(min(1 - 1 / np.log10(fewest), 0.7))
    return ParetoKhat(khat if khat.ndim else float(khat), threshold, smoothed)


def khat_error(khat: Any, num_draws: int) -> np.ndarray:
    """The standard error of a shape by maximum likelihood, and 0 of one that is infinite."""
    k = np.asarray(khat, float)
    error = (1 + np.maximum(k, -0.5)) / math.sqrt(_tail_of(num_draws))
    return np.where(np.isfinite(k), error, 0.0)


def _tail_of(num_draws: int) -> int:
    """The number of weights to which a shape is fitted."""
    return math.ceil(min(0.2 * num_draws, 3 * math.sqrt(num_draws)))


def _fit_tail(log_w: np.ndarray, precision: float) -> tuple[float, np.ndarray]:
    """``(khat, smoothed log weights)`` of ``(S,)`` finite log weights."""
    shifted = log_w - log_w.max()
    raw = shifted - np.log(np.sum(np.exp(shifted)))
    if log_w.size < FEWEST:  # nearly all draws are lost
        return np.inf, raw
    # Rounding in log p and log q, which are about as large as their difference or larger. Weights
    # that differ by a tenth are not called equal, however large their logarithms are.
    rounding = min(max(_EQUAL, 64 * precision * max(1.0, abs(log_w.max()))), _DIFFERENT)
    if -shifted.min() <= rounding:
        return -np.inf, np.full(log_w.shape, -np.log(log_w.size))
    tail = np.sort(shifted)[-_tail_of(log_w.size) :]
    if np.mean(tail > tail[0] + rounding) > 0.75:
        from arviz_stats.base.array import array_stats

        psislw: Any = array_stats.psislw
        smoothed, khat = psislw(-shifted)
        return float(khat), smoothed
    # A tail of a few values: the weights are bounded, if none of them is a large share.
    return (-np.inf if raw.max() <= -0.5 * np.log(log_w.size) else np.inf), raw


def log_weights_of(obj: Any, *of_a_fit: Any, proxy: TaylorProxy | None = None) -> np.ndarray:
    """``(S, *units)`` log weights of arrays, a ``DataTree`` or its part, or a fit."""
    if isinstance(obj, np.ndarray | jax.Array | list | float):
        return np.asarray(obj)
    if isinstance(obj, MCMC):
        raise IntractableDensityError(f"the draws of an MCMC have no density; {INSTEAD}.")

    from xarray import DataArray, DataTree

    if isinstance(obj, DataTree):
        if "sample_stats" not in obj or "log_weight" not in obj["sample_stats"]:
            raise IntractableDensityError(
                f"the DataTree has no log_weight, because its draws have no density; {INSTEAD}."
            )
        obj = obj["sample_stats"]["log_weight"]
    if isinstance(obj, DataArray):
        weight = obj.transpose("chain", "draw", ...).to_numpy()
    else:
        fit = by_proxy(fit_of(obj, *of_a_fit), proxy)
        for problem in fit.problems:
            warnings.warn(InferenceWarning(problem), stacklevel=4)
        _refuse_without_density(fit)
        weight = fit.stats["log_weight"]
    return weight.reshape(-1, *weight.shape[2:])


def _refuse_without_density(fit: Fit) -> None:
    """An error if the draws of a fit have no density."""
    if fit.proto.marginalized:
        raise IntractableDensityError(
            f"latent site '{fit.proto.marginalized[0]}' was summed out, so there is no density of"
            f" the draws; {INSTEAD}."
        )
    if fit.proto.density == "none":
        what = fit.attributes.get("guide", "this fit")
        raise IntractableDensityError(
            f"{what} gives draws without a density, so they have no importance weights; {INSTEAD}"
            f"{declare(fit.proto.undeclared)}."
        )
