"""Whether particles, or draws without a density, are as wide as their gradients say, and at rest.

It takes points with the gradients of all data, one of each. Of the identity
:math:`E[(x - \bar x) g^\top] = -I` it makes the sd that the gradients imply. With C the covariance
of the points x and :math:`M = -\tfrac1m \\sum_i (x_i - \bar x) g_i^\top` the implied sd ratio is
:math:`\\mathrm{sd}(x_a) / \\sqrt{(M^{-1} C)_{aa}}`.
"""

from collections.abc import Iterator
import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.diagnostics._facts import Facts
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._points import Points, minibatch_noise
from numpyro_ext.diagnostics.context import DiagnosisContext, FitContext
from numpyro_ext.diagnostics.judges.chains import split_by_mode
from numpyro_ext.diagnostics.judges.exact_moves import exact_moves
from numpyro_ext.diagnostics.judges.points import has_moves
from numpyro_ext.diagnostics.judges.shares import AtModes, draws_at_modes
from numpyro_ext.diagnostics.limits import judged, worst_rows
from numpyro_ext.diagnostics.table import Row, equally_spaced
from numpyro_ext.scores.discrepancy import squared_ksd
from numpyro_ext.scores.implied_sd import IMPLIED_RATIO, IMPLIED_SHIFT, implied_sd_ratio

__all__ = ["discrepancy", "particle_facts", "particle_rows", "particles", "stein"]

POINTS = 2000
"""The largest number of points, equally spaced, in the Stein discrepancy."""

_ratios_of = jax.jit(implied_sd_ratio)


def particles(context: DiagnosisContext) -> list[Row]:
    """The lines of particles; they say whether these are right unless chains were too short to
    judge the shares of modes."""
    m = context.num_points
    if not isinstance(context, FitContext):
        return particle_rows(m, context.facts)
    if not context.has_gradient:
        return particle_rows(m, Facts(num_latents=context.num_latents))
    at, points = split_by_mode(context), context.points
    number, *rest = particle_rows(m, particle_facts(points))
    if at is not None:
        rest = worst_rows([particle_rows(*one)[1:] for one in _groups(context.fit, points, at)])
    moved = exact_moves(context)
    short = any(row.not_judged and np.isfinite(row.value) for row in moved)
    known = draws_at_modes(context)
    shares = [] if known is None else [known.row]
    return [number, *(row._replace(of_draws=not short) for row in rest), *shares]


def _groups(fit: Fit, points: Points, at: AtModes) -> Iterator[tuple[int, Facts]]:
    """The number of particles at each mode with their facts, where there are enough."""
    for k in range(len(at.modes)):
        here = at.which[0] == k
        if (m := int(here.sum())) > points.x.shape[1]:
            x, score = points.x[here], points.score[here]
            yield m, particle_facts(Points(x, score, points.name, minibatch_noise(fit, x)))


def stein(context: FitContext) -> list[Row]:
    """The lines of draws without a density, which are independent, so that their mean has an error
    of its own; none if all are equal."""
    if context.density != "none" or not has_moves(context):
        return []
    found = context.points
    m, d = found.x.shape
    if m <= d or not bool(jnp.all(jnp.any(found.x != found.x[0], 0))):
        return []
    remedy = "train longer, or take a richer guide"
    rows = _stein_rows(particle_facts(found), "draws", remedy, IMPLIED_SHIFT + 3 / math.sqrt(m))
    return [row._replace(of_draws=True) for row in [*rows, *discrepancy(context)]]


def discrepancy(context: FitContext) -> list[Row]:
    """The Stein discrepancy, for information."""
    if not context.has_gradient:
        return []
    x, score, *_ = context.points
    fine = np.flatnonzero(np.all(np.isfinite(x) & np.isfinite(score), axis=1))
    if len(fine) < 2:
        return []
    chosen = fine[equally_spaced(len(fine), POINTS)]
    ksd = float(squared_ksd(x[chosen], score[chosen], statistic="v"))
    verdict = "for comparison with other runs of this model; smaller is better."
    return [Row("squared KSD", ksd, None, "", None, verdict)]


