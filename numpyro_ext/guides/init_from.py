"""The normal distribution of a fitted guide, from which another guide starts."""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

from numpyro_ext._model.read import ModelInfo, latent_sites
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext._numpyro import normal_of_guide

__all__ = ["FittedNormal", "check_sites", "fitted_normal"]


class FittedNormal(NamedTuple):
    """A normal distribution of all latent sites, in unconstrained space."""

    shapes: dict[str, tuple[int, ...]]
    """The constrained shape of each site, in the order of the vector."""
    loc: Array
    """The mean, ``(latent_dim,)``."""
    scale: Array
    """The standard deviations, or the lower triangular factor of a full covariance."""


def fitted_normal(init_from: Any) -> FittedNormal:
    """The distribution of a pair ``(guide, params)``, which must be finite, or of a proxy."""
    if isinstance(init_from, TaylorProxy):
        if init_from.factor is None:
            raise ValueError(
                "init_from is a taylor_proxy that has no normal approximation, because its center"
                " is not near a mode, as its warning said; give a pair (guide, params) of a fitted"
                " AutoMultivariateNormal, or leave init_from out."
            )
        shapes = {name: jnp.shape(init_from.center[name]) for name, _ in init_from.shapes}
        return FittedNormal(shapes, init_from.location, init_from.factor)
    if not (
        isinstance(init_from, tuple) and len(init_from) == 2 and isinstance(init_from[1], dict)
    ):
        raise TypeError(
            f"init_from is {type(init_from).__name__}; it must be a pair (guide, params) of a"
            " fitted guide such as AutoMultivariateNormal and the params of its svi.run, or a"
            " taylor_proxy at a mode."
        )
    guide, params = init_from
    loc, scale = normal_of_guide(guide, params)
    if not bool(jnp.all(jnp.isfinite(loc)) & jnp.all(jnp.isfinite(scale))):
        raise ValueError(
            f"the mean or the scale of the {type(guide).__name__} of init_from is not finite; fit"
            " it at a smaller learning rate."
        )
    sites = latent_sites(guide.prototype_trace)
    return FittedNormal({s["name"]: jnp.shape(s["value"]) for s in sites}, loc, scale)


def check_sites(normal: FittedNormal, info: ModelInfo) -> None:
    """An error if the model has other latent sites than the fitted guide."""
    shapes = {name: one.constrained.shape for name, one in info.latents.items()}
    if list(shapes.items()) != list(normal.shapes.items()):
        raise ValueError(
            f"the guide of init_from has the latent sites {normal.shapes}, but the model has"
            f" {shapes}; fit it on this model, with the same arguments."
        )
