"""Rows on the host that are read in one callback, before a plate of the model takes them."""

from typing import Any

import jax
from jax import Array
import numpy as np

from numpyro_ext.data._rows import HostRows, Rows, Same, is_rows, read_together, rows_among

_MOST_BYTES = 2**28
"""The size up to which rows are read ahead of the steps that take them."""


@jax.tree_util.register_static
class _ReadRows(HostRows):
    """Rows that were read as ``x[index]``, in the place of x, for whoever takes this very index."""

    def __init__(self, source: Any, index: Array, rows: Rows) -> None:
        super().__init__((Same(index), source))
        self.source, self._index, self._rows = source, index, rows
        self.is_stream = source.is_stream

    name = property(lambda self: self.source.name)
    row = property(lambda self: self.source.row)

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __getitem__(self, index: Any) -> Any:
        if index is self._index:
            return self._rows
        if isinstance(index, str) and isinstance(self._rows, dict):
            return _ReadRows(self.source[index], self._index, self._rows[index])
        return super().__getitem__(index) if isinstance(index, tuple) else self.source[index]

    def read(self, index: np.ndarray) -> Rows:
        return self.source.read(index)


def _of_plates(tree: Any, sizes: dict[str, int]) -> dict[str, list[HostRows]]:
    """The rows on the host that are as many as a plate has, unless they are spread over devices."""
    by_plate: dict[str, list[HostRows]] = {}
    for x in dict.fromkeys(rows_among(tree)):
        plate = next((name for name, size in sizes.items() if size == len(x)), None)
        if plate is not None and x.parts is None:
            by_plate.setdefault(plate, []).append(x)
    return by_plate


def bytes_of_rows(tree: Any, sizes: dict[str, int]) -> int:
    """The bytes of whatever is read from the host for one row of each plate; 0 if nothing is."""
    by_plate = _of_plates(tree, sizes)
    return sum(x.bytes_of_a_row for xs in by_plate.values() for x in xs)


def read_ahead(tree: Any, sizes: dict[str, int], indices: dict[str, Array]) -> list[Rows] | None:
    """The rows of whatever is on the host in a tree, at the indices ``(*steps, B)`` of plates with
    so many rows; None if there are none, or too many bytes of them."""
    by_plate = _of_plates(tree, sizes)
    num_bytes = sum(
        indices[name].size * x.bytes_of_a_row for name, xs in by_plate.items() for x in xs
    )
    if not 0 < num_bytes <= _MOST_BYTES:
        return None
    return [rows for name, xs in by_plate.items() for rows in read_together(xs, indices[name])]


def with_rows(tree: Any, sizes: dict[str, int], indices: dict[str, Array], rows: list[Rows]) -> Any:
    """The tree with rows that :func:`read_ahead` has read, of one step, in place of their sources.

    :param dict indices: the very arrays that the plates will give.
    """
    by_plate = _of_plates(tree, sizes)
    sources = [(x, indices[name]) for name, xs in by_plate.items() for x in xs]
    read = {x: _ReadRows(x, i, r) for (x, i), r in zip(sources, rows, strict=True)}
    return jax.tree.map(lambda x: read.get(x, x) if is_rows(x) else x, tree, is_leaf=is_rows)
