"""Modes between which short Markov chains do not move, seen in one number at a time."""

import math

import numpy as np

__all__ = ["NUMBERS", "least_crossing"]

NUMBERS = 1000
"""At most so many numbers are looked at, equally spaced."""
FEWEST_ON_A_SIDE = 5
WELL_MIXED = 1.9
"""Chains over those on the smaller side: if all cross, 2 do where it holds half of them."""
CUTS = 20
"""So many places where few chains pass are looked at closely."""


def least_crossing(start: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, int]:
    """Of all places between two modes of a number, the one with the fewest crossings.

    It is the share of the chains on the smaller side that is seen to change sides, with 95 %
    confidence at most, and the number; inf where there is no such place. A place lies between two
    modes if in an interval of the width in which half of the chains on the smaller side start there
    are less than half as many.

    :param start: ``(chain, n)`` numbers at the start of the chains.
    :param low: the least that they are later, and ``high`` the largest.
    """
    m, n = start.shape
    fewest = max(FEWEST_ON_A_SIDE, m // 50)
    if m < 2 * fewest or not n:
        return math.inf, 0
    several = math.log(n)  # the least of n counts may be less
    columns = zip(start.T, low.T, high.T, strict=True)
    found = [_of_number(x, least, most, fewest, several) for x, least, most in columns]
    least = int(np.argmin(found))
    return float(found[least]), least


def _of_number(
    start: np.ndarray, low: np.ndarray, high: np.ndarray, fewest: int, several: float
) -> float:
    if not np.all(np.isfinite([start, low, high])):
        return math.inf
    order = np.argsort(start)
    start, low, high = start[order], low[order], high[order]
    m = len(start)
    left = np.arange(fewest, m - fewest + 1)
    cuts = 0.5 * (start[left - 1] + start[left])
    # Of both sides together; where it is least, the chains of the smaller side are counted.
    across = np.searchsorted(np.sort(low), cuts) - np.searchsorted(np.sort(high), cuts)
    # Equal numbers cannot be cut.
    share = np.where(start[left - 1] < start[left], across / np.minimum(left, m - left), np.inf)
    found = math.inf
    if np.min(share) >= WELL_MIXED:
        return found
    least = np.argsort(share, kind="stable")[:CUTS]
    for left_of, cut in zip(left[least].tolist(), cuts[least].tolist(), strict=True):
        found = min(found, _at(start, low, high, left_of, cut, several))
    return found


def _at(
    start: np.ndarray, low: np.ndarray, high: np.ndarray, left: int, cut: float, several: float
) -> float:
    """The share at one place, with so many chains to its left."""
    m = len(start)
    is_left = left <= m - left
    side = slice(0, left) if is_left else slice(left, m)
    there = start[side]
    half = (len(there) + 1) // 2
    width = np.min(there[half - 1 :] - there[: len(there) - half + 1])
    near = int(np.diff(np.searchsorted(start, [cut - width / 2, cut + width / 2]))[0])
    if _at_most(near) + several >= half / 2:
        return math.inf
    crossing = int(np.sum(high[side] >= cut) if is_left else np.sum(low[side] < cut))
    return (_at_most(crossing) + several) / len(there)


def _at_most(count: float) -> float:
    """The 95 % limit of the mean of a Poisson number, about: 3 if none was seen."""
    return count + 2 * math.sqrt(count) + 3
