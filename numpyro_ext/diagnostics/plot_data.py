"""What a picture of a diagnosis shows, taken from what the checks have computed."""

import math
from typing import Any, NamedTuple

import numpy as np

from numpyro_ext.diagnostics.context import DiagnosisContext, FitContext
from numpyro_ext.diagnostics.judges.chains import Agreement, compare_chains
from numpyro_ext.diagnostics.judges.exact_moves import HMCCheck, run_hmc_from
from numpyro_ext.diagnostics.judges.weights import WeightSummary, weigh_draws
from numpyro_ext.diagnostics.limits import RATIO_KNOWN, decide

__all__ = ["Moves", "DiagnosisPlotData", "plot_data_of"]

SHOWN, DRAWN = 10, 3
"""The largest number of quantities with a line of their own, and with their draws."""
_DRAWS = 2000


class Moves(NamedTuple):
    """The numbers that exact moves change most, the worst one first."""

    names: list[str]
    shift: np.ndarray
    """``(k,)`` as in :class:`MoveComparison`, NaN where not known, as are the next ones."""
    shift_error: np.ndarray
    ratio: np.ndarray
    ratio_error: np.ndarray
    total: int
    """The number of quantities of which these are the worst."""
    farthest: float
    limits: tuple[float, float]
    draws: dict[str, tuple[np.ndarray, np.ndarray]]
    """Draws of a few of them, ``(m,)``, and moved ones, ``(n,)``."""
    pairs: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]
    """The coordinates of a linear combination that is wrong: ``(m, 2)``, and ``(n, 2)``."""


class DiagnosisPlotData(NamedTuple):
    """The parts of a picture; None, or empty, where a fit does not have one."""

    moves: Moves | None
    tail: WeightSummary | None
    """The log weights, and the fit to their tail."""
    losses: list[np.ndarray]
    """The losses of each restart."""
    chains: Agreement | None


def plot_data_of(context: DiagnosisContext) -> DiagnosisPlotData:
    """What the judges of a context have seen, after they were asked."""
    groups, losses, tail, chains = [], [], None, None
    if isinstance(context, FitContext):
        groups = [x for x in run_hmc_from(context) if isinstance(x, HMCCheck)]
        if context.kind == "guide":
            every = [np.asarray(getattr(one, "losses", ())) for one in context.results]
            losses = [one for one in every if one.ndim == 1 and len(one) > 1]
    if context.kind == "guide" and (known := weigh_draws(context)) is not None:
        tail = None if known.found is None else known._replace(usable=None)
    if context.kind != "particles" and context.has_chains:
        found = compare_chains(context)
        chains = found if found.names else None
    return DiagnosisPlotData(_moves(groups) if groups else None, tail, losses, chains)


def _badness(shift: Any, ratio: Any, group: HMCCheck) -> Any:
    """How far outside of its limits a number is, which are at 1; 0 where that is not known."""
    low, high = np.log(group.wording.limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log(ratio)
    beyond = np.where(log < 0, log / low, log / high), np.abs(shift) / group.wording.shift
    return np.max(np.nan_to_num(np.stack(beyond), nan=0.0), 0)


def _moves(groups: list[HMCCheck]) -> Moves:
    """The worst of all groups, and of the linear combinations those that are wrong."""
    parts, columns, draws, pairs = [], [], {}, {}
    for group in groups:
        found = group.comparison
        four = found.shift, found.shift_error, found.ratio, found.error
        columns.append(np.stack([np.asarray(x, np.float64) for x in four]))
        parts += [(group, k) for k in range(columns[-1].shape[1])]
    each = np.concatenate(columns, 1)
    bad = np.concatenate([_badness(x[0], x[2], g) for x, g in zip(columns, groups, strict=True)])
    order = np.argsort(-bad, kind="stable")[:SHOWN]
    order = order[~np.isnan(each[::2, order]).all(0)]
    names, worst = [parts[k][0].name(parts[k][1]) for k in order.tolist()], [each[:, order]]
    for k in order.tolist()[:DRAWN]:
        group, number = parts[k]
        if group.comparison.after is not None:
            before, after = group.comparison.before[:, number], group.comparison.after[..., number]
            draws[group.name(number)] = _few(before), _few(after.ravel())
    for group in groups:
        for column, coordinates in _wrong_combinations(group):
            first, second = (group.coordinate(int(k)) for k in coordinates)
            if (first, second) in pairs:
                continue
            names.append(f"{first} with {second}")
            worst.append(column[:, None])
            before, after = (
                group.comparison.points[:, coordinates],
                group.comparison.later[..., coordinates],
            )
            pairs[first, second] = _few(before), _few(after.reshape(-1, 2))
    wording = groups[0].wording
    shift, shift_error, ratio, error = np.concatenate(worst, 1)
    four = shift, shift_error, ratio, error
    return Moves(names, *four, len(parts), wording.shift, wording.limits, draws, pairs)


def _wrong_combinations(group: HMCCheck) -> list[tuple[np.ndarray, np.ndarray]]:
    """Shift, its error, ratio and its error, ``(4,)``, and the two coordinates of each combination
    that is wrong, the worst one first."""
    if (combined := group.comparison.combined) is None:
        return []
    low, high = group.wording.limits
    unknown, found = np.full(2, np.nan), []
    for k in (0, 1):
        value, error = combined.ratios[k : k + 1], combined.errors[k : k + 1]
        limits = math.log(low), math.log(high)
        if decide(np.log(value), error / value, limits, RATIO_KNOWN)[0] is False:
            found.append((np.concatenate([unknown, value, error]), combined.coordinates[k]))
    farthest = group.wording.shift
    one = combined.shift, combined.shift_error
    if decide(*one, (-farthest, farthest), farthest)[0] is False:
        found.append((np.concatenate([*one, unknown]), combined.coordinates[2]))
    found.sort(key=lambda one: -_badness(one[0][0], one[0][2], group))
    return [(column, np.sort(which)) for column, which in found]


def _few(x: Any) -> np.ndarray:
    """Equally spaced ones of many draws."""
    return np.asarray(x[:: max(1, len(x) // _DRAWS)])
