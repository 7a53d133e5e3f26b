"""At which modes chains, or particles, are, and whether each mode has its share of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._model.mode_search import make_search
from numpyro_ext._model.modes import Mode, Modes, of_kind
from numpyro_ext._model.normal_fit import NormalMeasure
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import Sites
from numpyro_ext.diagnostics._facts import Numbers
from numpyro_ext.diagnostics._points import flat_draws
from numpyro_ext.diagnostics.context import DiagnosisContext, FitContext, cached
from numpyro_ext.diagnostics.limits import (
    DEPARTURE,
    ELSEWHERE,
    FEWEST_EFFECTIVE,
    SHARES,
    farthest,
    judged,
)
from numpyro_ext.diagnostics.table import Row

__all__ = ["SHARE", "AtModes", "draws_at_modes", "place_in"]

SHARE = "shares of the modes, off in sds"
_DISTINCT = 1.0


class AtModes(NamedTuple):
    """Draws by the mode that they are at."""

    modes: list[Mode]
    which: np.ndarray
    """``(chain, draw)``, -1 for a draw that is not kept; of particles ``(1, m)``."""
    places: list[str]
    """What a mode is called: the number in which the modes are farthest apart."""
    row: Row
    """Whether each mode has its share."""

    def within(self, draws: Numbers) -> dict[int, Numbers]:
        """The draws at each mode, of those chains that were there for half as long as any, and as
        many of each; none of a mode at which there are too few."""
        found = {}
        for k in range(len(self.modes)):
            here = self.which == k
            counts = here.sum(1)
            if counts.max() < FEWEST_EFFECTIVE:
                continue
            chains = np.flatnonzero(2 * counts >= counts.max())
            n = int(counts[chains].min())
            at = {name: [x[c][here[c]][:n] for c in chains] for name, x in draws.items()}
            found[k] = {name: np.stack(x) for name, x in at.items()}
        return found


def place_in(modes: list[Mode]) -> Callable[[Array], tuple[Array, Array]]:
    """The mode at which a point most likely is, by the mixture of their normals, and the square of
    its distance from there."""
    volumes = [
        jnp.log(jnp.abs(m.factor if m.factor.ndim == 1 else jnp.diag(m.factor))).sum()
        for m in modes
    ]

    def place(x: Array) -> tuple[Array, Array]:
        away = jnp.stack([jnp.sum(mode.whitening.to_xi(x) ** 2) for mode in modes])
        logs = jnp.log(jnp.array([mode.share for mode in modes])) - jnp.stack(volumes) - away / 2
        k = jnp.argmax(jnp.where(jnp.isnan(logs), -jnp.inf, logs))
        return k, away[k]

    return place


@cached
def draws_at_modes(context: DiagnosisContext) -> AtModes | None:
    """Where the draws are; None where no several modes are known."""
    if not isinstance(context, FitContext) or context.kind == "guide":
        return None
    particles = context.kind == "particles"
    # Most fits know no several modes, and then nothing is computed.
    modes = _modes_of_particles(context) if particles else _modes_of_kernel(context)
    if len(modes) < 2 or not context.has_gradient:
        return None
    target = context.potential()
    if len(modes[0].center) != target.info.size:
        return None
    place, block = place_in(modes), context.block
    if particles:
        kept = np.ones((1, context.num_points), bool)
        which, away = jax.jit(jax.vmap(place))(context.points.x)
    else:
        draws = {name: context.draws[name] for name in context.info.latents}
        kept = np.ones(next(iter(draws.values())).shape[:2], bool)
        if "sampling" in context.stats:
            kept &= np.asarray(context.stats["sampling"], bool)

        def run(draws: Sites) -> tuple[Array, Array]:
            return lax.map(place, flat_draws(target, draws, block), batch_size=block)

        flat = {name: jnp.asarray(x.reshape(-1, *x.shape[2:])) for name, x in draws.items()}
        which, away = jax.jit(run)(flat)
    which, away = (np.asarray(x).reshape(kept.shape) for x in (which, away))
    which = np.where(kept & np.isfinite(away), which, -1)
    places = _places(target, modes)
    return AtModes(modes, which, places, _row(modes, which, away, places, particles=particles))


def _modes_of_kernel(context: FitContext) -> list[Mode]:
    """The modes that a kernel has found, if they are several that lie apart."""
    modes = getattr(context.obj.sampler, "modes", None)
    if not isinstance(modes, Modes) or context.facts.temperature not in (None, 1):
        return []
    return list(modes.modes) if of_kind(modes.problems, "several modes") else []


def _groups(context: FitContext) -> np.ndarray | None:
    """``(m, K)``, 1 for the one of several modes at which a particle began; None if unknown."""
    if isinstance(context.obj, MCMC):
        groups = getattr(context.obj.last_state, "modes", None)
    else:
        prefix = getattr(context.obj.guide, "prefix", "auto")
        groups = context.fit.params[0].get(f"{prefix}_modes")
    return None if groups is None or np.shape(groups)[1] < 2 else np.asarray(groups)


def _modes_of_particles(context: FitContext) -> list[Mode]:
    """The modes near the means of groups of particles, with their shares; none where groups are not
    known or have come to the same mode."""
    groups = _groups(context)
    if groups is None or not context.has_gradient:
        return []
    x = np.asarray(context.points.x)
    if len(groups) != len(x) or not np.all(np.isfinite(x)):
        return []
    starts = [x[here > 0.5].mean(0) for here in groups.T if np.any(here > 0.5)]
    target = context.potential()
    modes = list(make_search(context.rng_key, target, adam=False)(starts))
    if any(
        one.distance(two.center) < _DISTINCT for one in modes for two in modes if one is not two
    ):
        return []
    measure = NormalMeasure(context.rng_key, target)
    logs = np.array([mode.log_evidence for mode in modes])
    shares = np.exp(logs - np.logaddexp.reduce(logs))
    if not np.all(shares > 0):
        return []
    pairs = zip(modes, shares.tolist(), strict=True)
    return [replace(measure.with_shape(mode), share=share) for mode, share in pairs]


def _places(target: Potential, modes: list[Mode]) -> list[str]:
    """For each mode, the coordinate in which the modes are farthest apart, in their widths."""
    centers = np.stack([np.asarray(mode.center, np.float64) for mode in modes])
    sds = np.stack([mode.sds for mode in modes])
    k = int(np.argmax(np.ptp(centers, 0) / sds.mean(0)))
    constrain, info = target.postprocess(), target.info
    site, at = next((n, s) for n, s in info.slices.items() if s.start <= k < s.stop)
    values = [np.ravel(constrain(info.unravel(mode.center))[site]) for mode in modes]
    # A constrained site may have more numbers than coordinates, or fewer.
    j = min(k - at.start, values[0].size - 1)
    name = site if values[0].size == 1 else f"{site}[{j}]"
    return [f"{name} = {value[j]:.3g}" for value in values]


def _row(
    modes: list[Mode], which: np.ndarray, away: np.ndarray, places: list[str], *, particles: bool
) -> Row:
    """The share of the draws q at each mode against that p of the evidence: the mean of a number
    may be off by the root of the sum of (q - p)^2 / p, in standard deviations."""
    p = np.array([mode.share for mode in modes])
    counts = np.array([np.sum(which == k) for k in range(len(modes))])
    q = counts / max(counts.sum(), 1)

    def off(group: np.ndarray) -> float:
        of_p, of_q = (np.bincount(group, x) for x in (p, q))
        there = of_p > 0
        return float(np.sqrt(np.sum((of_q - of_p)[there] ** 2 / of_p[there])))

    value = off(np.arange(len(p)))
    told = "; ".join(
        f"at {places[k]} {_who(which, k, particles)} with {q[k]:.3g} of the draws, and by the"
        f" evidence {p[k]:.3g}"
        for k in range(min(len(p), 4))
    )
    d = len(modes[0].center)
    far = float(np.mean(away[which >= 0] > farthest(d))) if counts.sum() else 1.0
    shape = max(mode.departure if mode.share >= SHARES**2 else 0.0 for mode in modes)
    root = np.arange(len(p))
    for k, mode in enumerate(modes):
        root[k] = root[mode.copy_of] if mode.copy_of is not None else k
    why = None
    if far > ELSEWHERE:
        why = f"{far:.0%} of the draws are at none of the modes that are known"
    elif not all(mode.at_mode and not mode.variational for mode in modes):
        why = "not every group is near a mode, so that its evidence is not known"
    elif not shape <= DEPARTURE:
        why = "the posterior is far from normal at a mode, so that Laplace's evidence is doubtful"
    elif value > SHARES >= off(root):
        why = "the modes with other shares seem to be copies of each other"
    if why:
        verdict = f"not judged: {why} ({told})."
        return Row(SHARE, value, None, f"{SHARES}", None, verdict)
    more = "particles" if particles else "chains that start together (chain_method='vectorized')"
    return judged(
        SHARE,
        value,
        f"{SHARES}",
        value <= SHARES,
        f"each mode has its share: {told}.",
        f"{told}; take more {more}, or AutoMixtureNormal.",
    )


def _who(which: np.ndarray, k: int, particles: bool) -> str:
    """The particles, or the chains with most of their draws at a mode."""
    if particles:
        return f"are {np.sum(which == k):,} particles"
    here = np.flatnonzero(2 * np.sum(which == k, 1) > np.sum(which >= 0, 1))
    if not len(here):
        return "is no chain most of the time,"
    shown = ", ".join(map(str, here[:8])) + (", ..." if len(here) > 8 else "")
    return f"{'is chain' if len(here) == 1 else 'are the chains'} {shown}"
