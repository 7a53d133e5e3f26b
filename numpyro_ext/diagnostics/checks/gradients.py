r"""Whether particles, or draws without a density, are as wide as their gradients say, and at rest.

It takes points with the gradients of all data, one of each. Of the identity
:math:`E[(x - \bar x) g^\top] = -I` it makes the sd that the gradients imply. With C the covariance
of the points x and :math:`M = -\tfrac1m \sum_i (x_i - \bar x) g_i^\top` the implied sd ratio is
:math:`\mathrm{sd}(x_a) / \sqrt{(M^{-1} C)_{aa}}`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.diagnostics._points import Points, minibatch_noise
from numpyro_ext.diagnostics.checks.chains import split_by_mode
from numpyro_ext.diagnostics.checks.draws import has_moves
from numpyro_ext.diagnostics.checks.moves import moves
from numpyro_ext.diagnostics.comparison import MEAN, SD
from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.table import Row
from numpyro_ext.scores.implied_sd import IMPLIED_RATIO, IMPLIED_SHIFT, implied_sd_ratio

_ratios_of = jax.jit(implied_sd_ratio)


def enough_particles(context: FitContext) -> list[Row]:
    """The line of too few particles; none if they are enough."""
    m, d = context.num_points, context.info.size
    if m >= 2 * d:
        return []
    verdict = (
        f"{d} dimensions need twice as many particles at least, or their spread is too narrow (and"
        " with no more than d it cannot be judged); take more particles."
    )
    return [Row("number of particles", m, None, f"{2 * d}", False, verdict)]


def by_gradients(context: FitContext) -> list[Row]:
    """The lines of particles, or of draws without a density, by their gradients.

    They judge the draws unless the moves were too short to judge the shares of modes, of which
    gradients say nothing.
    """
    if context.kind == "particles":
        if not context.has_gradient:
            return []
        short = any(row.ok is None and np.isfinite(row.value) for row in moves(context))
        by_mode, points = split_by_mode(context), context.points
        if by_mode is None:
            rows = rows_of_points(points, particles=True)
        else:
            groups = [
                points.subset(np.flatnonzero(by_mode.which[0] == k))
                for k in range(len(by_mode.modes))
            ]
            noisy = [p._replace(noise=minibatch_noise(context.fit, p.x)) for p in groups]
            worst: dict[str, Row] = {}
            for row in (row for p in noisy for row in rows_of_points(p, particles=True)):
                if row.quantity not in worst or row.ok is False:
                    worst[row.quantity] = row
            rows = list(worst.values())
        why = "not judged: gradients say nothing of the shares of modes, and moves were too short."
        return [row._replace(ok=None, verdict=why) if short and row.ok else row for row in rows]
    if context.proto.density != "none" or not has_moves(context):
        return []
    points = context.points
    # Draws that are all equal have no spread.
    varies = bool(jnp.all(jnp.any(points.x != points.x[0], 0)))
    return rows_of_points(points, particles=False) if varies else []


def rows_of_points(points: Points, *, particles: bool) -> list[Row]:
    """The lines of the spread and the mean; none without more points than coordinates."""
    m, d = points.x.shape
    if m <= d:
        return []
    # Where all points agree there is no spread to divide by, or only the rounding of their mean.
    varies = np.flatnonzero(np.any(np.asarray(points.x != points.x[0]), 0))
    implied, shift = _ratios_of(points.x[:, varies], points.score[:, varies])
    ratios = np.zeros(d)
    ratios[varies] = implied
    worst = _worst_of(ratios, IMPLIED_RATIO)
    x, g = (np.asarray(y, np.float64) for y in points[:2])
    # The shift is the root of b^T C b / d, b the mean gradient and C the covariance of the points.
    with np.errstate(invalid="ignore", over="ignore"):  # of lost particles
        slope = np.mean((x - x.mean(0)) * ((x - x.mean(0)) @ g.mean(0))[:, None], 0)
        error = np.std(g @ slope) / (math.sqrt(m) * d * max(float(shift), 1e-30))
    remedy = "train longer, or take a richer guide"
    limit = IMPLIED_SHIFT + 3 / math.sqrt(m)
    if particles:
        remedy = "run longer, take more particles, or another field"
        limit = max(IMPLIED_SHIFT, 1 / math.sqrt(m))
    return [
        _row_of_mean(float(shift), float(error), limit, points.noise or 0.0, remedy),
        _row_of_spread(float(ratios[worst]), points.name(worst), remedy),
    ]


def _worst_of(ratios: np.ndarray, limits: tuple[float, float]) -> int:
    """The index of the ratio farthest from 1, in units of the limit on its side, or NaN."""
    low, high = np.log(limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.maximum(np.log(ratios) / low, np.log(ratios) / high)
    return int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))


def _row_of_spread(ratio: float, name: str, remedy: str) -> Row:
    low, high = IMPLIED_RATIO
    ok: bool | None = low <= ratio <= high
    verdict = "the sds are right (by gradients)."
    if math.isnan(ratio):
        ok = None
        verdict = (
            f"not judged: along {name} the gradients do not point back to the mean of the draws, so"
            " they imply no spread."
        )
    elif not ok:
        verdict = (
            "the draws are not as wide as their gradients say that the posterior is, most of all in"
            f" {name}; {remedy}."
        )
    return Row(SD, ratio, None, f"{low} to {high}", ok, verdict, of_draws=True)


def _row_of_mean(shift: float, error: float, limit: float, noise: float, remedy: str) -> Row:
    """Particles share their minibatch, so their mean follows its noise where steps are large."""
    ok: bool | None = shift - error <= limit
    verdict = "the means are right (by gradients)."
    if math.isnan(shift) or math.isnan(error):
        ok, verdict = None, "not judged: a gradient is not a number at some of the draws."
    elif not ok:
        if noise > shift:
            remedy = (
                "the gradients of a minibatch, which all of them share, are farther off, so take a"
                " larger batch, or more steps whose size falls to 0, as that of particle_step"
            )
        verdict = f"the gradients of all data do not cancel at the mean of the draws; {remedy}."
    return Row(MEAN, shift, error, f"{limit:.2g}", ok, verdict, of_draws=True)
