"""At which of the modes that its start has found the draws of a fit are, and with which shares."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_sample, init_to_uniform

from numpyro_ext._model.arguments import rows_on_host
from numpyro_ext._model.circles import with_circles
from numpyro_ext._model.mode_search import places_of, search_modes
from numpyro_ext._model.modes import Mode, Modes, of_kind
from numpyro_ext._model.operations import jit_on_data, quick_options
from numpyro_ext.diagnostics._fit import Fit, cached, flat_draws
from numpyro_ext.diagnostics.limits import DEPARTURE, ELSEWHERE, SHARES, farthest
from numpyro_ext.diagnostics.table import Row

SHARES_OF_MODES = "shares of the modes"
MOST_LATENTS, MOST_COST = 100, 2 * 10**6
"""Coordinates, and numbers that a gradient computes, up to which modes are searched for where a fit
has not looked for any."""
_ANOTHER = 1.0
"""Standard deviations from the nearest mode at which a mode is one of other data."""
_MORE = {
    "chains": "take more chains that start together (chain_method='vectorized'), or"
    " AutoMixtureNormal",
    "guide": "take AutoMixtureNormal, or more of its components",
    **dict.fromkeys(("particles", "ensemble"), "take more particles, or AutoMixtureNormal"),
}


class AtModes(NamedTuple):
    """Draws by the mode that they are at."""

    row: Row
    """Whether each mode has its share."""
    modes: list[Mode]
    which: np.ndarray
    """``(chain, draw)``, -1 for a draw that is not kept; of particles ``(1, m)``."""
    places: list[str]
    """What each mode is called."""

    @property
    def all_visited(self) -> bool:
        """True if each mode of a mass that counts has a draw."""
        heavy = [k for k, mode in enumerate(self.modes) if mode.share > SHARES**2]
        return bool(np.isin(heavy, self.which).all())


def place_in(modes: list[Mode]) -> Callable[[Array], tuple[Array, Array]]:
    """The mode at which a point most likely is, and the square of its distance from there."""
    volumes = [mode.log_volume for mode in modes]

    def place(x: Array) -> tuple[Array, Array]:
        away = jnp.stack([jnp.sum(mode.to_xi(x) ** 2) for mode in modes])
        logs = jnp.log(jnp.array([mode.share for mode in modes])) - jnp.stack(volumes) - away / 2
        k = jnp.argmax(jnp.where(jnp.isnan(logs), -jnp.inf, logs))
        return k, away[k]

    return place


@cached
def _modes_of_start(fit: Fit) -> Modes | None:
    """The modes that the start of a fit has found; None where its guide or kernel has begun another
    fit since, on other data, for which one of them has a gradient."""
    source = getattr(fit.obj, "guide", None) or fit.obj.sampler
    modes = getattr(source, "start_modes", None)
    if not isinstance(modes, Modes) or len(modes.modes) == 1 or not fit.has_gradient:
        return modes
    mode = next((mode for mode in modes.modes if mode.at_mode), None)
    by_few_rows = of_kind(modes.problems, "few rows") or rows_on_host((fit.args, fit.kwargs))
    if mode is None or modes.size != fit.info.size or by_few_rows:
        return modes
    target = fit.potential(fit.params[0], with_circles(fit.info, modes.circles))
    run = jit_on_data(lambda x: target.value_and_grad_flat(x, {})[1], quick_options())
    off = np.linalg.norm(mode.on_host.pull(np.asarray(run(mode.center), float)))
    return modes if off < _ANOTHER else None


@cached
def draws_at_modes(fit: Fit) -> AtModes | None:
    """Where the draws are among the modes of the start; None where it has not found several."""
    if fit.kind == "chains":
        modes = getattr(fit.obj.sampler, "modes", None)
        if fit.temperature not in (None, 1):
            return None
    else:
        modes = _modes_of_start(fit)
    return None if modes is None else compare_with(fit, modes)


def searched(fit: Fit) -> AtModes | None:
    """The same of a cheap search, for a guide that began without a search for modes."""
    info = fit.info
    is_dear = info.size > MOST_LATENTS or fit.gradient_cost > MOST_COST
    if is_dear or _modes_of_start(fit) is not None:
        return None
    potential, modes = fit.potential(fit.params[0], info), None
    # From near 0 alone a mode far away is missed, and from draws of the prior a search may be lost.
    for strategy, starts in ((init_to_sample, 6), (init_to_uniform, 4)):
        with warnings.catch_warnings(), suppress(Exception):  # the other lines stay
            warnings.simplefilter("ignore")
            modes = search_modes(random.key(0), fit.model, potential, None, strategy, starts=starts)
            if modes.heaviest.at_mode:
                break
    return compare_with(fit, modes)


def compare_with(fit: Fit, modes: Any) -> AtModes | None:
    """The draws at these modes, if they are several that lie apart."""
    if not isinstance(modes, Modes) or not of_kind(modes.problems, "several modes"):
        return None
    if not fit.has_gradient or modes.size != fit.info.size:
        return None
    if of_kind(modes.problems, "few rows"):  # the masses are not known by some rows
        return None
    kept = np.ones(next(iter(fit.draws.values())).shape[:2], bool)
    if fit.kind == "chains" and fit.sampling is not None:
        kept = fit.sampling
    draws = {name: fit.draws[name] for name in fit.info.latents}
    x = {name: jnp.asarray(y.reshape(-1, *y.shape[2:])) for name, y in draws.items()}
    info = with_circles(fit.info, modes.circles)
    target = fit.potential(fit.params[0], info)
    points = jax.jit(lambda x: flat_draws(target, x, fit.block))(x)
    place = jax.jit(jax.vmap(place_in(list(modes.modes))))
    which, away = (np.asarray(y).reshape(kept.shape) for y in place(points))
    which = np.where(kept & np.isfinite(away), which, -1)
    places = places_of(target, modes.modes)
    row = _row(fit, list(modes.modes), which, away, places)
    return AtModes(row, list(modes.modes), which, places)


def _off(q: np.ndarray, p: np.ndarray) -> float:
    r"""The root of the sum of (q - p)^2 / p over modes with the shares q of the draws and the mass
    p, up to a factor. Where a share f = 1 - sum(q) of the draws is elsewhere, so is a mass e that
    is not known, and :math:`\sum_k q_k^2 / ((1 - e) p_k) + f^2 / e - 1` is least, over all e, at
    :math:`(\sqrt{\sum_k q_k^2 / p_k} + f)^2 - 1`."""
    there = p > 0
    ratio = np.sqrt(np.sum(q[there] ** 2 / p[there]) * p.sum()) + 1 - q.sum()
    return float(np.sqrt(max(ratio**2 - 1, 0.0)))


def _row(
    fit: Fit, modes: list[Mode], which: np.ndarray, away: np.ndarray, places: list[str]
) -> Row:
    """The shares q of the draws at each mode against the shares p of the evidence: the mean of a
    number may be off by the root of the sum of (q - p)^2 / p, in standard deviations."""
    p = np.array([mode.share for mode in modes])
    counts = np.array([np.sum(which == k) for k in range(len(modes))])
    q = counts / max(counts.sum(), 1)
    # A copy of a mode, by a permutation or changes of sign, belongs to the one that it copies.
    root = np.arange(len(p))
    for k, mode in enumerate(modes):
        root[k] = root[mode.copy_of] if mode.copy_of is not None else k
    value = _off(q, p)
    listed = "; ".join(
        f"{places[k]} has {q[k]:.3g} of the draws and {p[k]:.3g} of the mass"
        for k in range(min(len(p), 4))
    )
    d = len(modes[0].center)
    is_far = away > farthest(d)
    far = float(np.mean(is_far[which >= 0])) if counts.sum() else 1.0
    is_mode = np.array([mode.at_mode and not mode.variational for mode in modes])
    is_normal = np.array([mode.share < SHARES**2 or mode.departure <= DEPARTURE for mode in modes])
    why = None
    if far > ELSEWHERE:
        why = f"{far:.0%} of the draws are at none of the modes that are known"
    elif not is_mode.all():
        why = "a search has not come to a mode, so that its mass is not known"
    elif not is_normal.all():
        why = "the posterior is far from normal at a mode, so that its mass is doubtful"
    elif value > SHARES >= _off(*(np.bincount(root, x) for x in (q, p))):
        why = "the modes with other shares seem to be copies of each other"
    if why:
        # Wrong all the same is what would be so for any mass elsewhere and with any of the masses
        # off by a factor of two, whether draws at no mode belong to the nearest one or elsewhere.
        near = np.array([np.sum((which == k) & ~is_far) for k in range(len(p))])
        known = is_mode & is_normal
        shares = (np.bincount(root, x * known) for x in (p, q, near / max(counts.sum(), 1)))
        mass, *drawn = shares
        least = min(_off(x, np.clip(x, mass / 2, 2 * mass)) for x in drawn)
        if not least > SHARES:
            verdict = f"not judged: {why} ({listed})."
            return Row(SHARES_OF_MODES, value, None, f"{SHARES}", None, verdict)
        value, listed = least, f"{listed}, which is wrong although {why}"
    ok = value <= SHARES
    verdict = f"each mode has its share: {listed}." if ok else f"{listed}; {_MORE[fit.kind]}."
    return Row(SHARES_OF_MODES, value, None, f"{SHARES}", ok, verdict)
