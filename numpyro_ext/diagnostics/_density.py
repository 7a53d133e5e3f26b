"""Whether the draws of a guide come with their density, read off its trace."""

from collections.abc import Collection
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Delta, Distribution, Unit, biject_to

from numpyro_ext._model.implicit import has_density
from numpyro_ext._typing import Trace

__all__ = ["density_of", "is_data", "is_latent", "log_abs_det", "log_density"]


def is_latent(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def is_data(site: dict[str, Any]) -> bool:
    """An observed site; a ``numpyro.factor``, whose value has size 0, is none."""
    return (
        site["type"] == "sample" and site["is_observed"] and not isinstance(innermost(site), Unit)
    )


def innermost(site: dict[str, Any]) -> Distribution:
    """The distribution under ``expand``, ``mask``, ``to_event`` and transforms."""
    fn = site["fn"]
    while isinstance(getattr(fn, "base_dist", None), Distribution):
        fn = fn.base_dist
    return fn


def log_density(trace: Trace) -> Array:
    """Log joint of a trace in constrained space, plate scales included; traced values allowed."""
    total = jnp.zeros(())
    for site in trace.values():
        if site["type"] == "sample":
            if site["intermediates"]:
                log_prob = site["fn"].log_prob(site["value"], site["intermediates"])
            else:
                log_prob = site["fn"].log_prob(site["value"])
            scale = site["scale"]
            total = total + jnp.sum(log_prob if scale is None else scale * log_prob)
    return total


def log_abs_det(trace: Trace, names: Collection[str]) -> Array:
    """Log Jacobian determinant from unconstrained to constrained values, summed over sites."""
    total = jnp.zeros(())
    for name in names:
        fn, value = trace[name]["fn"], trace[name]["value"]
        if not fn.support.is_discrete:
            transform = biject_to(fn.support)
            u = transform.inv(value)
            total = total + jnp.sum(transform.log_abs_det_jacobian(u, value))
    return total


def density_of(guide_trace: Trace, model_trace: Trace) -> str:
    r"""``"exact"``, ``"bound"`` or ``"none"``: what the log densities of a guide's sites add up to.

    A guide on latent vectors (``AutoContinuous``) draws an auxiliary vector with a density and moves
    it to the model's sites by ``Delta`` s that carry the Jacobian: exact, if the auxiliary values are
    the unconstrained latents themselves. Auxiliary variables beyond these make the sum the density of
    an extended space, a bound. A ``Delta`` that nothing accounts for is a point mass, and an
    ``Implicit`` site has no density at all.
    """
    points, noise = [], []
    for name, site in guide_trace.items():
        if not is_latent(site):
            continue
        fn = innermost(site)
        if not has_density(site["fn"]):
            return "none"
        if name not in model_trace:
            noise.append(np.ravel(jax.device_get(site["value"])))
        elif isinstance(fn, Delta):
            u = biject_to(model_trace[name]["fn"].support).inv(site["value"])
            points.append(np.ravel(jax.device_get(u)))
    if not points:
        return "bound" if noise else "exact"
    point = np.concatenate(points)
    if noise and _same(point, np.concatenate(noise)):
        return "exact"
    has_factor = any(s["type"] == "sample" and s["is_observed"] for s in guide_trace.values())
    covered = sum(map(len, noise)) >= len(point)
    return "bound" if covered and (has_factor or any(_same(point, x) for x in noise)) else "none"


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and bool(np.allclose(x, y, rtol=1e-3, atol=1e-3))
