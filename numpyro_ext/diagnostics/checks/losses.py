"""Whether the fit of a guide has come to rest: its losses, an engine, or local inference."""

from collections.abc import Sequence
from inspect import signature
import math
from typing import Any

from jax import random
import numpy as np
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._fit_of import restarts_of
from numpyro_ext.diagnostics.comparison import SD
from numpyro_ext.diagnostics.limits import FALL, LOST, NARROW, STEP_NOISE
from numpyro_ext.diagnostics.table import Row

RESIDUAL = "residual"
_FAR = 10.0
"""Nats: a loss that falls by more in a fifth of the steps began far from the posterior."""


def losses(fit: Fit, others: Sequence[Row]) -> list[Row]:
    """The line of the losses, or the lines of the equations that an engine solves. A loss that has
    not come to rest, or equations that are not solved, have no line where the draws were found
    right."""
    of_draws = [other.ok for other in others if other.of_draws]
    is_right = True in of_draws and False not in of_draws
    if hasattr(fit.obj, "convergence"):
        rows = convergence_rows(fit.obj, restarts_of(fit.result))
        return [row for row in rows if row.ok or row.quantity != RESIDUAL or not is_right]
    row = loss_row(losses_of(fit), nearer(fit.obj.guide))
    return [] if row is None or (row.ok is False and is_right and row.error) else [row]


def losses_of(fit: Fit) -> list[np.ndarray]:
    """The losses of each restart."""
    every = [np.asarray(getattr(result, "losses", ())) for result in restarts_of(fit.result)]
    return [losses for losses in every if losses.ndim == 1 and len(losses) > 1]


def loss_row(losses: list[np.ndarray], start: str = "find_modes(model, *args)") -> Row | None:
    """The last fifth of the losses against the fifth before, of the restart that differs most."""
    name, limit = "change of the loss", f"{FALL} or 3 errors"
    changes = []
    for each in losses:
        fifth = len(each) // 5
        if fifth < 2:
            continue
        parts = [each[-3 * fifth : -2 * fifth], each[-2 * fifth : -fifth], each[-fifth:]]
        lost = float(np.mean(~np.isfinite(np.concatenate(parts[1:]))))
        if lost > LOST:
            verdict = (
                f"{lost:.0%} of the losses are not finite; take a smaller learning rate, or"
                " stable_update=True."
            )
            return Row(name, math.nan, None, limit, False, verdict)
        # A step that is not finite is skipped; a few of them do no harm.
        m0, m1, m2 = (float(np.mean(x[np.isfinite(x)])) for x in parts)
        variances = [float(np.var(x[np.isfinite(x)], ddof=1)) for x in parts[1:]]
        error = math.sqrt(sum(variances) / fifth)
        changes.append((abs(m2 - m1) / max(error, 1e-300), m2 - m1, m1 - m0, error, fifth))
    if not changes:
        return None
    _, change, before, error, fifth = max(changes)
    right = "the last fifth of the losses is as high as the fifth before it."
    wrong = "the loss rose in the last fifth of the steps; take a smaller learning rate."
    if change < 0:
        longer = _run_longer(-change, -before, fifth, start)
        wrong = f"the loss still fell in the last fifth of the steps; {longer}."
    ok = abs(change) <= max(FALL, 3 * error)
    return Row(name, change, error, limit, ok, right if ok else wrong)


def nearer(guide: Any) -> str:
    """How this guide begins nearer to the posterior."""
    if hasattr(guide, "init_from"):
        return "init_from=find_modes(model, *args)"
    if isinstance(guide, AutoMultivariateNormal | AutoDiagonalNormal | AutoNormal):
        return (
            "svi.run(..., init_params=find_modes(model, *args).whitening.init_params(guide, *args))"
        )
    if isinstance(guide, AutoGuide) and "init_loc_fn" in signature(type(guide)).parameters:
        return "init_loc_fn=init_to_median()"
    return "svi.run(..., init_params=) of an earlier fit"


def _run_longer(fall: float, before: float, fifth: int, start: str) -> str:
    """How many more steps a loss takes if its fall shrinks by one factor in every fifth."""
    if fall > _FAR:
        return f"begin nearer to the posterior: {start}"
    shrinks = fall / before if before > fall else 1.0
    fifths = math.log(fall / FALL) / -math.log(shrinks) if shrinks < 0.9 else 5.0
    steps = fifth * max(1, math.ceil(min(fifths, 5.0)))
    return f"run about {steps:,} steps more"


def convergence_rows(engine: Any, results: list[Any]) -> list[Row]:
    """Whether an engine has solved its equations, in the worst of its restarts.

    :param engine: its ``convergence(state)`` is a dict with the ``residual`` and its ``limit`` (0
        if it is not compared), the numbers of factors ``skipped`` and ``inaccurate``, and maybe the
        ``noise`` of the rows that were drawn.
    """
    states = [result.state for result in results if hasattr(result, "state")]
    each = [engine.convergence(state) for state in states]
    if not each:
        return []
    worst, rows = max(each, key=lambda x: x["residual"]), []
    if limit := worst["limit"]:
        right = "a further sweep leaves the mean and the variances as they are."
        wrong = "the sweeps have not settled; run longer, or with a smaller damping."
        value, ok = worst["residual"], worst["residual"] < limit
        rows.append(Row(RESIDUAL, value, None, f"{limit:g}", ok, right if ok else wrong))
    noise = max((x["noise"] for x in each if x.get("noise", math.nan) >= 0), default=None)
    if noise is not None:
        right = "the rows that were drawn move the mean and the standard deviations by less."
        wrong = "the result hangs on the rows that were drawn; run longer, or take more in a step."
        limit, ok = f"{STEP_NOISE}", noise <= STEP_NOISE
        rows.append(Row(RESIDUAL, noise, None, limit, ok, right if ok else wrong))
    skipped, inaccurate = (max(x[name] for x in each) for name in ("skipped", "inaccurate"))
    right = "every factor was updated in the last step."
    wrong = "factors were left as they were; their moments do not exist or were not found."
    wrong += f" The nodes of the quadrature were too few {inaccurate} times." * bool(inaccurate)
    ok = skipped == 0
    return [*rows, Row("factors skipped", skipped, None, "0", ok, right if ok else wrong)]


def local_inference(fit: Fit) -> list[Row]:
    """The lines of a guide with ``judge_local`` and ``narrowest_global``, not of another guide."""
    guide, draws = fit.obj.guide, fit.draws
    if not hasattr(guide, "judge_local"):
        return []
    key_prior, key_step = random.split(random.fold_in(fit.rng_key, 1))
    fitted = fit.model, fit.params, draws, fit.args, fit.kwargs
    judgements = guide.judge_local(key_prior, *fitted)
    rows = [Row(x.quantity, x.value, None, x.limit, x.ok, x.verdict) for x in judgements]
    if (narrowest := guide.narrowest_global(key_step, draws)) is None:
        return rows
    ratio, name = narrowest
    if ratio >= NARROW:
        return rows
    verdict = (
        f"the guide draws '{name}' independently of local sites, so it is narrower than after a"
        " step of Gibbs sampling, and the posterior is wider still; take"
        " guide.sample_globals of its local draws, which is nearer, or NUTS."
    )
    return [*rows, Row(SD, ratio, None, f"> {NARROW}", False, verdict, of_draws=True)]
