"""Log weights of many rows in single precision: the rows are compared before they are added up."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext._model.arguments import is_traced
from numpyro_ext.diagnostics import to_arviz

N = 300_000
X = 3 * random.normal(random.key(0), (N,))


def of_rows(x):
    z = numpyro.sample("z", dist.Normal(0, 10))
    with numpyro.plate("N", N):
        numpyro.sample("x", dist.Normal(z, 3.0), obs=x)


def of_one_event(x):
    z = numpyro.sample("z", dist.Normal(0, 10))
    numpyro.sample("x", dist.Normal(z, 3.0).expand([N]).to_event(1), obs=x)


@pytest.mark.slow
@pytest.mark.parametrize("model", [of_rows, of_one_event])
def test_log_weights_are_those_of_the_normal_posterior(model):
    """The posterior is N(m, s^2) with 1 / s^2 = N / 9 + 1 / 100, and the guide has half of s."""
    s = 1 / np.sqrt(N / 9 + 0.01)
    m = s**2 * np.sum(np.asarray(X, np.float64)) / 9
    params = {"z_auto_loc": jnp.asarray(m, float), "z_auto_scale": jnp.asarray(s / 2, float)}
    svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
    tree = to_arviz(svi, params, model_args=(X,), num_samples=30, log_likelihood=False)
    z = tree.posterior["z"].to_numpy()[0].astype(np.float64)
    loc = np.float64(params["z_auto_loc"])
    expected = -0.5 * ((z - m) / s) ** 2 + 0.5 * ((z - loc) / (s / 2)) ** 2
    found = tree.sample_stats["log_weight"].to_numpy()[0]
    # The log density is -750,000, of which single precision knows .06 at best. The draws lie on
    # a grid of 1e-9 in units of .005.
    error = (found - expected) - np.mean(found - expected)
    assert np.abs(error).max() < 0.01
    assert np.ptp(expected) > 0.5


def given_as(x, reads=False):
    """Whether the model was given its data as an input of a program, and the log likelihoods."""
    inputs = []

    def model(x):
        inputs.append(is_traced(x))
        scale = 3.0 + int(reads and x[0] > 1e9)  # a number that the model reads
        z = numpyro.sample("z", dist.Normal(0, 10))
        with numpyro.plate("N", len(x)):
            numpyro.sample("x", dist.Normal(z, scale), obs=x)

    def guide(x):
        numpyro.sample("z", dist.Normal(0.5, 1e-3))

    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    tree = to_arviz(svi, {}, model_args=(x,), num_samples=2)
    expected = dist.Normal(tree.posterior["z"].to_numpy()[..., None], 3.0).log_prob(x)
    np.testing.assert_allclose(tree.log_likelihood["x"], expected, rtol=1e-5)
    return inputs[-1]


@pytest.mark.parametrize(
    ("x", "reads", "is_input"),
    [
        (X[:10_000], False, True),
        (np.asarray(X[:10_000]), False, True),
        (np.asarray(X[:10_000]), True, False),
        (X[:9_999], False, False),
        (np.asarray(X[:10_000], np.float64), False, False),
    ],
    ids=["rows", "NumPy", "rows that are read", "few rows", "double precision"],
)
def test_large_arrays_are_inputs_of_the_program_that_xla_cannot_fold(x, reads, is_input):
    assert given_as(x, reads) is (is_input or (x.dtype == np.float64 and jax.config.jax_enable_x64))
