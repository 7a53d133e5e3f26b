"""Whether chains, or restarts, agree, are long enough, and have their temperature and step."""

import math
from typing import Any

import numpy as np
from scipy.special import chdtri

from numpyro_ext._model.labels import coordinate_name
from numpyro_ext._model.modes import of_kind
from numpyro_ext._model.spheres import without_signs
from numpyro_ext.diagnostics._fit import Fit, Numbers, cached
from numpyro_ext.diagnostics.checks.modes import draws_at_modes
from numpyro_ext.diagnostics.limits import (
    DIVERGING,
    ESS,
    ESS_EACH,
    FALSE_ALARM,
    RHAT,
    RHAT_OF_ENSEMBLE,
    SHORTENED,
    TEMPERATURE,
)
from numpyro_ext.diagnostics.table import Row, equally_spaced, shown

AGREEMENT = "largest R-hat"
_RESTARTS = "keep the one of the lowest loss, or take a guide with several modes"
_NUMBERS = 1000
"""The largest number of coordinates, equally spaced, that are looked at."""
_WORST = 20
"""Coordinates of the largest R-hat, of which it is asked whether they are by chance."""
_FEWEST_TIMES = 4
_OF_SIZES = 7.0
"""The square of the relative error of an effective size, times that size: 5 to 7 over 200 pairs,
or fours, of autoregressions that are worth 40 to 200 draws."""
_LONGEST = 10.0
"""Times as long: from here on another start is the better advice than a longer run."""


def divergences(fit: Fit) -> list[Row]:
    """The line of trajectories that diverged, or of refused transitions of a biased kernel."""
    diverging = fit.stats.get("diverging")
    if diverging is None:
        return []
    if fit.is_biased and fit.sampling is not None and fit.sampling.any():
        diverging = diverging[:, fit.sampling.all(0)]
    number, limit = float(np.sum(diverging)), 0.0
    advice = "raise target_accept_prob, or reparametrise the model"
    if fit.is_biased:
        limit = math.floor(DIVERGING * np.size(diverging))
        advice = "take a smaller step, or start from find_modes or an SVI fit"
    verdict = f"the chains left the region that they should explore; {advice}."
    row = Row("divergences", number, None, f"{limit:.0f}", False, verdict)
    return [row] if number > limit else []


def agreement(fit: Fit) -> list[Row]:
    """The lines of R-hat and effective sample size of chains."""
    if are_at_modes(fit):
        return []
    compared = compare_chains(fit)
    enough = min(ESS, ESS_EACH * compared.chains)
    return [_rhat(compared, compared.by_chance(RHAT, enough)), _ess(compared, enough)]


def agreement_of_restarts(fit: Fit) -> list[Row]:
    """The line of R-hat of several restarts."""
    # The same restart twice says nothing about other optima, and points have no spread.
    is_repeated = "distinct_restarts" in fit.attributes or len(fit.params) == 1
    if is_repeated or all(np.all(x == x[:, :1]) for x in fit.draws.values()):
        return []
    return [_rhat(compare_chains(fit), RHAT, of_restarts=True)]


def agreement_of_ensemble(fit: Fit) -> list[Row]:
    """The lines of an ensemble, unless it is at several modes."""
    return [] if are_at_modes(fit) else rows_of_ensemble(compare_chains(fit))


def rows_of_ensemble(compared: "Agreement") -> list[Row]:
    """The lines of the chains of an ensemble; no lines for a few times, which are draws already."""
    if compared.draws < _FEWEST_TIMES:
        return []
    # At each time there are as many independent draws as chains.
    return [_rhat(compared, RHAT_OF_ENSEMBLE), _ess(compared, min(ESS, compared.chains))]


@cached
def compare_chains(fit: Fit) -> "Agreement":
    """All numbers of chains, or of restarts."""
    of_ensemble = fit.kind == "ensemble"
    draws = fit.by_chain() if of_ensemble else fit.draws
    supports = {name: latent.support for name, latent in fit.info.latents.items()}
    return Agreement(without_signs(draws, supports), independent=of_ensemble)


def are_at_modes(fit: Fit) -> bool:
    """Whether particles, or chains that do not agree, are at several modes with known shares."""
    by_mode = draws_at_modes(fit)
    if by_mode is None or by_mode.row.ok is None or fit.kind == "guide":
        return False
    return fit.kind != "chains" or not _rhat(compare_chains(fit), RHAT).ok


