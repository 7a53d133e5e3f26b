"""Rows of a memory-mapped file; the system is told of their pages before they are touched."""

import mmap
import os
import time
from typing import Any

import numpy as np

_SLOW = 5e-6
"""Seconds for a row above which rows come from the disk, and not from memory."""


class MappedRows:
    """``take(index)`` of an array that is mapped from a file.

    If a read was slow, the next one asks for all of its pages first, which the disk then reads
    together, and no pages around them.

    :param x: a contiguous ``np.memmap``.
    """

    def __init__(self, x: np.memmap) -> None:
        whole: Any = x
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        ahead = (
            x.__array_interface__["data"][0] - whole.__array_interface__["data"][0] + whole.offset
        )
        self.begin = ahead
        """The byte of the file at which the array begins."""
        assert x.filename is not None
        self._file, self._rows = x.filename, x.view(np.ndarray)
        # What is mapped begins where the system lets a map begin.
        self._in_map = ahead - whole.offset + whole.offset % mmap.ALLOCATIONGRANULARITY
        knows = isinstance(whole.base, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED")
        self._map: Any = whole.base if knows else None
        self._is_slow = False

    def _check(self) -> None:
        """An error if the file is shorter than it was: a page behind its end kills the process."""
        size, needed = os.stat(self._file).st_size, self.begin + self._rows.nbytes
        if size < needed:
            raise OSError(f"the file has {size} bytes, and had {needed} when it was opened")

    def take(self, index: np.ndarray | slice) -> np.ndarray:
        """Rows by their numbers, or a view of a slice of them."""
        self._check()
        if isinstance(index, slice):
            if self._is_slow:
                self.ask_for(np.array([index.start]), index.stop - index.start)
            return self._rows[index]
        began = time.perf_counter()
        if self._is_slow:
            self.ask_for(index, 1)
        # The numbers have been checked, and "clip" does not do it again.
        rows = np.take(self._rows, index, 0, mode="clip")
        slow = time.perf_counter() - began > _SLOW * len(index)
        if slow and not self._is_slow and self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)
        self._is_slow = slow
        return rows

    def ask_for(self, index: np.ndarray, num: int) -> None:
        """Tell the system that ``num`` rows from each of these will be read."""
        if self._map is None:
            return
        width = self._rows.strides[0]
        first = self._in_map + index.astype(np.int64) * width
        length = num * width + mmap.PAGESIZE
        for page in np.unique(first // mmap.PAGESIZE * mmap.PAGESIZE).tolist():
            self._map.madvise(mmap.MADV_WILLNEED, page, length)
