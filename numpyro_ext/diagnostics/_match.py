"""Whether a fit and the program that it is evaluated on belong together."""

import math
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_sample
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.read import Site, trace_of
from numpyro_ext._typing import Trace
from numpyro_ext.diagnostics._fit import Fit

__all__ = ["check_known", "check_size", "union"]


def check_size(site: Site, value: Array) -> None:
    """An error if a latent site of the model has another size than its draws."""
    shape = site["kwargs"].get("sample_shape", ()) + tuple(site["fn"].shape())
    drawn = jnp.shape(value)
    # Inside a loop a value has an axis more, that of its steps.
    if len(drawn) == len(shape) and jnp.size(value) != math.prod(shape):
        raise ValueError(
            f"the draws of latent site '{site['name']}' have shape {drawn}, but on these arguments"
            f" the model gives it the shape {shape}: it is known for the rows of the training data"
            " alone; pass these as model_args, or fit a guide that infers it from the data."
        )


def check_known(fit: Fit, model_trace: Trace, guide_trace: Trace) -> None:
    """An error that names a parameter or a mutable site of which the fit does not hold the value.

    NumPyro would start it anew, and so evaluate another model. A parameter of the model that starts
    at a constant may be missing: it was not trained, or is substituted in the model.
    """
    is_chain = "kernel" in fit.attributes
    missing = []
    for name, site in {**guide_trace, **model_trace}.items():
        if site["type"] not in ("param", "mutable") or name in fit.params[0]:
            continue
        if site["type"] == "param" and name in guide_trace:
            raise ValueError(
                f"the result has no parameter '{name}' of the guide, but {sorted(fit.params[0])};"
                " pass the result of a fit with this guide."
            )
        # Names that begin with an underscore are the counters of an objective.
        if site["type"] == "mutable" and not is_chain and not name.startswith("_"):
            raise ValueError(
                f"the mutable site '{name}' has a value in the state of the SVI, which a params"
                " dict such as svi.get_params(state) does not hold; pass result=state, or what"
                " run() returned."
            )
        if site["type"] == "param":
            missing.append(name)
    for name in _random_starts(fit, missing):
        remedy = "pass the result of its own fit"
        if is_chain:
            remedy = (
                "run NUTS, HMC or a kernel of numpyro_ext.mcmc with chain_method='sequential' or"
                " 'vectorized'"
            )
        raise ValueError(
            f"parameter '{name}' of the model starts at random, and the value that it had in this"
            f" fit is not known; {remedy}, or put the value into the model by"
            " numpyro.handlers.substitute."
        )


def _random_starts(fit: Fit, names: list[str]) -> list[str]:
    """Those of these parameters of the model whose start depends on the key."""
    if not names:
        return []

    def starts(key: Array) -> dict[str, Any]:
        model: Any = substitute(seed(fit.model, key), substitute_fn=init_to_sample)
        trace = trace_of(model, fit.args, fit.kwargs)
        return {name: trace[name]["value"] for name in names}

    found = eval_provenance(starts, key=random.key(0))
    return [name for name in names if union(found[name])]


def union(sources: Any) -> frozenset[str]:
    """All that any array of a tree depends on, by ``eval_provenance``."""
    leaves = jax.tree.leaves(sources, is_leaf=lambda x: isinstance(x, frozenset))
    return frozenset[str]().union(*leaves)
