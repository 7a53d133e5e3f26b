"""Whether the importance weights of a guide may be used, by k-hat, and what they change if so."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

from jax.scipy.special import ndtr
import numpy as np

from numpyro_ext.diagnostics._density import declare
from numpyro_ext.diagnostics._spread import (
    LEVELS,
    inside,
    is_heavy,
    least_spread,
    mean_and_sd,
    shares_to_sd_ratios,
)
from numpyro_ext.diagnostics.context import DiagnosisContext, FitContext, cached
from numpyro_ext.diagnostics.evidence import evidence_bounds
from numpyro_ext.diagnostics.judges.points import has_moves
from numpyro_ext.diagnostics.limits import (
    BAD_UNITS,
    GAP,
    GAP_EACH,
    NO_DENSITY,
    WEIGHTED_RATIO,
    WEIGHTED_SHIFT,
    judged_ranges,
    judged_ratios,
    judged_shifts,
    void_if_any_unjudged,
)
from numpyro_ext.diagnostics.psis import ParetoKhat, khat_error, pareto_khat
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["WeightSummary", "khat_rows", "reweighted_rows", "weigh_draws", "weights"]

UNITS = 1000
"""The largest number of units, equally spaced, that get a k-hat of their own."""
NUMBERS = 10**6
"""The largest number of floats of draws in memory in double precision."""
QUANTITY, OF_SHIFT = "sd ratio to reweighted, worst", "shift by reweighting, worst"
OF_RANGE, OF_GAP = "shape by reweighting, worst", "gap of the ELBO in nats"
_ROUNDING = 1e-6
"""What is left of an error where all weights are equal, which is no lack of evidence."""


class UsableWeights:
    """The smoothed weights of the units whose weights may be used.

    * ``weights`` - ``(S, units)``, each column with the sum 1.
    * ``column`` - for every unit, its column there; -1 for units that are left out.
    * ``gap`` - the ELBO of these units below their bound of order 0, and its error; None where it
      is not that of the guide alone.
    """

    def __init__(
        self, found: ParetoKhat, log_w: np.ndarray, chosen: np.ndarray, *, auxiliary: bool
    ) -> None:
        fine = np.atleast_1d(np.asarray(found.khat) <= found.threshold)
        logs = found.log_weights.reshape(len(found.log_weights), -1)
        self.weights = np.exp(logs[:, fine])
        self.column = np.full(log_w.shape[1], -1)
        self.column[chosen[fine]] = np.arange(fine.sum())
        self.gap = None if auxiliary else _gap(log_w[:, chosen[fine]])


class WeightSummary(NamedTuple):
    """What is known of weights before they are compared with anything."""

    rows: list[Row]
    usable: UsableWeights | None = None
    log_w: np.ndarray | None = None
    """``(S,)`` or ``(S, units)`` log weights of at most so many units, and the fit to their tail;
    None where there is no such fit."""
    found: ParetoKhat | None = None


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
def weigh_draws(context: DiagnosisContext) -> WeightSummary | None:
    """The weights of a guide, if it has a density."""
    if (log_weight := context.log_weight) is None:
        return None
    log_w = log_weight.reshape(-1, *log_weight.shape[2:])
    return khat_rows(log_w, auxiliary=context.density == "bound", cause=context.cause)


@cached
def weights(context: DiagnosisContext) -> list[Row]:
    """The lines of the weights of a guide, if it has a density."""
    if (known := weigh_draws(context)) is None:
        moved = isinstance(context, FitContext) and has_moves(context)
        more = "the next lines look at its draws" if moved else "compare it with MCMC"
        more += declare(context.undeclared)
        verdict = (
            "the guide has no density, so neither k-hat nor bounds of the evidence can be"
            f" computed; {more}."
        )
        return [Row("k-hat", np.nan, None, "0.7", None, verdict, of_draws=True)]
    if known.usable is None:
        return known.rows
    every = {name: x.reshape(-1, *x.shape[2:]) for name, x in context.latent.items()}
    return [*known.rows, *reweighted_rows(every, known.usable, context.unit_of, context.cause)]


def khat_rows(log_w: np.ndarray, *, auxiliary: bool, cause: str | None = None) -> WeightSummary:
    """Pareto shapes of ``(S, *units)`` log weights, the bounds of the evidence, and the weights. A
    large shape is no verdict on the draws: it says that their weights may not be used."""
    units = log_w.reshape(len(log_w), -1)
    chosen = equally_spaced(units.shape[1], UNITS)
    if not np.all(np.isfinite(units) | (units == -np.inf)) or len(log_w) < 25:
        verdict = (
            "there are too few weights or some are not numbers, because the guide leaves the"
            " support of the model; pass more num_samples, or fit again with another guide."
        )
        return WeightSummary([Row("k-hat", np.nan, None, "", False, verdict)])
    lost = float(np.max(np.mean(units == -np.inf, 0)))
    if lost > NO_DENSITY:
        share = "no draw has" if lost == 1 else f"{lost:.0%} of the draws do not have"
        verdict = (
            f"{share} a density under the model, because the guide leaves its support; fit again"
            " with another guide."
        )
        return WeightSummary([Row("k-hat", np.inf, None, "", False, verdict)])
    if log_w.ndim == 1 and np.sum(np.exp(log_w.astype(np.float64) - np.max(log_w)) > 0) == 1:
        verdict = (
            "all weights but one are 0: the guide has collapsed, or lies where the posterior has no"
            " mass; fit again with another loss or another guide."
        )
        return WeightSummary([Row("k-hat", np.inf, None, "", False, verdict)])
    some = units[:, chosen] if log_w.ndim > 1 else units[:, 0]
    found = pareto_khat(some)
    errors, limit = khat_error(found.khat, len(log_w)), found.threshold
    if log_w.ndim == 1:
        what, value, error, at_most = "k-hat", float(found.khat), float(errors), f"{limit:.2f}"
        ok = value <= limit
    else:
        # By chance a shape is over the limit if it is within its error of it.
        high = np.asarray(ndtr((found.khat - limit) / np.where(errors > 0, errors, 1e-9)))
        value = float(np.mean(found.khat > limit))
        error = float(np.sqrt(np.sum(high * (1 - high))) / high.size)
        what, at_most = f"share of units with k-hat > {limit:.2f}", f"{BAD_UNITS}"
        ok = value <= BAD_UNITS + 2 * error
    verdict = "the importance weights may be used: the next lines say what they change."
    if not ok:
        where = "" if log_w.ndim == 1 else " in these units"
        verdict = (
            f"the weights may not be used{where}, neither for the evidence nor to"
            " correct the draws. That does not say whether the draws are right: see the other"
            " lines."
        )
        if auxiliary:
            verdict += " Large weights may come from the guide, or its reverse model."
        verdict += "" if cause is None else f" {cause}."
    # Only with a verdict of its own would it be one on the draws.
    rows = [Row(what, value, error or None, at_most, True if ok else None, verdict, not ok)]
    bounds = evidence_bounds(log_w, alphas=(1.0, 0.0))
    (elbo, log_evidence), (se, se0) = bounds.values.tolist(), bounds.standard_errors.tolist()
    gap = f"the bound of order 0 is {log_evidence - elbo:.3g} nats above it."
    rows.append(Row("ELBO (order 1)", elbo, se, "", None, gap))
    verdict = "the estimate of the log evidence."
    if np.min(bounds.effective_sample_size) < 50:
        verdict = "a few draws carry it, so it says little about the log evidence."
    rows.append(Row("bound of order 0", log_evidence, se0, "", None, verdict))
    usable = UsableWeights(found, units, chosen, auxiliary=auxiliary) if ok else None
    return WeightSummary(rows, usable, some, found)


def reweighted_rows(
    draws: dict[str, np.ndarray],
    usable: UsableWeights,
    unit_of: Callable[[str], np.ndarray],
    remedy: str | None = None,
) -> list[Row]:
    """Mean and standard deviation of every number, with the weights and without.

    :param draws: ``{site: (S, *site)}``, in the order of the weights.
    """
    remedy = remedy or "train longer, or take a richer guide"
    names: list[str] = []
    shifts, ratios, ranges = [], [], []
    for site, x in draws.items():
        flat = x.reshape(len(x), -1)
        unit = unit_of(site)
        column = np.where(unit >= 0, usable.column[unit], -1)
        step = max(1, NUMBERS // len(x))
        for start in range(0, flat.shape[1], step):
            some = slice(start, start + step)
            here = np.flatnonzero(column[some] >= 0)
            if not len(here):
                continue
            given = flat[:, start + here], usable.weights, column[some][here]
            for rest, found in zip((shifts, ratios, ranges), _compare(*given), strict=True):
                rest.append(found)
            size = flat.shape[1]
            names += [f"{site}[{k}]" if size > 1 else site for k in (start + here).tolist()]
    if not names:
        return []
    shift, shift_error = np.concatenate(shifts, 1)
    ratio, error = np.concatenate(ratios, 1)
    of_ranges = np.concatenate(ranges, 2)
    end = f"{remedy}; or draw from these draws by their weights (pareto_khat gives them)."
    rows = [
        judged_shifts(
            OF_SHIFT,
            shift,
            shift_error,
            WEIGHTED_SHIFT,
            "the importance weights leave the means where they are.",
            lambda k, by: (
                f"the importance weights move the mean of {names[k]} by {by:.2g} of its standard"
                f" deviations, as they do where a mode has the wrong share; {end}"
            ),
        ),
        judged_ratios(
            QUANTITY,
            ratio,
            error,
            WEIGHTED_RATIO,
            "the importance weights leave the standard deviations as they are.",
            lambda k, by: (
                f"the importance weights make the standard deviation of {names[k]} {1 / by:.2g}"
                f" times what it is; {end}"
            ),
        ),
    ]
    reweighted = "the importance weights make"
    rest = []
    # Where the draws lie elsewhere, the ranges have other shares in any case.
    if rows[0].ok is not False:
        rest.append(
            judged_ranges(OF_RANGE, of_ranges[0], of_ranges[1], names.__getitem__, reweighted, end)
        )
    rest += _gap_rows(usable, ratio, remedy)
    return [*void_if_any_unjudged(rows), *(void_if_any_unjudged([*rows, row])[-1] for row in rest)]


def _gap_rows(usable: UsableWeights, ratios: np.ndarray, remedy: str) -> list[Row]:
    """The Kullback-Leibler divergence of the guide from the posterior by the weights, which sees
    dependence between numbers too."""
    if usable.gap is None:
        return []
    gap, error = usable.gap
    limit = GAP + GAP_EACH * len(ratios)
    # Equal weights are known but for rounding, if they are those of draws that vary.
    error = max(error, _ROUNDING) if np.any(~np.isnan(ratios)) else 0.0
    row = judged_shifts(
        OF_GAP,
        np.array([gap]),
        np.array([error]),
        limit,
        "the ELBO is as near to the log evidence as single numbers at their limits are.",
        lambda k, by: (
            f"the ELBO is {by:.2g} nats below the log evidence, more than means and standard"
            f" deviations explain, as where dependence is missing; {remedy}."
        ),
    )
    return [row._replace(limit=f"{limit:.3g}")]


def _compare(
    x: np.ndarray, weights: np.ndarray, column: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shifts in sds ``(2, n)``, sds over those by the weights ``(2, n)``, and the same of ranges
    ``(2, 2, n)``; the second of each is its error, and NaN a number that does not vary."""
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
    no_widths = np.array([np.nan, 0.0])[:, None, None]

    def of(by_moments: Any, by_ranges: Any) -> np.ndarray:
        value, error = (np.where(heavy, b, a) for a, b in zip(by_moments, by_ranges, strict=True))
        return np.where(varies, [value, np.maximum(error, _ROUNDING)], np.array([[np.nan], [0.0]]))

    return (
        of((shift, shift_error), (median, of_median)),
        of((ratio, error), (widths[0], of_widths[0])),
        np.where(varies, [widths, np.maximum(of_widths, _ROUNDING)], no_widths),
    )
