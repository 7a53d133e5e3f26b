"""How ``diagnose`` and ``to_arviz`` judge a run of stochastic-gradient MCMC."""

import math
from typing import Any, NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.diagnostics._cost import cost_of
from numpyro_ext.diagnostics._fit import Fit

__all__ = [
    "Row",
    "equally_spaced",
    "facts_of",
    "mean_and_error",
    "settings_rows",
    "sgmcmc_rows",
    "warn",
]

OFF = 0.1
"""Relative error of a temperature or of a variance that is still fine."""
DIVERGING = 0.01


def equally_spaced(size: int, most: int) -> np.ndarray:
    """At most so many of the numbers ``0 .. size - 1``, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(most, size)).astype(int))


class Row(NamedTuple):
    """One line of a :class:`Diagnosis`."""

    quantity: str
    value: float
    error: float | None
    """Monte Carlo standard error of the value."""
    limit: str
    """What the value is compared with; empty if there is nothing."""
    ok: bool | None
    """None for a number that is shown for information."""
    verdict: str
    """One sentence: what it means, and what to do."""

    @property
    def shown(self) -> str:
        """The value with its error."""
        if self.error is None or not math.isfinite(self.error):
            return _short(self.value)
        return f"{_short(self.value)} +- {_short(self.error, 2)}"


def _short(x: float, digits: int = 4) -> str:
    whole = float(x).is_integer() and abs(x) < 1e9
    return f"{x:,.0f}" if whole else f"{x:.{digits}g}"


def facts_of(mcmc: MCMC, fit: Fit) -> dict[str, Any]:
    """What the numbers of a run have to be compared with, as attributes."""
    kernel: Any = mcmc.sampler
    state: Any = mcmc.last_state
    facts: dict[str, Any] = {**cost_of(mcmc, fit)}
    steps = getattr(kernel, "steps_per_sample", 1)
    temperature = _temperature(kernel, state, mcmc.num_samples * steps)
    if temperature is not None:
        facts["temperature"] = temperature
    sizes = [np.size(x) for x in jax.tree.leaves(getattr(state, "z", ()))]
    facts["num_latents"] = sum(sizes) // mcmc.num_chains
    if (scale := getattr(state, "step_scale", None)) is not None:
        facts["step_scale"] = float(np.min(jax.device_get(scale)))
    if "thermostat" in getattr(state, "_fields", ()):
        facts["has_thermostat"] = 1
    share: Any = getattr(kernel, "noise_share", None)
    if share is not None and (value := share(state)) is not None:
        facts["noise_share"] = value
    if (settings := getattr(kernel, "settings", None)) is not None:
        facts["found_step_size"] = float(settings.step_size)
        facts["predicted_variance_ratio"] = float(settings.variance_ratio)
        facts["predicted_transitions"] = float(settings.transitions)
        if problems := list(getattr(settings, "problems", ())):
            facts["settings_problems"] = problems
    return facts


def _temperature(kernel: Any, state: Any, num_transitions: int) -> float | None:
    """T of the transitions that were drawn; None where it changes, or where there is none."""
    at, i = getattr(kernel, "temperature_at", None), getattr(state, "i", None)
    if at is None or i is None:
        return None
    last = int(np.max(jax.device_get(i)))
    seen = jnp.linspace(max(0, last - num_transitions), last - 1, 100).astype(int)
    if at(0) is None:
        return None
    # Not jitted, which would compile anew at each look at the run.
    values = jax.device_get(jax.vmap(at)(seen))
    # It is 0 while a cyclical schedule explores.
    found = {float(T) for T in values.tolist() if T > 0}
    return found.pop() if len(found) == 1 else None


def mean_and_error(x: np.ndarray) -> tuple[float, float]:
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
        rows.append(_noise_share(facts["noise_share"]))
    if T is not None and "implied_variance_ratio" in stats:
        rows.append(_implied_ratio(stats["implied_variance_ratio"], facts))
    if "diverging" in stats:
        rows.append(_divergences(stats["diverging"]))
    if "step_scale" in stats or "step_scale" in facts:
        scale = facts.get("step_scale", np.min(stats.get("step_scale", 1.0)))
        rows.append(_step_scale(float(scale)))
    return rows


def settings_rows(facts: dict[str, Any]) -> list[Row]:
    """What did not hold where the kernel found its settings; it warned of it when it began."""
    problems = facts.get("settings_problems", [])
    if not problems:
        return []
    # An attribute of a single string loses its list in some file formats.
    problems = [problems] if isinstance(problems, str) else list(problems)
    return [Row("problems of the settings", len(problems), None, "0", False, " ".join(problems))]


def _kinetic_temperature(x: np.ndarray, T: float, facts: dict[str, Any]) -> Row:
    r"""On a whitened Gaussian it is :math:`T_e / (1 - \epsilon^2/4)` at the end of a step.

    The coordinates have temperatures :math:`T_e` between T and that times the predicted ratio. A
    thermostat keeps it at T.
    """
    low = high = T
    if "found_step_size" in facts and "has_thermostat" not in facts:
        ratio, wide = facts["predicted_variance_ratio"], 1 - facts["found_step_size"] ** 2 / 4
        low, high = T * min(1.0, ratio) / wide, T * max(1.0, ratio) / wide
    value, error = mean_and_error(x)
    excess = max(low - value, value - high, 0.0)
    ok = not (excess > OFF * T and excess > 3 * error) and math.isfinite(value)
    verdict = "the draws have the temperature of the posterior."
    if not ok and value > high:
        verdict = (
            "gradient noise or too large a step heats the chain, so its draws are about"
            f" {math.sqrt(value / T):.2g} times too wide; {_less_noise(facts)}."
        )
    elif not ok:
        verdict = (
            "the momentum is not at its temperature, so the chain has not settled; warm it up"
            " longer, or start it from find_whitening or an SVI fit."
        )
    limit = _short(high, 3) if high - low < 0.005 * T else f"{_short(low, 3)} to {_short(high, 3)}"
    return Row("kinetic temperature", value, error, f"{limit} +- {OFF:.0%}", ok, verdict)


def _less_noise(facts: dict[str, Any]) -> str:
    if "found_step_size" in facts:
        return (
            "the posterior is not near normal in the coordinates found, so reparametrise the model,"
            " or take a smaller max_bias"
        )
    return (
        "pass step_size=None to have the settings found, or take a smaller step or a ControlVariate"
    )


def _noise_share(value: float) -> Row:
    """The share of the injected noise that the estimate of SGHMC takes off."""
    ok = value <= 1
    verdict = "the noise of the gradients is taken off the injected noise in full."
    if not ok:
        verdict = (
            "the estimate of the gradients' noise was cut, so the rest of it heats the chain; take"
            " a smaller step or more friction, or pass step_size=None to have them found."
        )
    return Row("gradient noise over injected noise", value, None, "1", ok, verdict)


def _implied_ratio(ratio: np.ndarray, facts: dict[str, Any]) -> Row:
    """What the gradients of a kernel without momentum imply for its variances on a Gaussian."""
    value, error = mean_and_error(ratio)
    ok = not (value - 1 > OFF and value - 1 > 3 * error) and math.isfinite(value)
    verdict = "the size of the gradients says that the step is small enough."
    if not ok:
        verdict = (
            "the step is too large for the noise of the gradients, so variances are too large by"
            f" this factor on average; {_less_noise(facts)}."
        )
    return Row("implied variance ratio", value, error, f"{1 + OFF:.3g}", ok, verdict)


def _divergences(diverging: np.ndarray) -> Row:
    share = float(np.mean(diverging))
    ok = share <= DIVERGING
    verdict = "no more than a few transitions were refused."
    if not ok:
        verdict = (
            "in these draws the chain met values that are not finite and stayed where it was; take"
            " a smaller step, or start from find_whitening or an SVI fit."
        )
    return Row("share of diverging draws", share, None, f"{DIVERGING:.3g}", ok, verdict)


def _step_scale(scale: float) -> Row:
    ok = scale >= 1
    verdict = "the step is the one that was asked for."
    if not ok:
        verdict = (
            "the chain diverged in warmup and went on with this fraction of its step; pass a step"
            " that is smaller by this factor, or step_size=None."
        )
    return Row("step scale after warmup", scale, None, "1", ok, verdict)


def warn(rows: list[Row], stacklevel: int) -> None:
    """An :class:`InferenceWarning` of one sentence for every row that is not fine."""
    for row in rows:
        if row.ok is False:
            warnings.warn(
                f"the {row.quantity} is {row.shown} (limit {row.limit}): {row.verdict}",
                InferenceWarning,
                stacklevel=stacklevel + 1,
            )
