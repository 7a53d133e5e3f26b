"""The models and guides that an objective, as it is declared, is not made for."""

from inspect import signature
from typing import Any
import warnings

import jax
from jax import Array
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.read import base_distribution, is_data, is_delta, sample_sites
from numpyro_ext._model.units import Layout
from numpyro_ext._typing import Params, Sites, Trace

__all__ = ["refuse", "refuse_hidden_gradient"]


def refuse(objective: Any, layout: Layout, model_trace: Trace, guide_trace: Trace) -> None:
    """An error, or a warning, if an :class:`Objective` is not for these programs."""
    name = type(objective).__name__
    for site in () if objective.can_infer_discrete else layout.not_reparameterized:
        fn = guide_trace[site]["fn"]
        sum_out = ", or sum the site out of the model" if fn.has_enumerate_support else ""
        raise ValueError(
            f"guide site '{site}' ({type(base_distribution(fn)).__name__}) is not"
            f" reparameterised, so {name} has no gradient for it; use VIMCO or"
            f" ThermodynamicELBO with the covariance gradient{sum_out}."
        )
    for site in layout.model_params if objective.upper_bound else ():
        raise ValueError(
            f"{name}: the model has the param site '{site}', and an upper bound that is"
            " minimised over it would lower the evidence; train it with VRELBO, then put its"
            " value into the model (numpyro.handlers.substitute)."
        )
    for site, plate in () if objective.linear else layout.subsampled_latents:
        raise ValueError(
            f"{name}: latent site '{site}' lies in the subsampled plate '{plate}', which does"
            " not enclose every site of model and guide, so one bound cannot be scaled to all"
            " data; use NestedVRELBO or BBAlphaELBO, VRELBO(1.), or no subsample_size."
        )
    if objective.proxy is not None:
        objective.proxy.check(name, layout, model_trace)
    noisy = not (objective.linear or objective.per_datum or objective.proxy is not None)
    for plate, size, batch in layout.subsampled if noisy else ():
        if plate not in layout.plates:
            takes_one = "proxy" in signature(type(objective)).parameters
            by_proxy = "give it proxy=taylor_proxy(model, *args), or " if takes_one else ""
            message = (
                f"{name} takes the noise of a minibatch ({batch} of {size} rows of the plate"
                f" '{plate}') for uncertainty of latent sites that all rows share: the guide"
                f" comes out too wide, often several times; {by_proxy}use BBAlphaELBO, the order 1"
                " (VRELBO(1.), Trace_ELBO), or no subsample_size."
            )
            warnings.warn(InferenceWarning(message), stacklevel=3)


def refuse_hidden_gradient(draws: Any, key: Array, drawn: Sites) -> None:
    """An error if a parameter of the guide is in a density that is not one of a drawn site, or in
    the support of one that is, where the mean of the score is not zero."""

    def others(params: Params) -> dict[str, Any]:
        trace = draws.guide_trace(key, {**draws.params, **params}, drawn)
        return {
            s["name"]: jax.tree.leaves(s["fn"].support)
            if s["name"] in drawn
            else (s["value"], draws.log_q(s))
            for s in sample_sites(trace)
        }

    params = {
        name: draws.params[name] for name in draws.layout.guide_params if name in draws.params
    }
    for name, origins in eval_provenance(others, params=params).items():
        if not any(jax.tree.leaves(origins, is_leaf=lambda x: isinstance(x, frozenset))):
            continue
        site = draws.guide_trace(key)[name]
        kind = "a Delta" if is_delta(site) else "observed" if is_data(site) else "a factor"
        why = f"is {kind} and depends on a parameter, so log q cannot be evaluated at a given value"
        if name in drawn:
            why = "has a support that depends on a parameter, so the mean of its score is not zero"
        raise ValueError(
            f"{type(draws.objective).__name__}: site '{name}' of the guide {why}; use"
            f" {draws.objective.without_log_q}."
        )
