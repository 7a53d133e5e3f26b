"""Whether the local inference of a structured guide is right, by its sites ``..._converged``, draws
of the prior, and a step of Gibbs where the guide knows its conjugate posterior."""

from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute

from numpyro_ext._model.read import latent_sites, shape_trace, trace_of
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.limits import COLLAPSED, NARROW, UNCONVERGED, judged
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["local_inference", "narrow_rows", "states_row"]

DRAWS, BLOCK, PRIOR_DRAWS = 50, 50, 200
"""Draws that are looked at, those whose statistics are in memory together, and those of the
prior."""


def local_inference(context: FitContext) -> list[Row]:
    """The lines of a guide with a deterministic site ``..._converged``; none of other guides."""
    fit, guide, draws = context.fit, context.obj.guide, context.draws
    assert fit.guide is not None
    seeded: Any = seed(fit.guide, random.key(0))
    programs = shape_trace(substitute(seeded, data=fit.params[0]), fit.args, fit.kwargs)
    reports = [
        name
        for name, site in programs.items()
        if site["type"] == "deterministic" and name.endswith("_converged")
    ]
    if not reports:
        return []

    @jax.jit
    def unconverged(params: Params) -> Array:
        trace = trace_of(substitute(seeded, data=params), fit.args, fit.kwargs)
        return 1 - jnp.mean(jnp.stack([jnp.mean(trace[name]["value"]) for name in reports]))

    worst = max(float(unconverged(params)) for params in fit.params)
    first = judged(
        "local inference not converged",
        worst,
        f"{UNCONVERGED}",
        worst <= UNCONVERGED,
        f"message passing came to rest for {'nearly ' if worst else ''}every datum.",
        "message passing was cut; raise max_iter of the rule, or take one in closed form.",
    )
    rows = [first]
    key_prior, key_step = random.split(random.fold_in(context.rng_key, 1))
    sizes = {site["name"]: _num_states(site["fn"]) for site in latent_sites(programs)}
    for name, size in sizes.items():
        if size != 1:
            rows.append(_collapse_row(name, draws[name], one_by_one=size > 0))
    if several := [name for name, size in sizes.items() if size > 1]:
        prior = _prior_draws(fit, several, key_prior)
        rows += [states_row(name, draws[name], prior[name]) for name in several]
    # Of a model whose global sites are conjugate to its local ones.
    return rows + (narrow_rows(guide, draws, key_step) if hasattr(guide, "sample_globals") else [])


def _num_states(fn: Any) -> int:
    """K if values are 0 to K - 1, 0 if they are bits, and 1 if they are not discrete."""
    support: Any = fn.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return int(getattr(support, "upper_bound", -1)) + 1 if support.is_discrete else 1


def _collapse_row(name: str, z: np.ndarray, *, one_by_one: bool) -> Row:
    """The largest share of one state, in the restart where it is largest; bits are one state
    together."""
    shares = []
    for chain in z:
        some = chain[equally_spaced(len(chain), DRAWS)]
        states = some.reshape(-1, 1) if one_by_one else some.reshape(-1, some.shape[-1])
        _, counts = np.unique(states, axis=0, return_counts=True)
        shares.append(float(counts.max() / counts.sum()))
    value = max(shares)
    return judged(
        f"largest share of '{name}'",
        value,
        f"{COLLAPSED}",
        value <= COLLAPSED,
        "the data are in several states.",
        "all data are in one state, so the mixture has collapsed; start from another init_natural"
        " or key, or take a plain normal latent.",
    )


def _prior_draws(fit: Fit, names: list[str], rng_key: Array) -> dict[str, np.ndarray]:
    """Draws of these sites from the model, which does not look at its data for them."""

    @jax.jit
    def draws(params: Params, keys: Array) -> Sites:
        def one(key: Array) -> Sites:
            seeded: Any = substitute(seed(fit.model, key), data=params)
            trace = trace_of(seeded, fit.args, fit.kwargs)
            return {name: trace[name]["value"] for name in names}

        return lax.map(one, keys, batch_size=BLOCK)

    return jax.device_get(draws(fit.params[0], random.split(rng_key, PRIOR_DRAWS)))


def states_row(name: str, z: np.ndarray, prior: np.ndarray) -> Row:
    """The number of states that hold data, beside the prior's: local optima leave some empty."""
    in_use = [np.mean([len(np.unique(draw)) for draw in chain]) for chain in z]
    value = float(min(in_use))
    least = int(np.quantile([len(np.unique(draw)) for draw in prior], 0.05, method="lower"))
    return judged(
        f"states of '{name}' in use",
        value,
        f"{least}",
        value > least - 0.5,
        "as many states hold data as the prior expects.",
        "fewer states hold data than in 95 % of the draws of the prior, as at a local optimum that"
        " has merged some; start from other keys and keep the best loss, or lower the"
        " concentrations if so few are right.",
    )


def narrow_rows(guide: Any, draws: dict[str, Any], rng_key: Array) -> list[Row]:
    r"""The widths of global sites over those after a step of Gibbs sampling.

    If q is a product, the variance of a global number is that given the local ones. The step adds
    the variance that comes of theirs, and makes it 1 + R times as large; in the posterior it is
    1 / (1 - R) times as large, which is exact for normals. So a ratio of 0.86 after the step says
    that the right one is 0.8. A quarter of the numbers of a site have a smaller one.
    """

    @jax.jit
    def after(sites: Sites, keys: Array) -> Sites:
        return lax.map(lambda x: guide.sample_globals(*x), (keys, sites), batch_size=BLOCK)

    ratios: dict[str, float] = {}
    for i, key in enumerate(random.split(rng_key, len(next(iter(draws.values()))))):
        one = {name: x[i] for name, x in draws.items()}
        moved = jax.device_get(after(one, random.split(key, len(next(iter(one.values()))))))
        for name, x in moved.items():
            before, width = _width(one[name]), _width(x)
            varies = (before > 0) & (width > 0)
            if varies.any():
                found = float(np.quantile(before[varies] / width[varies], 0.25))
                ratios[name] = min(ratios.get(name, np.inf), found)
    if not ratios:
        return []
    name = min(ratios, key=lambda name: ratios[name])
    row = judged(
        f"sd ratio of '{name}' to a Gibbs step",
        ratios[name],
        f"{NARROW}",
        ratios[name] >= NARROW,
        "global sites are nearly as wide as after a step of Gibbs sampling.",
        "the guide draws global sites independently of local ones, so they are narrower than after"
        " a step of Gibbs sampling, and those of the posterior are wider still; take"
        " guide.sample_globals of its local draws, which is nearer, or NUTS.",
    )
    return [row]


def _width(x: np.ndarray) -> np.ndarray:
    """The distance of the quartiles, which a heavy tail does not change."""
    low, high = np.quantile(x, [0.25, 0.75], axis=0)
    return np.ravel(high - low)
