"""Checks of arguments, whose errors are one sentence with the given and the allowed values."""

from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
import inspect
import numbers
from typing import Any

from jax.core import Tracer

__all__ = [
    "InferenceWarning",
    "check_choice",
    "check_count",
    "check_nonnegative",
    "check_positive",
    "check_several",
    "no_count_as_order",
    "of_an_object",
    "summary",
    "with_known_arguments",
]


class InferenceWarning(UserWarning):
    """The category of warnings about results that are not reliable; the computation goes on."""


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """``value`` as an ``int``, if it is an integer (NumPy's too) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {minimum}.")
    return int(value)


def check_several(name: str, value: Any, why: str) -> None:
    """An integer of at least 2; ``why`` says what one cannot do, and what to use instead."""
    if check_count(name, value) < 2:
        raise ValueError(f"{name} is {value}; it must be at least 2, because {why}.")


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


def with_known_arguments(init: Callable[..., None], hints: Mapping[str, str]) -> Any:
    """``__init__`` that reports an unknown keyword in the name of the class that was called.

    ``hints`` says what to use instead of a keyword that is known from elsewhere.
    """
    parameters = inspect.signature(init).parameters
    known = [name for name in parameters if name != "self"]
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return init

    @wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                hint = hints.get(name, f"it takes {', '.join(known)}")
                raise TypeError(f"{type(self).__name__} has no argument '{name}': {hint}.")
        init(self, *args, **kwargs)

    return wrapped


def no_count_as_order(init: Callable[..., None]) -> Callable[..., None]:
    """``__init__`` that refuses ``Name(10)`` where the first argument is an order and the second K.

    In ``Trace_ELBO(10)`` that is the number of particles.
    """
    order, *rest = [name for name in inspect.signature(init).parameters if name != "self"] or [""]
    if order not in ("alpha", "order") or "num_particles" not in rest:
        return init

    @wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given = args[0] if len(args) == 1 and "num_particles" not in kwargs else None
        if isinstance(given, numbers.Integral) and int(given) > 2:
            name = type(self).__name__
            raise ValueError(
                f"{name}({given}) is of order {given}, with the default number of particles; for"
                f" {given} particles write {name}(num_particles={given}), and for that order"
                f" {name}({given}.0)."
            )
        init(self, *args, **kwargs)

    return wrapped


def of_an_object(method: Callable[..., Any]) -> Any:
    """A method of a loss with an error for the case that its class itself is given as the loss."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "loss_with_mutable_state"):
            raise TypeError(
                "the loss is a class and not an object; call it, as in SVI(model, guide, optim,"
                " loss=VRELBO()) instead of loss=VRELBO."
            )
        return method(self, *args, **kwargs)

    return wrapped


def summary(
    made: Any, argument: Callable[[Any, str, Any], Any] = getattr, *, defaults: bool = True
) -> str:
    """
    ``Name(argument=value, ...)``, the call that made an object, with arrays by their shapes.

    :param argument: ``(made, name, default)`` to the value of an argument; an attribute by default.
    :param bool defaults: whether numbers and words that are the defaults are shown.
    """
    parts = []
    for name, parameter in inspect.signature(type(made).__init__).parameters.items():
        value = argument(made, name, parameter.empty)
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
