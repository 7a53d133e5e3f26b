"""The critic of a guide, a network that a loss trains beside it."""

from collections.abc import Callable
from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_ext._model.handlers import inside_plates
from numpyro_ext._typing import Params
from numpyro_ext.objectives.base import Draws, unwrap
from numpyro_ext.objectives.samples import SiteGroup

Critic = Callable[[Params, Array], Array]
"""``(params, z)`` to the critic at the points ``z``, ``(..., d)``."""


def critic_of(
    draws: Draws,
    group: SiteGroup,
    instead: str,
    *,
    field: bool = False,
    observed: int | None = None,
) -> Critic:
    """The critic of the guide at points ``(..., *group.shape, d)``; a vector for each if ``field``.
    With ``observed`` the points are ``(n, d + observed)``: latents and data."""
    name, guide = type(draws.objective).__name__, unwrap(draws.guide, "critic")
    dim = group.dim if field else 1
    if guide is None:
        needs = f", output_dim={dim}" if field else ""
        needs += "" if observed is None else f", features={observed}"
        wrapped = f"with_critic(guide{needs})"
        raise ValueError(
            f"{name} trains a critic, and the guide has none; give SVI {wrapped} of"
            f" numpyro_ext.guides, or use {instead}."
        )
    if observed is None:
        features = _features(draws, group, guide, instead)
    elif getattr(guide, "features", observed) != observed:
        raise ValueError(
            f"{name} shows the critic the latents and the {observed} observed numbers of"
            f" a row; make it by with_critic(guide, features={observed})."
        )
    else:
        features = {}

    def critic(params: Params, z: Array) -> Array:
        out = guide.critic(params, z, **features)
        if field and z.shape[-1] == 1:
            out = out[..., None]
        shape = z.shape if field else z.shape[:-1]
        if out.shape != shape:
            raise ValueError(
                f"the critic gives shape {out.shape}, and must give {shape}; give it"
                f" output_dim={dim} in with_critic."
            )
        return out

    return critic


def _features(draws: Draws, group: SiteGroup, guide: Any, instead: str) -> dict[str, Array]:
    """The features of the data for an amortised critic, one row for each vector of the group."""
    features = getattr(guide, "features", None)
    if features is None and group.plates:
        raise ValueError(
            f"the guide has a vector for each row of the plates {group.plates}, but its critic sees"
            f" no data; give it with_critic(guide, features=...), or use {instead}."
        )
    if isinstance(features, int):
        raise ValueError(
            f"the critic is made for {features} observed numbers of a row, beside which only"
            " DensityRatioELBO(contrast='joint') and SymmetricKL ask it; give"
            " with_critic(guide, features=...) a function."
        )
    if features is not None and not group.plates:
        raise ValueError(
            "the critic sees features of each datum, but judges all latents together, because not"
            " every site is in one plate; leave features out of with_critic."
        )
    if features is None:
        return {}
    with inside_plates(draws.guide_trace(draws.keys[0], draws.stopped), group.plates):
        return {"features": jnp.asarray(features(*draws.args, **draws.kwargs))}
