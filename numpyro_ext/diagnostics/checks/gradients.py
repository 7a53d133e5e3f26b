r"""Whether particles, or draws without a density, are as wide as their gradients say, and at rest.

It takes points with the gradients of all data, one of each. Of the identity
:math:`E[(x - \bar x) g^\top] = -I` it makes the sd that the gradients imply. With C the covariance
of the points x and :math:`M = -\tfrac1m \sum_i (x_i - \bar x) g_i^\top` the implied sd ratio is
:math:`\mathrm{sd}(x_a) / \sqrt{(M^{-1} C)_{aa}}`.
"""

import math

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.read import coordinate_name, read_model
from numpyro_ext._typing import Params
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.checks.chains import split_by_mode
from numpyro_ext.diagnostics.checks.draws import has_moves
from numpyro_ext.diagnostics.checks.moves import moves, worst_rows
from numpyro_ext.diagnostics.comparison import MEAN, SD
from numpyro_ext.diagnostics.context import FitContext, potential_of
from numpyro_ext.diagnostics.table import Row, equally_spaced
from numpyro_ext.scores.implied_sd import IMPLIED_RATIO, IMPLIED_SHIFT, implied_sd_ratio

_BATCHES, _PARTICLES = 32, 8
"""Minibatches from which the noise of the mean gradient is known, and particles in that mean."""

_ratios_of = jax.jit(implied_sd_ratio)


def enough_particles(context: FitContext) -> list[Row]:
    """The line of too few particles; none if they are enough."""
    m, d = next(iter(context.draws.values())).shape[1], context.info.size
    if m >= 2 * d:
        return []
    verdict = (
        f"{d} dimensions need twice as many particles at least, or their spread is too narrow (and"
        " with no more than d it cannot be judged); take more particles."
    )
    return [Row("number of particles", m, None, f"{2 * d}", False, verdict)]


def by_gradients(context: FitContext) -> list[Row]:
    """The lines of particles, or of draws without a density, by their gradients.

    They judge the draws unless the moves were too short to judge the shares of modes, which
    gradients do not see.
    """
    if context.kind == "particles":
        if not context.has_gradient:
            return []
        short = any(row.ok is None and np.isfinite(row.value) for row in moves(context))
        why = "not judged: gradients say nothing of the shares of modes, and moves were too short."
        rows = rows_of_particles(context)
        return [row._replace(ok=None, verdict=why) if short and row.ok else row for row in rows]
    if context.proto.density != "none" or not has_moves(context):
        return []
    x, score = context.points
    # Draws that are all equal have no spread.
    if not bool(jnp.all(jnp.any(x != x[0], 0))):
        return []
    limit = IMPLIED_SHIFT + 3 / math.sqrt(len(x))
    return rows_of_points(x, score, context, limit, "train longer, or take a richer guide")


def rows_of_particles(context: FitContext) -> list[Row]:
    """The lines of particles; where they are at several modes, the worst lines of all modes."""
    x, score = context.points
    by_mode = split_by_mode(context)
    groups = [np.arange(len(x))]
    if by_mode is not None:
        groups = [np.flatnonzero(by_mode.which[0] == k) for k in range(len(by_mode.modes))]
    rows = []
    for group in groups:
        limit = max(IMPLIED_SHIFT, 1 / math.sqrt(max(len(group), 1)))
        remedy = "run longer, take more particles, or another field"
        noise = minibatch_noise(context.fit, x[group]) if len(group) > x.shape[1] else 0.0
        rows += rows_of_points(x[group], score[group], context, limit, remedy, noise)
    return worst_rows(rows)


def rows_of_points(
    points: Array, score: Array, context: FitContext, limit: float, remedy: str, noise: float = 0.0
) -> list[Row]:
    """The lines of the spread and the mean of ``(m, d)`` points; none without more points than
    coordinates."""
    m, d = points.shape
    if m <= d:
        return []
    # Where all points agree there is no spread to divide by, or only the rounding of their mean.
    varies = np.flatnonzero(np.any(np.asarray(points != points[0]), 0))
    implied, shift = _ratios_of(points[:, varies], score[:, varies])
    ratios = np.zeros(d)
    ratios[varies] = implied
    worst = _worst_of(ratios, IMPLIED_RATIO)
    x, g = np.asarray(points, np.float64), np.asarray(score, np.float64)
    # The shift is the root of b^T C b / d, b the mean gradient and C the covariance of the points.
    with np.errstate(invalid="ignore", over="ignore"):  # of lost particles
        slope = np.mean((x - x.mean(0)) * ((x - x.mean(0)) @ g.mean(0))[:, None], 0)
        error = np.std(g @ slope) / (math.sqrt(m) * d * max(float(shift), 1e-30))
    name = coordinate_name(context.info.slices, worst)
    return [
        _row_of_mean(float(shift), float(error), limit, noise, remedy),
        _row_of_spread(float(ratios[worst]), name, remedy),
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


def minibatch_noise(fit: Fit, x: Array) -> float:
    """The shift by which the mean gradient of a minibatch, which all particles share, differs from
    the one of all data; 0 without minibatches."""
    if fit.minibatch is None:
        return 0.0
    info = read_model(fit.minibatch, fit.args, fit.kwargs, sums=True)

    @jax.jit
    def run(params: Params, x: Array) -> Array:
        target = potential_of(fit._replace(model=fit.minibatch), info, params)
        some = x[equally_spaced(len(x), _PARTICLES)]

        def mean_gradient(key: Array) -> Array:
            idx = target.draw_rows(key)
            return jnp.mean(lax.map(lambda z: target.value_and_grad_flat(z, idx)[1], some), 0)

        g = lax.map(mean_gradient, random.split(random.key(0), _BATCHES))
        # In units of the particles' spread, coordinate by coordinate, as the shift is.
        centred = (x - jnp.mean(x, 0)) / jnp.sqrt(len(x))
        moved = jnp.matmul(centred, (g - jnp.mean(g, 0)).T, precision="highest")
        return jnp.sqrt(jnp.mean(jnp.sum(moved**2, 0)) / info.size)

    return float(run(fit.params[0], x)) * math.sqrt(_BATCHES / (_BATCHES - 1))
