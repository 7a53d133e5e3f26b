"""The effective sample size of weighted draws, such as a chain with a decreasing step size has."""

from typing import Any

import numpy as np

from numpyro_ext._checks import check_count


def weighted_ess(x: Any, weights: Any = None, num_batches: int | None = None) -> np.ndarray:
    r"""Effective sample size of a weighted mean of correlated draws, by batch means.

    The draws of a chain with decreasing step sizes :math:`\varepsilon_t` are averaged with weights,
    :math:`m = \sum_t w_t x_t / \sum_t w_t` with :math:`w_t = \varepsilon_t`. In B contiguous
    batches with the weights :math:`W_b = \sum_{t \in b} w_t` and means :math:`m_b`,

    .. math::
        v = \frac{B}{B - 1} \sum_b \Big(\frac{W_b}{\sum_t w_t}\Big)^2 (m_b - m)^2, \qquad
        \mathrm{ess} = \frac{\sum_t w_t (x_t - m)^2}{v \sum_t w_t},

    at most :math:`n_w \log_{10} T` with :math:`n_w = (\sum_t w_t)^2 / \sum_t w_t^2`. The batches
    have equal sums of :math:`w_t^2`, so that each contributes alike to the variance of the mean.

    **It fails** where the chain forgets slowly: a batch has to be many times longer than its
    autocorrelation, otherwise the result is too large. It does not see the bias of the step size.
    Of numbers that are all equal it is NaN.

    :param x: one number of each draw, ``(T,)`` or ``(chain, T)``; chains are added.
    :param weights: ``(T,)``, or the shape of ``x``: step sizes, at least 0; None for equal ones.
    :param int num_batches: B, at least 2; None for :math:`\lfloor \sqrt T \rfloor`.
    :return: an array without axes.

    **References:**

    1. *Consistency and fluctuations for stochastic gradient Langevin dynamics*, Yee Whye Teh,
       Alexandre H. Thiery, Sebastian J. Vollmer, JMLR 2016 (the weighted average, eq. 4).
    2. *Batch means and spectral variance estimators in Markov chain Monte Carlo*, James M. Flegal,
       Galin L. Jones, Annals of Statistics 2010 (eq. 5).

    >>> import numpy as np
    >>> from numpyro_ext.diagnostics import weighted_ess
    >>> x = np.random.default_rng(0).normal(size=10_000)
    >>> w = 1 / np.sqrt(1 + np.arange(10_000))
    >>> exact = w.sum() ** 2 / (w**2).sum()
    >>> bool(abs(weighted_ess(x, w) / exact - 1) < 0.5)
    True
    """
    x = np.asarray(x, np.float64)
    if x.ndim not in (1, 2) or x.shape[-1] < 4:
        raise ValueError(f"x has shape {x.shape}; it must be (T,) or (chain, T) with T >= 4.")
    T = x.shape[-1]
    w = np.ones(T) if weights is None else np.asarray(weights, np.float64)
    if w.shape not in ((T,), x.shape):
        raise ValueError(f"weights has shape {w.shape}; it must be ({T},) or {x.shape}.")
    w = np.broadcast_to(w, x.shape)
    good = np.all(np.isfinite(x)) and np.all((w >= 0) & np.isfinite(w))
    if not good or not np.all(np.any(w > 0, axis=-1)):
        raise ValueError(
            "x holds nan or inf, or a weight is not a number of at least 0, or all weights of a"
            " chain are 0."
        )
    B = int(np.sqrt(T)) if num_batches is None else check_count("num_batches", num_batches, 2)
    each = [_of_chain(*chain, B) for chain in zip(np.atleast_2d(x), np.atleast_2d(w), strict=True)]
    return np.asarray(sum(each))


def _of_chain(x: np.ndarray, w: np.ndarray, B: int) -> float:
    w = w / w.max()  # or their squares would vanish or overflow
    share = w / w.sum()
    m = np.sum(share * x)
    variance = np.sum(share * (x - m) ** 2)
    if variance <= (1e-12 * np.max(np.abs(x))) ** 2:
        return np.nan
    squares = w**2
    middle = np.cumsum(squares) - squares / 2
    batch = np.minimum((B * middle / squares.sum()).astype(int), B - 1)
    # A batch that a single draw has skipped is empty.
    _, batch = np.unique(batch[w > 0], return_inverse=True)
    deviations = np.bincount(batch, (share * (x - m))[w > 0])
    count = len(deviations)
    if count == 1:
        return 1.0
    v = np.sum(deviations**2) * count / (count - 1)
    largest = np.log10(len(x)) / np.sum(share**2)
    return float(min(variance / v, largest)) if v > 0 else float(largest)
