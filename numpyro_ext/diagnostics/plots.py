"""A picture of a diagnosis, which ArviZ does not have."""

from collections.abc import Callable
from functools import partial
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numpyro_ext._model.labels import Coords, Labels, Names
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.checks.chains import AGREEMENT, Agreement, compare_chains
from numpyro_ext.diagnostics.checks.losses import losses_of
from numpyro_ext.diagnostics.checks.moves import moved_draws
from numpyro_ext.diagnostics.checks.weights import KHAT, WeightSummary, weigh_draws
from numpyro_ext.diagnostics.comparison import MEAN, SD, Comparison
from numpyro_ext.diagnostics.limits import RHAT
from numpyro_ext.diagnostics.table import Diagnosis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN, _WITH_DRAWS = 10, 3
"""The largest number of numbers with a line of their own, and with their draws."""
_DRAWS = 2000
"""Draws of a number that are kept for its picture."""


class DiagnosisPlotData(NamedTuple):
    """The parts of a picture; None, or empty, where a fit does not have one."""

    moved: Comparison | None
    """The numbers, and linear combinations, that moves change most, the worst one first."""
    draws: dict[str, tuple[np.ndarray, np.ndarray]]
    """Draws of a few of them, ``(m,)``, and moved ones, ``(n,)``."""
    weights: WeightSummary | None
    """The log weights, and the fit to their tail."""
    losses: list[np.ndarray]
    """The losses of each restart."""
    chains: Agreement | None
    labels: Labels
    """The labels of the numbers, which have the names of their places."""


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "this picture needs matplotlib; install it by pip install"
            " 'numpyro-ext-inference[examples]'."
        ) from error
    return plt


def plot_data_of(fit: Fit, labels: Labels) -> DiagnosisPlotData:
    """The arrays of a picture, which the checks of a fit have computed."""
    moved = moved_draws(fit)
    weights = weigh_draws(fit) if fit.kind == "guide" else None
    weights = None if weights is None or weights.tail is None else weights
    losses = losses_of(fit) if fit.kind == "guide" else []
    several = fit.kind == "chains" or (fit.kind == "guide" and len(fit.params) > 1)
    chains = compare_chains(fit) if several else None
    chains = chains if chains is not None and chains.names else None
    worst, draws = _worst_numbers([] if isinstance(moved, str) else moved)
    return DiagnosisPlotData(worst, draws, weights, losses, chains, labels)


