"""Log importance weights, of whatever holds or gives them."""

from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._checks import check_count
from numpyro_ext._model.implicit import IntractableDensityError
from numpyro_ext.diagnostics._evaluate import evaluate, prototype
from numpyro_ext.diagnostics._fit import check_key, fit_of

__all__ = ["log_weights_of"]

INSTEAD = (
    "judge its draws with kernel_stein_discrepancy or, against draws of the posterior, with"
    " maximum_mean_discrepancy."
)


def log_weights_of(
    obj: Any,
    result: Any,
    model_args: tuple | None,
    model_kwargs: dict[str, Any] | None,
    num_samples: int,
    rng_key: Any,
) -> np.ndarray:
    """``(S, *units)`` log weights of arrays, a ``DataTree`` or its part, an ``SVI`` or an engine.

    Chains and restarts are put one after the other.
    """
    if isinstance(obj, np.ndarray | jax.Array | list | tuple | float):
        if not hasattr(obj, "_fields"):
            return np.asarray(obj)
    if isinstance(obj, MCMC):
        raise IntractableDensityError(f"the draws of an MCMC have no density; {INSTEAD}")

    from xarray import DataArray, DataTree

    if isinstance(obj, DataTree):
        if "sample_stats" not in obj or "log_weight" not in obj["sample_stats"]:
            method = obj.attrs.get("inference_method", "unknown")
            raise IntractableDensityError(
                f"the DataTree (inference method '{method}') has no sample_stats.log_weight,"
                f" because its draws have no density; {INSTEAD}"
            )
        obj = obj["sample_stats"]["log_weight"]
    if isinstance(obj, DataArray):
        if not {"chain", "draw"} <= set(obj.dims):
            return obj.to_numpy()
        weight = obj.transpose("chain", "draw", ...).to_numpy()
    else:
        num_samples = check_count("num_samples", num_samples)
        rng_key = check_key(rng_key)
        fit = fit_of(obj, result, model_args, model_kwargs)
        key_prototype, key_draws = jax.random.split(rng_key)
        proto = prototype(fit, key_prototype)
        if proto.marginalized:
            raise IntractableDensityError(
                f"latent site '{proto.marginalized[0]}' was summed out, and the density of the"
                f" model without it is not computed here; {INSTEAD}"
            )
        if proto.density == "none":
            raise IntractableDensityError(
                f"{fit.attributes['guide']} gives draws without a density, so they have no"
                f" importance weights; {INSTEAD}"
            )
        weight = evaluate(fit, proto, key_draws, num_samples, lp=True)["stats"]["log_weight"]
    return weight.reshape(-1, *weight.shape[2:])
