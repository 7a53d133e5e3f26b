"""Rows that stay on the host or on disk, and are read when a plate asks for them."""

from collections.abc import Callable
import functools
import os
from typing import Any

import jax
from jax.sharding import NamedSharding
import numpy as np

from numpyro_ext.data._mapped import MappedRows
from numpyro_ext.data._parts import Parts
from numpyro_ext.data._rows import HostRows, Rows, Same

_NUMBERS = "biufc"


@jax.tree_util.register_static
class HostArray(HostRows):
    r"""
    Rows that stay where they are, in NumPy or on disk, and are read when a plate asks for them.

    It goes where an array of the data goes, and the model is not changed: ``x[i]`` are the rows
    ``i`` as a JAX array, also under ``jax.jit``, ``jax.vmap`` and ``jax.grad``, by a callback to
    the host; ``len(x)``, ``x.shape`` and ``x.dtype`` are known without a read. A step of a
    minibatch of B of N rows reads B rows. What takes a pass over all rows (the search for a mode, a
    proxy) takes them in pieces.

    The source is one of

     - a NumPy array, or ``np.memmap`` (``np.load(file, mmap_mode="r")``);
     - what has ``shape`` and ``dtype`` and takes a sorted array of integers: Zarr, h5py;
     - a column of a frame (pandas, polars, Arrow), by its ``to_numpy()``, or a frame of pandas or
       polars, whose rows are then dicts of columns;
     - a dict or tuple of these with the same number of rows, which are read together.

    Files of Parquet and of Arrow are not made for single rows; convert them once, as by
    ``np.save("x.npy", pq.read_table(file, columns=["x"])["x"].to_numpy())``. Data sets with items
    go through their loader, by :class:`Batches`.

    Two objects are equal if their sources are the same memory, file or object and their transforms
    the same function, so that a new one does not compile anew.

    Numbers have the dtypes of JAX: 64 bits become 32 without ``jax_enable_x64``, with an error for
    an integer that does not fit. A read that fails, a row that is not there and a NaN stop the run
    with an error that names the source and the row.

    :param source: where the rows are.
    :param transform: a function of the rows that were read, in NumPy (the array, dict or tuple),
        which returns as many rows: to standardise, to decode.
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
        self._columns = jax.tree.map(
            _Column, _by_names(self.source), is_leaf=lambda x: not _is_group(x)
        )
        columns, self._tree = jax.tree.flatten(self._columns)
        self._leaves: list[_Column] = columns
        lengths = sorted({column.shape[0] for column in columns})
        if len(lengths) != 1:
            raise ValueError(
                f"the columns of the source have {lengths} rows; all must have the same number."
            )
        self._length = lengths[0]
        if not self._length:
            raise ValueError(f"{columns[0].name} has no row.")
        same = tuple(column.identity for column in columns)
        if self.sharding is not None:
            self.parts = Parts(self.sharding, self._length)
        spread = None if self.parts is None else self.parts.key
        super().__init__((self._tree, same, self.transform, self.allow_nan, spread))

    @property
    def name(self) -> str:
        """The source, for a message."""
        return " and ".join(column.name for column in self._leaves)

    def __len__(self) -> int:
        return self._length if self.parts is None else self.parts.length

    @functools.cached_property
    def row(self) -> Any:
        """Shape and dtype of a row of each array of a read."""
        if self.transform is None:
            arrays: Any = self._columns
        else:
            arrays = self._take(np.arange(min(2, self._length)))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays)

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
            taken = self._take(range(int(flat[0]), int(flat[0]) + size))
        else:
            taken = self._take(flat)
        if index.ndim == 1:
            return taken
        return jax.tree.map(lambda x: x.reshape(*index.shape, *x.shape[1:]), taken)

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
            own = jax.tree.map(lambda x: x if x.flags.owndata else x.copy(), rows)
            rows = jax.tree.map(np.asarray, self.transform(own))
        for x in jax.tree.leaves(rows):
            if x.shape[:1] != (len(index),):
                raise ValueError(
                    f"the transform of {self.name} has made an array of shape {x.shape} from"
                    f" {len(index)} rows; it must keep their number."
                )
            if x.dtype.kind in "fc" and not self.allow_nan and x.size and np.isnan(np.max(x)):
                row = index[int(np.argmax(np.isnan(x).reshape(len(index), -1).any(axis=1)))]
                raise ValueError(
                    f"row {row} of {self.name} has NaN; leave such rows out, or say allow_nan=True"
                    " if the model masks them."
                )
        return rows


def _is_group(x: Any) -> bool:
    return type(x) in (dict, tuple)


def _by_names(source: Any) -> Any:
    """A source whose frames are dicts of columns."""
    if isinstance(source, dict):
        return {str(name): _by_names(x) for name, x in source.items()}
    if type(source) is tuple:
        return tuple(_by_names(x) for x in source)
    if hasattr(source, "to_numpy") and hasattr(source, "columns"):
        return {str(name): source[name] for name in source.columns}
    return source


class _Column:
    """One array of a source: ``take(index)`` with ``(n,)`` integers or a slice."""

    def __init__(self, source: Any) -> None:
        x: Any = source.to_numpy() if hasattr(source, "to_numpy") else source
        x = np.asarray(x) if isinstance(x, jax.Array) else x
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(
                f"the source is a {type(x).__name__}; give an array of rows, such as np.load(file,"
                " mmap_mode='r'), a Zarr or HDF5 array, or a column of a frame."
            )
        self.shape, self.dtype = tuple(x.shape), np.dtype(x.dtype)
        self.name = f"{getattr(x, 'name', '') or type(x).__name__} of shape {x.shape}"
        if isinstance(x, np.memmap) and x.filename is not None and x.flags.c_contiguous:
            mapped, status = MappedRows(x), os.stat(x.filename)
            self.name, self.take = f"the file {x.filename}", mapped.take
            self.identity: Any = str(x.filename), status.st_dev, status.st_ino, mapped.begin
        elif isinstance(x, np.ndarray):
            self.name = f"an array of shape {x.shape}"
            self.take = functools.partial(_take_array, x)
            self.identity = x.__array_interface__["data"][0], x.strides
        else:
            self.take, self.identity = functools.partial(_take_sorted, x), Same(x)
        self.identity = self.identity, self.shape, self.dtype.str
        if self.dtype.kind not in _NUMBERS:
            raise TypeError(
                f"{self.name} is of dtype {self.dtype}, which JAX does not have; store numbers, for"
                " words their codes, as by np.unique(x, return_inverse=True)[1]."
            )
        if not self.shape:
            raise TypeError(f"{self.name} is one number and has no rows.")


def _take_array(x: np.ndarray, index: np.ndarray | slice) -> np.ndarray:
    # The numbers have been checked, and "clip" does not do it again.
    return x[index] if isinstance(index, slice) else np.take(x, index, 0, mode="clip")


def _take_sorted(x: Any, index: np.ndarray | slice) -> np.ndarray:
    """Of what takes sorted indices without repeats alone, as h5py does."""
    if isinstance(index, slice):
        return np.asarray(x[index])
    rows, places = np.unique(index, return_inverse=True)
    return np.asarray(x[rows])[places]
