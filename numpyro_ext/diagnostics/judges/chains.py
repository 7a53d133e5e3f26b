"""Whether chains, or restarts of a guide, agree; how many independent draws they hold, and their
price."""

from collections.abc import Collection
from copy import copy
import math

import numpy as np

from numpyro_ext.diagnostics._facts import Facts, Numbers
from numpyro_ext.diagnostics.context import DiagnosisContext, cached
from numpyro_ext.diagnostics.judges.shares import AtModes, draws_at_modes
from numpyro_ext.diagnostics.limits import ESS, ESS_EACH, RHAT, SLOWER, judged
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["AGREEMENT", "Agreement", "agreement", "split_by_mode", "chain_rows", "compare_chains"]
__all__ += ["divergences"]

AGREEMENT = "largest R-hat"
COORDINATES = 1000
"""The largest number of coordinates, equally spaced, that are looked at."""


def divergences(context: DiagnosisContext) -> list[Row]:
    """The line of ``HMC`` and ``NUTS``; none where divergences were not collected."""
    if context.is_biased or "diverging" not in context.stats:
        return []
    value = float(np.sum(context.stats["diverging"]))
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


@cached
def agreement(context: DiagnosisContext) -> list[Row]:
    """The lines of chains, or of several restarts of a guide."""
    if not context.has_chains:
        return []
    found = compare_chains(context)
    if context.kind != "chains":
        return restart_rows(found, context.draws, context.facts)
    where = "" if split_by_mode(context) is None else " at a mode"
    rows = chain_rows(found, context.stats, context.facts, where)
    at = draws_at_modes(context)
    return rows if at is None or _agree(context) else [*rows, at.row]


@cached
def compare_chains(context: DiagnosisContext) -> "Agreement":
    """All numbers of chains, or of restarts; where chains differ, those of each mode by itself."""
    found = _all_together(context)
    if context.kind == "chains" and (at := split_by_mode(context)) is not None:
        return found.of_groups([Agreement(x) for x in at.within(context.draws).values()])
    return found


def split_by_mode(context: DiagnosisContext) -> AtModes | None:
    """The draws at each mode, where there are several with known shares; None where they are judged
    together, as those of chains that agree are, whatever modes they visit."""
    at = draws_at_modes(context)
    if at is None or at.row.ok is None or (context.kind == "chains" and _agree(context)):
        return None
    return at


def _agree(context: DiagnosisContext) -> bool:
    found = _all_together(context)
    return found.worst(found.rhat, largest=True)[0] <= RHAT


@cached
def _all_together(context: DiagnosisContext) -> "Agreement":
    return Agreement(context.draws, context.moving if context.kind == "chains" else ())


class Agreement:
    """R-hat and effective sample sizes of draws ``{site: (chain, draw, *site)}``."""

    def __init__(self, draws: Numbers, latents: Collection[str] = ()) -> None:
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

    def of_groups(self, groups: list["Agreement"]) -> "Agreement":
        """With the largest R-hat of several groups, and the sum of their effective sizes."""
        ess = dict.fromkeys(self.names, 0.0)
        rhat = dict.fromkeys(self.names, math.nan)
        for group in groups:
            for name, size, value in zip(group.names, group.ess, group.rhat, strict=True):
                ess[name] += float(size)
                rhat[name] = float(np.fmax(rhat[name], value))
        # A number that is the same at each mode has no effective size within any.
        found = copy(self)
        found.ess = np.array([size or math.nan for size in ess.values()])
        found.rhat = np.array(list(rhat.values()))
        return found

    def worst(self, values: np.ndarray, largest: bool) -> tuple[float, str]:
        known = np.flatnonzero(~np.isnan(values))
        if not len(known):
            return math.nan, ""
        k = known[np.argmax(values[known]) if largest else np.argmin(values[known])]
        return float(values[k]), self.names[k]


def _moving(found: Agreement) -> list[Row]:
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


def _rhat(found: Agreement, restarts: bool, where: str = "") -> Row:
    value, name = found.worst(found.rhat, largest=True)
    what = "restarts" if restarts else "chains" if found.chains > 1 else "halves of the chain"
    wrong = (
        f"the {what} differ{where}, most of all in {name}; run longer, or reparametrise the model."
    )
    if math.isnan(value):
        wrong = (
            f"it cannot be computed, which takes 4 finite draws of each of the {what}; draw more."
        )
    elif restarts:
        wrong = (
            f"the restarts are different optima, most of all in {name}; keep the one of the lowest"
            " loss, or take a guide with several modes."
        )
    right = f"the {what} agree{where}."
    return judged(AGREEMENT, value, f"{RHAT}", value <= RHAT, right, wrong)


def restart_rows(found: Agreement, draws: Numbers, facts: Facts) -> list[Row]:
    """The lines of several restarts of one fit, whose draws are the chains."""
    if facts.distinct_restarts is not None:
        verdict = (
            "restarts of the same parameters say nothing about other optima; make them by"
            " numpyro_ext.diagnostics.restarts."
        )
        number, limit = facts.distinct_restarts, str(facts.num_restarts)
        return [*_moving(found), Row("different restarts", number, None, limit, None, verdict)]
    if all(np.all(x == x[:, :1]) for x in draws.values()):  # points have no spread to compare with
        return _moving(found)
    return [*_moving(found), _rhat(found, restarts=True)]


def chain_rows(found: Agreement, stats: Numbers, facts: Facts, where: str = "") -> list[Row]:
    """The lines of a run of MCMC: R-hat, effective draws and their price, compared ``where``."""
    rows = [*_moving(found), _rhat(found, restarts=False, where=where)]
    ess, name = found.worst(found.ess, largest=False)
    limit = min(ESS, ESS_EACH * found.chains)
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
    if facts.predicted_transitions is not None:
        rows.append(_slowness(total / ess, facts))
    return rows


def _prices(ess: float, stats: Numbers, facts: Facts) -> list[Row]:
    """The price of an effective draw, without warmup; ``ess`` is per draw."""
    transitions, gradients = facts.transitions_per_draw, facts.gradients_per_draw
    if "n_steps" in stats:  # the leapfrog steps of the draws that were kept
        gradients = float(np.mean(stats["n_steps"])) * (transitions or 1)
    elif facts.takes_leapfrogs:
        verdict = 'the leapfrog steps were not collected: run it with extra_fields=("num_steps",).'
        return [Row("ESS per gradient", math.nan, None, "", None, verdict)]
    compare = "for comparison with other kernels and settings."
    if gradients is None:
        if transitions is None:
            return []
        return [Row("ESS per transition", ess / transitions, None, "", None, compare)]
    if facts.rows is None:
        return [Row("ESS per gradient", ess / gradients, None, "", None, compare)]
    batch, size = facts.batch_rows, facts.rows
    verdict = f"each gradient takes {batch:,.0f} of {size:,.0f} rows."
    rows = [Row("ESS per gradient", ess / gradients, None, "", None, verdict)]
    per_pass = ess / gradients * size / batch
    return [*rows, Row("ESS per pass over the data", per_pass, None, "", None, compare)]


def _slowness(draws: float, facts: Facts) -> Row:
    """Transitions per independent draw, of which a draw shows no fewer than its own."""
    step, predicted = facts.transitions_per_draw, facts.predicted_transitions
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
