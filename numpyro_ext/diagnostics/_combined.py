"""Linear combinations of coordinates whose spread or mean a Markov chain changes most."""

from typing import NamedTuple

import numpy as np
from scipy import linalg

from numpyro_ext.diagnostics._ranges import is_heavy, tail_size
from numpyro_ext.diagnostics._spread import Spread

__all__ = ["Combined", "worst_combinations"]


class Combined(NamedTuple):
    """Of the narrowest and the widest combination, and of the one that moves farthest."""

    ratios: np.ndarray
    """``(2,)`` as of single numbers."""
    errors: np.ndarray
    shift: np.ndarray
    """``(1,)``"""
    shift_error: np.ndarray
    coordinates: np.ndarray
    """``(3, 2)`` the two coordinates that have most of each."""


def worst_combinations(found: Spread) -> Combined | None:
    """The extreme eigenvectors of the moved covariance where the points have unit covariance.

    Of the largest of many eigenvalues chance makes a large one. So one half of the chains chooses
    the combination, and the other half says how it is spread; both ways, and the mean of both. None
    for a single coordinate, or too many.
    """
    if found.root is None or found.root.shape[0] < 2 or len(found.later) < 8:
        return None
    root, x, later = (np.asarray(y, np.float64) for y in (found.root, found.points, found.later))
    if not all(np.all(np.isfinite(y)) for y in (root, x, later)):
        return None
    d = len(root)

    def whitened(y: np.ndarray) -> np.ndarray:
        flat = (y - x.mean(0)).reshape(-1, d).T
        return linalg.solve_triangular(root, flat, lower=True).T.reshape(y.shape)

    before, after = whitened(x), whitened(later)
    pieces, chosen = [], []
    for first in (0, 1):
        choosing, judging = after[first::2], after[1 - first :: 2]
        flat = choosing.reshape(-1, d)
        directions = linalg.eigh(np.cov(flat.T))[1][:, [0, -1]]
        away = flat.mean(0) / max(float(np.linalg.norm(flat.mean(0))), 1e-300)
        directions = np.column_stack([directions, away])
        pieces.append(_compared(before @ directions, judging @ directions, float(found.draws_each)))
        weights = np.abs(linalg.solve_triangular(root, directions, lower=True, trans=1))
        chosen.append(np.argsort(-weights * x.std(0)[:, None], 0)[:2].T)
    log_ratio, relative, shift, shift_error = (np.stack(both) for both in zip(*pieces, strict=True))
    ratios = np.exp(log_ratio.mean(0))[:2]
    return Combined(
        ratios,
        ratios * (np.sqrt(np.sum(relative**2, 0)) / 2)[:2],
        np.abs(shift.mean(0))[2:],
        (np.sqrt(np.sum(shift_error**2, 0)) / 2)[2:],
        chosen[0],
    )


def _compared(
    x: np.ndarray, y: np.ndarray, draws_each: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``(3,)`` log ratios of the sds of ``(m, 3)`` draws to those of ``(chain, k, 3)`` later ones,
    shifts in sds of the draws, and the errors of both; NaN of a heavy tail."""
    m = len(x)
    centre, mean = x.mean(0), y.mean((0, 1))
    variance, later = x.var(0), np.mean((y - mean) ** 2, (0, 1))
    of_draws = draws_each * np.var((x - centre) ** 2 / variance, 0) / m
    of_chains = np.var(np.mean((y - mean) ** 2, 1) / later, 0) / len(y)
    distances = np.sort(np.abs(x - np.median(x, 0)), 0)[::-1][: tail_size(m) + 1]
    light = ~is_heavy(distances, m)
    error = np.sqrt(draws_each / m + np.var(y.mean(1), 0) / len(y) / variance)
    return (
        np.where(light, 0.5 * np.log(variance / later), np.nan),
        np.where(light, 0.5 * np.sqrt(of_draws + of_chains), 0.0),
        np.where(light, (mean - centre) / np.sqrt(variance), np.nan),
        np.where(light, error, 0.0),
    )
