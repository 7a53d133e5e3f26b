"""Log weights of many rows in single precision: the rows are compared before they are added up."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

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
