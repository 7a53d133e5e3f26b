"""Log densities of the sites of a trace, and their sums."""

from collections.abc import Collection
import math
from typing import Any

from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp
from numpyro.distributions import Independent, biject_to
from numpyro.distributions.util import is_identically_one

from numpyro_ext._model.read import Site, frames, is_data, layers, sample_sites
from numpyro_ext._numpyro import mask_of
from numpyro_ext._typing import Trace

__all__ = [
    "labels_drawn",
    "log_abs_det",
    "log_density",
    "log_prob",
    "num_seen",
    "row_log_lik",
    "row_log_prob",
    "scaled",
    "scales_rooted",
    "seen",
    "summed_log_density",
    "without_mask",
]


def log_prob(site: Site) -> Array:
    """``log p(value)`` of a sample site, with the axes of its batch and without any scale."""
    if site["intermediates"]:
        return site["fn"].log_prob(site["value"], site["intermediates"])
    return site["fn"].log_prob(site["value"])


def row_log_prob(site: Site) -> Array:
    """:func:`log_prob`, also of each row where the rows are declared one event by ``to_event``.

    With a scale that is an array the rows stay one event, whose axes the scale does not have.
    """
    fn, scale = site["fn"], site["scale"]
    if site["intermediates"] or (scale is not None and jnp.ndim(scale) > 0):
        return log_prob(site)
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return log_prob({**site, "fn": fn})


def scaled(site: Site, value: Array, divisor: float = 1.0) -> Array:
    """``value`` times the site's scale (plates, ``handlers.scale``) over ``divisor``."""
    scale: Any = site["scale"]
    if scale is None or is_identically_one(scale):
        return value if divisor == 1.0 else value / divisor
    if divisor != 1.0:
        scale = scale / divisor
    return value if is_identically_one(scale) else scale * value


def scales_rooted(trace: Trace, of_plates: float) -> Trace:
    """The trace with the square root of what ``handlers.scale`` adds to the scale of the plates.

    A row that counts s times has s times the curvature: the squares of these gradients have it.
    """
    return {
        name: {**site, "scale": of_plates * (site["scale"] / of_plates) ** 0.5}
        if site["type"] == "sample" and site["scale"] is not None
        else site
        for name, site in trace.items()
    }


def log_density(trace: Trace) -> Array:
    """Log joint of a trace in constrained space, scales included; traced values allowed."""
    total = jnp.zeros(())
    for site in sample_sites(trace):
        total = total + jnp.sum(scaled(site, log_prob(site)))
    return total


def summed_log_density(trace: Trace, batches: dict[str, tuple[int, int]]) -> Array:
    """
    :func:`log_density` of a trace of funsor's, summed over the values of its discrete latent sites.

    In plates with a minibatch the sum is that of each row, and its logarithm is scaled. Other
    scales are inside of the sum, as they are for ``NUTS``.

    :param dict batches: ``{plate: (size, rows)}`` of the plates that have fewer rows here.
    """
    import funsor  # an extra of the package
    from funsor.optimizer import apply_optimizer

    scales = {name: size / rows for name, (size, rows) in batches.items()}
    plates = {name for site in sample_sites(trace) for name in frames(site)}
    groups: list[tuple[set[str], list[Any]]] = []  # summed sites, and what depends on them
    for site in sample_sites(trace):
        log_p, names = log_prob(site), site["infer"]["dim_to_name"]
        if site["scale"] is not None:  # that of minibatches is outside of the sum
            log_p = log_p * (site["scale"] / math.prod(scales.get(n, 1.0) for n in frames(site)))
        if any(name.startswith("_time") for name in names.values()):
            raise ValueError(
                f"site '{site['name']}' is in a scan over time with discrete latent sites, which"
                " are summed out without minibatches alone; drop subsample_size."
            )
        factor = funsor.to_funsor(log_p if names else jnp.squeeze(log_p), funsor.Real, names)
        summed = set(factor.inputs) - plates
        joined = [group for group in groups if summed & group[0]]
        groups = [group for group in groups if not any(group is one for one in joined)]
        parts = [factor, *(part for group in joined for part in group[1])]
        groups.append((summed.union(*(group[0] for group in joined)), parts))
    total = jnp.zeros(())
    for summed, parts in groups:
        inside = [set(part.inputs) & plates for part in parts]
        shared, everywhere = set.intersection(*inside), set.union(*inside)
        for plate in (everywhere - shared) & set(scales):
            raise ValueError(
                f"the discrete latent sites {sorted(summed)} are summed out over all rows together"
                f" of the plate '{plate}', whose minibatches have no unbiased estimate of that sum;"
                " drop subsample_size, or put these sites into the plate."
            )
        with funsor.interpretations.lazy:
            lazy = funsor.sum_product.sum_product(
                funsor.ops.logaddexp,
                funsor.ops.add,
                parts,
                eliminate=frozenset(summed | (everywhere - shared)),
                plates=frozenset(everywhere),
            )
        optimised: Any = apply_optimizer(lazy)
        each = optimised.reduce(funsor.ops.add)
        total = total + math.prod(scales.get(name, 1.0) for name in shared) * each.data
    return total


