"""Points in unconstrained space, with the gradients of their log density on all data."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, coordinate_name, model_info, read_model
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._evaluate import Prototype, default_block_size
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.table import equally_spaced

_BATCHES, _AT = 32, 8
"""Minibatches from which the noise of the mean gradient is known, and particles in that mean."""


class Points(NamedTuple):
    """Points, and the gradients there of the log density of all data."""

    x: Array
    """``(m, d)``, in unconstrained space."""
    score: Array
    name: Callable[[int], str]
    """The name of a coordinate."""
    noise: Any = None
    """Noise of a minibatch's mean gradient, in units of the shift; None without minibatches."""

    def subset(self, places: np.ndarray) -> "Points":
        """Some of the points."""
        return self._replace(x=self.x[places], score=self.score[places])


def particles_of(obj: Any, fit: Fit) -> Sites:
    """The last position of every particle, constrained."""
    draws = fit.draws[0]
    if not isinstance(obj, MCMC):
        return draws
    # The chains of an ensemble are the particles, and its last draw is the answer.
    length = len(next(iter(draws.values()))) // fit.num_chains
    return {name: x[length - 1 :: length] for name, x in draws.items()}


def has_gradient(proto: Prototype) -> bool:
    """True if no drawn site is discrete, so that each has a gradient, and others can be summed
    out."""
    supports = (proto.trace[name]["fn"].support for name in proto.latents)
    summable = not proto.marginalized or find_spec("funsor") is not None
    return summable and not any(support.is_discrete for support in supports)


def potential_of(
    fit: Fit, info: ModelInfo, params: Params, deterministic: tuple[str, ...] = ()
) -> Potential:
    """The potential of a model, of a latent vector; other deterministic sites are left out."""
    assert fit.model is not None
    # They would only take another run of the model at each point.
    info = replace(info, deterministic=deterministic)
    return Potential(fit.model, info, params, fit.args, fit.kwargs, forward_mode=fit.forward_mode)


def flat_draws(target: Potential, draws: Sites, block: int) -> Array:
    """Constrained draws of the latent sites as ``(m, d)`` points."""
    ravel, unconstrain = target.info.ravel, target.unconstrain
    return lax.map(lambda draw: ravel(unconstrain("x", draw)), draws, batch_size=block)


def replace_nonfinite(x: Array) -> Array:
    """Points with the first finite one in place of those that are not: a transform that is
    saturated has no finite inverse."""
    fine = jnp.all(jnp.isfinite(x), 1)
    return x[jnp.where(fine, jnp.arange(len(x)), jnp.argmax(fine))]


def points_and_score(fit: Fit, trace: Trace, draws: dict[str, Any]) -> tuple[Array, Array]:
    """Draws in unconstrained space, and there minus the gradient of the potential."""
    info = model_info(trace, sums=True)

    @jax.jit
    def run(params: Params, draws: Sites) -> tuple[Array, Array]:
        potential = potential_of(fit, info, params)

        def at_draw(draw: Sites) -> tuple[Array, Array]:
            x = info.ravel(potential.unconstrain("x", draw))
            return x, -potential.value_and_grad_flat(x, {})[1]

        return lax.map(at_draw, draws, batch_size=default_block_size(trace))

    drawn = {name: jnp.asarray(draws[name]) for name in info.latents}
    return run(fit.params[0], drawn)


def score_points(fit: Fit, proto: Prototype, draws: dict[str, Any]) -> Points:
    """Constrained draws as points with their score."""
    x, score = points_and_score(fit, proto.trace, draws)
    return Points(
        x,
        score,
        partial(coordinate_name, model_info(proto.trace, sums=True).slices),
        minibatch_noise(fit, x),
    )


def minibatch_noise(fit: Fit, x: Array) -> float | None:
    """The shift by which the mean gradient of a minibatch, which all particles share, differs from
    that of all data; None without minibatches."""
    if fit.minibatch is None:
        return None
    info = read_model(fit.minibatch, fit.args, fit.kwargs, sums=True)

    @jax.jit
    def run(params: Params, x: Array) -> Array:
        target = potential_of(fit._replace(model=fit.minibatch), info, params)
        some = x[equally_spaced(len(x), _AT)]

        def mean_gradient(key: Array) -> Array:
            idx = target.draw_rows(key)
            return jnp.mean(lax.map(lambda one: target.value_and_grad_flat(one, idx)[1], some), 0)

        g = lax.map(mean_gradient, random.split(random.key(0), _BATCHES))
        # In units of the particles' spread, coordinate by coordinate, as the shift is.
        centred = (x - jnp.mean(x, 0)) / jnp.sqrt(len(x))
        moved = jnp.matmul(centred, (g - jnp.mean(g, 0)).T, precision="highest")
        return jnp.sqrt(jnp.mean(jnp.sum(moved**2, 0)) / info.size)

    return float(run(fit.params[0], x)) * math.sqrt(_BATCHES / (_BATCHES - 1))
