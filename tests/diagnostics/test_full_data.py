"""The model on all of its data."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest

from numpyro_ext.diagnostics import full_data

X = jnp.array([[0.5, -1.0], [2.0, 0.3], [-0.7, 1.4]])


def model(x, rows=None, columns=None):
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    with numpyro.plate("columns", x.shape[1], subsample_size=columns) as j:
        with numpyro.plate("rows", x.shape[0], subsample_size=rows) as i:
            z = numpyro.sample("z", dist.Normal(loc))
            numpyro.sample("x", dist.Normal(z, 0.5), obs=x[i][:, j])


def sites(fn, *args, **kwargs):
    return handlers.trace(handlers.seed(fn, 0)).get_trace(*args, **kwargs)


@pytest.mark.parametrize("sizes", [(2, None), (None, 1), (1, 1), (3, 2)])
def test_every_plate_is_whole_and_unscaled(sizes):
    found = sites(full_data(model, X, *sizes), X, *sizes)
    assert found["x"]["value"].shape == found["z"]["value"].shape == (3, 2)
    assert np.array_equal(found["x"]["value"], X)
    assert found["x"]["scale"] is None
    assert np.array_equal(found["rows"]["value"], np.arange(3))


@pytest.mark.x64
def test_log_density_is_that_of_the_model_without_minibatches(tol):
    values = {"loc": 0.3, "z": jnp.arange(6.0).reshape(3, 2)}
    full = log_density(full_data(model), (X, 2, 1), {}, values)[0]
    expected = (
        dist.Normal(1.0, 2.0).log_prob(0.3)
        + dist.Normal(0.3).log_prob(values["z"]).sum()
        + dist.Normal(values["z"], 0.5).log_prob(X).sum()
    )
    np.testing.assert_allclose(full, expected, rtol=tol(1e-6, 1e-14))


def test_a_guide_draws_local_latents_of_all_data():
    def guide(x, rows=None):
        with numpyro.plate("columns", 2), numpyro.plate("rows", 3, subsample_size=rows):
            loc = numpyro.param("loc", jnp.arange(3.0)[:, None] * jnp.ones(2), event_dim=0)
            numpyro.sample("z", dist.Normal(loc, 1e-6))

    found = sites(full_data(guide, X, rows=1), X, rows=1)
    np.testing.assert_allclose(found["z"]["value"], [[0, 0], [1, 1], [2, 2]], atol=1e-4)


def test_improper_priors_and_values_under_jit():
    def improper(x):
        loc = numpyro.sample("loc", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("rows", len(x), subsample_size=1) as i:
            numpyro.sample("x", dist.Normal(loc), obs=x[i])

    full = full_data(improper, X[:, 0])
    value = jax.jit(lambda z: log_density(full, (X[:, 0],), {}, {"loc": z})[0])(0.2)
    np.testing.assert_allclose(value, dist.Normal(0.2).log_prob(X[:, 0]).sum(), rtol=1e-6)


def test_a_minibatch_larger_than_the_data_is_an_error():
    with pytest.raises(ValueError, match="subsample_size 4 but only 3 rows"):
        sites(full_data(model), X, 4)
