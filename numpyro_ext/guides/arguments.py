"""Checks of what guides are given, each an error of one sentence."""

from collections.abc import Callable, Iterable
import inspect
from typing import Any

__all__ = ["check_call", "check_model", "check_params"]


def check_model(guide: type, model: Any) -> None:
    """An error unless ``model`` can be a model: most of all if ``SVI`` was given a class."""
    name = guide.__name__
    if not callable(model):
        raise TypeError(
            f"{name} was given {type(model).__name__} for its model, a function with numpyro.sample"
            f" sites; if this comes from SVI, pass it a guide and not its class:"
            f" SVI(model, {name}(model), ...)."
        )


def check_params(params: Any, names: Iterable[str], guide: Any) -> None:
    """An error unless ``params`` has these names: NumPyro takes initial values for the others."""
    if not isinstance(params, dict):
        raise TypeError(
            f"params is {type(params).__name__}; it must be the dict that svi.get_params(state)"
            " gives, which is result.params after result = svi.run(...)."
        )
    for name in names:
        if name not in params:
            raise ValueError(
                f"params has no '{name}' but {sorted(params)}; pass what svi.get_params gives for"
                f" this {type(guide).__name__} (prefix '{guide.prefix}')."
            )


def check_call(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
    """An error if the ``features`` of a guide do not take the model's arguments."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        given = [type(one).__name__ for one in args] + [f"{name}=" for name in kwargs]
        raise TypeError(
            f"features has the signature {inspect.signature(fn)}, but it is called with the"
            f" arguments of the model ({', '.join(given)}): {error}; give it the parameters of the"
            " model."
        ) from None
    except ValueError:  # what has no signature is called as it is
        return
