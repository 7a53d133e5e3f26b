"""Pictures that ArviZ does not have: a diagnosis, calibration and reliability."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numpyro_ext._checks import check_count
from numpyro_ext._model.labels import Coords, Labels, Names
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.calibration import Calibration
from numpyro_ext.diagnostics.checks.chains import AGREEMENT, Agreement, compare_chains
from numpyro_ext.diagnostics.checks.losses import losses_of
from numpyro_ext.diagnostics.checks.moves import moved_draws
from numpyro_ext.diagnostics.checks.weights import KHAT, WeightSummary, weigh_draws
from numpyro_ext.diagnostics.classification import bins_of, error_of, probs_and_labels
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


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    return _pyplot().subplots(figsize=(4.5, 4.5), layout="constrained")[1]


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


def plot_calibration(
    calibration: Calibration | Mapping[str, Calibration] | Sequence[Calibration],
    ax: Any = None,
) -> "Axes":
    """Share of the observations against the stated probability, one line per model.

    On the diagonal a prediction is calibrated. For central intervals a line above it means that the
    prediction is too wide, and a line below it that it is too narrow. The band holds 95 % of the
    points of a perfect model on as many observations as the first has.

    :param calibration: a result of :func:`regression_calibration`, a list of them, or a dict with
        the labels as keys.
    :param ax: matplotlib axes to draw on; default: new ones.
    :return: the axes; nothing is shown or saved.
    :raises ImportError: matplotlib is not installed.

    >>> import numpy as np
    >>> from numpyro_ext.diagnostics import plot_calibration, regression_calibration
    >>> y = np.random.default_rng(0).normal(size=200)
    >>> found = {c: regression_calibration(y, loc=0.0, scale=s)
    ...          for c, s in (("right", 1.0), ("narrow", 0.5))}
    >>> ax = plot_calibration(found)
    >>> ax.get_xlabel()
    'stated probability'
    """
    models: Mapping[str, Calibration]
    if isinstance(calibration, Calibration):
        models = {"": calibration}
    elif isinstance(calibration, Mapping):
        models = calibration
    else:
        models = {f"model {i}": each for i, each in enumerate(calibration)}
    ax = _axes(ax)
    first = next(iter(models.values()))
    p = np.linspace(0, 1, 101)
    half = 1.96 * np.sqrt(p * (1 - p) / first.count)
    band = np.clip([p - half, p + half], 0, 1)
    ax.fill_between(p, *band, color="0.88", linewidth=0, label="95 % of a perfect model")
    ax.plot([0, 1], [0, 1], color="0.4", linewidth=1)
    for label, each in models.items():
        order = np.argsort(each.levels)
        name = f"{label}, " if label else ""
        levels, shares = each.levels[order], each.empirical[order]
        ax.plot(levels, shares, marker="o", markersize=4, label=f"{name}error {each.error:.2g}")
    ax.set(xlabel="stated probability", ylabel="share of the observations")
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.legend(loc="best", fontsize=8)
    return ax


def plot_reliability(
    probs: Any, labels: Any = None, num_bins: int = 15, ax: Any = None, **of_a_fit: Any
) -> "Axes":
    """Accuracy of the most probable class against its probability, in bins, with their counts.

    Where a bar is below the diagonal the model is too confident. The marks on the diagonal are the
    stated probabilities with two standard errors; the number of rows stands in the bar.

    :param probs: ``(N, C)``; or ``(S, N, C)`` of S draws, of which the mean is taken; or a fit.
    :param labels: ``(N,)`` integers in ``0 .. C - 1``; of an ``SVI`` or engine, its result.
    :param int num_bins: bins of equal width.
    :param ax: matplotlib axes to draw on; default: new ones.
    :param of_a_fit: the arguments of :func:`predictive_scores`, for a fit.
    :return: the axes; nothing is shown or saved.
    :raises ImportError: matplotlib is not installed.

    >>> import numpy as np
    >>> from numpyro_ext.diagnostics import plot_reliability
    >>> rng = np.random.default_rng(0)
    >>> p = rng.uniform(size=500)
    >>> ax = plot_reliability(np.stack([1 - p, p], -1), rng.uniform(size=500) < p, num_bins=10)
    >>> ax.get_ylabel()
    'share that is right'
    """
    p, y = probs_and_labels(probs, labels, **of_a_fit)
    bins = bins_of(p, y, check_count("num_bins", num_bins))
    ax = _axes(ax)
    some = bins.count > 0
    width = 1 / num_bins
    left = np.arange(num_bins)[some] * width
    confidence, accuracy, count = (x[some] for x in bins)
    ax.plot([0, 1], [0, 1], color="0.4", linewidth=1)
    ax.bar(left, accuracy, width, align="edge", color="C0", edgecolor="white", alpha=0.75)
    error = 2 * np.sqrt(confidence * (1 - confidence) / count)
    stated = {"fmt": "none", "ecolor": "0.25", "capsize": 2, "linewidth": 1}
    ax.errorbar(confidence, confidence, error, label="stated, with 2 standard errors", **stated)
    for x, rows in zip(left, count, strict=True):
        ax.text(x + width / 2, 0.01, f"{rows:,}", ha="center", va="bottom", fontsize=7, rotation=90)
    ax.set(xlabel="probability of the most probable class", ylabel="share that is right")
    ax.set_title(f"{len(y):,} rows, calibration error {error_of(bins):.3f}")
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)  # below the bars
    return ax
