"""Points with the gradients of their log density, and the lines that these give."""

from collections.abc import Callable
from dataclasses import replace
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import model_info, read_model
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._evaluate import Prototype, default_block_size
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.table import Row, equally_spaced, judged
from numpyro_ext.scores.discrepancy import squared_ksd
from numpyro_ext.scores.implied_sd import implied_sd_ratio

__all__ = ["Points", "draw_rows", "has_gradient", "ksd_row", "particle_facts", "particle_rows"]

SD_RATIO = (0.85, 1.2)
SHIFT = 0.1
"""Of as many particles as make the error of m independent draws, 1 / sqrt(m), smaller."""
_BATCHES, _AT = 32, 8
"""Minibatches from which the noise of the mean gradient is known, and particles in that mean."""
POINTS = 2000
"""At most so many points enter the Stein discrepancy, equally spaced."""

_ratios_of = jax.jit(implied_sd_ratio)


class Points(NamedTuple):
    """Points, and the gradients there of the log density of all data."""

    x: Array
    """``(m, d)``, in unconstrained space."""
    score: Array
    name: Callable[[int], str]
    """The name of a coordinate."""
    noise: float | None = None
    """Of the mean gradient of a minibatch, in the units of the shift; None without minibatches."""


def particles_of(obj: Any, fit: Fit) -> Sites:
    """The last position of every particle, constrained."""
    draws = fit.draws[0]
    if not isinstance(obj, MCMC):
        return draws
    # The chains of an ensemble are the particles, and its last draw is the answer.
    length = len(next(iter(draws.values()))) // fit.num_chains
    return {name: x[length - 1 :: length] for name, x in draws.items()}


def has_gradient(proto: Prototype) -> bool:
    """True if no latent site is discrete, so that each of them has a gradient."""
    supports = (proto.trace[name]["fn"].support for name in proto.latents)
    return not proto.marginalized and not any(support.is_discrete for support in supports)


def potential_of(
    fit: Fit, trace: Trace, params: Params, deterministic: tuple[str, ...] = ()
) -> Potential:
    """The potential on all data, of a latent vector; other deterministic sites are left out."""
    assert fit.model is not None
    # They would only take another run of the model at each point.
    info = replace(model_info(trace), deterministic=deterministic)
    return Potential(fit.model, info, params, fit.args, fit.kwargs, forward_mode=fit.forward_mode)


def flat_draws(target: Potential, draws: Sites, block: int) -> Array:
    """Constrained draws of the latent sites as ``(m, d)`` points."""
    ravel, unconstrain = target.info.ravel, target.unconstrain
    return lax.map(lambda draw: ravel(unconstrain("x", draw)), draws, batch_size=block)


def in_place_of_lost(x: Array) -> Array:
    """Points with the first finite one in place of those that are not: a transform that is
    saturated has no finite inverse."""
    fine = jnp.all(jnp.isfinite(x), 1)
    return x[jnp.where(fine, jnp.arange(len(x)), jnp.argmax(fine))]


def points_and_score(fit: Fit, trace: Trace, draws: dict[str, Any]) -> tuple[Array, Array]:
    """Draws in unconstrained space, and there minus the gradient of the potential."""

    @jax.jit
    def run(params: Params, draws: Sites) -> tuple[Array, Array]:
        potential = potential_of(fit, trace, params)

        def one(draw: Sites) -> tuple[Array, Array]:
            x = potential.info.ravel(potential.unconstrain("x", draw))
            return x, -potential.value_and_grad_flat(x, {})[1]

        return lax.map(one, draws, batch_size=default_block_size(trace))

    given = {name: jnp.asarray(draws[name]) for name in model_info(trace).latents}
    return run(fit.params[0], given)


def scored(fit: Fit, proto: Prototype, draws: dict[str, Any]) -> Points:
    """Constrained draws as points with their score."""
    slices = model_info(proto.trace).slices
    x, score = points_and_score(fit, proto.trace, draws)
    noise = None if fit.minibatch is None else minibatch_noise(fit, x)
    return Points(x, score, lambda k: name_in(slices, k), noise)


def minibatch_noise(fit: Fit, x: Array) -> float:
    """The shift by which the mean gradient of a minibatch differs from that of all data.

    All particles share their minibatch, so their mean follows it and not the spread of them alone.
    """
    assert fit.minibatch is not None
    model = fit.minibatch
    info = replace(read_model(model, fit.args, fit.kwargs), deterministic=())
    forward = {"forward_mode": fit.forward_mode}

    @jax.jit
    def run(params: Params, x: Array) -> Array:
        target = Potential(model, info, params, fit.args, fit.kwargs, **forward)
        some = x[equally_spaced(len(x), _AT)]

        def mean_gradient(key: Array) -> Array:
            idx = target.draw_rows(key)
            return jnp.mean(lax.map(lambda one: target.value_and_grad_flat(one, idx)[1], some), 0)

        g = lax.map(mean_gradient, random.split(random.key(0), _BATCHES))
        # In units of the particles' spread, coordinate by coordinate, as the shift is.
        centred = (x - jnp.mean(x, 0)) / jnp.sqrt(len(x))
        moved = jnp.matmul(centred, (g - jnp.mean(g, 0)).T, precision="highest")
        return jnp.sqrt(jnp.mean(jnp.sum(moved**2, 0)) / info.size)

    return float(run(fit.params[0], x)) * math.sqrt(_BATCHES / (_BATCHES - 1))


