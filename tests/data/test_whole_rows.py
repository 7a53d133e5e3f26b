"""The modes of models that take the whole of rows on the host are those with the array."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext._model.potential import Program
from numpyro_ext.data import HostArray
from numpyro_ext.optim import find_modes

N = 3000
W = np.array([1.0, -0.5])
X = np.random.default_rng(0).normal([0.5, 0.0], size=(N, 2)).astype(np.float32)
Y = (np.random.default_rng(1).uniform(size=N) < 1 / (1 + np.exp(-X @ W))).astype(np.int32)


def coefficients():
    return numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))


def of_batches(x, y):
    """A batch of a loader; its plate says how many rows there are in all."""
    w = coefficients()
    with numpyro.plate("rows", N, subsample_size=len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def of_all(x, y):
    w = coefficients()
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def centred(x, y):
    w = coefficients()
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=(x - jnp.mean(x, 0)) @ w), obs=y)


def without_plate(x, y):
    numpyro.sample("y", dist.Bernoulli(logits=x @ coefficients()), obs=y)


def of_one_size(x, y):
    w = coefficients()
    with numpyro.plate("rows", N):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def local(x, y):
    w = coefficients()
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + z), obs=y)


@pytest.mark.slow
def test_modes(monkeypatch):
    read = []

    def noted(x):
        read.append(len(x))
        return x

    monkeypatch.setattr(Program, "piece_size", 700)
    right = find_modes(of_all, jnp.asarray(X), jnp.asarray(Y), starts=1)
    for model in (of_batches, of_all):
        modes = find_modes(model, HostArray(X, transform=noted), HostArray(Y), starts=1)
        assert not modes.problems
        assert modes.heaviest.distance(right.heaviest.center) < 0.05
        ratio = modes.heaviest.factor / np.where(right.heaviest.factor, right.heaviest.factor, 1)
        np.testing.assert_allclose(ratio, [[1, 0], [1, 1]], atol=0.02)
        assert modes.log_evidence == pytest.approx(right.log_evidence, abs=0.02)
    assert 700 in read


REFUSED = {
    centred: "not a sum over rows",
    without_plate: r"site 'y', .* lies in no plate",
    of_one_size: "on 5 rows it says: .*shape",
    local: "latent site 'z' has a value for each",
}


@pytest.mark.parametrize("model", REFUSED)
def test_models_that_cannot_be_read_by_rows_are_refused(model):
    with pytest.raises(
        ValueError, match=f"takes all rows of a HostArray at once, .*{REFUSED[model]}"
    ):
        find_modes(model, HostArray(X), HostArray(Y))
