"""The weights of the KL term in an epoch."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import Trace_ELBO
import pytest

from numpyro_ext.objectives import minibatch_kl_weights


def test_values():
    np.testing.assert_allclose(minibatch_kl_weights(3), [4 / 7, 2 / 7, 1 / 7], rtol=1e-6)
    np.testing.assert_allclose(minibatch_kl_weights(4, "uniform"), 0.25)


@pytest.mark.parametrize("num_batches", [1, 2, 30, 2000])
def test_sum_to_one_without_overflow(num_batches):
    for scheme in ("geometric", "uniform"):
        weights = minibatch_kl_weights(num_batches, scheme)
        assert weights.shape == (num_batches,)
        np.testing.assert_allclose(weights.sum(), 1, rtol=1e-5)
        assert np.all(np.diff(weights) <= 0)


def test_losses_of_an_epoch_sum_to_the_full_loss():
    x = jnp.array([0.3, -1.0, 2.0, 0.7, 1.1, -0.2]).reshape(3, 2)
    pi = minibatch_kl_weights(3)

    def model(i):
        with handlers.scale(scale=1.0 if i is None else 3 * pi[i]):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        batch = x.reshape(-1) if i is None else x[i]
        with numpyro.plate("data", 6, subsample_size=len(batch)):
            numpyro.sample("x", dist.Normal(z, 1.0), obs=batch)

    def guide(i):
        with handlers.scale(scale=1.0 if i is None else 3 * pi[i]):
            numpyro.sample("z", dist.Normal(0.2, 0.6))

    full, *batches = (
        Trace_ELBO().loss(random.key(0), {}, model, guide, i) for i in (None, 0, 1, 2)
    )
    np.testing.assert_allclose(sum(batches) / 3, full, rtol=1e-5)


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_batches"):
        minibatch_kl_weights(0)
    with pytest.raises(ValueError, match="'geometric', 'uniform'"):
        minibatch_kl_weights(3, "linear")
