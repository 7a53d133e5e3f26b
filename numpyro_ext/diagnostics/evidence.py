"""Bounds of the log evidence from the importance weights of a fitted guide."""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp, softmax

from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext.diagnostics.psis import log_weights_of


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
    bound of order n). The standard error is by the delta method,

    .. math::
        \frac{\mathrm{sd}(\tilde w)}{\sqrt S\, |1 - \alpha|}, \qquad
        \tilde w_s = S \frac{e^{(1 - \alpha)\, lw_s}}{\sum_j e^{(1 - \alpha)\, lw_j}},

    and ``sd(lw) / sqrt(S)`` for ``alpha=1``. If plates enclose every site of model and guide, their
    elements are independent units: the bounds are sums over units, and the squared errors too.

    **Biased.** For alpha below 1 the estimate is biased downwards, so an upper bound may come out
    below the evidence. **It fails** if a few weights carry everything: with an effective sample
    size under 50 neither the bounds below ``alpha=1`` nor their errors say anything.

    :param obj: ``(S,)`` or ``(S, *units)`` log weights; or a ``DataTree`` of :func:`to_arviz`; or
        an ``SVI`` or engine. Chains and restarts are put one after the other.
    :param alphas: finite orders of Renyi's divergence, q first.
    :param result: for an ``SVI`` or engine: what its ``run`` returned, or the state of the ``SVI``.
    :param tuple model_args: the model's arguments, for an ``SVI`` or engine.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: draws from the guide.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :param proxy: for an ``SVI`` on more than 10,000 rows: the result of
        :func:`numpyro_ext.objectives.taylor_proxy`, which stands in for most of them as in
        :func:`diagnose`; for rows of a ``HostArray`` one at the mean of the guide, if None.
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
    """
    of_a_fit = (result, model_args, model_kwargs, num_samples, rng_key)
    lw = log_weights_of(obj, *of_a_fit, proxy=proxy).astype(np.float64)
    if lw.ndim == 0 or lw.shape[0] < 2:
        raise ValueError(f"log_weights has shape {lw.shape}, not (S, *units) of 2 draws or more.")
    if np.any(np.isnan(lw) | np.isposinf(lw)):
        raise ValueError("log_weights holds nan or inf; the fit may have diverged.")
    orders = tuple(float(alpha) for alpha in alphas)
    if not np.all(np.isfinite(orders)):
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
