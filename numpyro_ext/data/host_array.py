"""Rows that stay on the host or on disk, and are read when a plate asks for them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
import functools
from importlib import import_module
import math
import os
from pathlib import Path
from typing import Any
import warnings

import jax
from jax import Array
from jax.sharding import NamedSharding
import numpy as np

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.data._mapped import MappedRows
from numpyro_ext.data._parts import Parts
from numpyro_ext.data._rows import HostRows, Rows, Same

_NUMBERS = "biufc"
_EXAMPLES = "such as np.load(file, mmap_mode='r'), a Zarr or HDF5 array, or a column of a frame"


@jax.tree_util.register_static
class HostArray(HostRows):
    r"""
    Rows that stay where they are, in NumPy or on disk, and are read when a plate asks for them.

    It goes where an array of the data goes, and the model is not changed: ``x[i]`` are the rows
    ``i`` as a JAX array, also under ``jax.jit``, ``jax.vmap`` and ``jax.grad``, by a callback to
    the host; ``len(x)``, ``x.shape`` and ``x.dtype`` are known without a read.

    The source is one of

     - a NumPy array, or ``np.memmap`` (``np.load(file, mmap_mode="r")``);
     - what has ``shape`` and ``dtype`` and takes a sorted array of integers: Zarr, h5py;
     - a column of a pandas or polars frame, or a whole frame; its rows are then dicts of columns;
     - a column or a table of Arrow, memory-mapped (``pa.ipc.open_file(pa.memory_map(file))``).
       Parquet is not made for single rows; convert it once, by
       ``np.save("x.npy", pq.read_table(file, columns=["x"])["x"].to_numpy())`` or, for larger
       files, by writing its batches as an Arrow file;
     - a data set with ``len(source)`` and ``source[k]``, as PyTorch, Grain and Hugging Face have,
       of numbers, arrays, or dicts or tuples of them;
     - a dict or tuple of these with the same number of rows, which are read together.

    Nothing is copied or hashed. Two objects are equal if their sources are the same memory, file or
    object and their transforms the same function, so that a new one does not compile anew; a source
    that changes between two calls of a program is read as it is at each. Inside a loop the compiler
    may read rows that do not depend on the step once for all steps.

    Numbers have the dtypes of JAX, in the order of the bytes of the machine: 64 bits become 32
    without ``jax_enable_x64``, with an error for a number that does not fit. A read that fails, a
    row that is not there and a NaN stop the run with an error that names the source and the row,
    and an :class:`InferenceWarning` names chunks of Zarr or HDF5 that have not been written.

    :param source: where the rows are.
    :param transform: a function of the rows that were read, in NumPy (the array, dict or tuple),
        which returns as many rows: to standardise, to decode. Its output's shapes are found once.
    :param bool allow_nan: whether NaN is a value of the data, as where the model masks what is
        missing.
    :param sharding: a ``NamedSharding`` of one axis, ``P("rows")``, over the devices of all
        processes (``jax.distributed``), of which each gives a source with the rows of its own:
        process 0 has the first, and ``len(x)`` counts all. A row is read by the process that has
        it, and the rows of a batch are spread over the devices, which share out the step.

    .. note:: Each ``x[i]`` is a call to the host of its own; put columns that are used together
        into one object: ``rows = HostArray({"x": x, "y": y})``, ``b = rows[i]``, ``b["x"]``.

    .. doctest::

        >>> import numpy as np, numpyro, numpyro.distributions as dist
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_ext.data import HostArray
        >>> from numpyro_ext.mcmc import SGLD
        >>> x = HostArray(np.linspace(1.0, 3.0, 1000))
        >>> x.shape, x.dtype.name, x[np.array([0, 999])].tolist()
        ((1000,), 'float32', [1.0, 3.0])
        >>> def model(x):
        ...     loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("rows", len(x), subsample_size=50) as i:
        ...         numpyro.sample("x", dist.Normal(loc, 1.0), obs=x[i])
        >>> mcmc = MCMC(SGLD(model, 2e-5), num_warmup=500, num_samples=5000, progress_bar=False)
        >>> mcmc.run(random.key(0), x)
        >>> draws = mcmc.get_samples()["loc"]
        >>> print(f"{draws.mean():.1f} +- {draws.std():.2f}")  # exact: 2.0 +- 0.032
        2.0 +- 0.03
    """

    def __init__(
        self,
        source: Any,
        *,
        transform: Callable[[Rows], Rows] | None = None,
        allow_nan: bool = False,
        sharding: NamedSharding | None = None,
    ) -> None:
        if isinstance(source, HostArray):
            raise TypeError("the source is a HostArray; pass what it was made of.")
        self.source, self.transform, self.allow_nan = source, transform, allow_nan
        self.sharding = sharding
        self._set_up()

    def _set_up(self) -> None:
        self._columns = jax.tree.map(
            _column, _by_names(self.source), is_leaf=lambda x: type(x) not in (dict, tuple)
        )
        columns, self._tree = jax.tree.flatten(self._columns, is_leaf=_is_column)
        self._leaves: list[_Column] = columns
        lengths = sorted({column.shape[0] for column in columns})
        if len(lengths) != 1:
            words = f"the columns of the source have {lengths} rows; all must have the same number."
            raise ValueError(words if lengths else "the source has no column.")
        self._length = lengths[0]
        if not self._length:
            raise ValueError(f"{columns[0].name} has no row.")
        self._ahead: tuple[int, int, Future[Rows]] | None = None
        self._last = 0
        same = tuple(column.identity for column in columns)
        if self.sharding is not None:
            self.parts = Parts(self.sharding, self._length)
        spread = None if self.parts is None else self.parts.key
        super().__init__((self._tree, same, self.transform, self.allow_nan, spread))

    def __getstate__(self) -> dict[str, Any]:
        names = "source", "transform", "allow_nan", "sharding"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._set_up()

    @property
    def name(self) -> str:
        """The source, for a message."""
        return " and ".join(column.name for column in self._leaves)

    def __len__(self) -> int:
        return self._length if self.parts is None else self.parts.length

    @functools.cached_property
    def row(self) -> Any:
        rows = self._columns
        if self.transform is not None:
            rows = self._take(np.arange(min(2, self._length)))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows, is_leaf=_is_column
        )

    def __getitem__(self, index: Any) -> Any:
        """The rows ``index``: integers of any shape, a slice, or ``...``; ``x[i, j]`` is
        ``x[i][..., j]``, and a word names a column of a source that has several."""
        if isinstance(index, str):
            if self.transform is not None or not isinstance(self._columns, dict):
                raise TypeError(f"{self!r} has no columns with names; take rows, and then x[i].")
            column = _by_names(self.source)[index]
            return HostArray(column, allow_nan=self.allow_nan, sharding=self.sharding)
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        elif index is Ellipsis:
            index = np.arange(len(self))
        return super().__getitem__(index)

    def read(self, index: np.ndarray) -> Rows:
        """Contiguous rows that follow the last ones are a pass: the next piece is read ahead."""
        flat, size = index.reshape(-1), index.size
        low, high = (int(flat.min()), int(flat.max())) if size else (0, 0)
        if low < -self._length or high >= self._length:
            wrong = low if low < -self._length else high
            raise IndexError(
                f"row {wrong} of {self.name} was asked for, which has {self._length} rows."
            )
        if low < 0:
            flat = np.where(flat < 0, flat + self._length, flat)
        if size > 1 and flat[-1] - flat[0] == size - 1 and np.all(np.diff(flat) == 1):
            taken = self._piece(int(flat[0]), int(flat[0]) + size)
        else:
            taken = self._take(flat)
        if index.ndim == 1:
            return taken
        return jax.tree.map(lambda x: x.reshape((*index.shape, *x.shape[1:])), taken)

    def _piece(self, begin: int, end: int) -> Rows:
        """Rows ``begin`` to ``end - 1``; those behind them are read meanwhile, if it is a pass."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (begin, end):
            rows = ahead[2].result()
        else:
            rows = self._take(range(begin, end))
        goes_on, self._last = self._last == begin > 0, end
        if goes_on and end < self._length:
            to = min(2 * end - begin, self._length)
            mapped = [c.array for c in self._leaves if isinstance(c.array, MappedRows)]
            if self.transform is None and len(mapped) == len(self._leaves):
                for rows_of_file in mapped:  # the system has threads of its own
                    rows_of_file.ask_for(np.array([end]), to - end)
            else:
                self._ahead = end, to, _reader().submit(self._take, range(end, to))
        return rows

    def _take(self, index: np.ndarray | range) -> Rows:
        """Rows of the source as they are there, transformed, in which there is no NaN."""
        which = slice(index.start, index.stop) if isinstance(index, range) else index
        try:
            columns = [column.take(which) for column in self._leaves]
        except Exception as error:
            raise RuntimeError(
                f"rows {min(index)} to {max(index)} of {self.name} could not be read:"
                f" {type(error).__name__}: {error}"
            ) from error
        rows = jax.tree.unflatten(self._tree, columns)
        if self.transform is not None:
            rows = self._transformed(rows, len(index))
        for x in jax.tree.leaves(rows):
            if x.dtype.kind in "fc" and not self.allow_nan and x.size and np.isnan(np.max(x)):
                row = index[int(np.argmax(np.isnan(x).reshape(len(index), -1).any(axis=1)))]
                raise ValueError(
                    f"row {row} of {self.name} has NaN; leave such rows out, or say allow_nan=True"
                    " if the model masks them."
                )
        return rows

    def _transformed(self, rows: Rows, size: int) -> Rows:
        assert self.transform is not None
        own = jax.tree.map(lambda x: x if x.flags.owndata else x.copy(), rows)
        rows = jax.tree.map(np.asarray, self.transform(own))
        for x in jax.tree.leaves(rows):
            if x.shape[:1] != (size,):
                raise ValueError(
                    f"the transform of {self.name} has made an array of shape {x.shape} from"
                    f" {size} rows; it must keep their number."
                )
        return rows


