"""Chains that are hotter than their posteriors say so while they run, and no others do."""

from functools import partial
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.mcmc import PSGLD, SGHMC, SGLD, SGNHT
from tests.mcmc.laws import normal

Y = jnp.asarray(np.random.default_rng(0).normal(size=20_000))


def mean_of(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", len(y), subsample_size=20) as i:
        numpyro.sample("y", dist.Normal(loc, 1.0), obs=y[i])


def run(mcmc):
    mcmc.run(random.key(0), Y, init_params={"loc": jnp.zeros(())})
    jax.block_until_ready(mcmc.get_samples())


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (partial(SGHMC, step_size=0.002, friction=1.0), "kinetic_temperature"),
        (partial(SGLD, step_size=2e-5), "implied_variance_ratio"),
    ],
)
def test_a_hot_chain_says_so_once(make, field):
    """The minibatch gradient has the variance 1000 * 20,000, so that it heats by a hundred."""
    words = f"the mean of {field} over 50 draws is at least .* what it should be, .*; take no step"
    mcmc = MCMC(make(mean_of), num_warmup=50, num_samples=300, progress_bar=False)
    with pytest.warns(InferenceWarning, match=words) as told:
        run(mcmc)
    assert len(told) == 1


@pytest.mark.parametrize(
    "make", [partial(SGHMC, step_size=0.01, friction=0.1), partial(SGLD, step_size=0.1)]
)
def test_right_chains_of_one_coordinate_say_nothing(make):
    """300 chains of 1,000 draws, some of which take 1,000 draws to forget a momentum."""
    kernel = make(normal(1.0))
    state = kernel.init(random.split(random.key(1), 300), 0, None, ())
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferenceWarning)
        state = jax.jit(lambda s: lax.fori_loop(0, 1000, lambda _, s: kernel.sample(s), s))(state)
    assert np.all(np.isfinite(state.heat))


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (SGLD, "take no step_size"),
        (SGHMC, "take no step_size"),
        (SGNHT, "take no step_size"),
        (PSGLD, "take no step_size"),
        (partial(PSGLD, adapt="always"), "take adapt='warmup'"),
    ],
)
def test_the_remedy_names_arguments_that_the_kernel_has(make, remedy):
    assert remedy in make(mean_of, 0.1).if_hot
    if "step_size" in remedy:
        make(mean_of)
    else:
        with pytest.raises(ValueError, match="adapt='warmup'"):
            make(mean_of)
