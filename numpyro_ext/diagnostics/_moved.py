"""Lines about draws or particles after Markov chains have moved them."""

from collections.abc import Callable
import math
from typing import NamedTuple

from jax import Array
import numpy as np

from numpyro_ext.diagnostics._modes import NUMBERS, least_crossing
from numpyro_ext.diagnostics._worst import judged_ratios, judged_shifts, together
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["GUIDE", "PARTICLES", "Kind", "Spread", "left_out", "moved_rows"]

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
_STUCK = 0.1
"""Share of accepted trajectories below which the points are stuck."""
QUANTITY = "sd ratio after moves, worst"
OF_SHIFT = "shift after moves, worst"
OF_SIDES = "chains that change sides, least"


class Spread(NamedTuple):
    """The result of :func:`spread_after_moves`."""

    ratio: Array
    """``(n,)`` standard deviations of the points over those of the chains; NaN where a number does
    not vary."""
    error: Array
    """``(n,)`` Monte Carlo errors of these ratios."""
    shift: Array
    """``(n,)`` mean of the chains minus that of the points, in standard deviations of the points; 0
    where a number does not vary."""
    shift_error: Array
    """``(n,)`` Monte Carlo errors of these shifts."""
    between: Array
    """``(n,)`` share of the variance of the chains that is between them: 0 for chains that have
    forgotten where they began, 1 for chains that stay there; NaN where a number does not vary."""
    ends: Array
    """``(3, chain, k)``: up to 1,000 numbers, equally spaced, at the start of the chains, and the
    least and the largest that they are later."""
    accepted: Array
    """Share of accepted trajectories."""


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
    found: Spread, name: Callable[[int], str], kind: Kind, *, shares_known: bool = False
) -> list[Row]:
    """The lines of the worst numbers: their spread, their mean, and modes that no chain leaves.

    :param name: the name of a number.
    :param shares_known: true if weights have judged the draws, and with them the shares of modes.
    """
    ratios, errors, shifts, shift_errors, between, ends = (np.asarray(x, float) for x in found[:-1])
    what, remedy, limits, farthest, shares = kind
    if float(found.accepted) < _STUCK:
        ratio, limit = float(np.nanmin(np.append(ratios, np.inf))), f"{limits[0]} to {limits[1]}"
        verdict = (
            f"a Markov chain on all data does not leave the {what}, so nothing can be said of"
            " their spread; the density may be rough, or not a number near some of them."
        )
        return [Row(QUANTITY, ratio, None, limit, False, verdict, True)]
    begins = f"a Markov chain on all data that starts from each of the {what}"
    end = f"{remedy}."
    rows = [
        judged_ratios(
            QUANTITY,
            ratios,
            errors,
            limits,
            f"a Markov chain on all data leaves the {what} as wide as they are; it is too short to"
            " find another mode.",
            lambda k, by: (
                f"{begins} makes the standard deviation of {name(k)} {1 / by:.2g} times what it is;"
                f" {end}"
            ),
        ),
        judged_shifts(
            OF_SHIFT,
            shifts,
            shift_errors,
            farthest,
            f"a Markov chain on all data leaves the mean of the {what} where it is.",
            lambda k, by: (
                f"{begins} moves the mean of {name(k)} by {by:.2g} of its standard deviations;"
                f" {end}"
            ),
        ),
    ]
    stays = int(np.argmax(np.nan_to_num(between)))
    if not shares_known and all(row.ok for row in rows) and between[stays] > STAY:
        verdict = (
            f"not judged: the Markov chains are too short for {name(stays)}, of whose variance"
            f" {between[stays]:.0%} is between them; a larger num_moves makes them longer."
        )
        rows = [row._replace(ok=None, verdict=verdict) for row in rows]
    rows = together(rows)
    known = shares_known or not shares
    value, least = (math.inf, 0) if known else least_crossing(*ends)
    if value < CROSSING:
        least = int(equally_spaced(len(ratios), NUMBERS)[least])
        verdict = (
            f"the {what} lie on two sides of a value of {name(least)} that hardly any Markov chain"
            f" crosses, so nothing has checked how many belong on each: {shares}."
        )
        rows.append(Row(OF_SIDES, value, None, f"{CROSSING}", False, verdict, True))
    return rows
