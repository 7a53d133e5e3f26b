"""Lines about guides: their losses, their sites, and their local inference."""

import math
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints
from numpyro.handlers import seed, substitute

from numpyro_ext._model.handlers import subsampled_plates
from numpyro_ext._model.read import Site, is_delta, latent_sites, shape_trace, trace_of
from numpyro_ext._typing import Converges, HasConjugate, Params, ReadsMinibatches, Sites
from numpyro_ext.diagnostics._density import coordinates
from numpyro_ext.diagnostics._evaluate import Prototype
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._spread import least_spread
from numpyro_ext.diagnostics.full_data import minibatch_plates, shapes_of
from numpyro_ext.diagnostics.table import Row, equally_spaced, judged

__all__ = [
    "convergence_rows",
    "local_rows",
    "loss_rows",
    "minibatch_cause",
    "narrow_rows",
    "network_rows",
    "point_rows",
    "run_rows",
    "states_row",
]

FALL = 0.1
"""Nats by which the losses may still fall over the last fifth."""
LOST = 0.01
"""Share of the last losses that may not be finite."""
UNCONVERGED = 0.01
"""Share of the data whose local inference may stop early."""
COLLAPSED = 0.99
"""Share of the data in one state above which there is no mixture left."""
DRAWS = 50
BLOCK = 50
"""Draws whose statistics are in memory together."""
PRIOR_DRAWS = 200
MANY_WEIGHTS = 30
"""Numbers in matrices from which on these may be the weights of a network."""
NARROW = 0.86
"""Of normals whose standard deviation is 0.8 of the right one."""


def loss_rows(losses: list[np.ndarray], *, is_right: bool) -> list[Row]:
    """The last fifth of the losses of each restart against the fifth before.

    :param is_right: whether other lines have found the draws right; then it is for information.
    """
    changes, lost = [], []
    for one in losses:
        fifth = len(one) // 5
        if fifth < 2:
            continue
        before, last = one[-2 * fifth : -fifth], one[-fifth:]
        lost.append(float(np.mean(~np.isfinite(np.concatenate([before, last])))))
        # The objectives of this package skip a step that is not finite; a few of them do no harm.
        if lost[-1] <= LOST:
            before, last = before[np.isfinite(before)], last[np.isfinite(last)]
        (m0, v0), (m1, v1) = ((np.mean(x), np.var(x, ddof=1)) for x in (before, last))
        changes.append((float(m1 - m0), float(np.sqrt((v0 + v1) / fifth))))
    if not changes:
        return []
    name, limit = "change of the loss", f"{FALL} or 3 errors"
    if max(lost) > LOST:
        verdict = (
            f"{max(lost):.0%} of the losses are not finite; take a smaller learning rate, or"
            " stable_update=True."
        )
        return [Row(name, math.nan, None, limit, False, verdict)]
    change, error = max(changes, key=lambda pair: abs(pair[0]) / max(pair[1], 1e-300))
    right = "the last fifth of the losses is as high as the fifth before it."
    wrong = "the loss rose in the last fifth of the steps; take a smaller learning rate."
    if change < 0:
        wrong = "the loss was still falling in the last fifth of the steps; run longer."
    ok = abs(change) <= max(FALL, 3 * error)
    if is_right and not ok:
        verdict = f"{wrong[:-1]}; the lines on the draws find nothing wrong with them."
        return [Row(name, change, error, "", None, verdict)]
    return [judged(name, change, limit, ok, right, wrong, error)]


def convergence_rows(engine: Converges, results: list[Any]) -> list[Row]:
    """Whether an engine has solved its equations, in the worst of its restarts."""
    states = [one.state for one in results if hasattr(one, "state")]
    found = [engine.convergence(state) for state in states]
    if not found:
        return []
    worst = max(found, key=lambda one: one["residual"])
    limit, skipped = worst["limit"], max(one["skipped"] for one in found)
    rows = []
    if limit:
        right = "a further sweep leaves the mean and the variances as they are."
        wrong = "the sweeps have not settled; run longer, or with a smaller damping."
        good = worst["residual"] < limit
        rows.append(judged("residual", worst["residual"], f"{limit:g}", good, right, wrong))
    noise = max((one["noise"] for one in found if one.get("noise", math.nan) >= 0), default=None)
    if noise is not None:
        right = "the rows that were drawn move the mean and the standard deviations by less."
        wrong = "the result hangs on the rows that were drawn; run longer, or take more in a step."
        rows.append(judged("noise of the steps", noise, "0.1", noise <= 0.1, right, wrong))
    right = "every factor was updated in the last step."
    wrong = "factors were left as they were; their moments do not exist or were not found."
    rows.append(judged("factors skipped", skipped, "0", skipped == 0, right, wrong))
    if inaccurate := max(one["inaccurate"] for one in found):
        verdict = "times a factor was not resolved by the nodes of its quadrature; take more."
        rows.append(Row("nodes too few", inaccurate, None, "", None, verdict))
    return rows


