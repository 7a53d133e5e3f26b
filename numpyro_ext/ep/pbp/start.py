"""Where probabilistic backpropagation begins: its data, checked and scaled, and its first state."""

from typing import Any

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_ext.ep.pbp.epochs import Belief, Counts, Gamma, PBPState, PriorSites, Site
from numpyro_ext.ep.pbp.network import SCALING, Network

__all__ = ["data_of", "inputs_of", "scaling_of", "start_state"]


def inputs_of(X: Any, num_inputs: int) -> Array:
    """X as an array ``(N, num_inputs)``."""
    X = _numbers("X", X)
    if X.ndim != 2 or X.shape[1] != num_inputs or len(X) == 0:
        remedy = ", by X[:, None] for a single input" if X.ndim == 1 and num_inputs == 1 else ""
        raise ValueError(
            f"X has shape {X.shape}; it must be (N, {num_inputs}), as layer_sizes[0] is"
            f" {num_inputs}{remedy}."
        )
    return X


def data_of(X: Any, y: Any, num_inputs: int) -> tuple[Array, Array]:
    """X and y as arrays ``(N, num_inputs)`` and ``(N,)``."""
    X, y = inputs_of(X, num_inputs), _numbers("y", y)
    if y.shape != (len(X),):
        raise ValueError(
            f"y has shape {y.shape} and X {X.shape}; y must be ({len(X)},), a number for each row"
            " of X."
        )
    return X, y


def _numbers(name: str, value: Any) -> Array:
    """A finite array of floats, or a sentence."""
    if isinstance(value, Tracer):
        return value
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "biuf":
            found = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} does not hold numbers only ({error}); code the columns of words as numbers,"
            " or leave them out."
        ) from None
    if not np.all(np.isfinite(found)):
        where = np.argwhere(~np.isfinite(found))
        raise ValueError(
            f"{name} has {len(where)} entries that are not finite, the first in row"
            f" {int(where[0, 0]) if found.ndim else 0}; leave these rows out, or fill them."
        )
    return jnp.asarray(value if isinstance(value, Array) else found, float)


def scaling_of(X: np.ndarray, y: np.ndarray, normalise: bool) -> dict[str, Array]:
    """Mean and standard deviation of X and y by name; 0 and 1 without ``normalise``."""

    def of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not normalise:
            return np.zeros(x.shape[1:]), np.ones(x.shape[1:])
        # Rounding would give a constant column a small standard deviation.
        return x.mean(0), np.where(x.max(0) == x.min(0), 1.0, x.std(0))

    return {n: jnp.asarray(x, float) for n, x in zip(SCALING, (*of(X), *of(y)), strict=True)}


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
