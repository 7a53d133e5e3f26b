"""The rows of the data in parts."""

from typing import Any

import numpy as np

from numpyro_ext._checks import check_count

__all__ = ["check_partition", "split_rows"]


def check_partition(partition: Any) -> Any:
    """An int, or labels as a NumPy array; or an error."""
    if np.ndim(partition) == 0:
        return check_count("partition", partition)
    labels = np.asarray(partition)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"partition has shape {labels.shape} and type {labels.dtype}; it must be the number of"
            " parts, or a vector of integer labels, one for each row."
        )
    missing = np.setdiff1d(np.arange(labels.max(initial=0) + 1), labels)
    if len(missing) or labels.min(initial=0) < 0:
        raise ValueError(
            f"partition has labels from {labels.min()} to {labels.max()}, without"
            f" {missing.tolist()}; they must be 0, 1, ... up to the number of parts less one."
        )
    return labels


def split_rows(partition: Any, size: int) -> np.ndarray:
    """The rows of each of J parts of ``size`` rows: ``(J, M)``, filled up with -1.

    :param partition: number of parts, contiguous and of nearly one size; or a label for each row.
    """
    if isinstance(partition, int):
        if partition > size:
            raise ValueError(f"partition is {partition}, and there are only {size} rows.")
        labels = np.repeat(
            np.arange(partition), [len(x) for x in np.array_split(np.arange(size), partition)]
        )
    else:
        labels = partition
        if len(labels) != size:
            raise ValueError(
                f"partition has {len(labels)} labels, and there are {size} rows; give one for each."
            )
    members = [np.flatnonzero(labels == j) for j in range(labels.max() + 1)]
    M = max(map(len, members))
    return np.stack([np.pad(x, (0, M - len(x)), constant_values=-1) for x in members])
