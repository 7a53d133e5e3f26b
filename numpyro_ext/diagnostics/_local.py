"""What a guide with local inference says of itself: did it converge, did the mixture collapse."""

from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute

from numpyro_ext._model.read import latent_sites, shape_trace, trace_of
from numpyro_ext._typing import HasConjugate, Params, Sites
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._memo import Memo, remember
from numpyro_ext.diagnostics._rules import Row, equally_spaced

__all__ = ["local_rows", "narrow_rows", "states_row"]

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


def local_rows(guide: Any, fit: Fit, tree: Any, rng_key: Array) -> list[Row]:
    """Rows of a guide with a deterministic site ``..._converged``; none of other guides."""
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

    memo, args, kwargs = {} if fit.memo is None else fit.memo, fit.args, fit.kwargs

    def unconverged(params: Params) -> Array:
        trace = trace_of(substitute(seeded, data=params), args, kwargs)
        return 1 - jnp.mean(jnp.stack([jnp.mean(trace[name]["value"]) for name in reports]))

    share = remember(memo, "unconverged", lambda: jax.jit(unconverged))
    worst = max(float(share(params)) for params in fit.params)
    ok = worst <= UNCONVERGED
    verdict = "message passing came to rest for every datum."
    if worst:
        verdict = "message passing came to rest for nearly every datum."
    if not ok:
        verdict = "message passing was cut; raise max_iter of the rule, or take one in closed form."
    rows = [Row("local inference not converged", worst, None, f"{UNCONVERGED}", ok, verdict)]
    draws = {str(name): np.asarray(x) for name, x in tree["posterior"].data_vars.items()}
    key_prior, key_step = random.split(rng_key)
    sizes = {site["name"]: _num_states(site["fn"]) for site in latent_sites(programs)}
    for name, size in sizes.items():
        if size != 1:
            rows.append(_collapse_row(name, draws[name], one_by_one=size > 0))
    if several := [name for name, size in sizes.items() if size > 1]:
        prior = _prior_draws(fit, several, memo, key_prior)
        rows += [states_row(name, draws[name], prior[name]) for name in several]
    narrow = narrow_rows(guide, draws, memo, key_step) if isinstance(guide, HasConjugate) else []
    return rows + narrow


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
    ok = value <= COLLAPSED
    verdict = "the data are in several states."
    if not ok:
        verdict = (
            "all data are in one state, so the mixture has collapsed; start from another"
            " init_natural or key, or take a plain normal latent."
        )
    return Row(f"largest share of '{name}'", value, None, f"{COLLAPSED}", ok, verdict)


def _prior_draws(fit: Fit, names: list[str], memo: Memo, rng_key: Array) -> dict[str, np.ndarray]:
    """Draws of these sites from the model, which does not look at its data for them."""
    model, args, kwargs = fit.model, fit.args, fit.kwargs

    def draws(params: Params, keys: Array) -> Sites:
        def one(key: Array) -> Sites:
            seeded: Any = substitute(seed(model, key), data=params)
            trace = trace_of(seeded, args, kwargs)
            return {name: trace[name]["value"] for name in names}

        return lax.map(one, keys, batch_size=BLOCK)

    run = remember(memo, "states of the prior", lambda: jax.jit(draws))
    return jax.device_get(run(fit.params[0], random.split(rng_key, PRIOR_DRAWS)))


def states_row(name: str, z: np.ndarray, prior: np.ndarray) -> Row:
    """How many states hold data, in the restart with the fewest, beside draws of the prior.

    Local optima leave states empty that the posterior uses, and their bounds and k-hat look well.
    """
    in_use = [np.mean([len(np.unique(draw)) for draw in chain]) for chain in z]
    value = float(min(in_use))
    least = int(np.quantile([len(np.unique(draw)) for draw in prior], 0.05, method="lower"))
    ok = value > least - 0.5
    verdict = "as many states hold data as the prior expects."
    if not ok:
        verdict = (
            "fewer states hold data than in 95 % of the draws of the prior, as at a local optimum"
            " that has merged some; start from other keys and keep the best loss, or lower the"
            " concentrations if so few are right."
        )
    return Row(f"states of '{name}' in use", value, None, f"{least}", ok, verdict)


def narrow_rows(
    guide: HasConjugate, draws: dict[str, Any], memo: Memo, rng_key: Array
) -> list[Row]:
    r"""Whether global sites are as wide as they are after a step of Gibbs sampling.

    If q is a product, the variance of a global number is that given the local ones. The step adds
    the variance that comes of theirs, and makes it 1 + R times as large; in the posterior it is
    1 / (1 - R) times as large, which is exact for normals. So a ratio of .86 after the step says
    that the right one is .8. A quarter of the numbers of a site have a smaller one.
    """

    def step(sites: Sites, keys: Array) -> Sites:
        return lax.map(lambda x: guide.sample_globals(*x), (keys, sites), batch_size=BLOCK)

    after = remember(memo, "Gibbs step", lambda: jax.jit(step))
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
    ok = ratios[name] >= NARROW
    verdict = "global sites are nearly as wide as after a step of Gibbs sampling."
    if not ok:
        verdict = (
            "the guide draws global sites independently of local ones, so they are narrower than"
            " after a step of Gibbs sampling, and those of the posterior are wider still; take"
            " guide.sample_globals of its local draws, which is nearer, or NUTS."
        )
    what = f"sd ratio of '{name}' to a Gibbs step"
    return [Row(what, ratios[name], None, f"{NARROW}", ok, verdict)]


def _width(x: np.ndarray) -> np.ndarray:
    """The distance of the quartiles, which a heavy tail does not change."""
    low, high = np.quantile(x, [0.25, 0.75], axis=0)
    return np.ravel(high - low)