def _by_names(source: Any) -> Any:
    """A source with its tables as dicts of columns."""
    if isinstance(source, dict):
        return {str(name): _by_names(x) for name, x in source.items()}
    if type(source) is tuple:
        return tuple(_by_names(x) for x in source)
    if hasattr(source, "get_all") and hasattr(source, "schema"):  # an Arrow file of batches
        source = source.read_all()
    if _from(source, "pyarrow") and hasattr(source, "column_names"):
        return {name: source.column(name) for name in source.column_names}
    if _from(source, "pandas", "polars") and hasattr(source, "columns"):
        return {str(name): source[name] for name in source.columns}
    return source


def _from(x: Any, *libraries: str) -> bool:
    return type(x).__module__.split(".")[0] in libraries


@functools.cache
def _reader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "rows")


class _Column:
    """One array of a source: ``take(index)``, with ``(n,)`` integers or a slice, by ``read``."""

    def __init__(self, array: Any, shape: tuple, dtype: Any, name: str, read: Any, identity: Any):
        self.shape, self.dtype, self.array = tuple(shape), np.dtype(dtype), array
        self.name, self.take, self.identity = name, functools.partial(read, array), identity
        if self.dtype.kind not in _NUMBERS:
            raise TypeError(
                f"{name} is of dtype {dtype}, which JAX does not have; store numbers, for words"
                " their codes, as by np.unique(x, return_inverse=True)[1]."
            )
        if not self.shape:
            raise TypeError(f"{name} is one number and has no rows.")


