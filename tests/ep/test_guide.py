"""The guide of an engine."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.ep import EP


def effects(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    with numpyro.plate("rows", len(y)) as idx:
        numpyro.sample("y", dist.Normal(theta[idx], 1.0), obs=y[idx])


def test_other_shapes_of_the_latents_have_another_guide():
    """As in leaving one group out, where the sites have one element less."""
    engine, y = EP(effects), jnp.array([1.0, -2.0, 0.6])
    before = engine.get_params(engine.init(random.key(0), y))
    assert engine.guide.sample_posterior(random.key(1), before)["theta"].shape == (3,)
    result = engine.run(random.key(0), 3, y[:2], progress_bar=False)
    np.testing.assert_allclose(result.params["auto_loc"], y[:2] / 2, atol=1e-4)
    draws = engine.guide.sample_posterior(random.key(1), result.params, sample_shape=(5,))
    assert draws["theta"].shape == (5, 2)
