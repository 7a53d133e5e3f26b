"""Regression data in random splits of 90/10: the folders of the literature, and a table offline.

A folder holds ``data.txt`` and the indices of its columns and rows: ``index_features.txt``,
``index_target.txt``, ``index_train_<k>.txt`` and ``index_test_<k>.txt``, k = 0..19, in
``<folder>/<name>`` or in ``<folder>/<name>/data``.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np


class RegressionSplit(NamedTuple):
    """Rows to train on and to test on, in their own units."""

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def uci_regression(folder: Path, name: str, split: int) -> RegressionSplit:
    """One split of a set, such as ``"boston"``; nothing is downloaded."""
    short = {"boston": "bostonHousing"}
    places = [folder / n / sub for n in (name, short.get(name, name)) for sub in ("", "data")]
    for place in places:
        if (place / f"index_train_{split}.txt").is_file():
            break
    else:
        raise FileNotFoundError(
            f"there is no index_train_{split}.txt in {places[0]}; give the folder that holds a"
            " folder for each set."
        )
    table = np.loadtxt(place / "data.txt")
    features, target, train, test = (
        np.loadtxt(place / f"index_{part}.txt", ndmin=1).astype(int)
        for part in ("features", "target", f"train_{split}", f"test_{split}")
    )
    X, y = table[:, features], table[:, target[0]]
    return RegressionSplit(X[train], y[train], X[test], y[test])


def regression_data(name: str = "diabetes", split: int = 0) -> RegressionSplit:
    """One split of scikit-learn's table of diabetes, 442 rows of 10 columns."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    order = np.random.default_rng(split).permutation(len(data.target))
    test, train = np.split(order, [round(0.1 * len(order))])
    return RegressionSplit(data.data[train], data.target[train], data.data[test], data.target[test])
