"""Bounds of the log evidence from the importance weights of a fitted guide."""

from collections.abc import Sequence
from functools import partial
import math
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from scipy.special import logsumexp, softmax

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.density import log_density
from numpyro_ext._model.handlers import rows
from numpyro_ext._model.minibatch import replace_indices
from numpyro_ext._model.potential import Program
from numpyro_ext._model.taylor import LARGEST_NOISE, TaylorProxy, noise_message, sd_over_minibatches
from numpyro_ext._model.units import find_layout
from numpyro_ext._typing import Params
from numpyro_ext.diagnostics._evaluate import concatenate, draw_of, model_trace_of
from numpyro_ext.diagnostics._fit import FitRequest, check_key, is_fit
from numpyro_ext.diagnostics._target import proxy_at_draws
from numpyro_ext.diagnostics.full_data import minibatch_plates
from numpyro_ext.diagnostics.psis import log_weights_of, look_at_density

_ROWS = 1000
"""Rows, at least, on which a draw is evaluated by a proxy."""
_TERMS = 10**6
"""Log likelihoods of rows in a block of draws."""


class EvidenceBounds(NamedTuple):
    """The result of :func:`evidence_bounds`, in nats."""

    alphas: tuple[float, ...]
    """The orders, as they were given."""
    values: np.ndarray
    """``(len(alphas),)``: the bound of each order, summed over units."""
    standard_errors: np.ndarray
    """``(len(alphas),)``: Monte Carlo standard error of each bound."""
    log_evidence: float
    """The bound of order 0: importance sampling's estimate of ``log p(x)``."""
    log_evidence_se: float
    """Its standard error."""
    effective_sample_size: np.ndarray
    """``(*units)``: ``1 / sum w^2`` of the normalised weights w, between 1 and S."""
    max_weight_share: np.ndarray
    """``(*units)``: the largest normalised weight."""

    def __repr__(self) -> str:
        each = zip(self.alphas, self.values, self.standard_errors, strict=True)
        bounds = ", ".join(f"{value:.2f} +- {se:.2g} (alpha={a:g})" for a, value, se in each)
        least = float(np.min(self.effective_sample_size))
        return f"EvidenceBounds({bounds}; effective sample size {least:.1f})"


def evidence_bounds(
    obj: Any,
    result: Any = None,
    *,
    alphas: Sequence[float] = (1.0, 0.5, 0.0, -1.0),
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int = 5000,
    rng_key: Any = None,
    proxy: TaylorProxy | None = None,
) -> EvidenceBounds:
    r"""Sandwich of the log evidence by variational Renyi bounds of several orders.

    .. math::
        \hat L_\alpha = \frac{1}{1 - \alpha}
            \log \frac{1}{S} \sum_{s=1}^{S} e^{(1 - \alpha)\, lw_s},
        \qquad lw_s = \log p(x, z_s) - \log q(z_s), \quad z_s \sim q,

    in nats. ``alpha=1`` is the mean of the log weights, the ELBO; orders above 0 are lower bounds,
    0 estimates the evidence itself, orders below 0 are upper bounds (``1 - n`` is the chi upper
    bound of order n). They do not increase in alpha. The standard error is by the delta method,

    .. math::
        \frac{\mathrm{sd}(\tilde w)}{\sqrt S\, |1 - \alpha|}, \qquad
        \tilde w_s = S \frac{e^{(1 - \alpha)\, lw_s}}{\sum_j e^{(1 - \alpha)\, lw_j}},

    and ``sd(lw) / sqrt(S)`` for ``alpha=1``. If plates enclose every site of model and guide, their
    elements are independent units: each is bounded separately, the bounds are summed, and the
    errors are added in squares.

    **Biased.** For alpha below 1 the estimate is biased downwards, so an upper bound may come out
    below the evidence. **It fails** if a few weights carry everything: with an effective sample
    size under 50 neither the bounds below ``alpha=1`` nor their errors say anything.

    :param obj: ``(S,)`` or ``(S, *units)`` log weights, as from
        :func:`numpyro_ext.objectives.log_weights`; or a ``DataTree`` of :func:`to_arviz`; or an
        ``SVI`` or engine. Chains and restarts are put one after the other.
    :param alphas: finite orders of Renyi's divergence, q first.
    :param result: for an ``SVI`` or engine: what its ``run`` returned, or the state of the ``SVI``.
    :param tuple model_args: the model's arguments, for an ``SVI`` or engine.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: draws from the guide.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :param proxy: for an ``SVI`` on data of which all rows are too many: the result of
        :func:`numpyro_ext.objectives.taylor_proxy`; for rows of a ``HostArray`` one at the mean of
        the guide, if None. Each draw is then evaluated on 1,000 rows of its own (of a
        minibatch, if it has more), and the noise that is left adds up to half its variance to
        the distances between the bounds. An ``InferenceWarning`` says if the standard deviation
        over the run's minibatches is above 0.5 nats at the draws of the guide.
    :return: an :class:`EvidenceBounds`.
    :raises IntractableDensityError: for guides without a density and for ``MCMC``.

    **References:**

    1. *Renyi divergence variational inference*, Yingzhen Li, Richard E. Turner, NIPS 2016
       (Theorem 1).
    2. *Variational inference via chi upper bound minimization*, Adji B. Dieng, Dustin Tran, Rajesh
       Ranganath, John Paisley, David M. Blei, NIPS 2017 (the sandwich, Section 2).

    >>> from numpyro_ext.diagnostics import evidence_bounds
    >>> bounds = evidence_bounds([-1.2, 0.3, -2.5, 0.9, -0.1, -4.0])
    >>> for alpha, value in zip(bounds.alphas, bounds.values):
    ...     print(f"{alpha:4} {value:.4f}")
     1.0 -1.1000
     0.5 -0.5089
     0.0 -0.1594
    -1.0 0.1908
    >>> print(f"{bounds.effective_sample_size:.1f} draws in effect, of 6")
    3.0 draws in effect, of 6
    """
    asked = FitRequest(obj, result, model_args, model_kwargs, num_samples, rng_key)
    if proxy is None and is_fit(obj) and not isinstance(obj, MCMC):
        proxy = proxy_at_draws(asked.fit(), obj)
    lw = log_weights_of(asked) if proxy is None else _log_weights_by(proxy, asked)
    lw = lw.astype(np.float64)
    if lw.ndim == 0 or lw.shape[0] < 2:
        raise ValueError(
            f"log_weights has shape {lw.shape}; it must be (S, *units) of 2 draws or more."
        )
    if np.any(np.isnan(lw) | np.isposinf(lw)):
        raise ValueError(
            "log_weights holds nan or inf; check the model and the guide at the draws where it"
            " does."
        )
    orders = tuple(float(alpha) for alpha in alphas)
    if not all(math.isfinite(alpha) for alpha in orders):
        raise ValueError(f"alphas is {orders}; every order must be a finite number.")
    with np.errstate(invalid="ignore"):  # of units in which no draw has a density
        bounds = [_bound(lw, 1 - alpha) for alpha in orders]
        log_evidence, log_evidence_se = _bound(lw, 1.0)
        share = softmax(lw, axis=0)
    return EvidenceBounds(
        alphas=orders,
        values=np.array([value for value, _ in bounds]),
        standard_errors=np.array([se for _, se in bounds]),
        log_evidence=log_evidence,
        log_evidence_se=log_evidence_se,
        effective_sample_size=1 / np.sum(share**2, 0),
        max_weight_share=np.max(share, 0),
    )