def _worst_numbers(groups: list[Comparison]) -> tuple[Comparison | None, dict[str, Any]]:
    """The numbers that change most, and the draws of a few of them."""
    if not groups:
        return None, {}
    first, values = groups[0], np.concatenate([group.values for group in groups], 1)
    numbers = [(group, k) for group in groups for k in range(group.values.shape[1])]
    low, high = np.log(first.limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log(values[2])
    beyond = np.where(log < 0, log / low, log / high), np.abs(values[0]) / first.farthest
    worst = np.argsort(-np.max(np.nan_to_num(beyond, nan=0.0), 0), kind="stable")[:_SHOWN]
    worst = worst[~np.isnan(values[::2, worst]).all(0)]
    draws: dict[str, Any] = {}
    for group, k in (numbers[i] for i in worst):
        is_number = k < group.values.shape[1] - group.num_combined
        if group.draws is not None and is_number and len(draws) < _WITH_DRAWS:
            both = (x[..., k].ravel() for x in group.draws)
            draws[group.name(k)] = tuple(np.asarray(x[:: max(1, len(x) // _DRAWS)]) for x in both)
    names = [group.name(k) for group, k in (numbers[i] for i in worst)]
    limits = {"limits": first.limits, "farthest": first.farthest}
    return Comparison(names.__getitem__, "", values[:, worst], **limits), draws


def plot_diagnosis(
    diagnosis: Diagnosis, coords: Coords | None = None, dims: Names | None = None
) -> "dict[str, Axes]":
    """A picture of what :func:`diagnose` has computed; a title is red where its line is wrong.

    A panel that the fit has nothing for is left out:

    - ``means``, ``sds``: means after moves, in sds, and sds over those after them, of the ten
      numbers that change most, with two Monte Carlo errors. Right ones lie in the band.
    - ``weights``: the largest importance weights, and the Pareto tail fitted to them.
    - ``losses``: the loss at each step, in nats above the end, and its running mean.
    - ``chains``: R-hat and effective sample size of each number. Right ones lie below the line.
    - the name of a number: its draws (filled) and the moved ones, of the three that change most.

    :param diagnosis: what :func:`diagnose` returned, with the moves for the panels that need them.
    :param coords: labels by dimension, as :func:`diagnose` takes them; by default the same.
    :param dims: dimensions by site.
    :return: the axes by the name of their panel; nothing is shown or saved.
    :raises ImportError: matplotlib is not installed.

    >>> from numpyro_ext.diagnostics import diagnose, plot_diagnosis
    >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.001), Trace_ELBO())
    >>> early = svi.run(jax.random.key(0), 200, progress_bar=False)
    >>> axes = plot_diagnosis(diagnose(svi, early))
    >>> list(axes)
    ['means', 'sds', 'weights', 'losses', 'y', 'x']
    >>> axes["means"].figure.savefig("diagnosis.png")                     # doctest: +SKIP
    """
    if not isinstance(diagnosis, Diagnosis):
        raise TypeError(
            f"diagnosis is a {type(diagnosis).__name__}; pass what diagnose returned, as in"
            " plot_diagnosis(diagnose(svi, result, model_args=(x, y)))."
        )
    drawn = _panels(diagnosis, coords, dims)
    if not drawn:
        raise ValueError("this diagnosis has nothing to draw; diagnose the fit itself.")
    columns = min(len(drawn), 3 if len(drawn) in (3, 5, 6) else 4)
    lines = -(-len(drawn) // columns)
    size = (3.6 * columns, 3.0 * lines + 0.4)
    figure, grid = _pyplot().subplots(
        lines, columns, figsize=size, squeeze=False, layout="constrained"
    )
    axes = dict(zip(drawn, grid.flat, strict=False))
    for ax in grid.flat[len(drawn) :]:
        ax.remove()
    if "means" in axes and "sds" in axes:
        axes["sds"].tick_params(labelleft=False)
    lines_of = {row.quantity: row for row in diagnosis.rows}
    for name, ax in axes.items():
        draw, quantity = drawn[name]
        draw(ax)
        if (row := lines_of.get(quantity)) is not None:
            red = {"color": "C3"} if row.ok is False else {}
            text = f"{row.quantity}\n{row.shown} (limit {row.limit})"
            ax.set_title(text, fontsize=9, **red)
    figure.suptitle(textwrap.fill(str(diagnosis).split("\n")[0], 36 * columns), fontsize=11)
    return axes


def _panels(
    diagnosis: Diagnosis, coords: Coords | None, dims: Names | None
) -> dict[str, tuple[Callable[[Any], None], str]]:
    """How each panel is drawn, and the quantity of the line that is its title."""
    panels: dict[str, tuple[Callable[[Any], None], str]] = {}
    if (data := diagnosis.plot_data) is None:
        return panels
    label = data.labels.named(coords, dims)
    if (moved := data.moved) is not None:
        count = moved.values.shape[1]
        names = [textwrap.fill(label(moved.name(k)), 24) for k in range(count)]
        shift, shift_error, ratio, error = moved.values
        band = -moved.farthest, moved.farthest
        panels["means"] = partial(_dots, names, shift, shift_error, band, 0.0), MEAN
        panels["sds"] = partial(_dots, names, ratio, error, moved.limits, 1.0), SD
    if data.weights is not None:
        panels["weights"] = partial(_tail, data.weights), KHAT
    if data.losses:
        panels["losses"] = partial(_losses, data.losses), "change of the loss"
    if data.chains is not None:
        panels["chains"] = partial(_chains, data.chains, label), AGREEMENT
    for name, both in data.draws.items():
        panels[label(name)] = partial(_posterior, label(name), *both), ""
    return panels


def _dots(
    names: list[str],
    values: np.ndarray,
    errors: np.ndarray,
    band: tuple[float, float],
    right: float,
    ax: Any,
) -> None:
    """One line for each number, the worst at the top, and a band of what is right."""
    place = np.arange(len(names))[::-1]
    beyond = (values < band[0]) | (values > band[1])
    ax.axvspan(*band, color="C2", alpha=0.15, linewidth=0)
    ax.axvline(right, color="0.5", linewidth=1)
    for some, colour in ((~beyond, "C0"), (beyond, "C3")):
        bars = 2 * errors[some]
        ax.errorbar(values[some], place[some], xerr=bars, fmt="o", ms=4, lw=1, color=colour)
    ax.set_yticks(place, names, fontsize=8)
    ax.set_ylim(-0.6, len(names) - 0.4)


def _tail(weights: Any, ax: Any) -> None:
    """The largest fifth of the weights."""
    log_w = np.sort(weights.log_w.astype(np.float64))[::-1]
    smoothed = np.sort(weights.tail.log_weights)[::-1]
    size, last = len(log_w), np.sum(log_w > -np.inf) - 1
    smoothed += log_w[last] - smoothed[last]  # only the tail differs
    mean, largest = np.logaddexp.reduce(log_w) - np.log(size), slice(0, max(25, size // 5))
    rank = np.arange(1, size + 1)[largest]
    ax.loglog(rank, np.exp(log_w - mean)[largest], "o", ms=3, label="weights")
    ax.loglog(rank, np.exp(smoothed - mean)[largest], color="C1", label="Pareto tail")
    ax.set(xlabel="rank of the draw", ylabel="weight over the mean")
    ax.legend(frameon=False, fontsize=8)


def _losses(losses: list[np.ndarray], ax: Any) -> None:
    """The second half decides the height, or the start would hide the rest."""
    ends = []
    for k, each in enumerate(losses):
        y = np.asarray(each, np.float64)
        y = y - np.nanmedian(np.where(np.isfinite(y), y, np.nan)[-max(1, len(y) // 5) :])
        window = max(1, len(y) // 50)
        mean = np.convolve(y, np.ones(window) / window, "valid")
        some = np.arange(0, len(y), max(1, len(y) // 2000))
        ax.plot(some, y[some], ".", ms=1.5, alpha=0.4, color=f"C{k}")
        ax.plot(np.arange(len(mean)) + window // 2, mean, lw=1.2, color=f"C{k}")
        ends.append(y[len(y) // 2 :])
    ax.set(xlabel="step", ylabel="loss above the end (nats)")
    late = np.concatenate(ends)
    if np.isfinite(late).any():
        low, high = np.quantile(late[np.isfinite(late)], [0.01, 0.99])
        room = 0.5 * (high - low) or 1.0
        ax.set_ylim(low - room, high + room)


def _chains(chains: Agreement, label: Callable[[str], str], ax: Any) -> None:
    ax.plot(chains.ess, chains.rhat, "o", ms=4)
    ax.axhline(RHAT, color="C3", linewidth=1)
    if np.any(np.isfinite(chains.rhat)):
        worst = int(np.nanargmax(chains.rhat))
        where = chains.ess[worst], chains.rhat[worst]
        name = label(chains.names[worst])
        ax.annotate(name, where, (4, 4), textcoords="offset points", fontsize=8)
    ax.set(xscale="log", xlabel="effective sample size", ylabel="R-hat")
    ax.tick_params(which="minor", labelbottom=False)


def _posterior(name: str, before: np.ndarray, after: np.ndarray, ax: Any) -> None:
    low, high = np.quantile(np.concatenate([before, after]), [0.005, 0.995])
    bins = np.linspace(low, high, 31) if high > low else 10
    ax.hist(before, bins, density=True, color="C0", alpha=0.45, label="draws")
    ax.hist(after, bins, density=True, color="C1", histtype="step", lw=1.5, label="moved")
    ax.set(xlabel=name, yticks=[])
    ax.legend(frameon=False, fontsize=8)
