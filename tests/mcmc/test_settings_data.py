"""Settings that were found belong to their data: other data have their own, or are refused."""

from functools import cache
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext.mcmc import SGHMC, SGLD
from tests.mcmc.models import gaussian_mean, gaussian_mean_data

ROWS = 50
Y = np.linspace(-1.7, 1.7, ROWS)


def mean(y, scale):
    """Under the wide prior the posterior has the mean of y and the sd scale / sqrt(50)."""
    loc = numpyro.sample("loc", dist.Normal(0.0, 1e4))
    numpyro.sample("y", dist.Normal(loc, scale).expand([ROWS]).to_event(1), obs=y)


NARROW = jnp.asarray(Y + 3.0), jnp.array(1.0)
WIDE = jnp.asarray(40.0 * Y + 60.0), jnp.array(40.0)


def chains(kernel, **options):
    options |= {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    return MCMC(kernel, num_warmup=20, num_samples=1000, **options)


def check(mcmc, y, scale):
    """Each draw is 4 steps of half a deviation from the last: the sd of 4,000 is known to 2 %, the
    mean of 500 to 5 % of a deviation. A chain whose scale is 40 times too small hardly moves."""
    loc = np.asarray(mcmc.get_samples(group_by_chain=True)["loc"])
    sd = float(scale) / ROWS**0.5
    assert loc.std() == pytest.approx(sd, rel=0.15)
    means = loc.reshape(8, 500).mean(1)
    assert np.max(np.abs(means - float(jnp.mean(y)))) < 0.3 * sd


@cache
def ran_on_both():
    """One compiled chain with the data as arguments, on the wide data last."""
    mcmc = chains(SGHMC(mean, steps_per_sample=4), jit_model_args=True)
    mcmc.run(random.key(0), *NARROW)
    check(mcmc, *NARROW)
    mcmc.run(random.key(1), *WIDE)
    return mcmc


@pytest.mark.slow
def test_data_that_are_arguments_of_a_compiled_chain_have_their_own_settings():
    mcmc = ran_on_both()
    check(mcmc, *WIDE)
    scale = float(mcmc.sampler.settings.whitening.factor[0, 0])
    assert scale == pytest.approx(40 / ROWS**0.5, rel=0.01)


@pytest.mark.slow
def test_a_chain_goes_on_with_its_own_data_and_with_no_other():
    mcmc = pickle.loads(pickle.dumps(ran_on_both()))
    mcmc.post_warmup_state = mcmc.last_state
    settings = mcmc.sampler.settings
    mcmc.run(random.key(2), *WIDE)
    check(mcmc, *WIDE)
    with pytest.raises(ValueError, match=r"goes on with other data .* set mcmc.post_warmup_state"):
        mcmc.run(random.key(3), *NARROW)
    assert mcmc.sampler.settings is settings
    mcmc.post_warmup_state = None


@pytest.mark.slow
def test_data_of_a_closure_have_their_own_settings():
    now = [NARROW]
    mcmc = chains(SGHMC(lambda: mean(*now[0]), steps_per_sample=4))
    for data in (NARROW, WIDE):
        now[0] = data
        mcmc.run(random.key(0))
        check(mcmc, *data)
    mcmc.post_warmup_state, now[0] = mcmc.last_state, NARROW
    with pytest.raises(ValueError, match="a chain goes on with other data than those for which"):
        mcmc.run(random.key(1))


def test_a_chain_does_not_go_on_with_another_latent_vector():
    def model(n):
        numpyro.sample("z", dist.Normal(0, 1).expand([n]).to_event(1))

    mcmc = chains(SGLD(model, 0.1))
    mcmc.run(random.key(0), 2)
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(ValueError, match=r"but on these arguments the model has {'z': \(3,\)}"):
        mcmc.run(random.key(0), 3)


def test_a_search_that_has_no_numbers_is_an_error():
    def simplex():
        numpyro.sample("x", dist.Dirichlet(jnp.ones(1)))

    with pytest.raises(ValueError, match="the latent sites have no free coordinate"):
        SGHMC(simplex).init(random.key(0), 10, None)

    def traced(x):
        return SGHMC(gaussian_mean).init(random.key(0), 10, None, (x,)).z

    with pytest.raises(ValueError, match="the run is inside a traced function"):
        jax.jit(traced)(gaussian_mean_data())