class Agreement:
    """R-hat and effective sample sizes of draws ``{site: (chain, draw, *site)}``, by ArviZ, but for
    the sizes of ``independent`` stationary chains: these follow from the spread of their means."""

    def __init__(self, draws: Numbers, *, independent: bool = False) -> None:
        from arviz_stats.base.array import array_stats

        shapes = tuple((name, x.shape[2:]) for name, x in draws.items())
        x = np.concatenate([x.reshape(*x.shape[:2], -1) for x in draws.values()], -1)
        chosen = equally_spaced(x.shape[-1], _NUMBERS)
        # Entries such as the zeros of a triangular factor never move.
        chosen = chosen[np.any(x[..., chosen] != x[:1, :1, chosen], (0, 1))]
        self.which = chosen
        self.names = [coordinate_name(shapes, k) for k in chosen.tolist()]
        x = x[..., chosen].astype(np.float64)
        self.chains, self.draws = x.shape[:2]
        self.rhat = self.ess = self.own = np.zeros(0)
        if not self.names:
            return
        halves = x
        if self.chains == 1:  # the first half against the second
            half = self.draws // 2
            halves = np.concatenate([x[:, :half], x[:, half : 2 * half]])
        with np.errstate(divide="ignore", invalid="ignore"):
            self.rhat = np.asarray(array_stats.rhat(halves, chain_axis=0, draw_axis=1))
            if independent:  # of many short chains, ArviZ's is a number that they do not change
                self.ess = self.chains * np.var(x, (0, 1)) / np.var(x.mean(1), 0, ddof=1)
            else:
                self.ess = np.asarray(array_stats.ess(x, chain_axis=0, draw_axis=1))
            self.parts = 2 * len(halves)  # into which R-hat cuts them
            self.own = np.full(len(self.names), np.nan)
            if not independent:
                worst = np.argsort(-np.nan_to_num(self.rhat))[:_WORST]
                self.own[worst] = _own_sizes(halves[..., worst])

    def by_chance(self, limit: float, enough: int) -> np.ndarray:
        r"""The R-hat that right chains have by chance, at least ``limit``, of the worst numbers.

        Of M parts of chains with an effective size E in all, R-hat squared is about
        :math:`1 + (M / E) \chi^2_{M-1} / (M - 1)` (Vats & Knudson, *Revisiting the Gelman-Rubin
        diagnostic*, 2021). E is what the chains have by themselves, or ``enough`` if they have
        less."""
        if not self.names:
            return np.zeros(0)
        quantile = chdtri(self.parts - 1, FALSE_ALARM / len(self.names)) / (self.parts - 1)
        return np.maximum(limit, np.sqrt(1 + self.parts * quantile / np.maximum(self.own, enough)))


def _own_sizes(x: np.ndarray) -> np.ndarray:
    """The sum over ``(chain, draw, n)`` chains of the effective size of each by itself, of a number
    or of its distance from the median, which R-hat looks at too."""
    from arviz_stats.base.array import array_stats

    sizes: Any = [
        [array_stats.ess(chain[None], chain_axis=0, draw_axis=1) for chain in y]
        for y in (x, abs(x - np.median(x, (0, 1))))
    ]
    # A chain that does not move may be right, but then no chance moves its mean either.
    return np.where(np.isfinite(sizes), sizes, x.shape[1]).sum(1).min(0)


def _rhat(compared: Agreement, limits: np.ndarray | float, of_restarts: bool = False) -> Row:
    """The line of the R-hat that is farthest beyond its limit."""
    limits = np.broadcast_to(limits, compared.rhat.shape)
    value, limit, name = math.nan, RHAT, ""
    if not np.all(np.isnan(beyond := (compared.rhat**2 - 1) / (limits**2 - 1))):
        k = int(np.nanargmax(beyond))
        value, limit, name = float(compared.rhat[k]), float(limits[k]), compared.names[k]
    what = "chains" if compared.chains > 1 else "halves of the chain"
    what, differ = ("restarts", "are different optima") if of_restarts else (what, "differ")
    if math.isnan(value):
        wrong = f"it needs 4 finite draws of each of the {what}; draw more."
    else:
        # The excess of R-hat squared falls as one over the length.
        advice = _RESTARTS if of_restarts else _run_longer((value**2 - 1) / (limit**2 - 1))
        wrong = f"the {what} {differ}, most of all in {name}; {advice}."
    ok = value <= limit
    return Row(AGREEMENT, value, None, shown(limit, 3), ok, f"the {what} agree." if ok else wrong)


def _ess(compared: Agreement, limit: int) -> Row:
    ess, name = math.nan, "all sites"
    if not np.all(np.isnan(compared.ess)):
        k = int(np.nanargmin(compared.ess))
        ess, name = float(compared.ess[k]), compared.names[k]
    longer = limit / ess if ess > 0 else math.inf
    error = math.sqrt(_OF_SIZES * ess) if ess > 0 else 0.0
    ok: bool | None = ess >= limit
    verdict = f"{name} has too few independent draws; {_run_longer(longer)}."
    if ok:
        verdict = "there are enough independent draws."
    elif limit <= ess + 2 * error:
        ok = None
        verdict = (
            f"not judged: the number for {name} is below its limit by less than two standard"
            f" errors, of {error:.2g} each; {_run_longer(longer)}."
        )
    return Row("smallest ESS", ess, None, f"{limit}", ok, verdict)