def worst_of(ratios: np.ndarray, limits: tuple[float, float]) -> int:
    """The index of the ratio farthest from 1, in units of the limit on its side, or NaN."""
    low, high = np.log(limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.maximum(np.log(ratios) / low, np.log(ratios) / high)
    return int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))


def particle_facts(found: Points) -> Facts:
    """Attributes that the gradients of points give; NaN without more than d of them."""
    # Where all points agree there is no spread to divide by, or only the rounding of their mean.
    varies = np.flatnonzero(np.any(np.asarray(found.x != found.x[0]), 0))
    implied, shift = _ratios_of(found.x[:, varies], found.score[:, varies])
    ratios = np.zeros(found.x.shape[1])
    ratios[varies] = implied
    worst = worst_of(ratios, IMPLIED_RATIO)
    x, g = (np.asarray(y, np.float64) for y in found[:2])
    # The shift is the root of b^T C b / d, b the mean gradient and C the covariance of the points.
    with np.errstate(invalid="ignore", over="ignore"):  # of lost particles
        slope = np.mean((x - x.mean(0)) * ((x - x.mean(0)) @ g.mean(0))[:, None], 0)
        error = np.std(g @ slope) / (math.sqrt(len(x)) * len(ratios) * max(float(shift), 1e-30))
    return Facts(
        num_latents=len(ratios),
        implied_sd_ratio=float(ratios[worst]),
        implied_sd_ratio_of=found.name(worst),
        shift=float(shift),
        shift_error=float(error),
        minibatch_noise=found.noise,
    )


def particle_rows(m: int, facts: Facts) -> list[Row]:
    """The number of particles and, by their gradients, their spread and their mean."""
    d = facts.num_latents
    number = judged(
        "number of particles",
        m,
        f"{2 * d}",
        m >= 2 * d,
        f"there are enough for {d} dimensions.",
        f"{d} dimensions need twice as many particles at least, or their spread is too narrow (and"
        " with no more than d it cannot be judged); take more particles.",
    )
    if m <= d or facts.implied_sd_ratio is None:
        return [number]
    remedy = "run longer, take more particles, or another field"
    return [number, *_stein_rows(facts, "particles", remedy, max(IMPLIED_SHIFT, 1 / math.sqrt(m)))]


def _stein_rows(facts: Facts, what: str, remedy: str, limit: float) -> list[Row]:
    ratio, shift = facts.implied_sd_ratio, facts.shift
    low, high = IMPLIED_RATIO
    limits = f"{low} to {high}"
    spread = judged(
        "implied sd ratio, worst",
        ratio,
        limits,
        low <= ratio <= high,
        f"the {what} are as wide as their gradients say.",
        f"the {what} are not as wide as their gradients say that the posterior is, most of all in"
        f" {facts.implied_sd_ratio_of}; {remedy}.",
    )
    if math.isnan(ratio):
        verdict = (
            f"not judged: along {facts.implied_sd_ratio_of} the gradients do not point back to"
            f" the mean of the {what}, so they imply no spread; see the other lines."
        )
        spread = Row("implied sd ratio, worst", ratio, None, limits, None, verdict)
    noise = facts.minibatch_noise or 0.0
    if noise > shift:
        remedy = (
            "the gradients of a minibatch, which all of them share, are farther off, so take a"
            " larger batch, or more steps whose size falls to 0, as that of particle_step"
        )
    error = facts.shift_error or 0.0
    mean = judged(
        "shift in sds",
        shift,
        f"{limit:.2g}",
        shift - error <= limit,
        f"the mean of the {what} has come to rest.",
        f"the mean of the {what} is not where the gradients of all data cancel; {remedy}.",
        error,
    )
    if math.isnan(shift) or math.isnan(error):
        verdict = "not judged: a gradient is not a number at some of them; see the other lines."
        mean = mean._replace(ok=None, verdict=verdict)
    if not noise:
        return [spread, mean]
    verdict = (
        f"the mean gradient of one minibatch is off by so much; the mean of the {what} follows it"
        f" where the steps are large{'' if noise > shift else ', which is not the cause here'}."
    )
    return [spread, mean, Row("noise of a minibatch in sds", noise, None, "", None, verdict)]
