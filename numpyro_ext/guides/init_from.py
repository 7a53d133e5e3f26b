"""Where a guide begins: the modes of its posterior, or the normal of a fitted guide."""

from contextlib import nullcontext
from typing import Any, NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.modes import Modes, modes_of
from numpyro_ext._model.read import ModelInfo, latent_sites, unconstrained_shape
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext._numpyro import normal_of_guide
from numpyro_ext._typing import Model

__all__ = ["SEARCH", "Start", "check_sites", "given_start", "searched_start"]

SEARCH = "search"
"""The default of ``init_from``."""


class Start(NamedTuple):
    """Normal distributions of all latent sites in unconstrained space, where a guide begins."""

    shapes: dict[str, tuple[int, ...]]
    """The unconstrained shape of each site, in the order of the vector."""
    shares: np.ndarray
    """``(K,)``, the heaviest first."""
    centers: np.ndarray
    """``(K, latent_dim)``."""
    roots: np.ndarray
    """The lower triangular factors of the covariances, or their diagonals if these are so."""


def given_start(init_from: Any) -> Start:
    """That of ``Modes``, of a pair ``(guide, params)``, which must be finite, or of a proxy."""
    if isinstance(init_from, Modes):
        return _of_modes(init_from)
    if isinstance(init_from, TaylorProxy):
        if init_from.factor is None:
            raise ValueError(
                "init_from is a taylor_proxy that has no normal approximation, because its center"
                " is not near a mode, as its warning said; give a pair (guide, params) of a fitted"
                " AutoMultivariateNormal, or leave init_from out."
            )
        return _single(dict(init_from.shapes), init_from.location, init_from.factor)
    if not (
        isinstance(init_from, tuple) and len(init_from) == 2 and isinstance(init_from[1], dict)
    ):
        raise TypeError(
            f"init_from is {type(init_from).__name__}; it must be a pair (guide, params) of a"
            " fitted guide such as AutoMultivariateNormal and the params of its svi.run, the result"
            f" of find_modes, a taylor_proxy at a mode, None for NumPyro's start, or {SEARCH!r}."
        )
    guide, params = init_from
    loc, scale = normal_of_guide(guide, params)
    if not bool(jnp.all(jnp.isfinite(loc)) & jnp.all(jnp.isfinite(scale))):
        raise ValueError(
            f"the mean or the scale of the {type(guide).__name__} of init_from is not finite; fit"
            " it at a smaller learning rate."
        )
    shapes = {
        site["name"]: unconstrained_shape(site["fn"].support, jnp.shape(site["value"]))
        for site in latent_sites(guide.prototype_trace)
    }
    return _single(shapes, loc, scale)


def searched_start(
    model: Model, args: tuple, kwargs: dict[str, Any], starts: int, room: int
) -> Start | None:
    """The modes of the posterior on these arguments; None, with a warning, where none are found.

    :param room: the number of modes at which the guide can begin; a warning says if there are more.
    """
    if is_traced((args, kwargs)):
        _warn(
            "the guide begins at NumPyro's start, because its model's arguments are traced"
            " (jax.jit, jax.vmap) and have no numbers to find a mode from; call svi.init outside,"
            " give init_from=find_modes(model, *args), or init_from=None to be silent."
        )
        return None
    # The search is on numbers, also where the program around it is traced.
    traced = is_traced(jnp.zeros(()))
    try:
        with block(), jax.ensure_compile_time_eval() if traced else nullcontext():
            modes = modes_of(model, args, kwargs, starts=starts)
    except Exception as error:  # whatever stops the search, the guide has a start without it
        _warn(
            f"the guide begins at NumPyro's start, because the search for a mode failed: {error}"
            " Give init_from=None to be silent."
        )
        return None
    far = [problem for problem in modes.problems if problem.kind == "several modes"]
    if far and len(modes.modes) > room:
        _warn(f"the guide begins at the heaviest of several modes: {' '.join(far)}")
    return _of_modes(modes)


def _of_modes(modes: Modes) -> Start:
    def stacked(name: str) -> np.ndarray:
        return np.stack([np.asarray(getattr(mode, name)) for mode in modes.modes])

    return Start(dict(modes.shapes), *map(stacked, ("share", "center", "factor")))


def _single(shapes: dict[str, tuple[int, ...]], center: Any, root: Any) -> Start:
    return Start(shapes, np.ones(1), np.asarray(center)[None], np.asarray(root)[None])


def _warn(message: str) -> None:
    warnings.warn(InferenceWarning(message), stacklevel=2)


def check_sites(start: Start, info: ModelInfo) -> None:
    """An error if the model has other latent sites than what ``init_from`` was found for."""
    if list(info.shapes) != list(start.shapes.items()):
        raise ValueError(
            f"init_from has the unconstrained latent sites {start.shapes}, but the model has"
            f" {dict(info.shapes)}; find or fit it on this model, with the same arguments."
        )
