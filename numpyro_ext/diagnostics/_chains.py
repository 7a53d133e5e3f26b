"""Lines about chains: their temperature and step, their agreement, and the price of a draw."""

from collections.abc import Collection
import math
from typing import Any

import numpy as np

from numpyro_ext._model.mode_search import Problem
from numpyro_ext.diagnostics.table import Row, equally_spaced, judged, shown

__all__ = [
    "AGREEMENT",
    "chain_rows",
    "hmc_rows",
    "restart_rows",
    "settings_rows",
    "sgmcmc_rows",
    "tells_of_modes",
]

OFF = 0.1
"""Relative error of a temperature or of a variance that is still fine."""
DIVERGING = 0.01
RHAT, AGREEMENT = 1.01, "largest R-hat"
COORDINATES = 1000
"""At most so many coordinates are looked at, equally spaced."""
SLOWER = 20
"""Measured over predicted transitions per independent draw that is still near normal."""
_NOT_KNOWN = (
    "not judged: the value is outside of its limits, and its error is larger than they are; look at"
    " the other lines, or draw more."
)
_DRAW_MORE = "its error takes 4 draws of each chain, so it is not judged; draw more."


def _mean_and_error(x: np.ndarray) -> tuple[float, float]:
    """Mean of ``(chain, draw)`` numbers and its Monte Carlo standard error."""
    from arviz_stats.base.array import array_stats

    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        error: Any = array_stats.mcse(x, chain_axis=0, draw_axis=1, method="mean")
    return float(np.mean(x)), float(error)


def sgmcmc_rows(stats: dict[str, np.ndarray], facts: dict[str, Any]) -> list[Row]:
    """Temperature or variance ratio, divergences and the step, as far as the numbers are there.

    :param stats: ``(chain, draw)`` arrays of ``sample_stats``.
    :param facts: those of :func:`facts_of`, and ``kernel``.
    """
    T = facts.get("temperature")
    if "sampling" in stats:
        kept = np.asarray(stats["sampling"], bool).all(0)
        stats = {name: x[:, kept] for name, x in stats.items() if kept.any()}
    rows = []
    if T is not None and "kinetic_temperature" in stats:
        rows.append(_kinetic_temperature(stats["kinetic_temperature"], T, facts))
    if facts.get("noise_share", 0) > 0:
        rows.append(_noise_share(facts))
    if T is not None and "implied_variance_ratio" in stats:
        rows.append(_implied_ratio(stats["implied_variance_ratio"], facts))
    if "diverging" in stats:
        rows.append(_divergences(stats["diverging"]))
    if "step_scale" in stats or "step_scale" in facts:
        scale = facts.get("step_scale", np.min(stats.get("step_scale", 1.0)))
        rows.append(_step_scale(float(scale), facts))
    return rows


def hmc_rows(stats: dict[str, np.ndarray]) -> list[Row]:
    """The divergences of ``HMC`` and ``NUTS``; none where they were not collected."""
    if "diverging" not in stats:
        return []
    value = float(np.sum(stats["diverging"]))
    row = judged(
        "divergences",
        value,
        "0",
        value == 0,
        "no trajectory diverged.",
        "trajectories left the region that they should explore; raise target_accept_prob, or"
        " reparametrise the model.",
    )
    return [row]


def settings_rows(facts: dict[str, Any], *, visits_modes: bool = False) -> list[Row]:
    """The assumptions that did not hold where the kernel found its settings.

    :param visits_modes: whether the chains have been found in all modes, so that the sentence about
        several of them is for information.
    """
    problems = facts.get("settings_problems", [])
    if not problems:
        return []
    # An attribute of a single string loses its list in some file formats.
    problems = [problems] if isinstance(problems, str) else list(problems)
    name = "problems of the settings"
    if visits_modes and all(tells_of_modes(problem) for problem in problems):
        verdict = f"{problems[0][:-1]}: here the chains agree, and no mode was found without draws."
        return [Row(name, len(problems), None, "", None, verdict)]
    return [Row(name, len(problems), None, "0", False, " ".join(problems))]


