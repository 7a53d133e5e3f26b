"""Where guides and particles begin: the modes of their posterior, or a normal that was fitted."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from numpyro.handlers import block

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.mode_search import DENSE_UP_TO, Mode, of_kind
from numpyro_ext._model.modes import Modes, modes_of
from numpyro_ext._model.read import ModelInfo, latent_sites, unconstrained_shape
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext._numpyro import normal_of_guide
from numpyro_ext._typing import Model, Params

__all__ = ["SEARCH", "InitFrom", "check_sites", "given_modes", "is_searched", "searched_modes"]

SEARCH = "search"
"""The default of ``init_from``."""
InitFrom = Modes | TaylorProxy | tuple[Any, Params] | str | None


def given_modes(init_from: InitFrom) -> Modes | None:
    """``Modes``, or those of a pair ``(guide, params)``, which must be finite, or of a proxy; None
    for None and for a search."""
    if init_from is None or isinstance(init_from, Modes):
        return init_from
    if isinstance(init_from, str) and init_from == SEARCH:
        return None
    if isinstance(init_from, TaylorProxy):
        if init_from.factor is None:
            raise ValueError(
                "init_from is a taylor_proxy that has no normal approximation, because its center"
                " is not near a mode, as its warning said; give a pair (guide, params) of a fitted"
                " AutoMultivariateNormal, or leave init_from out."
            )
        return Modes((Mode(init_from.location, init_from.factor),), init_from.shapes)
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
    shapes = tuple(
        (site["name"], unconstrained_shape(site["fn"].support, jnp.shape(site["value"])))
        for site in latent_sites(guide.prototype_trace)
    )
    return Modes((Mode(loc, scale),), shapes)


def is_searched(size: int, params: Iterable[str], mutable: bool) -> bool:
    """Whether a search makes sense: neither for networks, nor for more latent dimensions than a
    matrix is for.

    :param params: names of the model's ``param`` sites.
    :param bool mutable: whether it has ``mutable`` ones.
    """
    networks = mutable or any(name.endswith("$params") for name in params)
    return 0 < size <= DENSE_UP_TO and not networks


def searched_modes(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    starts: int = 4,
    room: int | None = None,
    who: str = "the guide begins",
) -> Modes | None:
    """The modes of the posterior on these arguments; None, with a warning, where none are found.

    :param room: the number of modes at which the guide can begin; a warning says if there are more.
    """
    if is_traced((args, kwargs)):
        _warn(
            f"{who} at NumPyro's start, because its model's arguments are traced (jax.jit,"
            " jax.vmap) and have no numbers to find a mode from; start it outside, give"
            " init_from=find_modes(model, *args), or init_from=None to be silent."
        )
        return None
    # The search is on numbers, also where the program around it is traced.
    traced = is_traced(jnp.zeros(()))
    try:
        with block(), jax.ensure_compile_time_eval() if traced else nullcontext():
            modes = modes_of(model, args, kwargs, starts=starts)
    except Exception as error:  # whatever stops the search, there is a start without it
        _warn(
            f"{who} at NumPyro's start, because the search for a mode failed: {error}"
            " Give init_from=None to be silent."
        )
        return None
    far = of_kind(modes.problems, "several modes")
    if far and room is not None and len(modes.modes) > room:
        _warn(f"{who} at the heaviest of several modes: {' '.join(far)}")
    return modes


def check_sites(modes: Modes, info: ModelInfo, what: str = "init_from") -> None:
    """An error if the model has other latent sites than those for which the modes were found."""
    if list(info.shapes) != list(modes.shapes):
        raise ValueError(
            f"{what} has the unconstrained latent sites {dict(modes.shapes)}, but the model has"
            f" {dict(info.shapes)}; find or fit it on this model, with the same arguments."
        )


def _warn(message: str) -> None:
    warnings.warn(InferenceWarning(message), stacklevel=2)
