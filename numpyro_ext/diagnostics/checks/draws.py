"""Whether draws are numbers, and whether they vary at all."""

from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.exact import (
    imprecise,
    least_concentrations,
    lost_gradients,
    may_be_imprecise,
    numbers_of,
)
from numpyro_ext._model.normal import mean_and_sd
from numpyro_ext._model.operations import jit_on_data
from numpyro_ext._model.read import Site, is_delta
from numpyro_ext._typing import Sites
from numpyro_ext.diagnostics._density import coordinates
from numpyro_ext.diagnostics._fit import Fit, cached
from numpyro_ext.diagnostics.comparison import least_spread
from numpyro_ext.diagnostics.table import Row

STILL = "sites that do not vary"


def finite(fit: Fit) -> list[Row]:
    """The line of draws with a number that is NaN or infinite; none if all are finite."""
    each = [np.isfinite(x.reshape(*x.shape[:2], -1)).all(-1) for x in fit.draws.values()]
    lost = float(np.mean(~np.all(each, 0)))
    if not lost:
        return []
    verdict = (
        "these draws have left the support of a site or are not finite; take a smaller step, or"
        " another start."
    )
    return [Row("draws not finite", lost, None, "0", False, verdict)]


@cached
def varying(fit: Fit) -> list[Row]:
    """The line of latent sites of which all draws are the same; none if all vary."""
    if fit.kind == "chains":
        z = getattr(fit.obj.last_state, "z", None)
        names = z if isinstance(z, dict) else fit.draws  # deterministic sites need not move
        moving = {name: x for name, x in fit.draws.items() if name in names}
        still = [name for name, x in moving.items() if x.size and np.all(x == x[:1, :1])]
        verdict = (
            f"no chain ever moved {_named(still)}: the transform of its support may be saturated;"
            " take another start or a smaller step."
        )
        return [Row(STILL, len(still), None, "0", False, verdict)] if still else []
    proto, draws = fit.proto, fit.latent
    sites = [name for name in proto.latents if draws[name].size]
    if not sites or draws[sites[0]].shape[1] < 2:
        return []
    is_still = {name: _still(proto.trace[name], draws[name]) for name in sites}
    if all(np.any(np.all(x, 1)) for x in is_still.values()):
        verdict = (
            "all draws are the same but for rounding, so this is a point estimate, whose error is"
            " not known; take a guide with a density, or another loss if it has one."
        )
        return [Row(STILL, len(sites), None, "0", None, verdict, of_draws=True)]
    still = [name for name in sites if np.any(is_still[name]) and _can_vary(proto.trace[name])]
    verdict = (
        f"all draws of {_named(still)} are the same: a Delta, or a number narrower than its"
        " rounding, is not a posterior; take a guide with a density for it, or double precision."
    )
    return [Row(STILL, len(still), None, "0", False, verdict, of_draws=True)] if still else []


def imprecise_sites(fit: Fit) -> list[str]:
    """Sentences on sites of the model with a log density that is wrong in single precision at one
    of three draws, and on sites of the guide with draws that have lost their gradient."""
    params = fit.params[0]
    key_guide, key_model = random.split(random.fold_in(fit.rng_key, 2))
    trace, sentences = fit.proto.trace, []
    if may_be_imprecise(trace):

        def numbers(draw: Sites) -> dict[str, Any]:
            return numbers_of(fit.model_trace(params, draw, key_model))

        draws = {name: fit.first[name] for name in fit.proto.latents}
        size, run = len(next(iter(draws.values()))), jit_on_data(numbers)
        for i in {0, size // 2, size - 1}:
            draw = {name: jnp.asarray(x[i]) for name, x in draws.items()}
            sentences = sentences or imprecise(trace, jax.device_get(run(draw)))
    if fit.kind == "guide":
        least = jax.jit(lambda: least_concentrations(fit.guide_trace(params, key_guide)))
        sentences = sentences + lost_gradients(jax.device_get(least()))
    return sentences


def enough_particles(fit: Fit) -> list[Row]:
    """The line of too few particles; none if they are enough."""
    m, d = next(iter(fit.draws.values())).shape[1], fit.info.size
    if m >= 2 * d:
        return []
    verdict = (
        f"along a field {d} dimensions need twice as many particles at least; take more particles,"
        " or ParVI(model) without a field."
    )
    return [Row("number of particles", m, None, f"{2 * d}", False, verdict)]


def has_moves(fit: Fit) -> bool:
    """Whether draws of a guide have a gradient, and are no point estimate without a density."""
    is_estimate = any(row.ok is None for row in varying(fit))
    return fit.has_gradient and not (fit.proto.density == "none" and is_estimate)


def _named(sites: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in sites)


def _still(site: Site, x: np.ndarray) -> np.ndarray:
    """``(chain, number)``: whether all draws are the same but for rounding; one for a whole site
    where numbers may be constants, as the zeros of a triangular factor."""
    flat = x.reshape(*x.shape[:2], -1)
    if not np.issubdtype(x.dtype, np.floating):
        still = np.all(flat == flat[:, :1], 1)
    else:
        mean, sd = mean_and_sd(np.moveaxis(flat, 1, 0).astype(np.float64))
        still = sd <= least_spread(mean, float(np.finfo(x.dtype).eps))
    support: Any = site["fn"].support
    each = not support.is_discrete and coordinates(support, site) == flat.shape[2]
    return still if each else np.all(still, 1, keepdims=True)


def _can_vary(site: Site) -> bool:
    """True for a latent site of the model with a coordinate that is neither discrete nor given."""
    support: Any = site["fn"].support
    return not support.is_discrete and not is_delta(site) and coordinates(support, site) > 0
