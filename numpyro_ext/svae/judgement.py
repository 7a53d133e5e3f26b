"""Whether a structured guide has come to rest for every datum, has collapsed, or is too narrow."""

from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute

from numpyro_ext._model.read import latent_sites, shape_trace, trace_of
from numpyro_ext._typing import Model, Params, Sites

UNCONVERGED, COLLAPSED = 0.01, 0.01
"""Shares of the data that may stop early in local inference, and that a state in use has."""
_BLOCK, _PRIOR_DRAWS, _DRAWS = 50, 200, 50
"""The numbers of draws in memory together, of the prior, and with states that are counted."""


class Judgement(NamedTuple):
    """A quantity beside its limit, and a sentence about it."""

    quantity: str
    value: float
    limit: str
    ok: bool
    verdict: str


def judge(
    guide: Any,
    rng_key: Array,
    model: Model,
    params: list[Params],
    draws: dict[str, np.ndarray],
    args: tuple,
    kwargs: dict[str, Any],
) -> list[Judgement]:
    """Whether message passing came to rest, and whether local optima have left states empty."""
    seeded: Any = seed(guide, random.key(0))
    sites = shape_trace(substitute(seeded, data=params[0]), args, kwargs)
    reports = [name for name in sites if name.endswith("_converged")]

    @jax.jit
    def unconverged(params: Params) -> Array:
        trace = trace_of(substitute(seeded, data=params), args, kwargs)
        return 1 - jnp.mean(jnp.stack([jnp.mean(trace[name]["value"]) for name in reports]))

    worst = max(float(unconverged(each)) for each in params) if reports else 0.0
    rest = "message passing came to rest for nearly every datum."
    cut = "message passing was cut; raise max_iter of the rule, or take one in closed form."
    ok = worst <= UNCONVERGED
    quantity, limit = "local inference not converged", f"{UNCONVERGED}"
    result = [Judgement(quantity, worst, limit, ok, rest if ok else cut)]
    discrete = [x["name"] for x in latent_sites(sites) if x["fn"].support.is_discrete]
    if not discrete:
        return result

    @jax.jit
    def prior_draws(keys: Array) -> Sites:
        def draw(key: Array) -> Sites:
            fn: Any = substitute(seed(model, key), data=params[0])
            trace = trace_of(fn, args, kwargs)
            return {name: trace[name]["value"] for name in discrete}

        return lax.map(draw, keys, batch_size=_BLOCK)

    prior = jax.device_get(prior_draws(random.split(rng_key, _PRIOR_DRAWS)))
    is_vector = {x["name"]: x["fn"].event_dim > 0 for x in latent_sites(sites)}
    rows = [states_in_use(n, draws[n], prior[n], vector=is_vector[n]) for n in discrete]
    return [*result, min(rows, key=lambda row: (row.ok, row.value))]


def _count(z: np.ndarray, *, vector: bool) -> int:
    """The number of states that hold a hundredth of the data; bits are one state together."""
    states = z.reshape(-1, z.shape[-1] if vector else 1)
    _, counts = np.unique(states, axis=0, return_counts=True)
    return int(np.sum(counts >= COLLAPSED * len(states)))


def states_in_use(name: str, z: np.ndarray, prior: np.ndarray, *, vector: bool) -> Judgement:
    """The states of a site ``(restart, draw, *site)`` that hold data, where they are fewest."""
    in_use = [np.mean([_count(draw, vector=vector) for draw in chain[:_DRAWS]]) for chain in z]
    value, of_prior = float(min(in_use)), [_count(draw, vector=vector) for draw in prior]
    # 95 % of the draws of the prior have more.
    least = int(np.quantile(of_prior, 0.05, method="lower"))
    ok = value > least - 0.5
    verdict = f"as many states of '{name}' hold data as the prior expects."
    if not ok:
        verdict = (
            f"fewer states of '{name}' hold data than in 95 % of the draws of the prior, as at a"
            " local optimum that has merged some; start from other keys and keep the best loss."
        )
    return Judgement("states in use", value, f"{least}", ok, verdict)


def narrowest(guide: Any, rng_key: Array, draws: dict[str, Any]) -> tuple[float, str] | None:
    """The least width of a global site over that after a step of Gibbs sampling, and its name."""
    # If q is a product, a global number has its variance given the local ones. The step makes it
    # 1 + R times as large; in the posterior it is 1 / (1 - R) times as large, exactly for normals.

    @jax.jit
    def after(sites: Sites, keys: Array) -> Sites:
        return lax.map(lambda x: guide.sample_globals(*x), (keys, sites), batch_size=_BLOCK)

    ratios: dict[str, float] = {}
    for i, key in enumerate(random.split(rng_key, len(next(iter(draws.values()))))):
        chain = {name: x[i] for name, x in draws.items()}
        moved = jax.device_get(after(chain, random.split(key, len(next(iter(chain.values()))))))
        for name, x in moved.items():
            before, width = _width(chain[name]), _width(x)
            varies = (before > 0) & (width > 0)
            if varies.any():
                ratio = float(np.quantile(before[varies] / width[varies], 0.25))
                ratios[name] = min(ratios.get(name, np.inf), ratio)
    if not ratios:
        return None
    name = min(ratios, key=lambda name: ratios[name])
    return ratios[name], name


def _width(x: np.ndarray) -> np.ndarray:
    """The distance of the quartiles, which a heavy tail does not change."""
    low, high = np.quantile(x, [0.25, 0.75], axis=0)
    return np.ravel(high - low)