def tells_of_modes(problem: str) -> bool:
    """Whether a sentence of the settings is that the posterior has several modes."""
    return isinstance(problem, Problem) and problem.kind == "several modes"


def _kinetic_temperature(x: np.ndarray, T: float, facts: dict[str, Any]) -> Row:
    """With settings that were found it is between the two that the law of the kernel predicts."""
    low, high = (T * facts.get(name, 1.0) for name in ("coldest_predicted", "hottest_predicted"))
    value, error = _mean_and_error(x)
    limit = f"{shown(low, 3)} to {shown(high, 3)}"
    limit = f"{shown(high, 3) if high - low < 0.005 * T else limit} +- {OFF:.0%}"
    excess = max(low - value, value - high, 0.0)
    if unknown := _unknown("kinetic temperature", value, error, limit, excess, OFF * T):
        return unknown
    ok = not (excess > OFF * T and excess > 3 * error) and math.isfinite(value)
    verdict = "the draws have the temperature of the posterior."
    if not ok and value > high:
        verdict = (
            "gradient noise or too large a step heats the chain, so its draws are about"
            f" {math.sqrt(value / high):.2g} times too wide; {_less_noise(facts)}."
        )
    elif not ok:
        verdict = (
            "the momentum is not at its temperature, so the chain has not settled; warm it up"
            " longer, or start it from find_modes or an SVI fit."
        )
    return Row("kinetic temperature", value, error, limit, ok, verdict, of_draws=True)


def _unknown(
    quantity: str, value: float, error: float, limit: str, excess: float, allowed: float
) -> Row | None:
    """The line of a mean of which there are too few draws to know its error, or to know it to what
    is allowed where it is outside of its limits by no more than three errors."""
    if math.isfinite(value) and math.isnan(error):
        return Row(quantity, value, None, limit, None, _DRAW_MORE, True)
    if allowed < excess <= 3 * error and error > allowed:
        return Row(quantity, value, error, limit, None, _NOT_KNOWN, True)
    return None


def _less_noise(facts: dict[str, Any]) -> str:
    if "found_step_size" in facts:
        return (
            "the posterior is not near normal in the coordinates found, so reparametrise the model,"
            " or take a smaller max_bias"
        )
    return (
        "pass step_size=None to have the settings found, or take a smaller step or a ControlVariate"
    )


def _noise_share(facts: dict[str, Any]) -> Row:
    """The share of the injected noise that the estimate of SGHMC takes off."""
    value = facts["noise_share"]
    return judged(
        "gradient noise over injected noise",
        value,
        "1",
        value <= 1,
        "the noise of the gradients is taken off the injected noise in full.",
        "the estimate of the gradients' noise was cut, so the rest of it heats the chain;"
        f" {_less_noise(facts)}.",
    )


def _implied_ratio(ratio: np.ndarray, facts: dict[str, Any]) -> Row:
    """The variances on a Gaussian that the gradients of a kernel without momentum imply."""
    value, error = _mean_and_error(ratio)
    limit = f"{1 + OFF:.3g}"
    if unknown := _unknown("implied variance ratio", value, error, limit, value - 1, OFF):
        return unknown
    return judged(
        "implied variance ratio",
        value,
        limit,
        not (value - 1 > OFF and value - 1 > 3 * error) and math.isfinite(value),
        "the size of the gradients says that the step is small enough.",
        "the step is too large for the noise of the gradients, so variances are too large by this"
        f" factor on average; {_less_noise(facts)}.",
        error,
        of_draws=True,
    )


def _divergences(diverging: np.ndarray) -> Row:
    share = float(np.mean(diverging))
    return judged(
        "share of diverging draws",
        share,
        f"{DIVERGING:.3g}",
        share <= DIVERGING,
        "no more than a few transitions were refused.",
        "in these draws the chain met values that are not finite and stayed where it was; take a"
        " smaller step, or start from find_modes or an SVI fit.",
    )


