"""How ``diagnose`` and ``to_arviz`` judge particles, and draws without a density of their own."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._model.read import model_info
from numpyro_ext._typing import Sites
from numpyro_ext.diagnostics._evaluate import prototype
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._rules import Row, equally_spaced
from numpyro_ext.diagnostics.discrepancy import points_and_score
from numpyro_ext.scores.discrepancy import squared_ksd
from numpyro_ext.scores.implied_sd import implied_sd_ratio

__all__ = [
    "draw_rows",
    "has_score",
    "ksd_row",
    "name_in",
    "particle_facts",
    "particle_rows",
    "particles_of",
    "score_of",
    "scored",
    "worst_of",
]

SD_RATIO = (0.85, 1.2)
SHIFT = 0.05
POINTS = 2000
"""At most so many points enter the Stein discrepancy, equally spaced."""

_ratios_of = jax.jit(implied_sd_ratio)


def particles_of(obj: Any, fit: Fit) -> Sites:
    """The last position of every particle, constrained."""
    draws = fit.draws[0]
    if not isinstance(obj, MCMC):
        return draws
    # The chains of an ensemble are the particles, and its last draw is the answer.
    chains = fit.num_chains
    return {n: jnp.reshape(x, (chains, -1, *x.shape[1:]))[:, -1] for n, x in draws.items()}


class Scored(NamedTuple):
    """Points, and the gradients there of the log density of all data."""

    x: Array
    """``(m, d)``, in unconstrained space."""
    score: Array
    name: Callable[[int], str]
    """What a coordinate is called."""


def has_score(fit: Fit) -> bool:
    """Whether every latent site has a gradient: those that are discrete do not."""
    proto = prototype(fit, random.key(0))
    supports = (proto.trace[name]["fn"].support for name in proto.latents)
    return not proto.marginalized and not any(support.is_discrete for support in supports)


def score_of(obj: Any, fit: Fit) -> Scored | None:
    """Particles and their score; None where there is none."""
    kernel = getattr(obj, "sampler", None)
    if fit.model is not None:
        forward = getattr(kernel, "forward_mode_differentiation", False)
        last = particles_of(obj, fit)
        return scored(last, fit, forward_mode=forward) if has_score(fit) else None
    potential = getattr(kernel, "potential_fn", None)
    z = getattr(obj.last_state, "z", None)
    if potential is None or z is None:
        return None
    grad = jax.vmap(jax.grad(potential))(z)
    x, g = (jax.vmap(lambda tree: ravel_pytree(tree)[0])(tree) for tree in (z, grad))
    return Scored(x, -g, lambda k: f"coordinate {k}")


def scored(draws: dict[str, Any], fit: Fit, *, forward_mode: bool = False) -> Scored:
    """Constrained draws with their score."""
    slices = model_info(prototype(fit, random.key(0)).trace).slices
    points = points_and_score(draws, fit, forward_mode=forward_mode)
    return Scored(*points, lambda k: name_in(slices, k))


def name_in(slices: dict[str, slice], k: int) -> str:
    """What number k of the sites is called."""
    site, at = next((n, at) for n, at in slices.items() if at.start <= k < at.stop)
    return site if at.stop - at.start == 1 else f"{site}[{k - at.start}]"


def worst_of(ratios: np.ndarray, limits: tuple[float, float]) -> int:
    """Which ratio is the farthest from 1, in units of the limit on its side; NaN is."""
    low, high = np.log(limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.maximum(np.log(ratios) / low, np.log(ratios) / high)
    return int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))


def number_row(m: int, d: int) -> Row:
    """Enough particles for the dimension."""
    ok = m >= 2 * d
    verdict = f"there are enough for {d} dimensions."
    if not ok:
        verdict = (
            f"{d} dimensions need twice as many particles at least, or their spread is too narrow"
            " (and with no more than d it cannot be judged); take more particles."
        )
    return Row("number of particles", m, None, f"{2 * d}", ok, verdict)


def particle_facts(found: Scored) -> dict[str, Any]:
    """What the gradients of points say of them, as attributes; NaN without more than d of them."""
    ratios, shift = (np.asarray(y, float) for y in _ratios_of(found.x, found.score))
    worst = worst_of(ratios, SD_RATIO)
    return {
        "num_latents": len(ratios),
        "implied_sd_ratio": float(ratios[worst]),
        "implied_sd_ratio_of": found.name(worst),
        "shift": float(shift),
    }


def particle_rows(m: int, facts: dict[str, Any]) -> list[Row]:
    """Whether there are enough, and by their gradients whether they are wide enough and at rest.

    :param facts: those of :func:`particle_facts`, as far as they are known.
    """
    d = facts["num_latents"]
    if m <= d or "implied_sd_ratio" not in facts:
        return [number_row(m, d)]
    remedy = "run longer, take more particles, or another field"
    return [number_row(m, d), *_stein_rows(facts, "particles", remedy, SHIFT)]


def draw_rows(found: Scored) -> list[Row]:
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
    ok = low <= ratio <= high
    verdict = f"the {what} are as wide as their gradients say."
    if not ok:
        verdict = (
            f"the {what} are not as wide as their gradients say that the posterior is, most of all"
            f" in {facts['implied_sd_ratio_of']}; {remedy}."
        )
    rows = [Row("implied sd ratio, worst", ratio, None, f"{low} to {high}", ok, verdict)]
    ok = shift <= limit
    verdict = f"the mean of the {what} has come to rest."
    if not ok:
        verdict = f"the mean of the {what} is not where the gradients cancel; {remedy}."
    return [*rows, Row("shift in sds", shift, None, f"{limit:.2g}", ok, verdict)]


def ksd_row(found: Scored) -> Row:
    """The Stein discrepancy, for information."""
    chosen = equally_spaced(len(found.x), POINTS)
    ksd = float(squared_ksd(found.x[chosen], found.score[chosen], statistic="v"))
    verdict = "for comparison with other runs of this model; smaller is better."
    return Row("squared KSD", ksd, None, "", None, verdict)
