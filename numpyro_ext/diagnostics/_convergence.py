"""Whether chains, or restarts of a fit, agree, and how many draws they are worth."""

from collections.abc import Collection
import math
from typing import Any

import numpy as np

from numpyro_ext.diagnostics._rules import Row, equally_spaced

__all__ = ["convergence_rows", "loss_rows", "restart_rows"]

RHAT = 1.01
COORDINATES = 1000
"""At most so many coordinates are looked at, equally spaced."""
SLOWER = 20
"""Measured over predicted transitions per independent draw that is still near normal."""
FALL = 0.1
"""Nats by which the losses may still fall over the last fifth."""


class _Numbers:
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


def _moving(numbers: _Numbers) -> list[Row]:
    rows = []
    if numbers.lost:
        verdict = (
            "these draws have left the support of a site or are not finite; take a smaller step, or"
            " another start."
        )
        rows.append(Row("share of draws not finite", numbers.lost, None, "0", False, verdict))
    if numbers.stuck:
        named = ", ".join(f"'{name}'" for name in numbers.stuck)
        verdict = (
            f"no chain ever moved {named}: the transform of its support may be saturated; take"
            " another start or a smaller step."
        )
        rows.append(
            Row("sites that never move", len(numbers.stuck), None, "0", False, verdict),
        )
    return rows


def _rhat(numbers: _Numbers, restarts: bool) -> Row:
    value, name = numbers.worst(numbers.rhat, largest=True)
    what = "restarts" if restarts else "chains" if numbers.chains > 1 else "halves of the chain"
    if math.isnan(value):
        verdict = (
            f"it cannot be computed, which takes 4 finite draws of each of the {what}; draw more."
        )
        return Row("largest R-hat", value, None, f"{RHAT}", False, verdict)
    ok = value <= RHAT
    verdict = f"the {what} agree."
    if not ok and restarts:
        verdict = (
            f"the restarts are different optima, most of all in {name}; keep the one of the lowest"
            " loss, or take a guide with several modes."
        )
    elif not ok:
        verdict = (
            f"the {what} differ, most of all in {name}; run longer, or reparametrise the model."
        )
    return Row("largest R-hat", value, None, f"{RHAT}", ok, verdict)


def restart_rows(draws: dict[str, np.ndarray]) -> list[Row]:
    """Of several restarts of one fit, whose draws are the chains."""
    numbers = _Numbers(draws)
    return [*_moving(numbers), _rhat(numbers, restarts=True)]


def convergence_rows(
    draws: dict[str, np.ndarray],
    stats: dict[str, np.ndarray],
    facts: dict[str, Any],
    latents: Collection[str],
) -> list[Row]:
    """Of a run of MCMC: R-hat, effective draws, and what they cost.

    :param latents: sites that have to move; deterministic ones need not.
    """
    numbers = _Numbers(draws, latents)
    rows = [*_moving(numbers), _rhat(numbers, restarts=False)]
    ess, name = numbers.worst(numbers.ess, largest=False)
    limit = min(400, 100 * numbers.chains)
    ok = ess >= limit
    verdict = "there are enough independent draws."
    if not ok:
        verdict = (
            f"the draws are worth too few independent ones in {name or 'any site'}; run longer, or"
            " reparametrise the model."
        )
    rows.append(Row("smallest ESS", ess, None, f"{limit}", ok, verdict))
    total = numbers.chains * numbers.draws
    if math.isnan(ess) or ess <= 0:
        return rows
    rows += _prices(ess / total, stats, facts)
    if "predicted_transitions" in facts:
        rows.append(_slowness(total / ess, facts))
    return rows


def _prices(ess: float, stats: dict[str, np.ndarray], facts: dict[str, Any]) -> list[Row]:
    """What an effective draw costs, warmup apart; ``ess`` is per draw."""
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
    """Transitions per independent draw; no fewer than those of a draw can be seen."""
    step, predicted = facts["transitions_per_draw"], facts["predicted_transitions"]
    value = draws * step
    ok = not (value > SLOWER * max(predicted, step))
    verdict = f"the law of the kernel predicts {predicted:,.3g}."
    if not ok:
        verdict = (
            f"the law of the kernel on a normal posterior predicts {predicted:,.3g}, so this one is"
            " not near normal; reparametrise the model (LocScaleReparam for hierarchies)."
        )
    limit = f"{SLOWER * max(predicted, step):,.3g}"
    return Row("transitions per independent draw", value, None, limit, ok, verdict)


def loss_rows(losses: list[np.ndarray]) -> list[Row]:
    """Whether the losses of the restarts have come to rest: the last fifth against that before."""
    changes = []
    for one in losses:
        fifth = len(one) // 5
        if fifth < 2:
            continue
        before, last = one[-2 * fifth : -fifth], one[-fifth:]
        (m0, v0), (m1, v1) = ((np.mean(x), np.var(x, ddof=1)) for x in (before, last))
        changes.append((float(m1 - m0), float(np.sqrt((v0 + v1) / fifth))))
    if not changes:
        return []
    name, limit = "change of the loss", f"{FALL} or 3 errors"
    lost = [change for change in changes if not math.isfinite(change[0])]
    if lost:
        verdict = "losses are not finite; take a smaller learning rate or stable_update=True."
        return [Row(name, math.nan, None, limit, False, verdict)]
    change, error = max(changes, key=lambda pair: abs(pair[0]) / max(pair[1], 1e-300))
    ok = abs(change) <= max(FALL, 3 * error)
    verdict = "the last fifth of the losses is as high as the fifth before it."
    if not ok and change < 0:
        verdict = "the loss was still falling in the last fifth of the steps; run longer."
    elif not ok:
        verdict = "the loss rose in the last fifth of the steps; take a smaller learning rate."
    return [Row(name, change, error, limit, ok, verdict)]
