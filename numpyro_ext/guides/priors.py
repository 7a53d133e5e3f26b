"""The normal priors of a model that are the same whatever its other sites and its data are."""

from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.arguments import split_arguments
from numpyro_ext._model.handlers import first_rows
from numpyro_ext._model.program import Program, shape_trace
from numpyro_ext._model.read import ModelInfo, layers
from numpyro_ext._model.start import draw_params
from numpyro_ext._typing import Model, Params, Sites

__all__ = ["NormalPrior", "normal_priors"]

_PLAIN = (dist.Normal, dist.ExpandedDistribution, dist.Independent)


class NormalPrior(NamedTuple):
    """The prior of one latent site."""

    event_dim: int
    infer: dict[str, Any]
    precision: np.ndarray | None
    """In the shape of the site, if the prior is ``Normal(0, scale)`` with a fixed scale."""
    problem: str = ""
    """What it is otherwise."""


def normal_priors(
    model: Model, info: ModelInfo, args: tuple, kwargs: dict[str, Any]
) -> dict[str, NormalPrior]:
    """The prior of each latent site, in the order of the model.

    A scale is fixed if it depends on no latent site, no parameter and no array of the arguments.
    """
    with block():  # a guide that reads its model is traced itself
        params = draw_params(random.key(0), model, info, args, kwargs)
    words, arrays = split_arguments(args, kwargs)
    first = substitute(seed(first_rows(model), random.key(0)), substitute_fn=init_to_uniform)
    trace = shape_trace(first, args, kwargs)
    normal = {
        name
        for name in info.latents
        if all(isinstance(layer, _PLAIN) for layer in layers(trace[name]["fn"]))
    }

    def moments(latents: Sites, params: Params, data: list[Any]) -> dict[str, Any]:
        fn = seed(first_rows(substitute(model, data=params)), random.key(0))
        with block():
            sites = Program(fn, *words.whole(data)).trace(latents)
        return {n: (sites[n]["fn"].mean, sites[n]["fn"].variance) for n in normal}

    z = {name: jnp.zeros(latent.unconstrained.shape) for name, latent in info.latents.items()}
    inputs = {"latents": z, "params": params, "data": [jnp.asarray(x) for x in arrays]}
    shapes = jax.eval_shape(lambda: inputs)
    sources = eval_provenance(moments, **shapes)
    with jax.ensure_compile_time_eval():
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        values = jax.jit(moments)(**zeros)
    priors = {}
    for name, latent in info.latents.items():
        fn, infer = trace[name]["fn"], trace[name]["infer"]
        problem, precision = "", None
        if name not in normal:
            kinds = (type(layer) for layer in layers(fn) if not isinstance(layer, _PLAIN[1:]))
            problem = f"is {next(kinds).__name__}"
        elif set().union(*sources[name]):
            problem = "depends on other sites or on the data"
        elif np.any(np.asarray(values[name][0])):
            problem = "has a mean that is not 0"
        else:
            precision = np.broadcast_to(1 / np.asarray(values[name][1]), latent.constrained.shape)
        priors[name] = NormalPrior(fn.event_dim, infer, precision, problem)
    return priors