def name_in(slices: dict[str, slice], k: int) -> str:
    """The name of number k of the sites."""
    site, at = next((n, at) for n, at in slices.items() if at.start <= k < at.stop)
    return site if at.stop - at.start == 1 else f"{site}[{k - at.start}]"


def worst_of(ratios: np.ndarray, limits: tuple[float, float]) -> int:
    """The index of the ratio farthest from 1, in units of the limit on its side, or NaN."""
    low, high = np.log(limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.maximum(np.log(ratios) / low, np.log(ratios) / high)
    return int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))


def number_row(m: int, d: int) -> Row:
    """The number of particles against the dimension."""
    return judged(
        "number of particles",
        m,
        f"{2 * d}",
        m >= 2 * d,
        f"there are enough for {d} dimensions.",
        f"{d} dimensions need twice as many particles at least, or their spread is too narrow (and"
        " with no more than d it cannot be judged); take more particles.",
    )


def particle_facts(found: Points) -> dict[str, Any]:
    """Attributes that the gradients of points give; NaN without more than d of them."""
    ratios, shift = (np.asarray(y, float) for y in _ratios_of(found.x, found.score))
    worst = worst_of(ratios, SD_RATIO)
    x, g = (np.asarray(y, np.float64) for y in found[:2])
    # The shift is the root of b^T C b / d, b the mean gradient and C the covariance of the points.
    slope = np.mean((x - x.mean(0)) * ((x - x.mean(0)) @ g.mean(0))[:, None], 0)
    error = np.std(g @ slope) / (math.sqrt(len(x)) * len(ratios) * max(float(shift), 1e-30))
    noise = {} if found.noise is None else {"minibatch_noise": found.noise}
    return {
        **noise,
        "num_latents": len(ratios),
        "implied_sd_ratio": float(ratios[worst]),
        "implied_sd_ratio_of": found.name(worst),
        "shift": float(shift),
        "shift_error": float(error),
    }


def particle_rows(m: int, facts: dict[str, Any]) -> list[Row]:
    """The number of particles and, by their gradients, their spread and their mean.

    :param facts: those of :func:`particle_facts`, as far as they are known.
    """
    d = facts["num_latents"]
    if m <= d or "implied_sd_ratio" not in facts:
        return [number_row(m, d)]
    remedy = "run longer, take more particles, or another field"
    limit = max(SHIFT, 1 / math.sqrt(m))
    return [number_row(m, d), *_stein_rows(facts, "particles", remedy, limit)]


def draw_rows(found: Points) -> list[Row]:
    """The same of independent draws, whose mean has an error of its own; none of equal draws."""
    m, d = found.x.shape
    if m <= d or not bool(jnp.all(jnp.any(found.x != found.x[0], 0))):
        return []
    remedy = "train longer, or take a richer guide"
    rows = _stein_rows(particle_facts(found), "draws", remedy, SHIFT + 3 / math.sqrt(m))
    return [*rows, ksd_row(found)]


def _stein_rows(facts: dict[str, Any], what: str, remedy: str, limit: float) -> list[Row]:
    ratio, shift = facts["implied_sd_ratio"], facts["shift"]
    low, high = SD_RATIO
    limits = f"{low} to {high}"
    spread = judged(
        "implied sd ratio, worst",
        ratio,
        limits,
        low <= ratio <= high,
        f"the {what} are as wide as their gradients say.",
        f"the {what} are not as wide as their gradients say that the posterior is, most of all in"
        f" {facts['implied_sd_ratio_of']}; {remedy}.",
    )
    if math.isnan(ratio):
        verdict = (
            f"not judged: along {facts['implied_sd_ratio_of']} the gradients do not point back to"
            f" the mean of the {what}, so they imply no spread; see the other lines."
        )
        spread = Row("implied sd ratio, worst", ratio, None, limits, None, verdict)
    noise = facts.get("minibatch_noise", 0.0)
    if noise > shift:
        remedy = (
            "the gradients of a minibatch, which all of them share, are farther off, so take a"
            " larger batch, or more steps whose size falls to 0, as that of particle_step"
        )
    error = facts.get("shift_error", 0.0)
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


def ksd_row(found: Points) -> Row:
    """The Stein discrepancy, for information."""
    chosen = equally_spaced(len(found.x), POINTS)
    ksd = float(squared_ksd(found.x[chosen], found.score[chosen], statistic="v"))
    verdict = "for comparison with other runs of this model; smaller is better."
    return Row("squared KSD", ksd, None, "", None, verdict)
