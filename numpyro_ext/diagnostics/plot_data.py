"""What a picture of a diagnosis shows, taken from what the checks have computed."""

from typing import Any, NamedTuple

import numpy as np

from numpyro_ext.diagnostics.checks.chains import Agreement, compare_chains
from numpyro_ext.diagnostics.checks.losses import losses_of
from numpyro_ext.diagnostics.checks.moves import MovedGroup, move_groups
from numpyro_ext.diagnostics.checks.weights import WeightSummary, weigh_draws
from numpyro_ext.diagnostics.context import FitContext

_SHOWN, _DRAWN = 10, 3
"""The largest number of numbers with a line of their own, and with their draws."""
_DRAWS = 2000


class MovedNumbers(NamedTuple):
    """The numbers that exact moves change most, the worst one first."""

    names: list[str]
    values: np.ndarray
    """``(4, k)`` shifts and their errors, ratios of sds and their errors."""
    limits: tuple[float, float]
    farthest: float
    draws: dict[str, tuple[np.ndarray, np.ndarray]]
    """Draws of a few of them, ``(m,)``, and moved ones, ``(n,)``."""


class DiagnosisPlotData(NamedTuple):
    """The parts of a picture; None, or empty, where a fit does not have one."""

    moved: MovedNumbers | None
    weights: WeightSummary | None
    """The log weights, and the fit to their tail."""
    losses: list[np.ndarray]
    """The losses of each restart."""
    chains: Agreement | None


def plot_data_of(context: FitContext) -> DiagnosisPlotData:
    """What the checks of a context have computed."""
    groups = [group for group in move_groups(context) if isinstance(group, MovedGroup)]
    weights = weigh_draws(context) if context.kind == "guide" else None
    if weights is not None:
        weights = None if weights.fit is None else weights._replace(usable=None)
    losses = losses_of(context) if context.kind == "guide" else []
    several = context.kind == "chains" or len(context.fit.params) > 1
    chains = compare_chains(context) if several and context.kind != "particles" else None
    chains = chains if chains is not None and chains.names else None
    return DiagnosisPlotData(_moved(groups) if groups else None, weights, losses, chains)


def _moved(groups: list[MovedGroup]) -> MovedNumbers:
    """The worst numbers of all groups."""
    columns, numbers = [], []
    for group in groups:
        moved = group.moved
        four = moved.shift, moved.shift_error, moved.ratio, moved.error
        columns.append(np.stack([np.asarray(x, np.float64) for x in four]))
        numbers += [(group, k) for k in range(columns[-1].shape[1])]
    values, first = np.concatenate(columns, 1), groups[0]
    low, high = np.log(first.limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log(values[2])
    beyond = np.where(log < 0, log / low, log / high), np.abs(values[0]) / first.farthest
    worst = np.argsort(-np.max(np.nan_to_num(beyond, nan=0.0), 0), kind="stable")[:_SHOWN]
    worst = worst[~np.isnan(values[::2, worst]).all(0)]
    draws = {}
    for group, k in (numbers[i] for i in worst[:_DRAWN]):
        if group.moved.after is not None:
            before, after = group.moved.before[:, k], group.moved.after[..., k].ravel()
            draws[group.name(k)] = _few(before), _few(after)
    names = [numbers[i][0].name(numbers[i][1]) for i in worst]
    return MovedNumbers(names, values[:, worst], first.limits, first.farthest, draws)


def _few(x: Any) -> np.ndarray:
    """Equally spaced ones of many draws."""
    return np.asarray(x[:: max(1, len(x) // _DRAWS)])