def _step_scale(scale: float, facts: dict[str, Any]) -> Row:
    found = "found_step_size" in facts
    return judged(
        "step scale after warmup",
        scale,
        "1",
        scale >= 1,
        "the chain kept its step.",
        "the chain diverged in warmup and went on with this fraction of its step;"
        f" {_less_noise(facts) if found else 'pass one this much smaller, or step_size=None'}.",
    )


class _Agreement:
    """R-hat and effective sample sizes of draws ``{site: (chain, draw, *site)}``."""

    def __init__(self, draws: dict[str, np.ndarray], latents: Collection[str] = ()) -> None:
        from arviz_stats.base.array import array_stats

        sizes = [math.prod(x.shape[2:]) for x in draws.values()]
        total = sum(sizes)
        chosen = equally_spaced(total, COORDINATES)
        self.names, self.stuck, columns, start = [], [], [], 0
        for (site, x), size in zip(draws.items(), sizes, strict=True):
            here = chosen[(chosen >= start) & (chosen < start + size)] - start
            start += size
            flat = np.asarray(x.reshape(*x.shape[:2], size)[..., here], np.float64)
            # Entries such as the zeros of a triangular factor never move; a whole latent site does.
            moves = np.any(flat != flat[:1, :1], (0, 1))
            if site in latents and len(here) and not np.any(moves):
                self.stuck.append(site)
            self.names += [f"{site}[{k}]" if size > 1 else site for k in here[moves]]
            columns.append(flat[..., moves])
        x = np.concatenate(columns, -1)
        self.lost = float(np.mean(~np.isfinite(x).all(-1)))
        self.chains, self.draws = x.shape[:2]
        self.rhat = self.ess = np.zeros(0)
        if not self.names:
            return
        halves = x
        if self.chains == 1:  # the first half against the second
            half = self.draws // 2
            halves = np.concatenate([x[:, :half], x[:, half : 2 * half]])
        with np.errstate(divide="ignore", invalid="ignore"):
            self.rhat = np.asarray(array_stats.rhat(halves, chain_axis=0, draw_axis=1))
            self.ess = np.asarray(array_stats.ess(x, chain_axis=0, draw_axis=1))

    def worst(self, values: np.ndarray, largest: bool) -> tuple[float, str]:
        known = np.flatnonzero(~np.isnan(values))
        if not len(known):
            return math.nan, ""
        k = known[np.argmax(values[known]) if largest else np.argmin(values[known])]
        return float(values[k]), self.names[k]


def _moving(found: _Agreement) -> list[Row]:
    rows = []
    if found.lost:
        verdict = (
            "these draws have left the support of a site or are not finite; take a smaller step, or"
            " another start."
        )
        rows.append(Row("share of draws not finite", found.lost, None, "0", False, verdict))
    if found.stuck:
        named = ", ".join(f"'{name}'" for name in found.stuck)
        verdict = (
            f"no chain ever moved {named}: the transform of its support may be saturated; take"
            " another start or a smaller step."
        )
        rows.append(Row("sites that never move", len(found.stuck), None, "0", False, verdict))
    return rows


def _rhat(found: _Agreement, restarts: bool) -> Row:
    value, name = found.worst(found.rhat, largest=True)
    what = "restarts" if restarts else "chains" if found.chains > 1 else "halves of the chain"
    wrong = f"the {what} differ, most of all in {name}; run longer, or reparametrise the model."
    if math.isnan(value):
        wrong = (
            f"it cannot be computed, which takes 4 finite draws of each of the {what}; draw more."
        )
    elif restarts:
        wrong = (
            f"the restarts are different optima, most of all in {name}; keep the one of the lowest"
            " loss, or take a guide with several modes."
        )
    right = f"the {what} agree."
    return judged(AGREEMENT, value, f"{RHAT}", value <= RHAT, right, wrong)


