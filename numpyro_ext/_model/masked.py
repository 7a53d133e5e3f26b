"""Entries of latent sites that a mask leaves out of the density, as an ``obs_mask`` does in rows
that are observed: their density is flat, and a guide would spread there without bound."""

from collections.abc import Collection
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.distributions.distribution import validation_enabled
from numpyro.distributions.util import sum_rightmost
from numpyro.handlers import block, seed, substitute
from numpyro.primitives import Messenger

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.density import Around, log_prob, scaled, seen, without_mask
from numpyro_ext._model.handlers import on_first_rows
from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import (
    FILLED,
    Site,
    elementwise,
    has_array_mask,
    latent_sites,
    layers,
    sample_sites,
    trace_of,
)
from numpyro_ext._numpyro import mask_of, replayed_trace, site_of_log_det
from numpyro_ext._typing import Model, Sites


def is_masked(site: Site) -> bool:
    """Return whether an array masks entries of a site, which are not filled."""
    return not isinstance(site["fn"], Filled) and has_array_mask(site["fn"])


class Filled(Around):
    """A masked distribution. If ``where`` is true, the masked entries are independent N(0, 1) in
    unconstrained space."""

    pytree_data_fields = ("where",)

    def __init__(self, base_dist: Any, where: Array | bool = True) -> None:
        super().__init__(base_dist)
        self.where = jnp.asarray(where)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        value = super().sample(key, sample_shape)
        T, masked, _ = self._parts(value)
        u = random.normal(random.fold_in(key, 0), T.inverse_shape(jnp.shape(value)))
        return jnp.where(masked, T(u), value)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        T, masked, size = self._parts(value)
        u = T.inv(jnp.where(masked, value, T(jnp.zeros(T.inverse_shape(jnp.shape(value))))))
        log_p = sum_rightmost(dist.Normal().log_prob(u), T.domain.event_dim)
        log_p = log_p - T.log_abs_det_jacobian(u, T(u))
        masked = jnp.any(masked, tuple(range(-size, 0)))
        filled = sum_rightmost(jnp.where(masked, log_p, 0.0), self.event_dim - size)
        return super().log_prob(value) + filled

    def _parts(self, value: Array) -> tuple[Any, Array, int]:
        """The map to one event of the support, the masked entries and the axes of that event."""
        support = elementwise(self.support)
        masked = ~seen({"fn": self.base_dist, "value": value}) & self.where
        return biject_to(support), masked, support.event_dim


class masks_filled(Messenger):
    """The model with :class:`Filled` in place of each latent site that an array masks, if nothing
    in the density reads the masked entries. A discrete one has its own prior there.

    What is read keeps its mask, as a prior that is flat on purpose, and so do what the replayed
    guide masks as well and the sites ``but``.
    """

    def __init__(self, fn: Model, but: Collection[str] = ()) -> None:
        super().__init__(fn)
        self.but = but
        self.filled: dict[str, Array | bool] = {}
        self.met: set[str] = set()
        self.unread: dict[str, bool] = {}
        self.arguments: tuple[tuple, dict[str, Any]] = (), {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.arguments, self.filled, self.met = (args, kwargs), {}, set()
        return super().__call__(*args, **kwargs)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        self.met.add(msg["name"])
        latent = site_of_log_det(msg["name"], self.filled)
        if latent in self.filled:
            if latent != msg["name"]:  # a mask around the site is around its log Jacobian too
                own, unread = without_mask(msg["fn"]), self.filled[latent]
                both = own.log_prob(msg["value"]), msg["fn"].log_prob(msg["value"])
                msg["fn"] = own if unread is True else dist.Unit(jnp.where(unread, *both))
            return
        if msg["is_observed"] or not is_masked(msg):
            return
        guide_site = (replayed_trace() or {}).get(msg["name"])
        if msg["name"] in self.but or (guide_site is not None and is_masked(guide_site)):
            return
        unread = self._is_unread(msg)
        if unread is not False:
            self.filled[msg["name"]] = unread
            discrete = msg["fn"].support.is_discrete
            msg["fn"] = without_mask(msg["fn"]) if discrete else Filled(msg["fn"], unread)

    def _is_unread(self, site: Site) -> Array | bool:
        """Whether the density has the same numbers where the masked entries have another value."""
        name = site["name"]
        by_obs_mask = name.removesuffix("_unobserved") + "_observed" in self.met
        if by_obs_mask and sum(mask_of(layer) is not None for layer in layers(site["fn"])) == 1:
            return True
        if name not in self.unread:
            with jax.ensure_compile_time_eval(), block(), validation_enabled(False):
                with jax.debug_nans(False):
                    unread = jnp.array(True)
                    for a, b in zip(self._numbers(name, 0), self._numbers(name, -1), strict=True):
                        unread &= jnp.all(a == b)
            if is_traced(unread):
                return unread
            self.unread[name] = bool(unread)
        return self.unread[name]

    def _numbers(self, name: str, which: int) -> list[Array]:
        """The log densities of all sites, with a value of the masked entries or with another."""

        def value_of(site: Site) -> Array | None:
            if site["name"] != name or site["type"] != "sample" or site["is_observed"]:
                return None
            fn = site["fn"]
            options = {name: site["kwargs"][name] for name in ("rng_key", "sample_shape")}
            drawn = fn(**options)
            if fn.support.is_discrete:
                other = fn.enumerate_support(expand=False)[which]
            else:
                other = drawn if which == 0 else jnp.nan
            return jnp.where(seen({**site, "value": drawn}), drawn, other)

        fn = substitute(seed(on_first_rows(self.fn), random.key(0)), substitute_fn=value_of)
        sites = sample_sites(trace_of(fn, *self.arguments))
        return [log_prob(site) for site in sites if has_density(site["fn"])]


def record_filled(
    name: str, guide: Any, values: Sites, args: tuple, kwargs: dict[str, Any]
) -> None:
    """A factor in an auto guide that is set up, for losses that know nothing of
    :class:`masks_filled`: minus the log density that it adds to the model at the ``values``."""
    if not any(map(is_masked, latent_sites(guide.prototype_trace))):
        return
    fn = seed(on_first_rows(masks_filled(guide.model)), random.key(0))
    with block():
        trace = trace_of(substitute(fn, data=values), args, kwargs)
    total = jnp.zeros(())
    for site in latent_sites(trace):
        fn, value = site["fn"], site["value"]
        if isinstance(fn, Filled) and site["name"] in values:
            total += jnp.sum(scaled(site, fn.log_prob(value) - fn.base_dist.log_prob(value)))
    numpyro.factor(f"{name}{FILLED}", -total)