def _log_weights_by(proxy: TaylorProxy, asked: FitRequest) -> np.ndarray:
    """``(S,)`` log weights of a fit, each draw on other rows."""
    fit = asked.fit()
    _, key_draws = look_at_density(fit, check_key(asked.rng_key))
    on_batches = asked.obj.model
    proxy.check_data(on_batches, fit.args, fit.kwargs, once=True)
    plates = minibatch_plates(on_batches, fit.args, fit.kwargs)
    num_rows = min(proxy.size, max(proxy.batch, _ROWS))

    def log_weight(params: Params, rng_key: Array) -> tuple[Array, Array]:
        key_guide, key_rows, key_model = random.split(rng_key, 3)
        idx = {proxy.plate: replace_indices(key_rows, proxy.size, num_rows)}
        model = rows(on_batches, idx, plates)
        guide_trace, draw = draw_of(fit, params, None, key_guide)
        trace = model_trace_of(fit._replace(model=model), params, draw, key_model)
        layout = find_layout(trace, guide_trace, per_datum=False)
        proxy.check("evidence_bounds", layout, trace)
        run = partial(Program(model, fit.args, fit.kwargs).trace, rng_key=key_model)
        log_p, residuals = proxy.log_joint(trace, run)
        return log_p - log_density(guide_trace), jnp.var(residuals, ddof=1)

    @jax.jit
    def draws(params: Params, keys: Array) -> tuple[Array, Array]:
        block = max(1, _TERMS // num_rows)
        return lax.map(lambda key: log_weight(params, key), keys, batch_size=block)

    keys = random.split(key_draws, (len(fit.params), check_count("num_samples", asked.num_samples)))
    pieces = [jax.device_get(draws(*each)) for each in zip(fit.params, keys, strict=True)]
    lw, variances = (x.astype(np.float64) for x in concatenate(pieces))
    noise = sd_over_minibatches(variances, proxy.size, proxy.batch)
    if not noise <= LARGEST_NOISE:
        message = noise_message(noise, proxy.batch, proxy.size)
        warnings.warn(InferenceWarning(message), stacklevel=3)
    # Added here, because float32 would round the weights to the digits of the sum.
    return float(proxy.value) + lw


def _bound(lw: np.ndarray, a: float) -> tuple[float, float]:
    """The bound of order ``1 - a``, summed over units, and its standard error."""
    size = lw.shape[0]
    if a == 0:
        value, ratio, divisor = np.mean(lw, 0), lw, 1.0
    else:
        value = (np.asarray(logsumexp(a * lw, axis=0)) - math.log(size)) / a
        ratio, divisor = size * softmax(a * lw, axis=0), abs(a)
    if not np.all(np.isfinite(value)):
        return float(np.sum(value)), math.inf
    variance = np.var(ratio, 0, ddof=1) / (size * divisor**2)
    return float(np.sum(value)), float(np.sqrt(np.sum(variance)))
