"""Whether chains, or restarts of a guide, agree, and how many independent draws they hold."""

from copy import copy
import math

import numpy as np

from numpyro_ext._model.read import coordinate_name, slices_of
from numpyro_ext.diagnostics._fit import Numbers, flatten
from numpyro_ext.diagnostics.checks.modes import AtModes, draws_at_modes
from numpyro_ext.diagnostics.context import FitContext, cached
from numpyro_ext.diagnostics.limits import DIVERGING, ESS, ESS_EACH, RHAT
from numpyro_ext.diagnostics.table import Row, equally_spaced, judged

AGREEMENT = "largest R-hat"
_NUMBERS = 1000
"""The largest number of coordinates, equally spaced, that are looked at."""
_LONGEST = 10.0
"""Times as long: from here on another start is the better advice than a longer run."""


def divergences(context: FitContext) -> list[Row]:
    """The line of trajectories of HMC and NUTS that diverged, and of transitions of other kernels
    that were refused because a value was not finite; none where there are few enough."""
    diverging = context.stats.get("diverging")
    if diverging is None:
        return []
    if context.is_biased and context.sampling is not None and context.sampling.any():
        diverging = diverging[:, context.sampling.all(0)]
    number, limit = float(np.sum(diverging)), 0.0
    advice = "raise target_accept_prob, or reparametrise the model"
    if context.is_biased:
        limit = math.floor(DIVERGING * np.size(diverging))
        advice = "take a smaller step, or start from find_modes or an SVI fit"
    verdict = f"the chains left the region that they should explore; {advice}."
    row = Row("divergences", number, None, f"{limit:.0f}", False, verdict)
    return [row] if number > limit else []


@cached
def agreement(context: FitContext) -> list[Row]:
    """The lines of R-hat and of the effective sample size of chains, or of R-hat of several
    restarts of a guide."""
    if context.kind == "guide":
        return _restarts(context) if len(context.fit.params) > 1 else []
    compared = compare_chains(context)
    where = "" if split_by_mode(context) is None else " at a mode"
    return [_rhat(compared, where), _ess(compared)]


@cached
def compare_chains(context: FitContext) -> "Agreement":
    """All numbers of chains, or of restarts; where chains differ, each mode by itself."""
    together = _all_together(context)
    if context.kind == "chains" and (by_mode := split_by_mode(context)) is not None:
        return together.of_groups([Agreement(x) for x in by_mode.within(context.draws).values()])
    return together


def split_by_mode(context: FitContext) -> AtModes | None:
    """The draws at each mode, where there are several with known shares; None where they are judged
    together, as chains that agree are, whatever modes they visit."""
    by_mode = draws_at_modes(context)
    if by_mode is None or by_mode.row.ok is None or context.kind == "guide":
        return None
    return None if context.kind == "chains" and _agree(context) else by_mode


def _agree(context: FitContext) -> bool:
    together = _all_together(context)
    return together.worst(together.rhat, largest=True)[0] <= RHAT


@cached
def _all_together(context: FitContext) -> "Agreement":
    return Agreement(context.draws)


class Agreement:
    """R-hat and effective sample sizes of draws ``{site: (chain, draw, *site)}``, by ArviZ."""

    def __init__(self, draws: Numbers) -> None:
        from arviz_stats.base.array import array_stats

        places = slices_of(tuple((name, x.shape[2:]) for name, x in draws.items()))
        x = flatten(draws)
        chosen = equally_spaced(x.shape[-1], _NUMBERS)
        # Entries such as the zeros of a triangular factor never move.
        chosen = chosen[np.any(x[..., chosen] != x[:1, :1, chosen], (0, 1))]
        self.names = [coordinate_name(places, k) for k in chosen.tolist()]
        x = x[..., chosen].astype(np.float64)
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

    def of_groups(self, groups: list["Agreement"]) -> "Agreement":
        """With the largest R-hat of several groups, and the sum of their effective sizes."""
        ess = dict.fromkeys(self.names, 0.0)
        rhat = dict.fromkeys(self.names, math.nan)
        for group in groups:
            for name, size, value in zip(group.names, group.ess, group.rhat, strict=True):
                ess[name] += float(size)
                rhat[name] = float(np.fmax(rhat[name], value))
        # A number that is the same at each mode has no effective size within any.
        joined = copy(self)
        joined.ess = np.array([size or math.nan for size in ess.values()])
        joined.rhat = np.array(list(rhat.values()))
        return joined

    def worst(self, values: np.ndarray, largest: bool) -> tuple[float, str]:
        finite = np.flatnonzero(~np.isnan(values))
        if not len(finite):
            return math.nan, ""
        k = finite[np.argmax(values[finite]) if largest else np.argmin(values[finite])]
        return float(values[k]), self.names[k]


def _rhat(compared: Agreement, where: str) -> Row:
    value, name = compared.worst(compared.rhat, largest=True)
    what = "chains" if compared.chains > 1 else "halves of the chain"
    if math.isnan(value):
        wrong = f"it needs 4 finite draws of each of the {what}; draw more."
    else:
        # The excess of R-hat squared falls as one over the length.
        longer = (value**2 - 1) / (RHAT**2 - 1)
        wrong = f"the {what} differ{where}, most of all in {name}; {_run_longer(longer)}."
    right = f"the {what} agree{where}."
    return judged(AGREEMENT, value, f"{RHAT}", value <= RHAT, right, wrong)


def _ess(compared: Agreement) -> Row:
    ess, name = compared.worst(compared.ess, largest=False)
    limit = min(ESS, ESS_EACH * compared.chains)
    longer = limit / ess if ess > 0 else math.inf
    wrong = f"{name or 'all sites'} has too few independent draws; {_run_longer(longer)}."
    right = "there are enough independent draws."
    return judged("smallest ESS", ess, f"{limit}", ess >= limit, right, wrong)


def _run_longer(times: float) -> str:
    """How much longer a run has to be, or what helps instead."""
    if times <= _LONGEST:
        return f"run about {max(times, 1.1):.2g} times as long"
    return "start at the modes, find_modes(model, *args), or reparametrise the model"


def _restarts(context: FitContext) -> list[Row]:
    attributes = context.fit.attributes
    if (number := attributes.get("distinct_restarts")) is not None:
        verdict = (
            f"not judged: only {number} of {attributes['num_restarts']} restarts have parameters of"
            " their own, and the same ones say nothing about other optima; make them by"
            " numpyro_ext.diagnostics.restarts."
        )
        return [Row(AGREEMENT, math.nan, None, f"{RHAT}", None, verdict)]
    if all(np.all(x == x[:, :1]) for x in context.draws.values()):
        return []  # points have no spread to compare with
    compared = compare_chains(context)
    value, name = compared.worst(compared.rhat, largest=True)
    wrong = (
        f"the restarts are different optima, most of all in {name}; keep the one of the lowest"
        " loss, or take a guide with several modes."
    )
    right = "the restarts agree."
    return [judged(AGREEMENT, value, f"{RHAT}", value <= RHAT, right, wrong)]
