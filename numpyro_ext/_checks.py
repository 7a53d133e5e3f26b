"""Checks of arguments. Each error is one sentence with the given and the allowed values."""

from collections.abc import Callable, Collection
from functools import partial
import inspect
import numbers
from typing import Any

from jax.core import Tracer


class InferenceWarning(UserWarning):
    """The category of warnings about results that are not reliable; the computation goes on."""


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """``value`` as an ``int``, if it is an integer (NumPy's too) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {minimum}.")
    return int(value)


def if_given[T](check: Callable[[str, Any], T], name: str, value: Any) -> T | None:
    """``check(name, value)``; None for an argument that was left out."""
    return None if value is None else check(name, value)


def check_several(num_particles: Any, why: str) -> None:
    """An integer of at least 2; ``why`` says why 1 is too few, and what to use instead."""
    if check_count("num_particles", num_particles) < 2:
        raise ValueError(f"num_particles is {num_particles}; it must be at least 2, because {why}.")


def _check_scalar(name: str, value: Any, kind: str, low: float, strict: bool) -> None:
    if isinstance(value, Tracer):
        return
    if not (low < value if strict else low <= value) or value == float("inf"):
        raise ValueError(f"{name} is {value!r}; it must be a {kind}, finite number.")


def check_positive(name: str, value: Any) -> None:
    """A finite number above 0, or an error; a traced value passes."""
    _check_scalar(name, value, "positive", 0.0, strict=True)


def check_nonnegative(name: str, value: Any) -> None:
    """A finite number of at least 0, or an error; a traced value passes."""
    _check_scalar(name, value, "non-negative", 0.0, strict=False)


def check_share(name: str, value: Any) -> None:
    """A number in [0, 1), or an error; a traced value passes."""
    check_nonnegative(name, value)
    if not isinstance(value, Tracer) and float(value) >= 1:
        raise ValueError(f"{name} is {value!r}; it must be in [0, 1).")


def check_rate(name: str, value: Any) -> None:
    """A number in (0, 1], or an error; a traced value passes."""
    check_positive(name, value)
    if not isinstance(value, Tracer) and float(value) > 1:
        raise ValueError(f"{name} is {value!r}; it must be in (0, 1].")


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """One of ``allowed``, or a ``ValueError`` that lists them."""
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} is {value!r}; it must be one of {words}.")


class OwnArgumentsFirst:
    """The signature of a class with fields as arguments: a subclass's own before its bases'."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        def order(argument: inspect.Parameter) -> int:
            if argument.kind is not argument.KEYWORD_ONLY:
                return len(owner.__mro__) if argument.kind is argument.VAR_KEYWORD else -1
            fields = [vars(base).get("__annotations__", {}) for base in owner.__mro__]
            return next((k for k, own in enumerate(fields) if argument.name in own), len(fields))

        _, *arguments = inspect.signature(owner.__init__).parameters.values()
        return inspect.Signature(sorted(arguments, key=order))


def summary(made: Any, *, defaults: bool = True) -> str:
    """``Name(argument=value, ...)``, the call that made an object, with arrays by their shapes.

    :param bool defaults: whether numbers and words that are the defaults are shown.
    """
    parts = []
    for name, parameter in inspect.signature(type(made).__init__).parameters.items():
        value = getattr(made, name, parameter.empty)
        default = parameter.default
        if value is parameter.empty or parameter.kind is parameter.VAR_KEYWORD or name == "self":
            continue
        if value is default and (not defaults or default is None or isinstance(default, bool)):
            continue
        if not defaults and isinstance(value, (int, float, str)) and value == default:
            continue
        parts.append(f"{name}={_short(value)}")
    return f"{type(made).__name__}({', '.join(parts)})"


def _short(value: Any) -> str:
    shape = getattr(value, "shape", ())
    if shape:
        return f"<array of shape {shape}>"
    if isinstance(value, Tracer):
        return "<traced>"
    if hasattr(value, "dtype"):
        return f"{value}"
    if isinstance(value, dict):
        return f"{{{', '.join(map(str, value))}}}"
    if isinstance(value, partial):
        return _short(value.func)
    if type(value).__repr__ is object.__repr__:
        return type(value).__name__
    return getattr(value, "__name__", None) or repr(value)