def _is_column(x: Any) -> bool:
    return isinstance(x, _Column)


def _column(source: Any) -> _Column:
    if _from(source, "pandas", "polars"):
        return _of_numpy(source.to_numpy(), str(getattr(source, "name", "a column")))
    if _from(source, "pyarrow"):
        return _of_arrow(source)
    if isinstance(source, np.ndarray):
        return _of_numpy(source)
    if isinstance(source, Array):
        return _of_numpy(np.asarray(source))
    if hasattr(source, "shape") and hasattr(source, "dtype"):
        name = f"{getattr(source, 'name', '') or type(source).__name__} of shape {source.shape}"
        _warn_of_unwritten(source, name)
        return _Column(source, source.shape, source.dtype, name, _take_sorted, Same(source))
    has_items = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if has_items and not isinstance(source, str | bytes | list | Path):
        return _of_items(source)
    raise TypeError(
        f"the source is a {type(source).__name__}; give an array of rows {_EXAMPLES}, or a data"
        " set with len() and [k]."
    )


def _warn_of_unwritten(x: Any, name: str) -> None:
    """A warning of chunks of Zarr or HDF5 that nobody has written, which are read as zeros."""
    total, written, value = 0, 0, getattr(x, "fill_value", getattr(x, "fillvalue", 0))
    if hasattr(x, "nchunks_initialized"):
        total, written = x.nchunks, x.nchunks_initialized
    elif hasattr(getattr(x, "id", None), "get_num_chunks"):
        if x.chunks is None:
            total, written = 1, int(x.id.get_storage_size() > 0)
        else:
            pieces = zip(x.shape, x.chunks, strict=True)
            total, written = math.prod(-(-n // c) for n, c in pieces), x.id.get_num_chunks()
    if written < total:
        message = (
            f"{total - written} of the {total} chunks of {name} have not been written, and are read"
            f" as {value}; write these rows, or leave them out. Zarr does not store chunks that"
            " hold its fill value alone, of which this can be ignored."
        )
        warnings.warn(InferenceWarning(message), stacklevel=5)


def _of_numpy(x: np.ndarray, name: str = "") -> _Column:
    if isinstance(x, np.memmap) and x.filename is not None and x.flags.c_contiguous:
        mapped, status = MappedRows(x), os.stat(x.filename)
        same = str(x.filename), status.st_dev, status.st_ino, mapped.begin, x.shape, x.dtype.str
        return _Column(mapped, x.shape, x.dtype, f"the file {x.filename}", MappedRows.take, same)
    identity = x.__array_interface__["data"][0], x.shape, x.strides, x.dtype.str
    name = f"{f'the column {name!r}' if name else 'an array'} of shape {x.shape}"
    return _Column(x, x.shape, x.dtype, name, _take_array, identity)


def _take_array(x: np.ndarray, index: np.ndarray | slice) -> np.ndarray:
    # The numbers have been checked, and "clip" does not do it again.
    return x[index] if isinstance(index, slice) else np.take(x, index, 0, mode="clip")


def _take_sorted(x: Any, index: np.ndarray | slice) -> np.ndarray:
    """Of what takes sorted indices without repeats alone, as h5py does."""
    if isinstance(index, slice):
        return np.asarray(x[index])
    rows, places = np.unique(index, return_inverse=True)
    return np.asarray(x[rows])[places]


def _of_arrow(x: Any) -> _Column:
    pa = import_module("pyarrow")  # optional

    chunks = x.chunks if isinstance(x, pa.ChunkedArray) else [x]
    if x.null_count:
        raise ValueError(
            f"a column of Arrow has {x.null_count} missing values; fill them, or drop these rows."
        )
    if pa.types.is_fixed_size_list(x.type):
        width, dtype = (x.type.list_size,), x.type.value_type.to_pandas_dtype()
        parts = [chunk.flatten().to_numpy().reshape(-1, *width) for chunk in chunks]
    else:
        width, dtype = (), x.type.to_pandas_dtype()
        parts = [chunk.to_numpy(zero_copy_only=dtype is not np.bool_) for chunk in chunks]
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return _of_numpy(parts[0])
    ends = np.cumsum([len(part) for part in parts])
    identity = tuple(_of_numpy(part).identity for part in parts)
    shape = (int(ends[-1]) if parts else 0, *width)
    name = f"a column of Arrow of shape {shape}"
    return _Column((parts, ends), shape, dtype, name, _take_parts, identity)


def _take_parts(source: tuple[list, np.ndarray], index: np.ndarray | slice) -> np.ndarray:
    parts, ends = source
    index = np.arange(index.start, index.stop) if isinstance(index, slice) else index
    which = np.searchsorted(ends, index, side="right")
    place = index - (ends[which] - np.array([len(part) for part in parts])[which])
    rows = np.empty((len(index), *parts[0].shape[1:]), parts[0].dtype)
    for k in np.unique(which):
        here = which == k
        rows[here] = parts[k][place[here]]
    return rows


def _of_items(source: Any) -> Any:
    """The columns of a data set of items: one, or a dict or tuple of them."""
    items = _Items(source)
    first = items.stacked(np.zeros(1, int))
    leaves, tree = jax.tree.flatten(first)
    name = f"the data set {type(source).__name__} of {len(source)} rows"

    def column(k: int, x: np.ndarray) -> _Column:
        shape, take = (len(source), *x.shape[1:]), functools.partial(_take_items, k=k)
        return _Column(items, shape, x.dtype, name, take, (Same(source), k))

    return jax.tree.unflatten(tree, [column(k, x) for k, x in enumerate(leaves)])


class _Items:
    """A data set of which the columns of one read share their items."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.last: tuple[Any, list[np.ndarray]] | None = None

    def stacked(self, index: np.ndarray) -> Any:
        numbers = [int(k) for k in index]
        if hasattr(self.source, "__getitems__"):
            items = self.source.__getitems__(numbers)
        else:
            items = [self.source[k] for k in numbers]
        if isinstance(items, dict):  # columns of all these rows
            return {name: np.asarray(x) for name, x in items.items()}
        return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *items)


def _take_items(items: _Items, index: np.ndarray | slice, k: int) -> np.ndarray:
    index = np.arange(index.start, index.stop) if isinstance(index, slice) else index
    last = items.last
    if last is None or last[0] is not index:
        last = items.last = index, jax.tree.leaves(items.stacked(index))
    return last[1][k]