def _run_longer(times: float) -> str:
    """How much longer a run has to be, or what helps instead."""
    if times <= _LONGEST:
        return f"run about {max(times, 1.1):.2g} times as long"
    return "start at the modes, find_modes(model, *args), or reparametrise the model"


def temperature(fit: Fit) -> list[Row]:
    """The line of the kinetic temperature, or of the implied variances, of biased kernels."""
    stats, T = fit.stats, fit.temperature
    if not fit.is_biased or T is None or fit.kernel is None:
        return []
    kept: Any = slice(None)
    if fit.sampling is not None and fit.sampling.any():
        kept = fit.sampling.all(0)
    rows, settings, remedy = [], fit.kernel.settings, fit.kernel.if_hot
    if "kinetic_temperature" in stats:
        rows.append(_kinetic(stats["kinetic_temperature"][:, kept], T, settings, remedy))
    if "implied_variance_ratio" in stats:
        ratio, limit = stats["implied_variance_ratio"][:, kept], f"{1 + TEMPERATURE:.3g}"
        right = "the size of the gradients says that the step is small enough."
        wrong = (
            "the step is too large for the noise of the gradients, so variances are too large by"
            f" this factor on average; {remedy}."
        )
        name, bounds = "implied variance ratio", (-math.inf, 1.0)
        rows.append(row_of_mean(name, ratio, limit, bounds, TEMPERATURE, right, wrong))
    return rows


def _kinetic(x: np.ndarray, T: float, settings: Any, remedy: str) -> Row:
    coldest, hottest = (1.0, 1.0) if settings is None else settings.kinetic_temperature
    low, high = T * float(coldest), T * float(hottest)
    limit = f"{shown(low, 3)} to {shown(high, 3)}"
    limit = f"{shown(high, 3) if high - low < 0.005 * T else limit} +- {TEMPERATURE:.0%}"

    value = float(np.mean(x))
    wrong = (
        "the momentum is not at its temperature, so the chain has not settled; warm it up longer,"
        " or start it from find_modes or an SVI fit."
    )
    if value > high:
        wrong = (
            "gradient noise or too large a step heats the chain, so its draws are about"
            f" {math.sqrt(value / high):.2g} times too wide; {remedy}."
        )
    right, allowed = "the draws have the temperature of the posterior.", TEMPERATURE * T
    return row_of_mean("kinetic temperature", x, limit, (low, high), allowed, right, wrong)


def row_of_mean(
    quantity: str,
    x: np.ndarray,
    limit: str,
    bounds: tuple[float, float],
    allowed: float,
    right: str,
    wrong: str,
) -> Row:
    """The line of the mean of ``(chain, draw)`` numbers: off by ``allowed`` or 3 errors at most."""
    from arviz_stats.base.array import array_stats

    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mcse: Any = array_stats.mcse(x, chain_axis=0, draw_axis=1, method="mean")
    value, error = float(np.mean(x)), float(mcse)
    excess = max(bounds[0] - value, value - bounds[1])
    too_few = math.isfinite(value) and math.isnan(error)
    if too_few or (allowed < excess <= 3 * error and error > allowed):
        verdict = (
            "not judged: the value is outside of its limits by less than three Monte Carlo errors,"
            " which need 4 draws of each chain; draw more."
        )
        return Row(quantity, value, error, limit, None, verdict, True)
    ok = not (excess > allowed and excess > 3 * error) and math.isfinite(value)
    return Row(quantity, value, error, limit, ok, right if ok else wrong, True)


def problems_of_chains(fit: Fit) -> list[str]:
    """Sentences on what did not hold where the kernel found its settings."""
    settings = fit.kernel.settings if fit.kernel and fit.is_biased else None
    sentences: list[str] = list(settings.problems) if settings else []
    by_mode = draws_at_modes(fit)
    if by_mode is not None and by_mode.row.ok:
        # Several modes are no problem where each has its share of the draws.
        sentences = [x for x in sentences if x not in of_kind(sentences, "several modes")]
    return sentences


def problems_of_ensemble(fit: Fit) -> list[str]:
    """A sentence if many gradients were too long for the step of an ensemble."""
    state = fit.obj.last_state.optim_state
    if state is None or not (num_steps := int(np.max(state.num_steps))):
        return []
    share = float(np.mean(state.shortened)) / num_steps
    if share <= SHORTENED:
        return []
    return [
        f"{share:.0%} of the gradients were too long for the step and were shortened, so the"
        " particles see too little of the places where the posterior is narrow; reparametrise the"
        " model (find_centering), or give EnsembleLangevin a smaller step_size."
    ]
