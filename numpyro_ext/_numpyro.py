"""NumPyro's private names and attributes: nowhere else in the package, not even as strings.

Each was read from NumPyro 0.22.0.
"""

from collections.abc import Callable, Sequence
import copy
from typing import Any

from jax import jit
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed
from numpyro.infer import MCMC
from numpyro.infer.autoguide import (
    AutoGuide,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoSemiDAIS,
)
from numpyro.infer.util import (
    _substitute_default_key as default_key,
)
from numpyro.infer.util import (
    _without_rsample_stop_gradient as without_rsample_stop_gradient,
)
from numpyro.util import _validate_model as validate_model

from numpyro_ext._typing import Model, Params

__all__ = [
    "default_key",
    "mask_of",
    "max_tree_depth",
    "mcmc_arguments",
    "posterior_guide",
    "validate_model",
    "without_rsample_stop_gradient",
]


def mask_of(fn: dist.Distribution) -> Any:
    """The mask of a ``MaskedDistribution``; None for any other distribution."""
    return getattr(fn, "_mask", None)


def max_tree_depth(kernel: Any) -> int | None:
    """The limit of ``NUTS`` after warmup; None for a kernel that builds no trees."""
    limit = getattr(kernel, "_max_tree_depth", None)
    return limit[-1] if isinstance(limit, tuple) else limit


def mcmc_arguments(mcmc: MCMC) -> tuple[tuple, dict[str, Any]]:
    """The model's arguments in the last ``run``."""
    state: Any = mcmc
    return state._args, state._kwargs


def posterior_guide(
    guide: Model,
    params: Sequence[Params],
    args: tuple,
    kwargs: dict[str, Any],
    on_every_row: Callable[[Model], Model],
) -> tuple[Model, list[Params]]:
    """A guide whose call draws what ``sample_posterior`` draws, for all data, and its params.

    Nearly every guide is that already and comes back as it is. ``AutoLaplaceApproximation`` calls a
    point mass while it is fitted, and becomes a Normal; ``AutoSemiDAIS`` fixes the size of its
    minibatch, and gets the full one by ``on_every_row(model)``. The guide itself is not changed, except that
    a guide which was never called is set up.
    """
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        seed(guide, 0)(*args, **kwargs)
    if isinstance(guide, AutoGuideList):
        whole: Any = copy.copy(guide)
        whole._guides, params = [], list(params)
        for part in guide:
            part, params = posterior_guide(part, params, args, kwargs, on_every_row)
            whole._guides.append(part)
        return whole, params
    if isinstance(guide, AutoLaplaceApproximation):
        normal: Any = copy.copy(guide)
        loc, scale_tril = f"{guide.prefix}_loc", f"{guide.prefix}_scale_tril"
        normal._get_posterior = lambda *args, **kwargs: dist.MultivariateNormal(
            numpyro.param(loc), scale_tril=numpyro.param(scale_tril), validate_args=False
        )
        factor = jit(lambda one: guide.get_transform(one).scale_tril)
        params = [{**one, scale_tril: factor(one)} for one in params]
        if any(bool(jnp.any(jnp.diag(one[scale_tril]) == 0)) for one in params):
            raise ValueError(
                "the Hessian that AutoLaplaceApproximation takes at its parameters is singular or not"
                " positive, so it has no Normal to draw from; fit it longer, or use AutoNormal."
            )
        return normal, params
    if isinstance(guide, AutoSemiDAIS):
        full: Any = copy.copy(guide)
        name, size, _ = full._local_plate
        full._local_plate = (name, size, size)
        full.local_model = on_every_row(full.local_model)
        return full, list(params)
    return guide, list(params)
