"""Whether the importance weights of a guide may be used, by k-hat, and what they change if so."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_ext._model.labels import number_name
from numpyro_ext._model.normal import mean_and_sd
from numpyro_ext.diagnostics._density import declare
from numpyro_ext.diagnostics._fit import Fit, cached
from numpyro_ext.diagnostics.comparison import (
    Comparison,
    decide,
    is_heavy,
    least_spread,
    void_if_any_unjudged,
)
from numpyro_ext.diagnostics.limits import GAP, GAP_EACH, NO_DENSITY, WEIGHTED_RATIO
from numpyro_ext.diagnostics.psis import FEWEST, ParetoKhat, fit_tails, khat_error
from numpyro_ext.diagnostics.table import Row

KHAT, OF_GAP = "k-hat", "gap of the ELBO in nats"
_FLOATS = 10**6
"""The largest number of floats of draws in memory in double precision."""
_REMEDY = "train longer, or take a richer guide"
_ROUNDING = 1e-6
"""What is left of an error where all weights are equal, which is no lack of evidence."""


class WeightSummary(NamedTuple):
    """The line of k-hat, the log weights ``(S,)``, and the fit to their tail, if any."""

    row: Row
    log_w: np.ndarray
    tail: ParetoKhat | None = None
    auxiliary: bool = False
    """True if the weights belong to auxiliary variables too."""


@cached
def weigh_draws(fit: Fit) -> WeightSummary | None:
    """The weights of a guide, if it has a density."""
    if (log_weight := fit.stats.get("log_weight")) is None:
        return None
    chains, size = log_weight.shape[:2]
    log_w = log_weight.reshape(chains * size, -1).astype(np.float64).sum(1)
    return summarise_weights(log_w, auxiliary=fit.proto.density == "bound")


@cached
def weights(fit: Fit) -> list[Row]:
    """The lines of the weights of a guide; the first one is k-hat."""
    if (summary := weigh_draws(fit)) is None:
        verdict = (
            "not judged: the guide has no density, so its draws have no importance weights"
            f"{declare(fit.proto.undeclared)}."
        )
        return [Row(KHAT, np.nan, None, "0.7", None, verdict, of_draws=True)]
    draws = {name: x.reshape(-1, *x.shape[2:]) for name, x in fit.latent.items()}
    remedy = fit.noise_problem or _REMEDY
    return [summary.row, *(compare_with_weights(draws, summary, remedy) if summary.row.ok else [])]


def summarise_weights(log_w: np.ndarray, *, auxiliary: bool) -> WeightSummary:
    """The Pareto shape of ``(S,)`` log weights; a large one is no verdict on the draws."""
    if (why := _broken(log_w)) is not None:
        return WeightSummary(Row(KHAT, np.nan, None, "0.7", False, f"{why}."), log_w)
    tail = fit_tails(log_w)
    error, limit = float(khat_error(tail.khat, len(log_w))), f"{tail.threshold:.2f}"
    row = Row(KHAT, tail.khat, error or None, limit, True, "the importance weights may be used.")
    if tail.khat > tail.threshold:
        verdict = (
            "not judged: the importance weights may not be used, neither for the evidence nor to"
            " correct the draws. The draws may be right all the same."
        )
        verdict += " Large weights may come from the auxiliary variables." if auxiliary else ""
        # Where the weights may be used, the next lines are the verdict on the draws.
        row = row._replace(ok=None, verdict=verdict, of_draws=True)
    return WeightSummary(row, log_w, tail, auxiliary)


def _broken(log_w: np.ndarray) -> str | None:
    """What is wrong with log weights that have no tail."""
    leaves = "because the guide leaves the support of the model; take another guide"
    if not np.all(np.isfinite(log_w) | (log_w == -np.inf)):
        return f"log weights are not numbers, {leaves}"
    if len(log_w) < FEWEST:
        return f"there are fewer than {FEWEST} weights; pass more num_samples"
    lost = float(np.mean(log_w == -np.inf))
    if lost > NO_DENSITY:
        share = "no draw has" if lost == 1 else f"{lost:.0%} of the draws do not have"
        return f"{share} a density under the model, {leaves}"
    if np.sum(np.exp(log_w.astype(np.float64) - np.max(log_w)) > 0) == 1:
        return (
            "all weights but one are 0: the guide has collapsed, or lies where the posterior has no"
            " mass; take another loss or another guide"
        )
    return None


def compare_with_weights(
    draws: dict[str, np.ndarray], summary: WeightSummary, remedy: str = _REMEDY
) -> list[Row]:
    """Mean and sd of every number of ``{site: (S, *site)}``, with the weights and without."""
    assert summary.tail is not None
    w = np.exp(summary.tail.log_weights)[:, None]
    names: list[str] = []
    pieces = []
    for site, x in draws.items():
        flat, step = x.reshape(len(x), -1), max(1, _FLOATS // len(x))
        size = flat.shape[1]
        pieces += [_compare(flat[:, k : k + step], w) for k in range(0, size, step)]
        names += [number_name(site, x.shape[1:], k) for k in range(size)]
    values = np.concatenate(pieces, 1)
    by_weights = f"{remedy}; or draw from these draws by their weights (pareto_khat gives them)"
    rows = Comparison(names.__getitem__, by_weights, values, limits=WEIGHTED_RATIO).rows()
    return [*_gap_row(summary, values[2], rows, remedy), *rows]


def _gap_row(
    summary: WeightSummary, ratios: np.ndarray, others: list[Row], remedy: str
) -> list[Row]:
    """The bound of order 0 minus the ELBO: the Kullback-Leibler divergence of the guide from the
    posterior by the weights, unless a draw without a density makes it infinite."""
    x = summary.log_w.astype(np.float64) - np.max(summary.log_w)
    if summary.auxiliary or np.any(x == -np.inf):
        return []
    w, size = np.exp(x), len(x)
    gap = float(np.log(w.mean()) - x.mean())
    error = float(np.std(w / w.mean() - 1 - (x - x.mean()))) / math.sqrt(size)
    limit = GAP + GAP_EACH * len(ratios)
    # Equal weights of draws that vary are known but for rounding.
    error = max(error, _ROUNDING) if np.any(~np.isnan(ratios)) else 0.0
    ok, _ = decide(np.array([gap]), np.array([error]), (-limit, limit), limit)
    verdict = {
        True: "the ELBO is as near to the log evidence as it is if every number is at its limits.",
        False: f"the ELBO is {gap:.2g} nats below the log evidence, more than means and standard"
        f" deviations explain, as where dependence is missing; {remedy}.",
        None: "not judged: the gap is not known well enough; take more draws (num_samples).",
    }[ok]
    row = Row(OF_GAP, abs(gap), error, f"{limit:.3g}", ok, verdict, of_draws=True)
    return [void_if_any_unjudged([*others, row])[-1]]


def _compare(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """``(4, n)`` shifts in sds, sds over sds by the weights ``(S, 1)``, and the error of each below
    it; NaN of a number that does not vary, or has too heavy a tail."""
    eps = np.finfo(x.dtype).eps if np.issubdtype(x.dtype, np.floating) else 0.0
    x = x.astype(np.float64)
    size, (centre, sd) = len(x), mean_and_sd(x)
    varies = sd > least_spread(centre, eps)
    y = np.where(varies, (x - centre) / np.where(varies, sd, 1.0), 0.0)
    shift = np.sum(w * y, 0)
    # The error of a mean by the weights minus the mean without, in units of an sd that has one too.
    of_shift = w * (y - shift) - (y + shift * (y**2 - 1) / 2) / size
    shift_error = np.sqrt(np.sum(of_shift**2, 0))
    variance = np.maximum(np.sum(w * (y - shift) ** 2, 0), 1e-12)
    of_ratio = w * ((y - shift) ** 2 / variance - 1) - (y**2 - 1) / size
    ratio = 1 / np.sqrt(variance)
    error = 0.5 * ratio * np.sqrt(np.sum(of_ratio**2, 0))
    judged = varies & ~is_heavy(x, np.median(x, 0))
    values = [shift, np.maximum(shift_error, _ROUNDING), ratio, np.maximum(error, _ROUNDING)]
    return np.where(judged, values, np.array([[np.nan], [0.0], [np.nan], [0.0]]))
