"""Regression data that scikit-learn carries, with fixed random splits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numpyro_ext._checks import check_choice, check_count, check_positive


class RegressionSplit(NamedTuple):
    """Features ``(rows, d)`` and targets ``(rows,)`` in their own units, split in two."""

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def regression_data(name: str, split: int = 0, test_fraction: float = 0.1) -> RegressionSplit:
    """A small regression problem that needs no download, in one of its random splits.

    The rows are permuted by ``numpy.random.default_rng(split)``, and the first of them are the test
    set. Nothing is standardised. The tables are

    * ``"diabetes"``: progress of the disease from 10 measurements of 442 patients,
    * ``"wine_alcohol"``: alcohol from the other 12 analyses of 178 wines,
    * ``"breast_cancer_radius"``: mean radius from the other 29 features of 569 tumours, which is
      nearly linear,
    * ``"linnerud"``: weight of 20 men from three exercises.

    :param str name: one of these.
    :param int split: the number of the split, from 0.
    :param float test_fraction: share of the rows in the test set, in (0, 1).
    :return: a named tuple ``(X_train, y_train, X_test, y_test)`` of double precision.
    :raises ImportError: scikit-learn is not installed; it is in the extra ``examples``.

    .. doctest::

        >>> from numpyro_ext.targets import regression_data
        >>> data = regression_data("diabetes")
        >>> data.X_train.shape, data.X_test.shape
        ((398, 10), (44, 10))
    """
    check_choice("name", name, tuple(_TABLES))
    check_count("split", split, 0)
    check_positive("test_fraction", test_fraction)
    X, y = _TABLES[name]()
    num_test = round(test_fraction * len(y))
    if not 0 < num_test < len(y):
        raise ValueError(
            f"test_fraction is {test_fraction!r}, which leaves {num_test} of {len(y)} rows for"
            " testing; it must leave at least one on either side."
        )
    order = np.random.default_rng(split).permutation(len(y))
    test, train = order[:num_test], order[num_test:]
    return RegressionSplit(X[train], y[train], X[test], y[test])


def _load(name: str) -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "regression_data reads the tables of scikit-learn, which is not installed; install it,"
            ' or the extra, as by pip install ".[examples]".'
        ) from error
    return getattr(datasets, f"load_{name}")()


def _diabetes() -> tuple[np.ndarray, np.ndarray]:
    table = _load("diabetes")
    return np.asarray(table.data), np.asarray(table.target)


def _first_column(name: str) -> tuple[np.ndarray, np.ndarray]:
    table = np.asarray(_load(name).data)
    return table[:, 1:], table[:, 0]


def _linnerud() -> tuple[np.ndarray, np.ndarray]:
    table = _load("linnerud")
    return np.asarray(table.data), np.asarray(table.target)[:, 0]


_TABLES: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "diabetes": _diabetes,
    "wine_alcohol": lambda: _first_column("wine"),
    "breast_cancer_radius": lambda: _first_column("breast_cancer"),
    "linnerud": _linnerud,
}
