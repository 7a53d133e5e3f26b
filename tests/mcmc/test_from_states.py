"""The draws of a loop of one's own as those of an ``MCMC``."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.diagnostics import diagnose, to_arviz
from numpyro_ext.mcmc import SGHMC, mcmc_from_states

N, B, DRAWS = 1000, 50, 20
X = 2.0 + np.random.default_rng(0).normal(size=N)


def model(x):
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    with numpyro.plate("rows", N, subsample_size=len(x)):
        numpyro.sample("x", dist.Normal(2.0, scale), obs=x)


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 2])
def test_draws_of_a_loop_are_those_of_an_mcmc(num_chains):
    """Constrained, by chain; facts are those of batches, and what is computed that of all rows."""
    kernel = SGHMC(model)
    key = random.key(0) if num_chains == 1 else random.split(random.key(0), num_chains)
    state = kernel.init(key, 0, None, (X[:B],))

    def draw(state, batch):
        state = kernel.sample(state, (batch,))
        return state, state

    _, states = jax.lax.scan(draw, state, jnp.asarray(X[: B * DRAWS]).reshape(DRAWS, B))
    mcmc = mcmc_from_states(kernel, states, X)
    by_chain = jnp.exp(jnp.moveaxis(states.z["scale"].reshape(DRAWS, num_chains), 1, 0))
    found = mcmc.get_samples(group_by_chain=True)["scale"]
    np.testing.assert_allclose(found, by_chain, rtol=1e-6)
    np.testing.assert_allclose(mcmc.get_samples()["scale"], by_chain.ravel(), rtol=1e-6)
    tree = to_arviz(mcmc)
    assert dict(tree.log_likelihood.sizes) == {"chain": num_chains, "draw": DRAWS, "rows": N}
    assert "lp_minibatch" in tree.sample_stats and "lp" not in tree.sample_stats
    assert "kinetic temperature" in str(diagnose(mcmc, num_moves=0))
    with pytest.raises(ValueError, match="not one minibatch"):
        diagnose(mcmc, model_args=(X[:B],))
    if num_chains == 1:
        listed = [jax.tree.map(lambda x, k=k: x[k], states) for k in range(DRAWS)]
        again = mcmc_from_states(kernel, listed, X).get_samples()["scale"]
        np.testing.assert_array_equal(again, found[0])
        with pytest.raises(ValueError, match="give one state for each draw"):
            mcmc_from_states(kernel, state, X)
