"""UCI regression with the 20 random splits of 90/10 that the literature on networks uses.

A folder holds ``data.txt`` and the indices of its columns and rows: ``index_features.txt``,
``index_target.txt``, ``index_train_<k>.txt`` and ``index_test_<k>.txt``, k = 0..19. They lie in
``<folder>/<name>/data`` or in ``<folder>/<name>``, and a data set may have its short name.
"""

from pathlib import Path

import numpy as np

from numpyro_ext.targets import RegressionSplit

NAMES = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
"""Short names, and those of the published folders."""


def uci_regression(folder: str | Path, name: str, split: int) -> RegressionSplit:
    """Rows of one split, in their own units.

    :param folder: the folder that holds one folder for each data set; nothing is downloaded.
    :param name: a short name or a published one, ``"boston"`` or ``"bostonHousing"``.
    :param split: its number, from 0.
    """
    data = _folder(Path(folder), name)
    files = [
        data / file
        for file in (
            "data.txt",
            "index_features.txt",
            "index_target.txt",
            f"index_train_{split}.txt",
            f"index_test_{split}.txt",
        )
    ]
    for file in files:
        if not file.is_file():
            count = len(list(data.glob("index_train_*.txt")))
            here = f"has the splits 0 to {count - 1}" if count else "has no splits"
            raise FileNotFoundError(
                f"there is no file {file}, which split {split!r} of '{name}' needs; {data} {here}."
            )
    table = np.loadtxt(files[0], ndmin=2)
    features, target, train, test = (np.loadtxt(file, ndmin=1).astype(int) for file in files[1:])
    X, y = table[:, features], table[:, target[0]]
    return RegressionSplit(X[train], y[train], X[test], y[test])


def _folder(folder: Path, name: str) -> Path:
    """The folder that holds ``data.txt``."""
    if name not in NAMES and name not in NAMES.values():
        known = ", ".join(repr(short) for short in NAMES)
        raise ValueError(f"name is {name!r}; it must be one of {known}.")
    short = next(key for key, value in NAMES.items() if name in (key, value))
    places = [
        folder / one / inner
        for one in dict.fromkeys((short, NAMES[short]))
        for inner in ("data", "")
    ]
    for place in places:
        if (place / "data.txt").is_file():
            return place
    looked = ", ".join(str(place / "data.txt") for place in places)
    raise FileNotFoundError(
        f"'{name}' is not in {folder}: there is none of {looked}; give the folder with one folder"
        " for each data set."
    )
