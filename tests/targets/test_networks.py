"""The network, its priors and its data: against the formula written by hand, and ridge."""

import importlib.util
from pathlib import Path

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import log_density
import pytest

from numpyro_ext.targets import bayesian_mlp, regression_data, scale_mixture

WEIGHTS = {
    "w0": np.array([[0.3, -1.2, 0.5], [0.8, 0.1, -0.7]]),
    "b0": np.array([0.2, -0.1, 0.4]),
    "w1": np.array([[1.1], [-0.4], [0.9]]),
    "b1": np.array([-0.3]),
}
X = np.array([[0.5, -1.0], [1.5, 0.2], [-0.7, 0.9], [2.0, -0.3]])
Y = np.array([0.4, -1.0, 2.2, 0.7])


def hidden_by_hand():
    return np.maximum(X @ WEIGHTS["w0"] + WEIGHTS["b0"], 0.0)


@pytest.mark.x64
def test_regression_is_the_formula(tol):
    """Log joint of weights, noise precision and data, with a prior of unequal scale."""
    given = {name: jnp.asarray(x) for name, x in WEIGHTS.items()}
    prior = dist.Normal(0.2, 1.5)

    def joint(precision):
        kwargs = {"hidden": (3,), "weight_prior": prior}
        sites = {**given, "noise_precision": precision}
        return log_density(bayesian_mlp, (jnp.asarray(X), jnp.asarray(Y)), kwargs, sites)[0]

    f = (hidden_by_hand() @ WEIGHTS["w1"] + WEIGHTS["b1"])[:, 0]
    flat = np.concatenate([x.ravel() for x in WEIGHTS.values()])
    expected = -0.5 * np.sum(((flat - 0.2) / 1.5) ** 2 + np.log(2 * np.pi * 1.5**2))
    expected += 6 * np.log(6) - np.log(120) + 5 * np.log(1.7) - 6 * 1.7
    expected += 0.5 * np.sum(np.log(1.7 / (2 * np.pi)) - 1.7 * (Y - f) ** 2)
    np.testing.assert_allclose(jax.jit(joint)(1.7), expected, rtol=tol(1e-5, 1e-12))


def test_known_noise_minibatch_and_prediction():
    """The mean of the minibatch densities is that of all rows; f is there where y is not."""
    given = {name: jnp.asarray(x) for name, x in WEIGHTS.items()}

    @jax.jit
    def joint(rows):
        kwargs = {"hidden": (3,), "noise_prior": 2.0, "subsample_size": len(rows)}
        return log_density(
            bayesian_mlp, (jnp.array(X), jnp.array(Y)), kwargs, given | {"data": rows}
        )[0]

    single = jnp.stack([joint(jnp.array([i])) for i in range(4)])
    np.testing.assert_allclose(jnp.mean(single), joint(jnp.arange(4)), rtol=1e-5)
    model = substitute(seed(bayesian_mlp, random.key(0)), data=given)
    sites = trace(model).get_trace(jnp.array(X), hidden=(3,), noise_prior=2.0)
    f = (hidden_by_hand() @ WEIGHTS["w1"] + WEIGHTS["b1"])[:, 0]
    np.testing.assert_allclose(sites["f"]["value"], f, rtol=1e-5)
    assert "noise_precision" not in sites and sites["w0"]["infer"]["in_axis"] == -2


def test_classification_has_logits():
    given = {
        **WEIGHTS,
        "w1": np.array([[1.0, 0.2], [-0.5, 0.3], [0.7, -1.0]]),
        "b1": np.array([0.1, -0.2]),
    }
    model = substitute(seed(bayesian_mlp, random.key(0)), data=given)
    sites = trace(model).get_trace(jnp.array(X), hidden=(3,), num_classes=2)
    logits = hidden_by_hand() @ given["w1"] + given["b1"]
    np.testing.assert_allclose(sites["f"]["value"], logits, rtol=1e-5)
    assert set(np.unique(sites["y"]["value"])) <= {0, 1} and "noise_precision" not in sites


@pytest.mark.x64
def test_scale_mixture_is_its_density(tol):
    """Also far in the tail, where the narrow component underflows."""
    prior, w = scale_mixture(0.25, 2.0, 0.05), np.array([0.0, 0.3, -1.0, 9.0])

    def normal(s):
        return np.exp(-0.5 * (w / s) ** 2) / (s * np.sqrt(2 * np.pi))

    expected = np.log(0.25 * normal(2.0) + 0.75 * normal(0.05))
    np.testing.assert_allclose(prior.log_prob(jnp.array(w)), expected, rtol=tol(1e-5, 1e-12))


# The RMSE over 20 splits, and its standard error.
RIDGE = [("diabetes", 56.0, 1.1), ("wine_alcohol", 0.552, 0.022)]
RIDGE += [("breast_cancer_radius", 0.0846, 0.0034)]


@pytest.mark.parametrize(("name", "mean_error", "standard_error"), RIDGE)
def test_ridge_has_the_errors_of_the_protocol(name, mean_error, standard_error):
    """A second implementation, standardised ridge with unit penalty, has them on its own splits."""
    errors = []
    for split in range(20):
        data = regression_data(name, split)
        mean, sd = data.X_train.mean(0), data.X_train.std(0)
        A, B = ((np.column_stack([(x - mean) / sd, np.ones(len(x))])) for x in data[::2])
        center, unit = data.y_train.mean(), data.y_train.std()
        t = (data.y_train - center) / unit
        w = np.linalg.solve(A.T @ A + np.eye(A.shape[1]), A.T @ t)
        errors.append(np.sqrt(np.mean((data.y_test - (B @ w * unit + center)) ** 2)))
    assert np.mean(errors) == pytest.approx(mean_error, rel=2e-3)
    assert np.std(errors, ddof=1) / 20**0.5 == pytest.approx(standard_error, rel=0.1)


def test_splits_are_disjoint_and_cover_the_table():
    data = regression_data("wine_alcohol", 3)
    assert data.X_test.shape == (18, 12) and data.y_train.shape == (160,)
    rows = np.concatenate([data.X_train, data.X_test])
    targets = np.concatenate([data.y_train, data.y_test])
    assert len(np.unique(np.column_stack([rows, targets]), axis=0)) == 178
    with pytest.raises(ValueError, match="name is 'boston'; it must be one of 'diabetes'"):
        regression_data("boston")


@pytest.fixture
def uci():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "_shared" / "uci.py"
    spec = importlib.util.spec_from_file_location("uci", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("inner", ["bostonHousing/data", "boston"])
def test_published_splits_are_read_from_either_layout(uci, tmp_path, inner):
    folder = tmp_path / inner
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", np.arange(12.0).reshape(4, 3))
    for name, index in (
        ("features", [0, 2]),
        ("target", [1]),
        ("train_0", [3, 0, 1]),
        ("test_0", [2]),
    ):
        np.savetxt(folder / f"index_{name}.txt", index)
    for name in ("boston", "bostonHousing"):
        data = uci.uci_regression(tmp_path, name, 0)
        np.testing.assert_array_equal(data.X_train, [[9, 11], [0, 2], [3, 5]])
        np.testing.assert_array_equal(data.y_test, [7])
    with pytest.raises(FileNotFoundError, match=r"index_train_1.txt, .* has the splits 0 to 0"):
        uci.uci_regression(tmp_path, "boston", 1)
