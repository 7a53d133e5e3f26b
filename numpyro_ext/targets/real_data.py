"""Tables that scikit-learn carries, with fixed splits."""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice


class BreastCancer(NamedTuple):
    """Standardised features and 0/1 labels (1: malignant), split 80/20."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    names: tuple[str, ...]


def breast_cancer() -> BreastCancer:
    """The 10 means of nuclei in 569 biopsies, standardised by the training rows, and a fixed split.

    >>> from numpyro_ext.targets import breast_cancer
    >>> data = breast_cancer()
    >>> data.x_train.shape, data.x_test.shape
    ((455, 10), (114, 10))
    """
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    raw: Any = load_breast_cancer()
    x, y = raw.data[:, :10], 1 - raw.target
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=0.2, random_state=0, stratify=y
    )
    scaler = StandardScaler().fit(x_train)
    return BreastCancer(
        jnp.asarray(scaler.transform(x_train), jnp.result_type(float)),
        jnp.asarray(y_train),
        jnp.asarray(scaler.transform(x_test), jnp.result_type(float)),
        jnp.asarray(y_test),
        tuple(str(name) for name in raw.feature_names[:10]),
    )


class RegressionSplit(NamedTuple):
    """Features ``(rows, d)`` and targets ``(rows,)`` in their own units, split in two."""

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def regression_data(name: str, split: int = 0) -> RegressionSplit:
    """A small regression problem that needs no download, in one of its random splits.

    The rows are permuted by ``numpy.random.default_rng(split)``, and the first tenth of them are
    the test set. Nothing is standardised.

    :param str name: ``"diabetes"`` (442 rows, 10 features), ``"wine_alcohol"`` (178, 12) or
        ``"breast_cancer_radius"`` (569, 29; nearly linear).
    :param int split: the number of the split, from 0.

    >>> from numpyro_ext.targets import regression_data
    >>> data = regression_data("diabetes")
    >>> data.X_train.shape, data.X_test.shape
    ((398, 10), (44, 10))
    """
    from sklearn import datasets

    check_choice("name", name, tuple(_TABLES))
    loader, first_column = _TABLES[name]
    table = getattr(datasets, loader)()
    X, y = np.asarray(table.data), np.asarray(table.target)
    if first_column:
        X, y = X[:, 1:], X[:, 0]
    num_test = round(0.1 * len(y))
    order = np.random.default_rng(split).permutation(len(y))
    test, train = order[:num_test], order[num_test:]
    return RegressionSplit(X[train], y[train], X[test], y[test])


# The loader of scikit-learn, and whether its first column is the target.
_TABLES = {
    "diabetes": ("load_diabetes", False),
    "wine_alcohol": ("load_wine", True),
    "breast_cancer_radius": ("load_breast_cancer", True),
}
