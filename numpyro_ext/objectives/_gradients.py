"""The gradient estimators of the Renyi bound.

Each takes the engine and the order as a function of the mutable state, and gives the bound of every
unit (with its gradient) and the mutable state of the particles.
"""

from collections.abc import Callable
from typing import Any

from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp

from numpyro_ext.objectives._log_weights import Engine, Particle
from numpyro_ext.objectives._power_mean import (
    power_mean,
    surrogate,
    weighted_surrogate,
)

AlphaOf = Callable[[Engine, Particle], Any]
Estimate = tuple[Array, dict[str, Any]]


def standard(engine: Engine, alpha_of: AlphaOf) -> Estimate:
    """``sum_k w^_k grad lw_k``."""
    particles = engine.particles()
    alpha = alpha_of(engine, particles)
    return surrogate(particles.log_weight, 1 - alpha), particles.state


def single(engine: Engine, alpha_of: AlphaOf) -> Estimate:
    """The gradient of one ``lw_j`` per unit, ``j ~ Categorical(w^)``: a single backward pass.

    With units the guide's K draws are differentiated and the model runs once, at the chosen ones.
    """
    if len(engine.keys) == 1:
        return standard(engine, alpha_of)

    def forward(key: Array) -> Particle:
        particle = engine.particle(
            key, params=engine.stopped, guide_params=engine.params, detach=True
        )
        return particle if engine.layout.plates else particle._replace(values={})

    particles = engine.map(forward, engine.keys)
    alpha = alpha_of(engine, particles)
    value, weights = power_mean(particles.log_weight, 1 - alpha)
    j = random.categorical(engine.extra_key, jnp.log(weights), axis=0)
    if engine.layout.plates:
        guide_trace = engine.guide_trace(engine.keys[0])
        chosen = {
            name: _take(value, engine.layout.along(guide_trace[name], j))
            for name, value in particles.values.items()
        }
        log_p = engine.log_joint(engine.keys[0], guide_trace, chosen)
        lw_j = log_p - _take(particles.log_q_local, j)
    else:
        lw_j = engine.particle(engine.keys[j]).log_weight
    bound = weighted_surrogate(value, jnp.ones((1, *lw_j.shape)), lw_j[None])
    return bound, particles.state


def stl(engine: Engine, alpha_of: AlphaOf) -> Estimate:
    """``sum_k w^_k`` times the path derivative: log q at the same z with its parameters stopped."""
    particles = engine.map(lambda key: path_only(engine, key), engine.keys)
    alpha = alpha_of(engine, particles)
    return surrogate(particles.log_weight, 1 - alpha), particles.state


def dreg(engine: Engine, alpha_of: AlphaOf) -> Estimate:
    """The path derivative with ``w^_k (alpha + (1 - alpha) w^_k)``, the model's parameters with ``w^_k``.

    Each value enters as ``sg(z) + gamma_k (z - sg(z))``, so that only its path derivative is scaled.
    """
    first = engine.particles(params=engine.stopped)
    alpha = alpha_of(engine, first)
    _, weights = power_mean(first.log_weight, 1 - alpha)
    gamma = alpha + (1 - alpha) * weights
    particles = engine.map(lambda xs: path_only(engine, *xs), (engine.keys, gamma))
    return surrogate(particles.log_weight, 1 - alpha), particles.state


ESTIMATORS = {"dreg": dreg, "single": single, "standard": standard, "stl": stl}


def path_only(engine: Engine, key: Array, gamma: Array | None = None, **options: Any) -> Particle:
    """A particle whose guide has a gradient through its draws only, scaled by ``gamma`` if given."""
    guide_trace = engine.guide_trace(key)
    engine.refuse_hidden_density(key, guide_trace)
    values = {}
    for name, site in engine.drawn_sites(guide_trace).items():
        z = site["value"]
        if gamma is not None:
            stopped = stop_gradient(z)
            z = stopped + engine.layout.along(site, gamma) * (z - stopped)
        values[name] = z
    options = {"guide_params": engine.stopped, "values": values, **options}
    return engine.particle(key, **options)._replace(values={})


def _take(x: Array, j: Array) -> Array:
    """``x[j]`` along the particle axis, ``j`` broadcasting against the rest."""
    return jnp.take_along_axis(x, j[None], 0)[0]
