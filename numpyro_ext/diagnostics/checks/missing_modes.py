"""Whether a mode is missing, or has another share of the draws than of the mass."""

from collections.abc import Sequence
import math

import numpy as np

from numpyro_ext.diagnostics.checks.chains import split_by_mode
from numpyro_ext.diagnostics.checks.draws import has_moves
from numpyro_ext.diagnostics.checks.modes import SHARES_OF_MODES, draws_at_modes, searched
from numpyro_ext.diagnostics.checks.moves import MovedGroup, move_groups
from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.limits import CROSSING
from numpyro_ext.diagnostics.table import Row, equally_spaced

_FEWEST = 5
"""Chains that begin on the smaller side of a place, at least; or a fiftieth of them."""
_WELL_MIXED = 1.9
"""Chains over those on the smaller side: if all cross, 2 do where it holds half of them."""
_CUTS = 20
"""The number of places where few chains pass that are looked at closely."""
_WHERE_FROM = {
    "particles": "as many particles are on a side as began there; AutoMixtureNormal, whose"
    " importance weights check the shares, says how many belong there",
    "guide": "the share of each side is that of the guide; train longer, or take AutoMixtureNormal"
    " until its weights may be used and check the shares",
}


def missing_modes(context: FitContext, others: Sequence[Row]) -> list[Row]:
    """The line of the modes that the start has found; otherwise the line of two sides between which
    hardly a chain moves, or of the modes that a search finds where no other line is wrong."""
    by_mode = draws_at_modes(context)
    if by_mode is not None:
        # Chains that agree have visited what modes there are with the right shares.
        agree = context.kind == "chains" and split_by_mode(context) is None
        return [] if agree and by_mode.row.ok is not None else [by_mode.row]
    if context.kind == "chains":
        return []
    for group in move_groups(context):
        if isinstance(group, MovedGroup) and (row := _sides(context, group)) is not None:
            return [row]
    if context.kind == "guide" and context.num_moves != 0 and has_moves(context):
        fine = all(row.ok is not False for row in others)
        by_mode = searched(context) if fine else None
        return [] if by_mode is None else [by_mode.row]
    return []


def _sides(context: FitContext, group: MovedGroup) -> Row | None:
    """The line of two sides between which hardly a chain moves, where nothing else judges how many
    draws belong to each."""
    if group.shares_known:
        return None
    ends = np.asarray(group.moved.ends, float)
    value, k = least_crossing(*ends)
    if value >= CROSSING:
        return None
    k = int(equally_spaced(len(group.moved.ratio), ends.shape[-1])[k])
    verdict = (
        f"the draws lie on two sides of a value of {group.name(k)} that only so small a share of"
        " the Markov chains crosses, so nothing has checked how many belong on each:"
        f" {_WHERE_FROM[context.kind]}."
    )
    return Row(SHARES_OF_MODES, value, None, f"> {CROSSING}", False, verdict, True)


def least_crossing(start: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, int]:
    """The share of the chains on the smaller side of a place between two modes that is seen to
    change sides, with 95 % confidence at most, where it is least; and the number. Between two modes
    an interval in which half of the smaller side would start holds less than half as many; inf
    without such a place.

    :param start: ``(chain, n)`` numbers at the start, and ``low`` and ``high`` the extremes later.
    """
    m, n = start.shape
    fewest = max(_FEWEST, m // 50)
    if m < 2 * fewest or not n:
        return math.inf, 0
    several = math.log(n)  # the least of n counts may be less
    columns = zip(start.T, low.T, high.T, strict=True)
    rates = [_crossings_of(x, least, most, fewest, several) for x, least, most in columns]
    least = int(np.argmin(rates))
    return float(rates[least]), least


def _crossings_of(
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
    rate = math.inf
    if np.min(share) >= _WELL_MIXED:
        return rate
    least = np.argsort(share, kind="stable")[:_CUTS]
    for left_of, cut in zip(left[least].tolist(), cuts[least].tolist(), strict=True):
        rate = min(rate, _crossings_at(start, low, high, left_of, cut, several))
    return rate


def _crossings_at(
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
    if _upper_limit(near) + several >= half / 2:
        return math.inf
    crossing = int(np.sum(high[side] >= cut) if is_left else np.sum(low[side] < cut))
    return (_upper_limit(crossing) + several) / len(there)


def _upper_limit(count: float) -> float:
    """The 95 % limit of the mean of a Poisson number, about: 3 if none was seen."""
    return count + 2 * math.sqrt(count) + 3
