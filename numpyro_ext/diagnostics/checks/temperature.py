"""Whether a chain of stochastic gradients has the temperature and the step of its posterior."""

from collections.abc import Callable
import math
from typing import Any

import numpy as np

from numpyro_ext._model.modes import of_kind
from numpyro_ext.diagnostics.checks.chains import AGREEMENT, agreement
from numpyro_ext.diagnostics.checks.modes import draws_at_modes
from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.limits import TEMPERATURE
from numpyro_ext.diagnostics.table import Row, shown


def temperature(context: FitContext) -> list[Row]:
    """The line of the kinetic temperature, or of the variances that the size of the gradients
    implies, of kernels whose draws have a bias."""
    stats, T = context.stats, context.temperature
    if not context.is_biased or T is None:
        return []
    kept: Any = slice(None)
    if context.sampling is not None and context.sampling.any():
        kept = context.sampling.all(0)
    rows, settings = [], context.settings
    if "kinetic_temperature" in stats:
        rows.append(_kinetic(stats["kinetic_temperature"][:, kept], T, settings))
    if "implied_variance_ratio" in stats:
        rows.append(_implied_variance(stats["implied_variance_ratio"][:, kept], settings))
    return rows


def _less_noise(settings: Any) -> str:
    if settings is not None:
        return settings.if_hot
    return "pass step_size=None to have it found, or take a smaller step or a ControlVariate"


def _kinetic(x: np.ndarray, T: float, settings: Any) -> Row:
    """With settings that were found it is between the two that the law of the kernel predicts."""
    coldest, hottest = (1.0, 1.0) if settings is None else settings.kinetic_temperature
    low, high = T * float(coldest), T * float(hottest)
    limit = f"{shown(low, 3)} to {shown(high, 3)}"
    limit = f"{shown(high, 3) if high - low < 0.005 * T else limit} +- {TEMPERATURE:.0%}"

    def wrong(value: float) -> str:
        if value > high:
            return (
                "gradient noise or too large a step heats the chain, so its draws are about"
                f" {math.sqrt(value / high):.2g} times too wide; {_less_noise(settings)}."
            )
        return (
            "the momentum is not at its temperature, so the chain has not settled; warm it up"
            " longer, or start it from find_modes or an SVI fit."
        )

    right = "the draws have the temperature of the posterior."
    allowed = TEMPERATURE * T
    return row_of_mean("kinetic temperature", x, limit, (low, high), allowed, right, wrong)


def _implied_variance(ratio: np.ndarray, settings: Any) -> Row:
    """The variances on a Gaussian that the gradients of a kernel without momentum imply."""

    def wrong(_: float) -> str:
        return (
            "the step is too large for the noise of the gradients, so variances are too large by"
            f" this factor on average; {_less_noise(settings)}."
        )

    right = "the size of the gradients says that the step is small enough."
    limit, bounds = f"{1 + TEMPERATURE:.3g}", (-math.inf, 1.0)
    return row_of_mean("implied variance ratio", ratio, limit, bounds, TEMPERATURE, right, wrong)


def row_of_mean(
    quantity: str,
    x: np.ndarray,
    limit: str,
    bounds: tuple[float, float],
    allowed: float,
    right: str,
    wrong: Callable[[float], str],
) -> Row:
    """The line of the mean of ``(chain, draw)`` numbers.

    The mean may be outside of the bounds by ``allowed``, or by three errors; ``wrong`` makes the
    sentence about a mean that is farther away.
    """
    from arviz_stats.base.array import array_stats

    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mcse: Any = array_stats.mcse(x, chain_axis=0, draw_axis=1, method="mean")
    value, error = float(np.mean(x)), float(mcse)
    excess = max(bounds[0] - value, value - bounds[1])
    if math.isfinite(value) and math.isnan(error):
        verdict = "not judged: the Monte Carlo error needs 4 draws of each chain; draw more."
        return Row(quantity, value, None, limit, None, verdict, True)
    if allowed < excess <= 3 * error and error > allowed:
        verdict = (
            "not judged: the value is outside of its limits by less than three Monte Carlo errors;"
            " draw more."
        )
        return Row(quantity, value, error, limit, None, verdict, True)
    ok = not (excess > allowed and excess > 3 * error) and math.isfinite(value)
    return Row(quantity, value, error, limit, ok, right if ok else wrong(value), True)


def problems(context: FitContext) -> list[Row]:
    """The line of what did not hold where the kernel found its settings or its chains were warmed
    up, and of the density by which a fit is judged; none where all held."""
    sentences = [*context.problems, *_of_kernel(context)]
    if not sentences:
        return []
    return [Row("problems", len(sentences), None, "0", False, " ".join(sentences))]


def _of_kernel(context: FitContext) -> list[str]:
    kernel, settings = context.kernel, context.settings
    if kernel is None or not context.is_biased:
        return []
    state = context.obj.last_state
    sentences: list[str] = list(settings.problems) if settings else []
    by_mode = draws_at_modes(context)
    agree = any(row.quantity == AGREEMENT and row.ok for row in agreement(context))
    if agree and by_mode is not None and by_mode.row.ok:
        # Several modes are no problem where each has its share of the draws.
        sentences = [x for x in sentences if x not in of_kind(sentences, "several modes")]
    if (kernel.noise_share(state) or 0) > 1:
        sentences.append(
            "the estimate of the gradients' noise is larger than the injected noise, so the rest of"
            f" it heats the chain; {_less_noise(settings)}."
        )
    scale = getattr(state, "step_scale", None)
    if scale is not None and (least := float(np.min(np.asarray(scale)))) < 1:
        sentences.append(
            f"the chain diverged in warmup and went on with {least:.2g} of its step;"
            f" {_less_noise(settings) if settings else 'pass a smaller one, or step_size=None'}."
        )
    return sentences