def run_rows(obj: Any, results: list[Any], is_right: bool) -> list[Row]:
    """The lines of the losses, or of the equations that an engine solves."""
    if isinstance(obj, Converges):
        return convergence_rows(obj, results)
    found = [getattr(one, "losses", None) for one in results]
    losses = [np.asarray(one) for one in found if one is not None]
    return loss_rows([one for one in losses if one.ndim == 1], is_right=is_right)


def point_rows(proto: Prototype, draws: dict[str, np.ndarray]) -> list[Row]:
    """The line of latent sites of which draws differ by rounding alone, if there are any.

    :param draws: ``{site: (chain, draw, *site)}``.
    """
    some = [name for name in proto.latents if draws[name].size]
    if not some or draws[some[0]].shape[1] < 2:
        return []
    still = {name: _still(proto.trace[name], draws[name]) for name in some}
    points = [name for name in some if np.any(still[name]) and _can_vary(proto.trace[name])]
    if all(np.any(np.all(still[name], 1)) for name in some):
        verdict = (
            "all draws are the same but for rounding, so this is an estimate and no posterior:"
            " nothing can be said of its error; take a guide with a density, such as AutoNormal, or"
            " another loss if it has one."
        )
        return [Row("spread of the draws", 0.0, None, "> 0", None, verdict, of_draws=True)]
    if not points:
        return []
    named = ", ".join(f"'{name}'" for name in points)
    verdict = (
        f"all draws of {named} are the same: a Delta, or a number narrower than its rounding, is"
        " not a posterior, and other sites are too narrow given it; take a guide with a density"
        " for it, or double precision."
    )
    return [Row("sites that do not vary", len(points), None, "0", False, verdict, of_draws=True)]


def _still(site: Site, x: np.ndarray) -> np.ndarray:
    """``(chain, number)``: whether all draws of a number are the same but for rounding.

    One for the whole site where numbers may be constants, as the zeros of a triangular factor.
    """
    flat = x.reshape(*x.shape[:2], -1)
    if not np.issubdtype(x.dtype, np.floating):
        still = np.all(flat == flat[:, :1], 1)
    else:
        rounding = least_spread(flat.mean(1, np.float64), float(np.finfo(x.dtype).eps))
        still = flat.std(1, np.float64) <= rounding
    support: Any = site["fn"].support
    each = not support.is_discrete and coordinates(support, site) == flat.shape[2]
    return still if each else np.all(still, 1, keepdims=True)


def _can_vary(site: Site) -> bool:
    """True for a latent site of the model with a coordinate that is neither discrete nor given."""
    support: Any = site["fn"].support
    return not support.is_discrete and not is_delta(site) and coordinates(support, site) > 0


def network_rows(fit: Fit) -> list[Row]:
    """A line for a model with latent matrices outside of plates, as the weights of a network are.

    Such weights may change places and signs, so that no guide of them is right and no two chains
    agree, and their predictions may be right all the same.
    """
    if fit.model is None:
        return []
    count = 0
    for site in latent_sites(shapes_of(fit.model, fit.args, fit.kwargs)):
        plates = {frame.dim for frame in site["cond_indep_stack"]}
        shape = jnp.shape(site["value"])
        own = [
            n for i, n in enumerate(shape) if i - len(shape) + site["fn"].event_dim not in plates
        ]
        support: Any = site["fn"].support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        if len(own) > 1 and support in (constraints.real, constraints.real_matrix):
            count += math.prod(shape)
    if count < MANY_WEIGHTS:
        return []
    verdict = (
        "if these are the weights of a network, they are not identified, and the lines on them do"
        " not say whether its predictions are right: judge these by predictive_scores on rows that"
        " were not in the fit."
    )
    return [Row("latent numbers in matrices", count, None, "", None, verdict)]


def minibatch_cause(obj: Any, fit: Fit, proto: Prototype) -> str | None:
    """What to do where the loss takes the noise of a minibatch for uncertainty; None elsewhere."""
    loss = getattr(obj, "loss", None)
    if not isinstance(loss, ReadsMinibatches) or loss.linear or loss.per_datum:
        return None
    if getattr(loss, "proxy", None) is not None:
        return None
    plates = minibatch_plates(obj.model, fit.args, fit.kwargs)
    # The arguments may be all the data, where the run was given a batch.
    plates = {**subsampled_plates(getattr(obj.guide, "prototype_trace", None) or {}), **plates}
    for plate, (size, batch) in plates.items():
        if plate not in proto.plates:
            return (
                f"{type(loss).__name__} takes the noise of its minibatches ({batch} of {size} rows"
                f" of the plate '{plate}') for uncertainty of latent sites that all rows share, so"
                " train with BBAlphaELBO or the order 1 (VRELBO(1.), Trace_ELBO), or without"
                " subsample_size"
            )
    return None


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
