"""Lines about draws or particles after Markov chains have moved them."""

from collections.abc import Callable
import math
from typing import NamedTuple

import numpy as np

from numpyro_ext.diagnostics._combined import worst_combinations
from numpyro_ext.diagnostics._modes import NUMBERS, least_crossing
from numpyro_ext.diagnostics._spread import Spread
from numpyro_ext.diagnostics._worst import judged_ranges, judged_ratios, judged_shifts, together
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["GUIDE", "PARTICLES", "Kind", "left_out", "moved_rows"]

SD_RATIO = (0.8, 1.2)
GUIDE_SD_RATIO = (0.85, 1.15)
"""As of the implied ratio: chains that are short have not left all of their bias behind."""
SHIFT, GUIDE_SHIFT = 0.3, 0.2
"""The mean of 100 particles that are random draws is off by .1, and the worst of ten by more."""
CROSSING = 0.6
"""Of chains that are slow but have one mode more change sides: 0.67 and more in a banana whose
width is a tenth of its length, and at most 0.6 with modes 8 standard deviations apart."""
STAY = 0.4
"""Share of the variance that is between chains above which they are too short to judge alone."""
_STUCK, _FREE = 0.1, 0.995
"""Share of accepted trajectories below which the points are stuck, and above which the steps are so
small that they say nothing."""
QUANTITY = "sd ratio after moves, worst"
OF_SHIFT = "shift after moves, worst"
OF_RANGE = "shape after moves, worst"
OF_SIDES = "chains that change sides, least"


class Kind(NamedTuple):
    """The words and the limits for one kind of points."""

    what: str
    remedy: str
    limits: tuple[float, float]
    shift: float
    shares: str
    """What the shares of modes are, and the remedy; empty if another line judges them."""


PARTICLES = Kind(
    "particles",
    "take twice as many particles, reparametrise the model, or compare with NUTS",
    SD_RATIO,
    SHIFT,
    "as many particles are on a side as began there; take AutoMixtureNormal, whose importance"
    " weights check the shares",
)
GUIDE = Kind(
    "draws",
    "reparametrise the model, train longer, take a richer guide, or compare with NUTS",
    GUIDE_SD_RATIO,
    GUIDE_SHIFT,
    "the share of each side is that of the guide; train longer, or take AutoMixtureNormal until its"
    " weights may be used and check the shares",
)


def left_out(verdict: str) -> list[Row]:
    """The line that says why the points were not judged by moves."""
    low, high = GUIDE_SD_RATIO
    return [Row(QUANTITY, math.nan, None, f"{low} to {high}", None, verdict, True)]


def moved_rows(
    found: Spread,
    name: Callable[[int], str],
    kind: Kind,
    coordinate: Callable[[int], str] = str,
    *,
    shares_known: bool = False,
) -> list[Row]:
    """The lines of the worst numbers: their spread, mean and shape, and modes that no chain leaves.

    :param name: the name of a number.
    :param coordinate: the name of a coordinate.
    :param shares_known: true if weights have judged the draws, and with them the shares of modes.
    """
    ratios, errors, shifts, shift_errors, between = (np.asarray(x, float) for x in found[:5])
    what, remedy, limits, farthest, shares = kind
    accepted, n = float(found.accepted), len(ratios)
    if accepted < _STUCK:
        ratio, limit = float(np.nanmin(np.append(ratios, np.inf))), f"{limits[0]} to {limits[1]}"
        verdict = (
            f"a Markov chain on all data does not leave the {what}, so nothing can be said of"
            " their spread; the density may be rough, or not a number near some of them."
        )
        return [Row(QUANTITY, ratio, None, limit, False, verdict, True)]
    combined = worst_combinations(found)
    pairs = np.zeros((0, 2), int) if combined is None else combined.coordinates

    def number(k: int, of: int) -> str:
        if k < n:
            return name(k)
        first, second = sorted(pairs[of + k - n].tolist())
        return f"a linear combination of {coordinate(first)} and {coordinate(second)} most of all"

    begins = f"a Markov chain on all data that starts from each of the {what}"
    end = f"{remedy}."

    def lines(*given: np.ndarray) -> list[Row]:
        ratios, errors, shifts, shift_errors = given
        return [
            judged_ratios(
                QUANTITY,
                ratios,
                errors,
                limits,
                f"a Markov chain on all data leaves the {what} as wide as they are; it is too short"
                " to find another mode.",
                lambda k, by: (
                    f"{begins} makes the standard deviation of {number(k, 0)} {1 / by:.2g} times"
                    f" what it is; {end}"
                ),
            ),
            judged_shifts(
                OF_SHIFT,
                shifts,
                shift_errors,
                farthest,
                f"a Markov chain on all data leaves the mean of the {what} where it is.",
                lambda k, by: (
                    f"{begins} moves the mean of {number(k, 2)} by {by:.2g} of its standard"
                    f" deviations; {end}"
                ),
            ),
        ]

    single = ratios, errors, shifts, shift_errors
    rows = lines(*single)
    if combined is not None:
        both = zip(single, combined[:4], strict=True)
        with_combinations = lines(*(np.append(one, other) for one, other in both))
        # The worst of so many is known less well, and says something only where it is wrong.
        if any(row.ok is False for row in with_combinations):
            rows = with_combinations
    stays = int(np.argmax(np.nan_to_num(between)))
    why = None
    if accepted > _FREE:
        why = (
            f"of the steps of the Markov chains {accepted:.1%} are accepted, so they are too small"
            " for the density, or it is the same everywhere"
        )
    elif not shares_known and between[stays] > STAY:
        why = (
            f"the Markov chains are too short for {name(stays)}, of whose variance"
            f" {between[stays]:.0%} is between them; a larger num_moves makes them longer"
        )
    if why and all(row.ok for row in rows):
        rows = [row._replace(ok=None, verdict=f"not judged: {why}.") for row in rows]
    rows = together(rows)
    # Where the draws lie elsewhere, the ranges have other shares in any case.
    if found.range_ratio is not None and rows[1].ok is not False:
        ranges = found.range_ratio, found.range_error
        row = judged_ranges(OF_RANGE, *ranges, name, f"{begins} makes", end)
        # Few draws may be enough for a mean, and not for a shape; but not the other way round.
        rows.append(together([*rows, row])[-1])
    known = shares_known or not shares
    ends = np.asarray(found.ends, float)
    value, least = (math.inf, 0) if known else least_crossing(*ends)
    if value < CROSSING:
        least = int(equally_spaced(n, NUMBERS)[least])
        verdict = (
            f"the {what} lie on two sides of a value of {name(least)} that hardly any Markov chain"
            f" crosses, so nothing has checked how many belong on each: {shares}."
        )
        rows.append(Row(OF_SIDES, value, None, f"{CROSSING}", False, verdict, True))
    return rows
