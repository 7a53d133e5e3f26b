"""The log predictive density of data, row by row or all rows together."""

import math
from typing import Any

import numpy as np

from numpyro_ext._checks import check_choice, check_nonnegative
from numpyro_ext.diagnostics._fit_of import is_fit, predicting_fit, refuse_arguments
from numpyro_ext.diagnostics.held_out import log_mean_exp, log_weights_of


def log_predictive_density(
    log_lik: Any,
    result: Any = None,
    *,
    kind: str = "pointwise",
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int = 1000,
    rng_key: Any = None,
) -> float:
    r"""Log predictive density of N rows of data, in nats per row.

    With :math:`l_{sn} = \log p(y_n \mid \theta_s)` of S draws,

    .. math::

        \text{pointwise:}\quad \frac1N \sum_{n=1}^N \log \frac1S \sum_{s=1}^S e^{l_{sn}},
        \qquad \text{joint:}\quad \frac1N \log \frac1S \sum_{s=1}^S e^{\sum_n l_{sn}}.

    The pointwise density scores each row alone, the joint one all together, under one
    :math:`\theta`. **Biased downwards**, as the log of a mean over draws is: the joint one as long
    as few draws fit all rows best.

    :param log_lik: an array ``(S, N)`` or ``(chain, draw, *rows)``; a ``DataArray``, or the
        ``DataTree`` of :func:`to_arviz`, with one variable in its group; or a fit. With
        latent variables of each row the weights of :func:`held_out_log_likelihood` stand for the
        likelihoods.
    :param result: of an ``SVI`` or engine, its result; a list of restarts is a deep ensemble.
    :param str kind: ``"pointwise"`` or ``"joint"``.
    :param tuple model_args: for a fit: the model's arguments with the data to score.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: draws from a guide, per restart.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :return: a number.

    **References**

    1. *Understanding predictive information criteria for Bayesian models*, A. Gelman, J. Hwang,
       A. Vehtari (Statistics and Computing 2014), equations 3 to 5 (pointwise).
    2. *Evaluating Approximate Inference in Bayesian Deep Learning*, A. G. Wilson et al. (NeurIPS
       2021 competition).

    >>> from numpyro_ext.diagnostics import log_predictive_density
    >>> log_lik = [[-1.0, -2.0, -0.5], [-1.5, -0.7, -3.0]]
    >>> for kind in ("pointwise", "joint"):
    ...     print(f"{log_predictive_density(log_lik, kind=kind):.4f}")
    -1.1618
    -1.3418
    """
    check_choice("kind", kind, ("pointwise", "joint"))
    of_a_fit: Any = {"result": result, "model_args": model_args, "model_kwargs": model_kwargs}
    if is_fit(log_lik):
        fit = predicting_fit(log_lik, **of_a_fit, num_samples=num_samples, rng_key=rng_key)
        matrix = log_weights_of(fit)
        matrix = matrix.reshape(len(matrix), -1)
    else:
        refuse_arguments("log_lik", **of_a_fit)
        matrix = _matrix(log_lik)
    if kind == "pointwise":
        return float(np.mean(log_mean_exp(matrix)))
    return float(log_mean_exp(matrix.sum(1)) / matrix.shape[1])


def _matrix(log_lik: Any) -> np.ndarray:
    """``(S, N)`` log likelihoods of arrays and of ArviZ's objects."""
    group = getattr(log_lik, "children", {}).get("log_likelihood", log_lik)
    if hasattr(group, "data_vars"):
        names = [str(name) for name in group.data_vars]
        if len(names) != 1:
            raise ValueError(f"log_lik has the variables {names}; pass one of them.")
        group = group[names[0]]
    if hasattr(group, "dims"):
        group = group.transpose("chain", "draw", ...).to_numpy()
    x = np.asarray(group, np.float64)
    if x.ndim < 2 or not x.size:
        raise ValueError(f"log_lik has shape {x.shape}; it must be (S, N) or (chain, draw, *rows).")
    if np.isnan(x).any() or (x == np.inf).any():
        raise ValueError("log_lik has NaN or +inf; each log density must be finite or -inf.")
    return x.reshape(x.shape[0] * (x.shape[1] if x.ndim > 2 else 1), -1)


def gaussian_log_density_bound(rmse: float) -> float:
    r"""The mean log density of a calibrated normal prediction with this RMSE and one variance.

    .. math:: -\tfrac12 \log(2 \pi e\, \mathrm{rmse}^2),

    in nats per row, the largest mean log density that a normal of the same variance for all rows
    reaches at this root mean squared error.

    :param rmse: the root mean squared error, in the unit of the observations.
    :return: a number; infinite at 0.

    >>> from numpyro_ext.diagnostics import gaussian_log_density_bound
    >>> f"{gaussian_log_density_bound(2.0):.4f}"
    '-2.1121'
    """
    check_nonnegative("rmse", rmse)
    return math.inf if rmse == 0 else -0.5 * math.log(2 * math.pi * math.e) - math.log(rmse)
