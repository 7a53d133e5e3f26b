"""What is read on the host, by a callback, where a plate takes its rows."""

import abc
import functools
import math
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_ext.data._callback import read_on_host
from numpyro_ext.data._parts import Parts, read_shapes

Rows = Any
"""NumPy arrays with the same number of rows: one, or a dict or tuple of them."""


class NotInMemory(TypeError):
    """An operation on the whole of rows on the host."""


class HostRows(abc.ABC):
    """Rows on the host, of which ``x[i]`` reads those with the numbers ``i``, as JAX arrays.

    :param tuple key: what makes two of them equal, so that a program serves for both.
    """

    parts: Parts | None = None
    """Which process and device reads which rows, if they are spread over several."""
    is_stream = False
    """True if rows come as they are, and none can be chosen."""

    def __init__(self, key: tuple) -> None:
        self._key = (type(self), *key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostRows) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The source, for a message."""

    @property
    @abc.abstractmethod
    def row(self) -> Any:
        """Shape and dtype of a row of each array of a read, as the source has them."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number N of rows."""

    @abc.abstractmethod
    def read(self, index: np.ndarray) -> Rows:
        """Rows by numbers of any shape; they may be a view of the source."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array; ``(N,)`` of several."""
        row = self.row
        return (len(self), *(row.shape if isinstance(row, jax.ShapeDtypeStruct) else ()))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """As JAX has it."""
        if not isinstance(self.row, jax.ShapeDtypeStruct):
            raise TypeError(f"{self.name} has several arrays, each of its own dtype.")
        return as_jax_has_it(self.row.dtype)

    @property
    def row_in_jax(self) -> Any:
        """:attr:`row` with the dtypes of JAX."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, as_jax_has_it(x.dtype)), self.row
        )

    @property
    def bytes_of_a_row(self) -> int:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.row))

    def __getitem__(self, index: Any) -> Any:
        """The rows ``index``, integers of any shape; ``x[i, j]`` is ``x[i][..., j]``."""
        if isinstance(index, tuple):
            rows, *rest = index
            axes = (slice(None),) * (1 if isinstance(rows, slice) else jnp.ndim(rows))
            return self[rows][(*axes, *rest)]
        if not isinstance(index, Tracer | Array):
            index = np.asarray(index)
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(
                f"rows of {self!r} are taken by integers, and the index is of dtype {index.dtype}."
            )
        if self.parts is None:
            return read_together([self], index)[0]
        row = self.row_in_jax
        read = functools.partial(self._read_part, self.parts, row)
        if not isinstance(index, Tracer):
            return self.parts.everywhere(read, row, index)
        return self.parts.together(read, row, index)

    def _read_part(self, parts: Parts, row: Any, device: Any, index: Any) -> Rows:
        """The rows which the device with that number along the mesh axis reads; 0 for others."""
        mine, index = parts.of(int(np.reshape(device, -1)[0]), np.asarray(index))
        placed = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), read_shapes(row, index))
        if mine.any():
            rows = jax.tree.leaves(self.read_as(row, index[mine]))
            for x, own in zip(jax.tree.leaves(placed), rows, strict=True):
                x[mine] = own
        return placed

    def read_as(self, row: Any, index: np.ndarray) -> Rows:
        """Rows with the dtypes that the program expects, which its ``x64`` has set."""
        return jax.tree.map(lambda x, like: self._converted(x, like.dtype), self.read(index), row)

    def _converted(self, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        with np.errstate(over="ignore"):
            new = x.astype(dtype, copy=False)
        if x.dtype.itemsize > new.dtype.itemsize:
            lost = new != x if x.dtype.kind in "iu" else np.isinf(new) & ~np.isinf(x)
            if np.any(lost):
                raise ValueError(
                    f"{self.name} has {x[lost][0]}, too large for {dtype}; set jax_enable_x64."
                )
        return new

    def __jax_array__(self) -> Array:
        raise NotInMemory(
            f"{self!r} is not in memory; take rows by x[i], where i are the indices of the plate:"
            " `with numpyro.plate(name, len(x), subsample_size=B) as i`."
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.__jax_array__())

    __iter__ = None


def read_together(sources: list[HostRows], index: Any) -> list[Any]:
    """``[x[index] for x in sources]``, in one callback where the index is traced."""
    rows = [x.row_in_jax for x in sources]

    def read(index: Any) -> list[Rows]:
        numbers = np.asarray(index)
        return [x.read_as(row, numbers) for x, row in zip(sources, rows, strict=True)]

    if not isinstance(index, Tracer):
        return jax.tree.map(jnp.array, read(index))  # a copy: rows may be a view of the source
    return read_on_host(read, rows, index)


def as_jax_has_it(dtype: Any) -> np.dtype:
    """The dtype of an array that JAX makes of such numbers."""
    return np.dtype(jax.dtypes.canonicalize_dtype(np.dtype(dtype).newbyteorder("=")))


def is_rows(x: Any) -> bool:
    return isinstance(x, HostRows)


def rows_among(tree: Any) -> list[HostRows]:
    """The rows on the host among the arguments of a model."""
    return list(filter(is_rows, jax.tree.leaves(tree, is_leaf=is_rows)))


def is_on_host(tree: Any) -> bool:
    return bool(rows_among(tree))


def is_stream(tree: Any) -> bool:
    """Whether there are rows among the arguments of a model that cannot be chosen."""
    return any(x.is_stream for x in rows_among(tree))


class Same:
    """An object that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
