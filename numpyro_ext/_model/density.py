"""Log densities of the sites of a trace, and their sums."""

from collections.abc import Collection
from typing import Any

from jax import Array
import jax.numpy as jnp
from numpyro.distributions import Distribution, Independent, biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.util import is_identically_one

from numpyro_ext._model.read import Site, frames, layers, sample_sites
from numpyro_ext._numpyro import mask_of
from numpyro_ext._typing import Trace


class Around(Distribution):
    """A distribution around another one; a subclass replaces a part of it."""

    arg_constraints = {}  # noqa: RUF012 - NumPyro's own way to say that nothing is checked
    pytree_data_fields = ("base_dist",)

    def __init__(self, base_dist: Any) -> None:
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape, base_dist.event_shape)

    @property
    def has_rsample(self) -> bool:
        return self.base_dist.has_rsample

    @property
    def support(self) -> Constraint:
        return self.base_dist.support

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.base_dist(rng_key=key, sample_shape=sample_shape)

    def rsample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample(key, sample_shape)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        return self.base_dist.log_prob(value)


def log_prob(site: Site) -> Array:
    """``log p(value)`` of a sample site, with the axes of its batch and without any scale."""
    if site["intermediates"]:
        return site["fn"].log_prob(site["value"], site["intermediates"])
    return site["fn"].log_prob(site["value"])


def row_log_prob(site: Site) -> Array:
    """:func:`log_prob`, also of each row where the rows are declared one event by ``to_event``,
    unless the scale is an array."""
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
    """The trace with the root of each scale s that ``handlers.scale`` adds to the scale of the
    plates, so that the squares of its gradients count s times."""
    return {
        name: {**site, "scale": of_plates * (site["scale"] / of_plates) ** 0.5}
        if site["type"] == "sample" and site["scale"] is not None
        else site
        for name, site in trace.items()
    }


def log_density(trace: Trace) -> Array:
    """Log joint of a trace in constrained space, scales included; traced values allowed."""
    return sum((jnp.sum(scaled(x, log_prob(x))) for x in sample_sites(trace)), jnp.zeros(()))


def row_log_lik(trace: Trace, plate: str, *, rooted: bool = False) -> Array:
    """``(rows,)``, log p of the sites in each row of a plate, without the scale of that plate, and
    with other scales ``rooted`` or not."""
    # On sliced arguments the plate may have one row or N, and scales by what it has.
    size, batch = trace[plate]["args"]
    batch = batch or size
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
    is_seen = jnp.ones(shape, bool)
    for layer in layers(site["fn"]):
        mask = mask_of(layer)
        if mask is not None:
            # A mask has the axes of a batch, and none of an event.
            mask = jnp.reshape(mask, jnp.shape(mask) + (1,) * layer.event_dim)
            is_seen = is_seen & jnp.broadcast_to(mask, shape)
    return is_seen


def num_seen(site: Site) -> Array:
    """How many numbers of each row of a site no mask leaves out, with the axes of its batch."""
    return jnp.sum(seen(site), tuple(range(-site["fn"].event_dim, 0)))
