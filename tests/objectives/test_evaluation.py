"""log_weights: the draws, their chunks and their axes."""

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
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


def test_bad_arguments():
    with pytest.raises(ValueError, match="subsample of 2 of 6 rows"):
        jax.eval_shape(
            lambda: log_weights(random.key(0), LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 2)
        )
