"""Access to methods that only some guides have, among them a critic, with an error otherwise."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jax import Array
import jax.numpy as jnp

from numpyro_ext._model.handlers import inside_plates
from numpyro_ext._typing import Params
from numpyro_ext.objectives.base import Draws
from numpyro_ext.objectives.site_groups import SiteGroup

Critic = Callable[[Params, Array], Array]
"""``(params, z)`` to the critic at the points ``z``, ``(..., d)``."""


@runtime_checkable
class HasCritic(Protocol):
    """A guide that carries the parameters of a critic, a network that its loss trains."""

    def critic(self, params: Params, z: Array) -> Array:
        """The critic at unconstrained points ``(..., latent_dim)``: ``(...)``, or ``(...,
        output_dim)`` if that is larger than 1."""
        ...


def unwrap(guide: Any, protocol: type) -> Any:
    """The guide, or the one inside the handlers around it, that satisfies a Protocol; or None."""
    while not isinstance(guide, protocol):
        if not hasattr(guide, "fn"):
            return None
        guide = guide.fn
    return guide


def guide_with(draws: Draws, protocol: type, methods: str, example: str) -> Any:
    """The guide, or the one inside a handler around it, that satisfies a Protocol; or an error,
    which says what ``methods`` are missing and gives an ``example`` that has them."""
    guide = unwrap(draws.guide, protocol)
    if guide is None:
        guide = draws.guide
        while hasattr(guide, "fn"):
            guide = guide.fn
        name = getattr(guide, "__name__", type(guide).__name__)
        raise TypeError(
            f"{type(draws.objective).__name__} needs a guide with {methods}, which {name} does not"
            f" have; use {example}."
        )
    return guide


def critic_of(
    draws: Draws, groups: tuple[SiteGroup, ...], instead: str, *, field: bool = False
) -> Critic:
    """The critic of the guide, for points ``(..., *group.shape, d)`` of the only group.

    :param str instead: an alternative without a critic, for the errors.
    :param bool field: True for a critic that returns a vector for each point, and not a number.
    """
    name = type(draws.objective).__name__
    guide, group = unwrap(draws.guide, HasCritic), groups[0]
    dim = group.dim if field else 1
    wrapped = f"with_critic(guide{f', output_dim={dim}' if field else ''})"
    if guide is None:
        raise ValueError(
            f"{name} trains a critic, and the guide has none; give SVI the guide {wrapped}, of"
            f" numpyro_ext.guides, or use {instead}."
        )
    if len(groups) > 1:
        plates = " and in ".join(_plates(group) for group in groups)
        raise ValueError(
            f"{name} has one critic, but the Implicit sites of the guide are vectors of several"
            f" kinds, in {plates}; use {instead}."
        )
    features = _features(draws, group, guide, name, instead)
    seen = {} if features is None else {"features": features}

    def critic(params: Params, z: Array) -> Array:
        out = guide.critic(params, z, **seen)
        if field and z.shape[-1] == 1:
            out = out[..., None]
        shape = z.shape if field else z.shape[:-1]
        if out.shape != shape:
            raise ValueError(
                f"the critic gives shape {out.shape} for points of shape {z.shape}, where {name}"
                f" needs {shape}; give it output_dim={dim} in with_critic."
            )
        return out

    return critic


def _features(draws: Draws, group: SiteGroup, guide: Any, name: str, instead: str) -> Array | None:
    """The features of the data for an amortised critic, one row for each vector of the group."""
    features = getattr(guide, "features", None)
    if features is None and group.plates:
        raise ValueError(
            f"the guide has one distribution for each row of {_plates(group)}, but its critic does"
            " not see the data; give it with_critic(guide, features=...), a function of the model's"
            f" arguments that gives one row of numbers for each datum, or use {instead}."
        )
    if features is None:
        return None
    if not group.plates:
        raise ValueError(
            f"the critic sees features of each datum, but {name} judges all latents of the guide"
            " together, because not every site of model and guide is in one plate; leave features"
            " out of with_critic."
        )
    with inside_plates(draws.guide_trace(draws.keys[0], draws.stopped), group.plates):
        return jnp.asarray(features(*draws.args, **draws.kwargs))


def _plates(group: SiteGroup) -> str:
    if not group.plates:
        return "no plate"
    return f"the plate{'s' * (len(group.plates) > 1)} {', '.join(map(repr, group.plates))}"
