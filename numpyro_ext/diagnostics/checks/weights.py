"""Whether the importance weights of a guide may be used, by k-hat, and what they change if so."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import special

from numpyro_ext.diagnostics._density import declare
from numpyro_ext.diagnostics._evaluate import Prototype
from numpyro_ext.diagnostics._spread import (
    LEVELS,
    inside,
    is_heavy,
    least_spread,
    mean_and_sd,
    shares_to_sd_ratios,
)
from numpyro_ext.diagnostics.comparison import Comparison, decide, void_if_any_unjudged
from numpyro_ext.diagnostics.context import FitContext, cached
from numpyro_ext.diagnostics.limits import (
    BAD_UNITS,
    GAP,
    GAP_EACH,
    NO_DENSITY,
    WEIGHTED_RATIO,
)
from numpyro_ext.diagnostics.psis import FEWEST, ParetoKhat, fit_tails, khat_error
from numpyro_ext.diagnostics.table import Row, equally_spaced

KHAT, OF_GAP = "k-hat", "gap of the ELBO in nats"
_UNITS = 1000
"""The largest number of units, equally spaced, that get their own k-hat."""
_FLOATS = 10**6
"""The largest number of floats of draws in memory in double precision."""
_REMEDY = "train longer, or take a richer guide"
_ROUNDING = 1e-6
"""What is left of an error where all weights are equal, which is no lack of evidence."""


class UsableWeights(NamedTuple):
    """The smoothed weights of the units whose weights may be used."""

    weights: np.ndarray
    """``(S, units)``, each column with the sum 1."""
    column: np.ndarray
    """For every unit, its column there; -1 for units that are left out."""
    gap: tuple[float, float] | None
    """The ELBO of these units below their bound of order 0, and its error; None where it is
    infinite, or belongs to auxiliary variables too."""


class WeightSummary(NamedTuple):
    """The line of k-hat, and the weights if they may be used."""

    row: Row
    usable: UsableWeights | None = None
    log_w: np.ndarray | None = None
    """``(S,)`` or ``(S, units)`` log weights of at most so many units, and the fit to their tail;
    None where there is no such fit."""
    fit: ParetoKhat | None = None


def _gap(log_w: np.ndarray) -> tuple[float, float] | None:
    """The bound of order 0 minus the ELBO, of ``(S, units)`` log weights, and its error; None where
    a few draws without a density make it infinite."""
    if np.any(log_w == -np.inf):
        return None
    x = log_w.astype(np.float64) - np.max(log_w, 0)
    w, size = np.exp(x), len(log_w)
    each = np.sum(w / w.mean(0) - 1 - (x - x.mean(0)), 1)
    return float(np.sum(np.log(w.mean(0)) - x.mean(0))), float(np.std(each)) / math.sqrt(size)


@cached
def weigh_draws(context: FitContext) -> WeightSummary | None:
    """The weights of a guide, if it has a density."""
    if (log_weight := context.stats.get("log_weight")) is None:
        return None
    log_w = log_weight.reshape(-1, *log_weight.shape[2:])
    return summarise_weights(log_w, auxiliary=context.proto.density == "bound")


@cached
def weights(context: FitContext) -> list[Row]:
    """The lines of the weights of a guide; the first one is k-hat."""
    if (summary := weigh_draws(context)) is None:
        verdict = (
            "not judged: the guide has no density, so its draws have no importance weights"
            f"{declare(context.proto.undeclared)}."
        )
        return [Row(KHAT, np.nan, None, "0.7", None, verdict, of_draws=True)]
    if summary.usable is None:
        return [summary.row]
    draws = {name: x.reshape(-1, *x.shape[2:]) for name, x in context.latent.items()}
    rows = compare_with_weights(draws, summary.usable, partial(_unit_of, context.proto))
    return [summary.row, *rows]


def _unit_of(proto: Prototype, name: str) -> np.ndarray:
    """The unit of every number of a site, by which the weights of a draw are split."""
    units, site = proto.units, proto.trace[name]
    shape = jnp.shape(site["value"])
    if units is None:
        return np.zeros(math.prod(shape), int)
    count = jnp.arange(math.prod(units.shape)).reshape(units.shape)
    return np.ravel(np.broadcast_to(units.along(site, count), shape))


def summarise_weights(log_w: np.ndarray, *, auxiliary: bool) -> WeightSummary:
    """The Pareto shape of ``(S, *units)`` log weights; of many units, that which all but the worst
    twentieth of them have. A large shape is no verdict on the draws: it says that their weights may
    not be used."""
    units = log_w.reshape(len(log_w), -1)
    if (why := _broken(units)) is not None:
        return WeightSummary(Row(KHAT, np.nan, None, "0.7", False, f"{why}."))
    chosen = equally_spaced(units.shape[1], _UNITS)
    some = units[:, chosen] if log_w.ndim > 1 else units[:, 0]
    fit = fit_tails(some)
    khat = np.atleast_1d(np.asarray(fit.khat, float))
    errors = np.atleast_1d(khat_error(khat, len(log_w)))
    k = np.argsort(khat)[-1]
    if log_w.ndim > 1:
        # By chance a shape is over the limit if it is within its error of it.
        over = special.ndtr((khat - fit.threshold) / np.where(errors > 0, errors, 1e-9))
        bad = BAD_UNITS + 2 * math.sqrt(np.sum(over * (1 - over))) / len(khat)
        k = np.argsort(khat)[max(0, len(khat) - 1 - math.floor(bad * len(khat)))]
    value, error, ok = float(khat[k]), float(errors[k]), bool(khat[k] <= fit.threshold)
    verdict = "the importance weights may be used."
    if not ok:
        which = "" if log_w.ndim == 1 else " of more than a twentieth of the units"
        verdict = (
            f"not judged: the importance weights{which} may not be used, neither for the evidence"
            " nor to correct the draws. The draws may be right all the same."
        )
        verdict += " Large weights may come from the auxiliary variables." if auxiliary else ""
    # Where the weights may be used, the next lines are the verdict on the draws.
    limit = f"{fit.threshold:.2f}"
    row = Row(KHAT, value, error or None, limit, True if ok else None, verdict, of_draws=not ok)
    if not ok:
        return WeightSummary(row, None, some, fit)
    fine = khat <= fit.threshold
    column = np.full(units.shape[1], -1)
    column[chosen[fine]] = np.arange(fine.sum())
    logs = fit.log_weights.reshape(len(log_w), -1)
    gap = None if auxiliary else _gap(units[:, chosen[fine]])
    return WeightSummary(row, UsableWeights(np.exp(logs[:, fine]), column, gap), some, fit)


def _broken(units: np.ndarray) -> str | None:
    """What is wrong with ``(S, units)`` log weights that have no tail."""
    if not np.all(np.isfinite(units) | (units == -np.inf)):
        return (
            "log weights are not numbers, because the guide leaves the support of the model; fit"
            " again with another guide"
        )
    if len(units) < FEWEST:
        return f"there are fewer than {FEWEST} weights; pass more num_samples"
    lost = float(np.max(np.mean(units == -np.inf, 0)))
    if lost > NO_DENSITY:
        share = "no draw has" if lost == 1 else f"{lost:.0%} of the draws do not have"
        return (
            f"{share} a density under the model, because the guide leaves its support; fit again"
            " with another guide"
        )
    single = units.shape[1] == 1
    if single and np.sum(np.exp(units.astype(np.float64) - np.max(units)) > 0) == 1:
        return (
            "all weights but one are 0: the guide has collapsed, or lies where the posterior has no"
            " mass; fit again with another loss or another guide"
        )
    return None


def compare_with_weights(
    draws: dict[str, np.ndarray],
    usable: UsableWeights,
    unit_of: Callable[[str], np.ndarray],
) -> list[Row]:
    """Mean, standard deviation and shape of every number, with the weights and without.

    :param draws: ``{site: (S, *site)}``, in the order of the weights.
    """
    names: list[str] = []
    pieces = []
    for site, x in draws.items():
        flat = x.reshape(len(x), -1)
        unit = unit_of(site)
        column = np.where(unit >= 0, usable.column[unit], -1)
        step = max(1, _FLOATS // len(x))
        for start in range(0, flat.shape[1], step):
            some = slice(start, start + step)
            here = np.flatnonzero(column[some] >= 0)
            if not len(here):
                continue
            pieces.append(_compare(flat[:, start + here], usable.weights, column[some][here]))
            size = flat.shape[1]
            names += [f"{site}[{k}]" if size > 1 else site for k in (start + here).tolist()]
    if not names:
        return []
    shift, ratio, widths = (np.concatenate(x, -1) for x in zip(*pieces, strict=True))
    comparison = Comparison(
        "importance weighting",
        "weights",
        names.__getitem__,
        f"{_REMEDY}; or draw from these draws by their weights (pareto_khat gives them)",
        *shift,
        *ratio,
        *widths,
        limits=WEIGHTED_RATIO,
    )
    rows = comparison.rows()
    return [*_gap_row(usable, ratio[0], rows[:2]), *rows]


def _gap_row(usable: UsableWeights, ratios: np.ndarray, others: list[Row]) -> list[Row]:
    """The Kullback-Leibler divergence of the guide from the posterior by the weights, which sees
    dependence between numbers too."""
    if usable.gap is None:
        return []
    gap, error = usable.gap
    limit = GAP + GAP_EACH * len(ratios)
    # Equal weights of draws that vary are known but for rounding.
    error = max(error, _ROUNDING) if np.any(~np.isnan(ratios)) else 0.0
    ok, _ = decide(np.array([gap]), np.array([error]), (-limit, limit), limit)
    verdict = {
        True: "the ELBO is as near to the log evidence as it is if every number is at its limits.",
        False: f"the ELBO is {gap:.2g} nats below the log evidence, more than means and standard"
        f" deviations explain, as where dependence is missing; {_REMEDY}.",
        None: "not judged: the gap is not known well enough; take more draws (num_samples).",
    }[ok]
    row = Row(OF_GAP, abs(gap), error, f"{limit:.3g}", ok, verdict, of_draws=True)
    return [void_if_any_unjudged([*others, row])[-1]]


def _compare(
    x: np.ndarray, weights: np.ndarray, column: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shifts in sds ``(2, n)``, sds over those by the weights ``(2, n)``, and the same of widths of
    intervals ``(2, 2, n)``; the second of each is its error, and NaN a number that does not vary.
    """
    eps = np.finfo(x.dtype).eps if np.issubdtype(x.dtype, np.floating) else 0.0
    x = x.astype(np.float64)
    size, (centre, sd) = len(x), mean_and_sd(x)
    varies = sd > least_spread(centre, eps)
    y = np.where(varies, (x - centre) / np.where(varies, sd, 1.0), 0.0)
    w = weights[:, column]

    def moved(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means by the weights, and the errors of these minus the means without."""
        mean = np.sum(w * z, -2)
        rest = w * (z - mean[..., None, :]) - (z - z.mean(-2)[..., None, :]) / size
        return mean, np.sqrt(np.sum(rest**2, -2))

    shift, shift_error = moved(y)
    variance = np.maximum(np.sum(w * (y - shift) ** 2, 0), 1e-12)
    of_ratio = w * ((y - shift) ** 2 / variance - 1) - (y**2 - 1) / size
    ratio = 1 / np.sqrt(variance)
    error = 0.5 * ratio * np.sqrt(np.sum(of_ratio**2, 0))
    ranked = np.sort(x, 0)
    levels = ranked[np.round(np.array(LEVELS) * (size - 1)).astype(int)]
    shares = inside(x, levels)
    held, no_error = shares.mean(1), np.zeros((3, x.shape[1]))
    widths, of_widths, median, of_median = shares_to_sd_ratios(
        held, no_error, *moved(shares), _ROUNDING
    )
    heavy = is_heavy(x, levels[2])
    nothing = np.array([np.nan, 0.0])

    def choose(by_moments: Any, by_intervals: Any) -> np.ndarray:
        """Of a number with a heavy tail the comparison by intervals."""
        pairs = zip(by_moments, by_intervals, strict=True)
        value, error = (np.where(heavy, b, a) for a, b in pairs)
        return np.where(varies, [value, np.maximum(error, _ROUNDING)], nothing[:, None])

    return (
        choose((shift, shift_error), (median, of_median)),
        choose((ratio, error), (widths[0], of_widths[0])),
        np.where(varies, [widths, np.maximum(of_widths, _ROUNDING)], nothing[:, None, None]),
    )
