"""Lines about guides: their losses, their importance weights, and their local inference."""

import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute

from numpyro_ext._model.read import latent_sites, shape_trace, trace_of
from numpyro_ext._typing import HasConjugate, Params, Sites
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.evidence import evidence_bounds
from numpyro_ext.diagnostics.psis import pareto_khat
from numpyro_ext.diagnostics.table import Row, equally_spaced, judged

__all__ = ["local_rows", "loss_rows", "narrow_rows", "states_row", "weight_rows"]

FALL = 0.1
"""Nats by which the losses may still fall over the last fifth."""
UNITS = 1000
"""At most so many units get a k-hat of their own, equally spaced."""
BAD_UNITS = 0.05
UNCONVERGED = 0.01
"""Share of the data whose local inference may stop early."""
COLLAPSED = 0.99
"""Share of the data in one state above which there is no mixture left."""
DRAWS = 50
BLOCK = 50
"""Draws whose statistics are in memory together."""
PRIOR_DRAWS = 200
NARROW = 0.86
"""Of normals whose standard deviation is 0.8 of the right one."""


def loss_rows(losses: list[np.ndarray]) -> list[Row]:
    """The last fifth of the losses of each restart against the fifth before."""
    changes = []
    for one in losses:
        fifth = len(one) // 5
        if fifth < 2:
            continue
        before, last = one[-2 * fifth : -fifth], one[-fifth:]
        (m0, v0), (m1, v1) = ((np.mean(x), np.var(x, ddof=1)) for x in (before, last))
        changes.append((float(m1 - m0), float(np.sqrt((v0 + v1) / fifth))))
    if not changes:
        return []
    name, limit = "change of the loss", f"{FALL} or 3 errors"
    lost = [change for change in changes if not math.isfinite(change[0])]
    if lost:
        verdict = "losses are not finite; take a smaller learning rate or stable_update=True."
        return [Row(name, math.nan, None, limit, False, verdict)]
    change, error = max(changes, key=lambda pair: abs(pair[0]) / max(pair[1], 1e-300))
    right = "the last fifth of the losses is as high as the fifth before it."
    wrong = "the loss rose in the last fifth of the steps; take a smaller learning rate."
    if change < 0:
        wrong = "the loss was still falling in the last fifth of the steps; run longer."
    ok = abs(change) <= max(FALL, 3 * error)
    return [judged(name, change, limit, ok, right, wrong, error)]


def weight_rows(log_w: np.ndarray, *, auxiliary: bool) -> list[Row]:
    """Pareto shapes of ``(S, *units)`` log weights, and the bounds of the evidence.

    :param auxiliary: true if the weights are those of a bound, with auxiliary variables.
    """
    units = log_w.reshape(len(log_w), -1)
    chosen = equally_spaced(units.shape[1], UNITS)
    if not np.all(np.isfinite(units) | (units == -np.inf)) or len(log_w) < 25:
        verdict = (
            "there are too few weights or some are not numbers, because the guide leaves the"
            " support of the model; pass more num_samples, or fit again with another guide."
        )
        return [Row("k-hat", np.nan, None, "", False, verdict)]
    found = pareto_khat(units[:, chosen] if log_w.ndim > 1 else units[:, 0])
    wrong = "the guide is far from the posterior; take a richer guide, or reparametrise the model."
    if auxiliary:
        wrong = (
            "the guide is far from the posterior, or its reverse model from its auxiliary variables"
            " (these weights are of both); train longer, or take a richer network for either."
        )
    right = "the importance weights can be used, so the guide is near the posterior."
    if log_w.ndim == 1:
        what, value, limit = "k-hat", found.khat, found.threshold
        row = judged(what, value, f"{limit:.2f}", bool(value <= limit), right, wrong)
    else:
        value = float(np.mean(found.khat > found.threshold))
        what, ok = f"share of units with k-hat > {found.threshold:.2f}", value <= BAD_UNITS
        row = judged(what, value, f"{BAD_UNITS}", ok, right, f"in these units {wrong}")
    bounds = evidence_bounds(log_w, alphas=(1.0, 0.0))
    (elbo, log_evidence), (se, se0) = bounds.values.tolist(), bounds.standard_errors.tolist()
    gap = f"the bound of order 0 is {log_evidence - elbo:.3g} nats above it."
    rows = [row, Row("ELBO (order 1)", elbo, se, "", None, gap)]
    verdict = "the estimate of the log evidence."
    if np.min(bounds.effective_sample_size) < 50:
        verdict = "a few draws carry it, so it says little about the log evidence."
    rows.append(Row("bound of order 0", log_evidence, se0, "", None, verdict))
    return rows


def local_rows(guide: Any, fit: Fit, draws: dict[str, np.ndarray], rng_key: Array) -> list[Row]:
    """The lines of a guide with a deterministic site ``..._converged``; none of other guides.

    :param draws: ``{site: (chain, draw, *site)}``.
    """
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
    key_prior, key_step = random.split(rng_key)
    sizes = {site["name"]: _num_states(site["fn"]) for site in latent_sites(programs)}
    for name, size in sizes.items():
        if size != 1:
            rows.append(_collapse_row(name, draws[name], one_by_one=size > 0))
    if several := [name for name, size in sizes.items() if size > 1]:
        prior = _prior_draws(fit, several, key_prior)
        rows += [states_row(name, draws[name], prior[name]) for name in several]
    return rows + (narrow_rows(guide, draws, key_step) if isinstance(guide, HasConjugate) else [])


def _num_states(fn: Any) -> int:
    """K if values are 0 to K - 1, 0 if they are bits, and 1 if they are not discrete."""
    support: Any = fn.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return int(getattr(support, "upper_bound", -1)) + 1 if support.is_discrete else 1


def _collapse_row(name: str, z: np.ndarray, *, one_by_one: bool) -> Row:
    """The largest share of one state, in the restart where it is largest.

    :param one_by_one: whether each step of a sequence has a state; bits are one state together.
    """
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
    """The number of states that hold data, in the restart with the fewest, beside the prior's.

    Local optima leave states empty that the posterior uses, and their bounds and k-hat look well.
    """
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


def narrow_rows(guide: HasConjugate, draws: dict[str, Any], rng_key: Array) -> list[Row]:
    r"""The widths of global sites over those after a step of Gibbs sampling.

    If q is a product, the variance of a global number is that given the local ones. The step adds
    the variance that comes of theirs, and makes it 1 + R times as large; in the posterior it is
    1 / (1 - R) times as large, which is exact for normals. So a ratio of .86 after the step says
    that the right one is .8. A quarter of the numbers of a site have a smaller one.
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
