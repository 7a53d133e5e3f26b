"""The fit of an ``SVI``, an engine or an ``MCMC``, and the errors about it."""

from dataclasses import replace
from inspect import signature
from typing import Any
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute
from numpyro.infer import MCMC, SVI, init_to_sample
from numpyro.infer.autoguide import AutoGuide

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.arguments import is_traced, without_handlers
from numpyro_ext._model.checks import check_rows
from numpyro_ext._model.handlers import at_most_all_rows, every_row
from numpyro_ext._model.masked import is_masked, masks_filled
from numpyro_ext._model.read import latent_sites, set_up, shape_trace
from numpyro_ext._numpyro import mcmc_arguments, params_of_hmc, posterior_guide
from numpyro_ext._typing import Diagnosable, Engine, Model, Params
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.full_data import minibatch_plates, on_all_rows


def _name_of(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def check_key(rng_key: Any) -> Array:
    return jax.random.key(0) if rng_key is None else rng_key


def _params_of(obj: Any, result: Any, restart: int) -> Params:
    state = getattr(result, "state", result)
    params = getattr(result, "params", result)
    if isinstance(obj, SVI) and params is state and hasattr(state, "optim_state"):
        params = obj.get_params(state)
    if not isinstance(params, dict):
        raise TypeError(
            f"result is a {type(result).__name__}; pass what run() returned, or a list."
        )
    mutable = getattr(state, "mutable_state", None)
    for name, value in params.items():
        for leaf in jax.tree.leaves(value):
            if not np.all(np.isfinite(np.asarray(leaf))):
                raise ValueError(
                    f"parameter '{name}' of restart {restart} is not finite; run the fit again with"
                    " a smaller step, or with stable_update=True."
                )
    return {**params, **(mutable or {})}


def restarts_of(result: Any) -> list[Any]:
    """The results of a list of restarts; a single result is one restart."""
    is_list = isinstance(result, list | tuple) and not hasattr(result, "_fields")
    return list(result) if is_list else [result]


def _all_params(obj: Any, result: Any) -> list[Params]:
    """One dict of params per restart, all of the same shapes."""
    results = restarts_of(result)
    params = [_params_of(obj, each, i) for i, each in enumerate(results)]
    shapes = [jax.tree.map(jnp.shape, each) for each in params]
    for i, each in enumerate(shapes):
        if each != shapes[0]:
            raise ValueError(f"restart {i} has parameters of other names or shapes than restart 0.")
    return params


def _same_starts(params: list[Params]) -> dict[str, int]:
    """``distinct_restarts`` and a warning if some have the same numbers."""
    numbers = [
        tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(each)) for each in params
    ]
    distinct = len(set(numbers))
    if distinct == len(params) or not any(numbers):
        return {}
    warnings.warn(
        f"only {distinct} of {len(params)} restarts have parameters of their own, because NumPyro's"
        " guides keep the start of their first run; use numpyro_ext.diagnostics.restarts.",
        InferenceWarning,
        stacklevel=5,
    )
    return {"distinct_restarts": distinct}


def check_arguments(args: Any, kwargs: Any) -> tuple[tuple, dict[str, Any]]:
    if not isinstance(args, tuple | list):
        shape = f" of shape {args.shape}" if hasattr(args, "shape") else ""
        raise TypeError(
            f"model_args is a {type(args).__name__}{shape}; for one argument pass model_args=(x,)."
        )
    return tuple(args), kwargs


def check_given(model: Model, args: tuple, kwargs: dict[str, Any]) -> None:
    """An error if the model lacks an argument: an ``SVI`` and an engine keep none."""
    try:
        takes = signature(without_handlers(model))
        takes.bind(*args, **kwargs)
    except ValueError:  # a callable without a signature
        return
    except TypeError as error:
        raise TypeError(
            f"the model takes {takes}: {error}; pass the arguments of the fit, as in"
            " model_args=(x, y)."
        ) from None


