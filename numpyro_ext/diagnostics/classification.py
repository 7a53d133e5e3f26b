"""Scores of predicted probabilities of classes: calibration, Brier score, and entropies."""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import entr

from numpyro_ext._checks import check_count
from numpyro_ext.diagnostics._fit_of import is_fit, refuse_arguments
from numpyro_ext.diagnostics._predicted import Predicted, labels_of, predictions_of_fit


class ReliabilityBins(NamedTuple):
    """The result of :func:`reliability_bins`; NaN in bins without data."""

    confidence: np.ndarray
    """``(num_bins,)``, the mean probability of the most probable class."""
    accuracy: np.ndarray
    """``(num_bins,)``, the share of rows that are in it."""
    count: np.ndarray
    """``(num_bins,)``, rows in the bin."""


class PredictiveUncertainty(NamedTuple):
    """The result of :func:`predictive_uncertainty`, entropies in nats, one for each row."""

    total: np.ndarray
    """The entropy of the mean probabilities."""
    aleatoric: np.ndarray
    """The mean entropy of the draws: noise of the labels."""
    epistemic: np.ndarray
    """The difference, which is the mutual information of the label and the draw."""


def reliability_bins(
    probs: Any, labels: Any = None, num_bins: int = 15, **of_a_fit: Any
) -> ReliabilityBins:
    r"""Confidence, accuracy and number of rows in bins of equal width of the confidence.

    The confidence :math:`c_n` is the probability of the most probable class, and a row is right if
    its label is that class. Bin b of B holds the rows with :math:`(b - 1) / B < c_n \le b / B`; 0
    is in the first.

    :param probs: ``(N, C)``; or ``(S, N, C)`` of S draws, of which the mean is taken; or a fit.
    :param labels: ``(N,)`` integers in ``0 .. C - 1``; of an ``SVI`` or engine, its result.
    :param int num_bins: B.
    :param of_a_fit: the arguments of :func:`predictive_scores`, for a fit.
    :return: :class:`ReliabilityBins`.

    >>> from numpyro_ext.diagnostics import reliability_bins
    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.35, 0.65], [0.6, 0.4]]
    >>> reliability_bins(probs, [0, 1, 1, 0], num_bins=2).accuracy
    array([ nan, 0.75])
    """
    return bins_of(*probs_and_labels(probs, labels, **of_a_fit), num_bins)


def bins_of(probs: np.ndarray, labels: np.ndarray, num_bins: int) -> ReliabilityBins:
    """:func:`reliability_bins` of ``(N, C)`` checked arrays."""
    right = probs.argmax(-1) == labels
    return _binned(probs.max(-1), right, check_count("num_bins", num_bins))


