"""A copy of rows in random order, of any number of rows in little memory."""

from pathlib import Path
import shutil
import tempfile
from typing import Any

import jax
import numpy as np

from numpyro_ext.data._rows import Rows
from numpyro_ext.data.host_array import HostArray


def shuffled_copy(source: Any, path: str | Path, *, seed: int = 0, memory: int = 2**28) -> Rows:
    """
    Copy rows in random order to a folder, and map the copy into memory.

    Rows in random order can be taken in blocks of neighbours, ``SGHMC(model, minibatch="block")``,
    each of which a disk reads at once, where 256 random rows are 256 reads. The source is read
    once, into several files that are then shuffled in memory. All orders are equally likely. The
    disk needs room for two copies until the end.

    :param source: what :class:`HostArray` takes, or such an object; several columns of one source
        stay together.
    :param path: a folder that is made, with a file ``0.npy``, ``1.npy`` and so on for each column.
    :param int seed: another one is another order.
    :param int memory: the bytes of rows that are in memory together.
    :return: the columns as ``np.memmap``, in the dict or tuple of the source, for
        :class:`HostArray`.

    .. doctest::

        >>> import numpy as np, tempfile
        >>> from numpyro_ext.data import HostArray, shuffled_copy
        >>> rows = {"x": np.arange(6.0), "y": np.arange(6)}
        >>> copy = shuffled_copy(rows, tempfile.mkdtemp() + "/shuffled")
        >>> sorted(copy["y"].tolist()), bool((copy["x"] == copy["y"]).all())
        ([0, 1, 2, 3, 4, 5], True)
        >>> HostArray(copy)["x"].shape
        (6,)
    """
    rows = source if isinstance(source, HostArray) else HostArray(source)
    if rows.parts is not None:
        raise ValueError(
            "the rows of the source are spread over devices (sharding); give x.source, and"
            " make HostArray(copy, sharding=...) of the copy."
        )
    folder, size = Path(path), len(rows)
    folder.mkdir(parents=True)  # an error if there is one: its files might be in use
    shapes, tree = jax.tree.flatten(rows.row)
    record = np.dtype([(f"f{k}", x.dtype, x.shape) for k, x in enumerate(shapes)])
    piece = max(1, memory // (4 * record.itemsize))
    generator = np.random.default_rng(seed)
    num_files = -(-size // piece)
    scattered = Path(tempfile.mkdtemp(dir=folder))
    try:
        for begin in range(0, size, piece):
            index = np.arange(begin, min(begin + piece, size))
            records = np.empty(len(index), record)
            for k, column in enumerate(jax.tree.leaves(rows.read(index))):
                records[f"f{k}"] = column
            which = generator.integers(0, num_files, len(index))
            records = records[np.argsort(which, kind="stable")]
            ends = np.cumsum(np.bincount(which, minlength=num_files))
            for number, part in enumerate(np.split(records, ends[:-1])):
                with open(scattered / str(number), "ab") as file:
                    part.tofile(file)
        columns = [
            np.lib.format.open_memmap(folder / f"{k}.npy", "w+", x.dtype, (size, *x.shape))
            for k, x in enumerate(shapes)
        ]
        begin = 0
        for number in range(num_files):
            records = np.fromfile(scattered / str(number), record)
            records = records[generator.permutation(len(records))]
            for k, column in enumerate(columns):
                column[begin : begin + len(records)] = records[f"f{k}"]
                column.flush()
            begin += len(records)
    finally:
        shutil.rmtree(scattered)
    mapped = [np.load(folder / f"{k}.npy", mmap_mode="r") for k in range(len(shapes))]
    return jax.tree.unflatten(tree, mapped)