def _set_up(guide: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Set up an auto guide that was never called, on data of any number of rows."""
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        model, guide.model = guide.model, at_most_all_rows(guide.model)
        try:
            set_up(guide, args, kwargs)
        finally:
            guide.model = model


def _fit_of_optimised(
    obj: Any, result: Any, model_args: tuple | None, model_kwargs: dict[str, Any] | None
) -> Fit:
    """The fit of an ``SVI`` or an engine, which has no draws yet."""
    if result is None:
        raise ValueError(
            f"{type(obj).__name__} does not keep its parameters: pass result= of run()."
        )
    params = _all_params(obj, result)
    args, kwargs = check_arguments(() if model_args is None else model_args, model_kwargs or {})
    is_svi, guide = isinstance(obj, SVI), obj.guide
    if is_svi:
        kwargs = {**obj.static_kwargs, **kwargs}
    if is_svi and getattr(obj.loss, "multi_sample_guide", False):
        raise ValueError(
            f"{type(obj.loss).__name__} has multi_sample_guide=True; pass an SVI with single draws."
        )
    attributes = {
        "inference_method": "svi" if is_svi else type(obj).__name__.lower(),
        "guide": _name_of(guide),
        "num_restarts": len(params),
        **(_same_starts(params) if len(params) > 1 else {}),
    }
    attributes |= {"loss": _name_of(obj.loss)} if is_svi else {"engine": _name_of(obj)}
    check_given(obj.model, args, kwargs)
    check_rows(obj.model, args, kwargs, init_to_sample)
    particles = getattr(guide, "particles", None)
    masks = not isinstance(guide, AutoGuide) and particles is None
    but = _masked_by(guide, params[0], args, kwargs) if masks else []
    model = on_all_rows(masks_filled(obj.model, but))
    if particles is not None:
        attributes["inference_method"] = "particles"
        if isinstance(guide, AutoGuide):  # other guides may not be jitted
            particles = jax.jit(particles)
        draws = [dict(particles(each)) for each in params]
        return Fit(model, args, kwargs, params, attributes, existing=draws)
    _set_up(guide, args, kwargs)
    linearised = None
    if as_normal := getattr(guide, "as_normal", None):  # a point while it is trained
        guide, params = as_normal(params)
        linearised = guide
    else:
        guide, params = posterior_guide(guide, params, args, kwargs, every_row)
    guide = on_all_rows(guide)
    return Fit(model, args, kwargs, params, attributes, guide, linearised)


def _masked_by(guide: Model, params: Params, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """Latent sites that a guide masks too, so that the loss has neither of their densities."""
    fn = seed(substitute(on_all_rows(guide), data=params), random.key(0))
    return [site["name"] for site in latent_sites(shape_trace(fn, args, kwargs)) if is_masked(site)]


def _fit_of_mcmc(
    mcmc: MCMC, result: Any, model_args: tuple | None, model_kwargs: dict[str, Any] | None
) -> Fit:
    """The fit of an ``MCMC`` that has run."""
    if result is not None:
        raise ValueError("an MCMC holds its own draws; leave out result=.")
    if mcmc.last_state is None:
        raise ValueError("the MCMC has not run; call mcmc.run(...) first.")
    kernel: Any = mcmc.sampler
    if (model := getattr(kernel, "model", None)) is None:
        raise TypeError("the MCMC runs on a potential function; az.from_numpyro takes it.")
    samples: Any = mcmc.get_samples()
    if any(len(x) == 0 for x in samples.values()):  # a site may hold no numbers
        raise ValueError("the MCMC holds no draws; call mcmc.run(...) after the warmup.")
    ran_args, ran_kwargs = mcmc_arguments(mcmc)
    args, kwargs = check_arguments(
        ran_args if model_args is None else model_args,
        ran_kwargs if model_kwargs is None else model_kwargs,
    )
    check_rows(model, args, kwargs, init_to_sample)
    plates = getattr(kernel, "given_plates", {})
    method = getattr(kernel, "inference_method", "mcmc")
    params = getattr(kernel, "params", None) or params_of_hmc(kernel)
    return Fit(
        # NumPyro's kernels leave masked entries flat.
        model=on_all_rows(masks_filled(model) if isinstance(kernel, Diagnosable) else model),
        args=args,
        kwargs=kwargs,
        attributes={"inference_method": method, "kernel": _name_of(kernel)},
        # The parameters of chains in parallel were traced and are gone.
        params=[{n: x for n, x in (params or {}).items() if not is_traced(x)}],
        existing=[samples],
        num_chains=mcmc.num_chains,
        by_minibatches=bool(plates or minibatch_plates(model, ran_args, ran_kwargs)),
    )


def fit_of(
    obj: Any,
    result: Any = None,
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int = 1000,
    rng_key: Any = None,
) -> Fit:
    """The fit of any object that can be converted, with the defaults of all functions."""
    num_samples = check_count("num_samples", num_samples)
    if isinstance(obj, MCMC):
        fit = _fit_of_mcmc(obj, result, model_args, model_kwargs)
    elif isinstance(obj, Engine):
        fit = _fit_of_optimised(obj, result, model_args, model_kwargs)
    else:
        raise TypeError(
            f"obj is a {_name_of(type(obj))}; it must be an SVI or an engine with result=, or an"
            " MCMC that has run. kernel_stein_discrepancy(draws, model=...) judges draws alone."
        )
    rng_key = check_key(rng_key)
    return replace(fit, obj=obj, result=result, rng_key=rng_key, num_samples=num_samples)


def is_fit(obj: Any) -> bool:
    return isinstance(obj, MCMC | Engine)


def refuse_arguments(what: str, **of_a_fit: Any) -> None:
    """An error if arguments that only a fit has were given beside an array."""
    for name in (name for name, x in of_a_fit.items() if x is not None):
        raise TypeError(f"{name} belongs to a fit, and {what} is an array; pass the fit itself.")


def predicting_fit(obj: Any, result: Any = None, **asked: Any) -> Fit:
    """The fit without draws of a cyclical schedule's exploration; an error if draws are NaN."""
    fit = replace(fit_of(obj, result, **asked), needs_latents=False)
    marks = obj.get_extra_fields().get("sampling") if isinstance(obj, MCMC) else None
    if marks is not None:
        kept = np.asarray(marks, bool)
        if not kept.any():
            raise ValueError(
                f"all {kept.size} draws belong to the exploration of the cyclical schedule; draw a"
                " whole cycle."
            )
        existing = [{n: x[kept] for n, x in draws.items()} for draws in fit.existing]
        fit = replace(fit, existing=existing)
    for draws in fit.existing:
        for name, x in draws.items():
            bad = int(np.sum(np.isnan(np.asarray(x, np.float64)).reshape(len(x), -1).any(1)))
            if bad:
                raise ValueError(
                    f"{bad} of {len(x)} draws of site '{name}' are NaN; take a smaller step."
                )
    return fit
