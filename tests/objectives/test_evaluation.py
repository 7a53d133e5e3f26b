"""log_weights: the draws, their chunks and their axes."""

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import IWELBO, log_weights
from tests.objectives.models import (
    LOCAL_PARAMS,
    X_LOCAL,
    global_model,
    linear_gaussian,
    local_guide,
    local_model,
    normal_guide,
)


@pytest.mark.slow
def test_one_column_for_each_independent_datum():
    lw = log_weights(random.key(0), LOCAL_PARAMS, local_model, local_guide, num_samples=7)
    assert lw.shape == (7, 6)
    loss = IWELBO(7).loss(random.key(0), LOCAL_PARAMS, local_model, local_guide)
    np.testing.assert_allclose(-(logsumexp(lw, 0) - jnp.log(7)).sum(), loss, rtol=1e-5)
    params = {"b": 0.7, "m": 0.2, "s": 0.8}
    assert log_weights(random.key(0), params, global_model, normal_guide, num_samples=4).shape == (
        4,
    )


def test_chunks_give_the_same_draws():
    whole, chunks = (
        log_weights(
            random.key(1),
            {"m": 0.5, "s": 0.9},
            linear_gaussian,
            normal_guide,
            1.5,
            num_samples=10,
            batch_size=b,
        )
        for b in (None, 4)
    )
    np.testing.assert_allclose(whole, chunks, rtol=1e-6)


def test_discrete_sites_have_weights():
    def model():
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        numpyro.sample("x", dist.Normal(1.0 * z, 1.0), obs=0.8)

    def guide():
        numpyro.sample("z", dist.Bernoulli(0.6))

    lw = log_weights(random.key(0), {}, model, guide, num_samples=50)
    exact = [
        np.log(0.7 / 0.4) + dist.Normal(0.0, 1.0).log_prob(0.8),
        np.log(0.3 / 0.6) + dist.Normal(1.0, 1.0).log_prob(0.8),
    ]
    np.testing.assert_allclose(jnp.unique(lw), np.sort(exact), rtol=1e-5)


def test_bad_arguments():
    with pytest.raises(ValueError, match="subsample of 2 of 6 rows"):
        jax.eval_shape(
            lambda: log_weights(random.key(0), LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 2)
        )
