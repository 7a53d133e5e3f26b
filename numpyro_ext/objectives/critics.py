"""How a loss asks a guide for its critic, and says so where there is none."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_ext._model.handlers import inside_plates
from numpyro_ext._typing import HasCritic, Params
from numpyro_ext.objectives.base import Draws
from numpyro_ext.objectives.protocols import unwrapped
from numpyro_ext.objectives.samples import Block

__all__ = ["Critic", "critic_of", "divergence", "refuse_model_params"]

Critic = Callable[[Params, Array], Array]
"""``(params, z)`` to the critic at the points ``z``, ``(..., d)``."""

# Up to this many dimensions the divergence of a field is exact.
_EXACT_UP_TO = 20


def refuse_model_params(draws: Draws) -> None:
    """An error for a discrepancy, whose minimum over a parameter of the model means nothing."""
    for site in draws.layout.model_params:
        raise ValueError(
            f"{type(draws.objective).__name__}: the model has the param site '{site}', but a"
            " discrepancy is no bound on the evidence, so its minimum over that parameter means"
            " nothing; train it with VRELBO or ImplicitELBO, then put its value into the model"
            " (numpyro.handlers.substitute)."
        )


def critic_of(
    draws: Draws, blocks: tuple[Block, ...], instead: str, *, field: bool = False
) -> Critic:
    """The critic of the guide, for points ``(..., *block.shape, d)`` of the only block.

    :param str instead: what the loss can do without a critic, for the errors.
    :param bool field: whether it gives a vector for each point, and not a number.
    """
    name = type(draws.objective).__name__
    guide, block = unwrapped(draws.guide, HasCritic), blocks[0]
    dim = block.dim if field else 1
    wrapped = f"with_critic(guide{f', output_dim={dim}' if field else ''})"
    if guide is None:
        raise ValueError(
            f"{name} trains a critic, and the guide has none; give SVI the guide {wrapped}, of"
            f" numpyro_ext.guides, or use {instead}."
        )
    if len(blocks) > 1:
        plates = " and in ".join(_plates(block) for block in blocks)
        raise ValueError(
            f"{name} has one critic, but the Implicit sites of the guide are vectors of several"
            f" kinds, in {plates}; use {instead}."
        )
    features = _features(draws, block, guide, name, instead)
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


def divergence(rng_key: Array, field: Callable[[Array], Array], z: Array) -> Array:
    """``(...)``, the divergence of a vector field at points ``(..., d)``.

    Exact by d derivatives for d of at most 20; by one random direction for each point otherwise,
    which is unbiased.
    """

    def along(v: Array) -> Array:
        return jnp.sum(v * jax.jvp(field, (z,), (v,))[1], -1)

    d = z.shape[-1]
    if d > _EXACT_UP_TO:
        return along(random.rademacher(rng_key, z.shape, z.dtype))
    axes = jnp.broadcast_to(
        jnp.eye(d, dtype=z.dtype).reshape(d, *(1,) * (z.ndim - 1), d), (d, *z.shape)
    )
    return jnp.sum(jax.vmap(along)(axes), 0)


def _features(draws: Draws, block: Block, guide: Any, name: str, instead: str) -> Array | None:
    """What an amortised critic sees of the data: one row for each vector of the block."""
    features = getattr(guide, "features", None)
    if features is None and block.plates:
        raise ValueError(
            f"the guide has one distribution for each row of {_plates(block)}, but its critic does"
            " not see the data; give it with_critic(guide, features=...), a function of the model's"
            f" arguments that gives one row of numbers for each datum, or use {instead}."
        )
    if features is None:
        return None
    if not block.plates:
        raise ValueError(
            f"the critic sees features of each datum, but {name} judges all latents of the guide"
            " together, because not every site of model and guide is in one plate; leave features"
            " out of with_critic."
        )
    with inside_plates(draws.guide_trace(draws.keys[0], draws.stopped), block.plates):
        return jnp.asarray(features(*draws.args, **draws.kwargs))


def _plates(block: Block) -> str:
    if not block.plates:
        return "no plate"
    return f"the plate{'s' * (len(block.plates) > 1)} {', '.join(map(repr, block.plates))}"