def restart_rows(draws: dict[str, np.ndarray], facts: dict[str, Any]) -> list[Row]:
    """The lines of several restarts of one fit, whose draws are the chains."""
    found = _Agreement(draws)
    if "distinct_restarts" in facts:
        verdict = (
            "restarts of the same parameters say nothing about other optima; make them by"
            " numpyro_ext.diagnostics.restarts."
        )
        number, limit = facts["distinct_restarts"], str(facts["num_restarts"])
        return [*_moving(found), Row("different restarts", number, None, limit, None, verdict)]
    if all(np.all(x == x[:, :1]) for x in draws.values()):  # points have no spread to compare with
        return _moving(found)
    return [*_moving(found), _rhat(found, restarts=True)]


def chain_rows(
    draws: dict[str, np.ndarray],
    stats: dict[str, np.ndarray],
    facts: dict[str, Any],
    latents: Collection[str],
) -> list[Row]:
    """The lines of a run of MCMC: R-hat, effective draws and their price.

    :param latents: sites that have to move; deterministic ones need not.
    """
    found = _Agreement(draws, latents)
    rows = [*_moving(found), _rhat(found, restarts=False)]
    ess, name = found.worst(found.ess, largest=False)
    limit = min(400, 100 * found.chains)
    enough = judged(
        "smallest ESS",
        ess,
        f"{limit}",
        ess >= limit,
        "there are enough independent draws.",
        f"the effective sample size of {name or 'all sites'} is too small; run longer, or"
        " reparametrise the model.",
    )
    rows.append(enough)
    total = found.chains * found.draws
    if math.isnan(ess) or ess <= 0:
        return rows
    rows += _prices(ess / total, stats, facts)
    if "predicted_transitions" in facts:
        rows.append(_slowness(total / ess, facts))
    return rows


def _prices(ess: float, stats: dict[str, np.ndarray], facts: dict[str, Any]) -> list[Row]:
    """The price of an effective draw, without warmup; ``ess`` is per draw."""
    transitions = facts.get("transitions_per_draw", math.nan)
    gradients = facts.get("gradients_per_draw", math.nan)
    if "n_steps" in stats:  # the leapfrog steps of the draws that were kept
        gradients = float(np.mean(stats["n_steps"])) * facts.get("transitions_per_draw", 1)
    elif "takes_leapfrogs" in facts:
        verdict = 'the leapfrog steps were not collected: run it with extra_fields=("num_steps",).'
        return [Row("ESS per gradient", math.nan, None, "", None, verdict)]
    compare = "for comparison with other kernels and settings."
    if math.isnan(gradients):
        if math.isnan(transitions):
            return []
        return [Row("ESS per transition", ess / transitions, None, "", None, compare)]
    if "rows" not in facts:
        return [Row("ESS per gradient", ess / gradients, None, "", None, compare)]
    batch, size = facts["batch_rows"], facts["rows"]
    verdict = f"each gradient takes {batch:,.0f} of {size:,.0f} rows."
    rows = [Row("ESS per gradient", ess / gradients, None, "", None, verdict)]
    per_pass = ess / gradients * size / batch
    return [*rows, Row("ESS per pass over the data", per_pass, None, "", None, compare)]


def _slowness(draws: float, facts: dict[str, Any]) -> Row:
    """Transitions per independent draw, of which a draw shows no fewer than its own."""
    step, predicted = facts["transitions_per_draw"], facts["predicted_transitions"]
    value = draws * step
    slowest = SLOWER * max(predicted, step)
    return judged(
        "transitions per independent draw",
        value,
        f"{slowest:,.3g}",
        not value > slowest,
        f"the law of the kernel predicts {predicted:,.3g}.",
        f"the law of the kernel on a normal posterior predicts {predicted:,.3g}, so this one is not"
        " near normal; reparametrise the model (of a hierarchy, change how it is centred).",
    )
