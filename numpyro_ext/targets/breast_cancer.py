"""The Wisconsin breast-cancer data that scikit-learn carries, ready for logistic regression."""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

from numpyro_ext._checks import check_choice


class BreastCancer(NamedTuple):
    """Standardised features and 0/1 labels (1: malignant), split 80/20."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    names: tuple[str, ...]


def breast_cancer(*, features: str = "mean", seed: int = 0) -> BreastCancer:
    """Data of 569 biopsies, with features standardised by the training rows and a fixed split.

    :param str features: ``"mean"`` (the 10 cell-nucleus means), or ``"all"`` 30.
    :param int seed: of the split.
    :return: a named tuple ``(x_train, y_train, x_test, y_test, names)``.

    .. doctest::

        >>> from numpyro_ext.targets import breast_cancer
        >>> data = breast_cancer()
        >>> data.x_train.shape, data.x_test.shape
        ((455, 10), (114, 10))
    """
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    check_choice("features", features, ("mean", "all"))
    raw: Any = load_breast_cancer()
    width = 10 if features == "mean" else 30
    x, y = raw.data[:, :width], 1 - raw.target
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=0.2, random_state=seed, stratify=y
    )
    scaler = StandardScaler().fit(x_train)
    return BreastCancer(
        jnp.asarray(scaler.transform(x_train), jnp.result_type(float)),
        jnp.asarray(y_train),
        jnp.asarray(scaler.transform(x_test), jnp.result_type(float)),
        jnp.asarray(y_test),
        tuple(str(name) for name in raw.feature_names[:width]),
    )
