"""Whether a chain of stochastic gradients has the temperature and the step of its posterior."""

import math

import numpy as np

from numpyro_ext.diagnostics._facts import Facts, Numbers, several_modes
from numpyro_ext.diagnostics.context import DiagnosisContext, FitContext
from numpyro_ext.diagnostics.judges.chains import AGREEMENT, agreement
from numpyro_ext.diagnostics.judges.other_modes import search_of_chains
from numpyro_ext.diagnostics.judges.shares import SHARE
from numpyro_ext.diagnostics.limits import DIVERGING, TEMPERATURE, judged, judged_mean
from numpyro_ext.diagnostics.table import Row, shown

__all__ = ["settings", "sgmcmc_rows", "stochastic_gradients"]


def stochastic_gradients(context: DiagnosisContext) -> list[Row]:
    """The lines of kernels whose draws have a bias."""
    return sgmcmc_rows(context.stats, context.facts) if context.is_biased else []


def settings(context: DiagnosisContext) -> list[Row]:
    """The assumptions that did not hold where the kernel found its settings; chains that agree,
    where each mode has its share or a search finds no mode without draws, make that there are
    several an information."""
    problems = context.facts.settings_problems
    if not problems:
        return []
    # An attribute of a single string loses its list in some file formats.
    problems = [problems] if isinstance(problems, str) else list(problems)
    right = [row.quantity for row in agreement(context) if row.ok]
    fine = None
    if AGREEMENT in right and SHARE in right:
        fine = "here the chains at each mode agree, and each mode has its share of the draws"
    elif AGREEMENT in right and isinstance(context, FitContext) and search_of_chains(context) == []:
        fine = "here the chains agree, and no mode was found without draws"
    name = "problems of the settings"
    if fine and several_modes(context.facts) == problems:
        verdict = f"{problems[0][:-1]}: {fine}."
        return [Row(name, len(problems), None, "", None, verdict)]
    return [Row(name, len(problems), None, "0", False, " ".join(problems))]


def sgmcmc_rows(stats: Numbers, facts: Facts) -> list[Row]:
    """Temperature or variance ratio, divergences and the step, as far as the numbers are there."""
    T = facts.temperature
    if "sampling" in stats:
        kept = np.asarray(stats["sampling"], bool).all(0)
        stats = {name: x[:, kept] for name, x in stats.items() if kept.any()}
    rows = []
    if T is not None and "kinetic_temperature" in stats:
        rows.append(_kinetic_temperature(stats["kinetic_temperature"], T, facts))
    if (facts.noise_share or 0) > 0:
        rows.append(_noise_share(facts))
    if T is not None and "implied_variance_ratio" in stats:
        rows.append(_implied_ratio(stats["implied_variance_ratio"], facts))
    if "diverging" in stats:
        rows.append(_divergences(stats["diverging"]))
    scale = facts.step_scale
    if scale is None and "step_scale" in stats:
        scale = float(np.min(stats["step_scale"]))
    if scale is not None:
        rows.append(_step_scale(scale, facts))
    return rows


def _kinetic_temperature(x: np.ndarray, T: float, facts: Facts) -> Row:
    """With settings that were found it is between the two that the law of the kernel predicts."""
    low, high = T * (facts.coldest_predicted or 1.0), T * (facts.hottest_predicted or 1.0)
    limit = f"{shown(low, 3)} to {shown(high, 3)}"
    limit = f"{shown(high, 3) if high - low < 0.005 * T else limit} +- {TEMPERATURE:.0%}"

    def wrong(value: float) -> str:
        if value > high:
            return (
                "gradient noise or too large a step heats the chain, so its draws are about"
                f" {math.sqrt(value / high):.2g} times too wide; {_less_noise(facts)}."
            )
        return (
            "the momentum is not at its temperature, so the chain has not settled; warm it up"
            " longer, or start it from find_modes or an SVI fit."
        )

    right = "the draws have the temperature of the posterior."
    bounds = (low, high)
    return judged_mean("kinetic temperature", x, limit, bounds, TEMPERATURE * T, right, wrong)


def _less_noise(facts: Facts) -> str:
    return facts.if_hot or (
        "pass step_size=None to have the settings found, or take a smaller step or a ControlVariate"
    )


def _noise_share(facts: Facts) -> Row:
    """The share of the injected noise that the estimate of SGHMC takes off."""
    value = facts.noise_share
    return judged(
        "gradient noise over injected noise",
        value,
        "1",
        value <= 1,
        "the noise of the gradients is taken off the injected noise in full.",
        "the estimate of the gradients' noise was cut, so the rest of it heats the chain;"
        f" {_less_noise(facts)}.",
    )


def _implied_ratio(ratio: np.ndarray, facts: Facts) -> Row:
    """The variances on a Gaussian that the gradients of a kernel without momentum imply."""
    return judged_mean(
        "implied variance ratio",
        ratio,
        f"{1 + TEMPERATURE:.3g}",
        (-math.inf, 1.0),
        TEMPERATURE,
        "the size of the gradients says that the step is small enough.",
        lambda value: (
            "the step is too large for the noise of the gradients, so variances are too large by"
            f" this factor on average; {_less_noise(facts)}."
        ),
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


def _step_scale(scale: float, facts: Facts) -> Row:
    found = facts.found_step_size is not None
    return judged(
        "step scale after warmup",
        scale,
        "1",
        scale >= 1,
        "the chain kept its step.",
        "the chain diverged in warmup and went on with this fraction of its step;"
        f" {_less_noise(facts) if found else 'pass one this much smaller, or step_size=None'}.",
    )
