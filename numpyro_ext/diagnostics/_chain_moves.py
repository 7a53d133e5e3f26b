"""Draws of kernels whose stationary law is not the posterior, before and after exact moves."""

from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.read import model_info
from numpyro_ext.diagnostics._evaluate import Prototype
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._moved import GUIDE, Kind, left_out, moved_rows
from numpyro_ext.diagnostics._moves import (
    DRAWS,
    coordinate_of,
    moved_draws,
    name_of,
    planned,
    watched,
)
from numpyro_ext.diagnostics._other_modes import other_modes_rows
from numpyro_ext.diagnostics._points import has_gradient
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["chain_moves_rows"]

CHAINS = Kind(
    "draws",
    "take a smaller step (or max_bias), reparametrise the model, or compare with NUTS",
    GUIDE.limits,
    GUIDE.shift,
    shares="",
)
FEWEST = 50
"""Effective draws, below which the moves would say nothing that the effective size does not."""
SEARCHED = 1000
"""So many draws are compared with the modes that a search finds."""
_COLUMNS = 1000
"""At most so many numbers get an effective size of their own; the others the least of these."""


def chain_moves_rows(
    fit: Fit,
    proto: Prototype,
    draws: dict[str, np.ndarray],
    stats: dict[str, np.ndarray],
    facts: dict[str, Any],
    num_moves: int | None,
    rng_key: Array,
    *,
    seek_modes: bool = False,
) -> tuple[list[Row], bool]:
    """Spread and mean of draws ``{site: (chain, draw, *site)}`` of a kernel that has a bias.

    Chains that are far from the posterior agree with each other, and a momentum may have its
    temperature where the coordinates have not: only exact moves on all data say so. Shares of modes
    are left to R-hat, because these chains have moved between them or have not.

    :param facts: ``temperature``, which the moves have too; without it the draws have several.
    :param seek_modes: whether to search for modes without draws.
    :return: the lines, and true if a search has found no such mode.
    """
    if num_moves == 0:
        return [], False
    if (temperature := facts.get("temperature")) is None:
        return left_out("not judged: the draws have no temperature, or several of them."), False
    if not has_gradient(proto):
        return left_out("not judged: a site was summed out, or has no gradient."), False
    info = model_info(proto.trace)
    x = _thinned({name: draws[name] for name in info.latents}, stats)
    sizes = _effective(x)
    if not np.min(sizes) >= FEWEST:
        return left_out(
            f"not judged: the effective sample size of the draws is below {FEWEST}."
        ), False
    plan = planned(fit, proto.trace, num_moves)
    if isinstance(plan, str):
        return left_out(plan), False
    # The first ones are moved, so they come from all of the run.
    total = int(np.prod(next(iter(x.values())).shape[:2]))
    order = np.random.default_rng(0).permutation(total)
    mixed = {name: jnp.asarray(y.reshape(total, *y.shape[2:])[order]) for name, y in x.items()}
    derived = sum(jnp.size(proto.trace[name]["value"]) for name in watched(proto.trace))
    sizes = np.append(sizes, np.full(derived, np.min(sizes)))
    inflation = jnp.asarray(np.maximum(total / sizes, 1.0), float)
    found = moved_draws(
        fit, proto.trace, plan, mixed, rng_key, temperature=temperature, independent=inflation
    )
    rows = moved_rows(found, name_of(proto.trace), CHAINS, coordinate_of(proto.trace))
    if not seek_modes or temperature != 1 or any(row.ok is False for row in rows):
        return rows, False
    first = {name: y[:SEARCHED] for name, y in mixed.items()}
    key_modes = random.fold_in(rng_key, 1)
    others = other_modes_rows(fit, proto, first, None, plan, key_modes)
    return rows + (others or []), others == []


def _thinned(draws: dict[str, np.ndarray], stats: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The finite draws of the sampling stage, equally spaced."""
    kept = np.all([np.isfinite(y).all((0, *range(2, y.ndim))) for y in draws.values()], 0)
    if "sampling" in stats:
        kept &= np.asarray(stats["sampling"], bool).all(0)
    chains, total = len(next(iter(draws.values()))), sum(y[0, 0].size for y in draws.values())
    most = min(DRAWS, 10**7 // max(total, 1)) // chains
    chosen = np.flatnonzero(kept)[equally_spaced(int(kept.sum()), max(most, 1))]
    return {name: y[:, chosen] for name, y in draws.items()}


def _effective(draws: dict[str, np.ndarray]) -> np.ndarray:
    """``(n,)`` effective sample sizes of all numbers; one that does not vary has all draws."""
    from arviz_stats.base.array import array_stats

    shape = next(iter(draws.values())).shape[:2]
    if shape[1] < 4:
        return np.zeros(1)
    x = np.concatenate([y.reshape(*shape, -1) for y in draws.values()], -1).astype(np.float64)
    chosen = equally_spaced(x.shape[-1], _COLUMNS)
    varies = np.any(x != x[:1, :1], (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        ess: Any = array_stats.ess(x[..., chosen], chain_axis=0, draw_axis=1)
    found = np.where(varies[chosen], ess, np.prod(shape))
    sizes = np.full(x.shape[-1], np.min(found))
    sizes[chosen] = found
    return sizes
