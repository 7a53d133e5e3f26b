"""The start of probabilistic backpropagation: the prior, with random means."""

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_ext.ep.network import Network
from numpyro_ext.ep.network_sites import Belief, Counts, Gamma, PBPState, PriorSites, Site

__all__ = ["start_state"]


def start_state(
    rng_key: Array,
    method: str,
    network: Network,
    scaling: dict[str, Array],
    num_data: int,
    *,
    refine_prior: bool,
    init_scale: float,
) -> PBPState:
    """The state before the first epoch: each weight N(m, E[1 / precision]), m ~ N(0, 1 / fan-in)
    times ``init_scale``, with the site of its prior inside."""
    key_means, key_state = random.split(rng_key)
    shapes = list(network.shapes.values())
    keys = random.split(key_means, len(shapes))
    means = [
        init_scale / shape[1] ** 0.5 * random.normal(key, shape)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    weight, noise = (
        Gamma(*(jnp.asarray(x, float) for x in prior)) if isinstance(prior, tuple) else None
        for prior in (network.priors.weight, network.priors.noise)
    )
    of_weight = network.priors.weight
    if isinstance(of_weight, tuple):
        precision = (of_weight[0] - 1) / of_weight[1]
    else:
        precision = of_weight
    q = Belief(means, [jnp.full(shape, 1 / precision) for shape in shapes], noise)
    prior = None
    if refine_prior and weight is not None:
        zero = jnp.zeros(sum(m.size for m in means))
        prior = PriorSites(zero + precision, Gamma(zero, zero))
    count = jnp.zeros((), jnp.int32)
    return PBPState(
        i=count,
        q=q,
        weight=weight,
        prior=prior,
        site=_sites(method, q, num_data),
        scaling=scaling,
        counts=Counts(count, count, count, count),
        skipped=count,
        num_data=jnp.asarray(num_data, jnp.int32),
        rng_key=key_state,
    )


def _sites(method: str, q: Belief, num_data: int) -> Site | None:
    """Sites that hold the random means, which are forgotten as the sites are replaced."""
    if method == "adf":
        return None
    shift = [m / v for m, v in zip(q.means, q.variances, strict=True)]
    total = Site(shift, [0 * v for v in q.variances], jax.tree.map(jnp.zeros_like, q.noise))
    if method == "sep":
        return total
    return jax.tree.map(lambda x: jnp.broadcast_to(x / num_data, (num_data, *x.shape)), total)
