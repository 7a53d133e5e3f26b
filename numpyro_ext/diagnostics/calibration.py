"""Calibration of predicted numbers: whether intervals hold as many observations as they say."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr

from numpyro_ext._checks import check_choice
from numpyro_ext.diagnostics._fit_of import is_fit, refuse_arguments
from numpyro_ext.diagnostics._predicted import Predicted, predictions_of_fit

LEVELS = tuple(i / 10 for i in range(1, 10))


class Calibration(NamedTuple):
    """The result of :func:`regression_calibration`."""

    levels: np.ndarray
    """``(J,)``, the probabilities p that the predictions state."""
    empirical: np.ndarray
    """``(J,)``, the share of the observations for which they hold."""
    error: float
    """The mean of ``(levels - empirical)**2``."""
    sharpness: float
    """The mean predictive variance; NaN where only ``pit`` was given."""
    count: int
    """The number n of observations."""

    @property
    def perfect_error(self) -> float:
        r"""The mean error of a perfect model, :math:`\\mathrm{mean}_j\\, p_j (1 - p_j) / n`, by the
        noise of n independent observations."""
        return float(np.mean(self.levels * (1 - self.levels)) / self.count)


def regression_calibration(
    y: Any = None,
    result: Any = None,
    *,
    samples: Any = None,
    pit: Any = None,
    loc: Any = None,
    scale: Any = None,
    levels: Sequence[float] | None = None,
    kind: str = "central",
    **of_a_fit: Any,
) -> Calibration:
    r"""Whether predictive intervals hold as many observations as they say.

    With the probability integral transform :math:`u_n = P(Y_n \le y_n)` of each observation under
    its prediction, and levels :math:`p_j`,

    .. math::

        \hat p_j &= \frac1n \#\{n : |2 u_n - 1| \le p_j\} \ \text{(central intervals)}, \\
        \hat p_j &= \frac1n \#\{n : u_n \le p_j\} \ \text{(cdf)}, \qquad
        \mathrm{error} = \frac1J \sum_j (p_j - \hat p_j)^2.

    The error of a perfect model is not zero (``perfect_error``). **It fails** to see whether a
    prediction is of any use: the distribution of all observations, for every row, is calibrated.

    The u of a fit is the mean over draws of the cdf of the observed site. Of counts, and of
    ``samples`` that equal the observation, half of the probability at y counts.

    :param y: observations, any shape; or a fit.
    :param result: of an ``SVI`` or engine, its result.
    :param samples: draws of the prediction, ``(S, *shape of y)``, noise included.
    :param pit: the :math:`u_n` themselves; y is not needed.
    :param loc: the mean of a normal prediction, with ``scale``.
    :param scale: its standard deviation.
    :param levels: in (0, 1); default 0.1, 0.2, ..., 0.9.
    :param str kind: ``"central"`` or ``"cdf"``.
    :param of_a_fit: the arguments of :func:`predictive_scores`, for a fit.
    :return: a :class:`Calibration`.

    **References**

    1. *Accurate Uncertainties for Deep Learning Using Calibrated Regression*, V. Kuleshov,
       N. Fenner, S. Ermon (ICML 2018), equations 2 and 9.

    >>> import numpy as np
    >>> from numpyro_ext.diagnostics import regression_calibration
    >>> y = np.random.default_rng(0).normal(3.0, 2.0, 1000)
    >>> right = regression_calibration(y, loc=3.0, scale=2.0)
    >>> narrow = regression_calibration(y, loc=3.0, scale=1.0)
    >>> bool(right.error < 10 * right.perfect_error), bool(narrow.error > 0.02)
    (True, True)
    """
    check_choice("kind", kind, ("central", "cdf"))
    grid = np.ravel(np.asarray(LEVELS if levels is None else levels, np.float64))
    if not grid.size or not ((grid > 0) & (grid < 1)).all():
        raise ValueError(f"levels is {levels!r}; it must hold probabilities between 0 and 1.")
    if is_fit(y):
        if any(x is not None for x in (samples, pit, loc, scale)):
            raise ValueError(
                "y is a fit, which predicts by itself; leave out samples=, pit=, loc=."
            )
        return calibration_of(predictions_of_fit(y, result, **of_a_fit), grid, kind)
    refuse_arguments("y", **of_a_fit)
    if sum(x is not None for x in (samples, pit, scale)) != 1 or (loc is None) != (scale is None):
        raise ValueError("give exactly one of samples=, pit=, or loc= with scale=.")
    if pit is not None:
        u, sharpness = np.asarray(pit, np.float64), np.nan
    else:
        observed = np.asarray(y, np.float64)
        if lost := np.sum(~np.isfinite(observed)):
            raise ValueError(
                f"y has {lost} numbers among {observed.size} that are not finite, the first at"
                f" place {np.argmin(np.isfinite(observed))}; leave these observations out."
            )
        u, sharpness = _pit_of_arrays(observed, samples, loc, scale)
    if not u.size or not ((u >= 0) & (u <= 1)).all():
        raise ValueError("the pit must hold probabilities in [0, 1], at least one, and no NaN.")
    return _calibration(np.ravel(u), sharpness, grid, kind)


def calibration_of(
    predicted: Predicted, levels: Sequence[float] | np.ndarray = LEVELS, kind: str = "central"
) -> Calibration:
    """The calibration of predicted numbers."""
    if predicted.pit is None or predicted.mean is None or predicted.variance is None:
        raise ValueError(
            f"site '{predicted.site}' has classes; its calibration is expected_calibration_error."
        )
    sharpness = float(np.mean(predicted.variance.mean(0) + predicted.mean.var(0)))
    # The mean of a cdf in single precision may be 1 and a little more.
    return _calibration(np.clip(predicted.pit, 0, 1), sharpness, np.asarray(levels), kind)


def _pit_of_arrays(y: np.ndarray, samples: Any, loc: Any, scale: Any) -> tuple[np.ndarray, float]:
    """The pit and the mean variance of draws or of a normal."""
    if samples is not None:
        x = np.asarray(samples, np.float64)
        if x.shape[1:] != y.shape:
            raise ValueError(f"samples has shape {x.shape} and y {y.shape}, not (S, *shape of y).")
        u = np.mean((x < y) + 0.5 * (x == y) + 0.0 * (x + y), 0)  # a comparison hides NaN
        return u, float(np.mean(x.var(0)))
    m, s = (np.broadcast_to(np.asarray(x, np.float64), y.shape) for x in (loc, scale))
    if not (np.isfinite(m) & np.isfinite(s) & (s > 0)).all():
        raise ValueError("loc must be finite, and scale finite and positive.")
    return ndtr((y - m) / s), float(np.mean(s**2))


def _calibration(u: np.ndarray, sharpness: float, levels: np.ndarray, kind: str) -> Calibration:
    x = np.abs(2 * u - 1) if kind == "central" else u
    empirical = np.array([np.mean(x <= p) for p in levels])
    error = float(np.mean((levels - empirical) ** 2))
    return Calibration(levels, empirical, error, sharpness, u.size)
