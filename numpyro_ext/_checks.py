"""Checks of arguments, each one sentence: what was given, and what is allowed."""

from collections.abc import Collection
import numbers
from typing import Any

from jax.core import Tracer

__all__ = ["InferenceWarning", "check_choice", "check_count", "check_nonnegative", "check_positive"]


class InferenceWarning(UserWarning):
    """A result that is not what it seems: shown once where it arises, the work goes on."""


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """``value`` as an ``int`` if it is an integer (NumPy's too) of at least ``minimum``, or an error."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {minimum}.")
    return int(value)


def _check_scalar(name: str, value: Any, kind: str, low: float, strict: bool) -> None:
    if isinstance(value, Tracer):
        return
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; it must be a {kind} number.") from None
    if not (low < number if strict else low <= number) or number == float("inf"):
        raise ValueError(f"{name} is {value!r}; it must be a {kind}, finite number.")


def check_positive(name: str, value: Any) -> None:
    """A finite number above 0, or an error; a traced value passes."""
    _check_scalar(name, value, "positive", 0.0, strict=True)


def check_nonnegative(name: str, value: Any) -> None:
    """A finite number of at least 0, or an error; a traced value passes."""
    _check_scalar(name, value, "non-negative", 0.0, strict=False)


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """One of ``allowed``, or a ``ValueError`` that lists them."""
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} is {value!r}; it must be one of {words}.")
