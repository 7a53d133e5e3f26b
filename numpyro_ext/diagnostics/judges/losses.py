"""Whether the optimiser of a guide has come to rest: its losses, or the equations of an engine."""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.limits import FALL, LOST, STEP_NOISE, judged
from numpyro_ext.diagnostics.table import Row

__all__ = ["convergence_rows", "loss_rows", "losses"]


def losses(context: FitContext, others: Sequence[Row]) -> list[Row]:
    """The lines of the losses, or of the equations that an engine solves; where the lines on the
    draws find these right, a loss is for information."""
    if hasattr(context.obj, "convergence"):
        return convergence_rows(context.obj, context.results)
    found = [getattr(one, "losses", None) for one in context.results]
    losses = [np.asarray(one) for one in found if one is not None]
    of_draws = [row.ok for row in others if row.of_draws]
    is_right = True in of_draws and False not in of_draws
    return loss_rows([one for one in losses if one.ndim == 1], is_right=is_right)


def loss_rows(losses: list[np.ndarray], *, is_right: bool) -> list[Row]:
    """The last fifth of the losses of each restart against the fifth before; for information where
    ``is_right``, other lines have found the draws right."""
    changes, lost = [], []
    for one in losses:
        fifth = len(one) // 5
        if fifth < 2:
            continue
        before, last = one[-2 * fifth : -fifth], one[-fifth:]
        lost.append(float(np.mean(~np.isfinite(np.concatenate([before, last])))))
        # The objectives of this package skip a step that is not finite; a few of them do no harm.
        if lost[-1] <= LOST:
            before, last = before[np.isfinite(before)], last[np.isfinite(last)]
        (m0, v0), (m1, v1) = ((np.mean(x), np.var(x, ddof=1)) for x in (before, last))
        changes.append((float(m1 - m0), float(np.sqrt((v0 + v1) / fifth))))
    if not changes:
        return []
    name, limit = "change of the loss", f"{FALL} or 3 errors"
    if max(lost) > LOST:
        verdict = (
            f"{max(lost):.0%} of the losses are not finite; take a smaller learning rate, or"
            " stable_update=True."
        )
        return [Row(name, math.nan, None, limit, False, verdict)]
    change, error = max(changes, key=lambda pair: abs(pair[0]) / max(pair[1], 1e-300))
    right = "the last fifth of the losses is as high as the fifth before it."
    wrong = "the loss rose in the last fifth of the steps; take a smaller learning rate."
    if change < 0:
        wrong = "the loss was still falling in the last fifth of the steps; run longer."
    ok = abs(change) <= max(FALL, 3 * error)
    if is_right and not ok:
        verdict = f"{wrong[:-1]}; the lines on the draws find nothing wrong with them."
        return [Row(name, change, error, "", None, verdict)]
    return [judged(name, change, limit, ok, right, wrong, error)]


def convergence_rows(engine: Any, results: list[Any]) -> list[Row]:
    """Whether an engine has solved its equations, in the worst of its restarts.

    :param engine: its ``convergence(state)`` is a dict with the ``residual`` and its ``limit`` (0
        if it is not compared), the numbers of factors ``skipped`` and ``inaccurate``, and maybe the
        ``noise`` of the rows that were drawn.
    """
    states = [one.state for one in results if hasattr(one, "state")]
    found = [engine.convergence(state) for state in states]
    if not found:
        return []
    worst = max(found, key=lambda one: one["residual"])
    limit, skipped = worst["limit"], max(one["skipped"] for one in found)
    rows = []
    if limit:
        right = "a further sweep leaves the mean and the variances as they are."
        wrong = "the sweeps have not settled; run longer, or with a smaller damping."
        good = worst["residual"] < limit
        rows.append(judged("residual", worst["residual"], f"{limit:g}", good, right, wrong))
    noise = max((one["noise"] for one in found if one.get("noise", math.nan) >= 0), default=None)
    if noise is not None:
        right = "the rows that were drawn move the mean and the standard deviations by less."
        wrong = "the result hangs on the rows that were drawn; run longer, or take more in a step."
        rows.append(
            judged("noise of the steps", noise, f"{STEP_NOISE}", noise <= STEP_NOISE, right, wrong)
        )
    right = "every factor was updated in the last step."
    wrong = "factors were left as they were; their moments do not exist or were not found."
    rows.append(judged("factors skipped", skipped, "0", skipped == 0, right, wrong))
    if inaccurate := max(one["inaccurate"] for one in found):
        verdict = "times a factor was not resolved by the nodes of its quadrature; take more."
        rows.append(Row("nodes too few", inaccurate, None, "", None, verdict))
    return rows
