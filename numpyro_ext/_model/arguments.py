"""The arguments of a model split into arrays, and the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block, seed

from numpyro_ext.data._rows import Same, rows_among

_NUMBERS = "biufc"
"""The kinds of dtypes that JAX has."""


def is_traced(tree: Any) -> bool:
    """Return whether a leaf has no numbers yet, as under ``jax.jit``."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


class _Indexed(np.ndarray):
    """A NumPy array with numbers that a model can read, and rows that a traced index can take. If
    the numbers are from a ``frame``, it answers to what NumPy lacks or means otherwise."""

    frame: Any = None

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, (tuple, list)) else (index,)
        if any(isinstance(part, Tracer) for part in parts):
            return jnp.asarray(np.asarray(self))[index]
        if self.frame is not None and any(isinstance(part, str) for part in parts):
            return indexed(self.frame[index])
        return super().__getitem__(index)

    def __getattr__(self, name: str) -> Any:
        if self.frame is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return indexed(getattr(self.frame, name))


def _of_frame(name: str) -> Callable[..., Any]:
    def method(self: _Indexed, *args: Any, **kwargs: Any) -> Any:
        there: Any = super(_Indexed, self) if self.frame is None else self.frame
        return indexed(getattr(there, name)(*args, **kwargs))

    return method


for _name in ("all", "any", "max", "mean", "min", "std", "sum", "var"):
    setattr(_Indexed, _name, _of_frame(_name))


def _frame_of(x: Any) -> Any:
    """The frame or Series that an argument is, or has its numbers from; None of any other."""
    if isinstance(x, _Indexed):
        return x.frame
    return x if hasattr(x, "to_numpy") else None


def indexed(x: Any) -> Any:
    """The arguments of a model; arrays of NumPy, frames and Series take traced indices."""
    frame = x if _frame_of(x) is x else None
    numbers = x if frame is None else np.asarray(frame.to_numpy())
    if type(numbers) in (np.ndarray, np.memmap) and numbers.dtype.kind in _NUMBERS:
        view = numbers.view(_Indexed)
        view.frame = frame
        return view
    if type(x) in (list, tuple):
        return type(x)(indexed(item) for item in x)
    if type(x) is dict:  # not by jax.tree, which sorts the keys
        return {key: indexed(value) for key, value in x.items()}
    return x


def check_frames(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """An error if the model does not run on a frame among its arguments, where a caller hands them
    on as they are: this package makes arrays of frames, NumPyro's own classes do not."""
    if not (frames := frames_in((args, kwargs))):
        return
    try:
        with block():
            seed(model, jax.random.key(0))(*args, **kwargs)
    except Exception as error:
        name = type(frames[0]).__name__
        raise TypeError(
            f"the model does not run on the {name} among its arguments ({type(error).__name__}), as"
            f" NumPyro's SVI and Trace_ELBO hand it on; pass arrays, jnp.asarray({name.lower()}"
            ".to_numpy()) or one for each column."
        ) from error


def frames_in(tree: Any) -> list[Any]:
    """The frames and Series among the arguments of a model, of which others have the numbers."""
    return [x for x in jax.tree.leaves(tree) if _frame_of(x) is x is not None]


def has_words(x: Any) -> bool:
    """Return whether an array, a frame or a Series has a dtype that JAX does not have."""
    frame = _frame_of(x)
    numbers = x if frame is None else frame.to_numpy()
    return isinstance(numbers, np.ndarray) and numbers.dtype.kind not in _NUMBERS


def without_handlers(model: Any) -> Any:
    """The function that a user wrote, with the signature that names the arguments."""
    while hasattr(model, "fn"):
        model = model.fn
    return model


@dataclass(frozen=True)
class Arguments:
    """Arguments of a model without their arrays, a static argument of ``jax.jit``."""

    tree: Any
    fixed: tuple[tuple[int, Any], ...]
    """The leaves that are no arrays (numbers, words, functions), with their places."""

    def whole(self, arrays: list[Array]) -> tuple[tuple, dict[str, Any]]:
        """The arguments and keyword arguments with these arrays."""
        leaves: list[Any] = list(arrays)
        for place, value in self.fixed:
            leaves.insert(place, value.value if isinstance(value, Same) else value)
        return jax.tree.unflatten(self.tree, leaves)


def split_arguments(
    args: tuple, kwargs: dict[str, Any], *, hold: bool = False
) -> tuple[Arguments, list[Any]]:
    """The rest of the arguments of a model, and the arrays among them. Frames belong to the rest;
    so do arrays that it is to ``hold``, for a model that looks at their numbers."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    fixed, arrays = [], []
    for place, leaf in enumerate(leaves):
        frame = _frame_of(leaf)
        x = leaf if frame is None else frame
        is_array = isinstance(x, np.ndarray | Array)
        if is_array and not hold and not has_words(x):
            arrays.append(x)
        else:
            fixed.append((place, Same(x) if is_array or frame is not None else x))
    return Arguments(tree, tuple(fixed)), arrays


def rows_on_host(tree: Any) -> int:
    """How many rows are on the host among the arguments of a model."""
    return max(map(len, rows_among(tree)), default=0)