def _binned(confidence: np.ndarray, right: np.ndarray, num_bins: int) -> ReliabilityBins:
    edges = np.arange(1, num_bins) / num_bins
    where = np.digitize(confidence, edges, right=True)
    count = np.bincount(where, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        mean_of, accuracy = (np.bincount(where, x, num_bins) / count for x in (confidence, right))
    return ReliabilityBins(mean_of, accuracy, count)


def error_of(bins: ReliabilityBins) -> float:
    """The expected calibration error of these bins."""
    gaps = np.abs(bins.accuracy - bins.confidence)
    return float(np.nansum(bins.count * gaps) / bins.count.sum())


def expected_calibration_error(
    probs: Any, labels: Any = None, num_bins: int = 15, **of_a_fit: Any
) -> float:
    r"""Expected calibration error of the most probable class.

    .. math:: \mathrm{ECE} = \sum_{b=1}^B \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|

    over the bins of :func:`reliability_bins`, between 0 and 1.

    **Biased upwards**: the error of a perfect model is the noise of its bins;
    :func:`predictive_scores` prints it beside. **It fails** to see the classes below the most
    probable one, and whether the model separates the rows at all.

    :param probs: ``(N, C)``; or ``(S, N, C)`` of S draws, of which the mean is taken; or a fit.
    :param labels: ``(N,)`` integers in ``0 .. C - 1``; of an ``SVI`` or engine, its result.
    :param int num_bins: B.
    :param of_a_fit: the arguments of :func:`predictive_scores`, for a fit.
    :return: a number.

    **References**

    1. *On Calibration of Modern Neural Networks*, C. Guo, G. Pleiss, Y. Sun, K. Q. Weinberger
       (ICML 2017), equation 3.

    >>> from numpyro_ext.diagnostics import expected_calibration_error
    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.35, 0.65], [0.6, 0.4]]
    >>> print(f"{expected_calibration_error(probs, [0, 1, 1, 0], num_bins=10):.4f}")
    0.4125
    """
    return error_of(bins_of(*probs_and_labels(probs, labels, **of_a_fit), num_bins))


def perfect_calibration_error(
    probs: np.ndarray, num_bins: int = 15, num_repeats: int = 200, seed: int = 0
) -> float:
    """The mean error of ``(N, C)`` probabilities that are right: labels are drawn from them."""
    rng, confidence = np.random.default_rng(seed), probs.max(-1)
    repeats = (rng.random(confidence.shape) < confidence for _ in range(num_repeats))
    return float(np.mean([error_of(_binned(confidence, right, num_bins)) for right in repeats]))


def brier_score(probs: Any, labels: Any = None, **of_a_fit: Any) -> float:
    r"""Brier score over all classes, between 0 and 2, lower being better.

    .. math:: \frac1N \sum_{n=1}^N \sum_{c=1}^C (p_{nc} - 1[y_n = c])^2.

    It is a proper score. The convention for two classes that counts one column only is half of it.

    :param probs: ``(N, C)``; or ``(S, N, C)`` of S draws, of which the mean is taken; or a fit.
    :param labels: ``(N,)`` integers in ``0 .. C - 1``; of an ``SVI`` or engine, its result.
    :param of_a_fit: the arguments of :func:`predictive_scores`, for a fit.
    :return: a number.

    **References**

    1. *Verification of Forecasts Expressed in Terms of Probability*, G. W. Brier (Monthly Weather
       Review 1950), equation 2.

    >>> from numpyro_ext.diagnostics import brier_score
    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.35, 0.65], [0.6, 0.4]]
    >>> print(f"{brier_score(probs, [0, 1, 1, 0]):.5f}")
    0.46625
    """
    return brier_of(*probs_and_labels(probs, labels, **of_a_fit))


def brier_of(probs: np.ndarray, labels: np.ndarray) -> float:
    """:func:`brier_score` of ``(N, C)`` checked arrays."""
    truth = labels[:, None] == np.arange(probs.shape[-1])
    return float(np.mean(np.sum((probs - truth) ** 2, -1)))


def predictive_uncertainty(
    probs: Any, result: Any = None, **of_a_fit: Any
) -> PredictiveUncertainty:
    r"""The entropy of a predicted class, split into noise of the label and doubt between draws.

    .. math::

        \underbrace{H\Big[\frac1S \sum_s p_s\Big]}_{\text{total}} =
        \underbrace{\frac1S \sum_s H[p_s]}_{\text{aleatoric}} +
        \underbrace{I[y; \theta]}_{\text{epistemic}}, \qquad H[p] = -\sum_c p_c \log p_c,

    in nats. More data take the epistemic part away, which is at most log S nats, and not the
    aleatoric one.

    :param probs: ``(S, N, C)``, probabilities of C classes in N rows under S draws, or with more
        axes between; or a fit.
    :param result: of an ``SVI`` or engine, its result.
    :param of_a_fit: the arguments of :func:`predictive_scores`, for a fit; the labels may be left
        out, ``model_args=(X_new,)``.
    :return: :class:`PredictiveUncertainty`, three arrays ``(N,)``.

    **References**

    1. *Bayesian Active Learning for Classification and Preference Learning*, N. Houlsby, F. Huszar,
       Z. Ghahramani, M. Lengyel (2011), equation 2.

    >>> from numpyro_ext.diagnostics import predictive_uncertainty
    >>> found = predictive_uncertainty([[[0.9, 0.1]], [[0.5, 0.5]]])  # two draws, one row
    >>> [f"{x[0]:.4f}" for x in found]
    ['0.6109', '0.5091', '0.1017']
    """
    if is_fit(probs):
        predicted = predictions_of_fit(probs, result, labelled=False, **of_a_fit)
        return uncertainty_of(classes_of(predicted)[0])
    refuse_arguments("probs", result=result, **of_a_fit)
    p = _checked(probs)
    if p.ndim < 3:
        raise ValueError(f"probs has shape {p.shape}; it must be (S, N, C), draws first.")
    return uncertainty_of(p)


def uncertainty_of(probs: np.ndarray) -> PredictiveUncertainty:
    """:func:`predictive_uncertainty` of a checked array."""
    p = np.clip(probs, 0, 1)  # of rounding
    total, each = entr(p.mean(0)).sum(-1), entr(p).sum(-1).mean(0)
    return PredictiveUncertainty(total, each, np.maximum(total - each, 0.0))


def probs_and_labels(probs: Any, labels: Any, **of_a_fit: Any) -> tuple[np.ndarray, np.ndarray]:
    """``(N, C)`` probabilities, the mean of all draws, and ``(N,)`` labels, of arrays or a fit."""
    if is_fit(probs):
        p, y = classes_of(predictions_of_fit(probs, labels, **of_a_fit))
        return p.mean(0), y
    refuse_arguments("probs", **of_a_fit)
    p, y = _checked(probs), np.asarray(labels)
    if p.ndim not in (2, 3):
        raise ValueError(
            f"probs has shape {p.shape}; it must be (N, C) or (S, N, C): for two classes,"
            " np.stack([1 - p, p], -1)."
        )
    p = p.mean(0) if p.ndim == 3 else p
    if y.shape != p.shape[:1]:
        raise ValueError(f"labels has shape {y.shape}; it must be ({len(p)},), a number a row.")
    return p, labels_of("labels", y, p.shape[-1])


def _checked(probs: Any) -> np.ndarray:
    """Probabilities in double precision; an error unless those of each row add up to 1."""
    p = np.asarray(probs, np.float64)
    is_probability = np.all((p >= -1e-6) & (p <= 1 + 1e-6))
    if p.ndim > 1 and not (is_probability and np.all(np.abs(p.sum(-1) - 1) <= 1e-3)):
        raise ValueError(
            f"probs has entries from {p.min():.4g} to {p.max():.4g}; each row must be probabilities"
            " with the sum 1 (of logits: jax.nn.softmax(logits))."
        )
    return p


def classes_of(predicted: Predicted) -> tuple[np.ndarray, np.ndarray]:
    """``(S, n, C)`` probabilities and labels of a prediction of classes."""
    if predicted.probs is None:
        raise ValueError(f"site '{predicted.site}' has {predicted.kind} and no classes.")
    name, count = f"site '{predicted.site}'", predicted.probs.shape[-1]
    return predicted.probs, labels_of(name, predicted.y, count)