def row_log_lik(trace: Trace, plate: str, *, rooted: bool = False) -> Array:
    """``(rows,)``, log p of the sites in each row of a plate, without the scale of that plate.

    :param bool rooted: whether other scales are those of :func:`scales_rooted`.
    """
    # On sliced arguments the plate may have one row or N, and scales by what it has.
    size, batch = trace[plate]["args"]
    batch = size if batch is None else batch
    trace = scales_rooted(trace, size / batch) if rooted else trace
    total = jnp.zeros(batch)
    for site in sample_sites(trace):
        if plate in frames(site):
            log_p = scaled(site, log_prob(site), size / batch)
            axis = log_p.ndim + frames(site)[plate]
            total = total + jnp.sum(log_p, [i for i in range(log_p.ndim) if i != axis])
    return total


def without_mask(fn: Any) -> Any:
    """A distribution without the masks around it."""
    while mask_of(fn) is not None:
        fn = fn.base_dist
    return fn


def labels_drawn(trace: Trace, plate: str, rng_key: Array) -> Trace:
    """The trace with values of its observed sites in a plate that are drawn from their own
    distributions, at the latent values of the trace."""
    drawn = dict(trace)
    for i, site in enumerate(sample_sites(trace)):
        if plate in frames(site) and site["is_observed"]:
            if not is_data(site):
                raise ValueError(
                    f"site '{site['name']}' is a numpyro.factor, of which no labels can be drawn;"
                    " write it as an observed site, or use another curvature."
                )
            value = site["fn"].sample(random.fold_in(rng_key, i))
            drawn[site["name"]] = {**site, "value": stop_gradient(value), "intermediates": []}
    return drawn


def log_abs_det(trace: Trace, names: Collection[str]) -> Array:
    """Log Jacobian determinant from unconstrained to constrained values, summed over sites."""
    total = jnp.zeros(())
    for name in names:
        fn, value = trace[name]["fn"], trace[name]["value"]
        if not fn.support.is_discrete:
            transform = biject_to(fn.support)
            u = transform.inv(value)
            total = total + jnp.sum(transform.log_abs_det_jacobian(u, value))
    return total


def seen(site: Site) -> Array:
    """Which entries of a site the model does not leave out by a mask."""
    shape = jnp.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())
    found = jnp.ones(shape, bool)
    for layer in layers(site["fn"]):
        mask = mask_of(layer)
        if mask is not None:
            # A mask has the axes of a batch, without those of an event.
            mask = jnp.reshape(mask, jnp.shape(mask) + (1,) * layer.event_dim)
            found = found & jnp.broadcast_to(mask, shape)
    return found


def num_seen(site: Site) -> Array:
    """How many numbers of each row of a site no mask leaves out, with the axes of its batch."""
    return jnp.sum(seen(site), tuple(range(-site["fn"].event_dim, 0)))
