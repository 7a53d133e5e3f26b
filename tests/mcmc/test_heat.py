"""Chains that are hotter than their posteriors say so while they run, and no others do."""

from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import scale
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.mcmc import SGHMC, SGLD, SGRLD, ExpandedMean, GammaSimplexReparam
from tests.mcmc.laws import normal

SIZE, BATCH, SD = 20_000, 50, 0.5
RNG = np.random.default_rng(0)
X = RNG.standard_normal(SIZE)
Y = 1.0 + 2.0 * X + SD * RNG.standard_normal(SIZE)


def line(x, y, times):
    a, b = numpyro.sample("a", dist.Normal(0, 10)), numpyro.sample("b", dist.Normal(0, 10))
    with scale(scale=times):
        numpyro.sample("y", dist.Normal(a + b * x, SD), obs=y)


def run(kernel, rows, num_draws, *args, num_chains=None):
    """Draws of the rows ``rows(i)``, after no warmup, in one program."""
    key = random.key(1)
    keys = key if num_chains is None else random.split(key, num_chains)
    state = kernel.init(keys, 0, None, (*rows(0), *args))

    @jax.jit
    def draw(state):
        def body(state, i):
            return kernel.sample(state, (*rows(i), *args)), state.z

        return lax.scan(body, state, jnp.arange(num_draws))

    state, draws = draw(state)
    jax.effects_barrier()
    return state, {name: np.asarray(z) for name, z in draws.items()}


@pytest.mark.parametrize("make", [SGHMC, SGLD])
def test_rows_that_are_new_at_every_call_heat_a_chain_and_it_says_so(make):
    """The step was found on 50 rows that count 400 times. On other rows the draws are 5 to 12 times
    too wide; the settings name the rows, and the warning says what to do."""
    x, y = jnp.asarray(X), jnp.asarray(Y)

    def rows(i):
        here = random.randint(random.fold_in(random.key(0), i), (BATCH,), 0, SIZE)
        return x[here], y[here]

    kernel = make(line)
    remedy = "found on the 50 rows of these arguments, .*'y' is scaled by 400: .*subsample_size=B"
    with pytest.warns(InferenceWarning, match=f"times what it should be.*{remedy}") as told:
        _, draws = run(kernel, rows, 1000, SIZE / BATCH)
    assert len(told) == 1
    assert "the 50 rows of these arguments, which no plate subsamples" in str(kernel.settings)
    assert np.std(draws["b"][200:]) > 3 * SD / SIZE**0.5


@pytest.mark.parametrize(
    "make",
    [
        partial(SGHMC, step_size=0.01, friction=0.1),
        partial(SGLD, step_size=0.1),
    ],
)
def test_right_chains_of_one_coordinate_say_nothing(make):
    """300 chains of 1,000 draws, some of which take 1,000 draws to forget a momentum."""
    state, draws = run(make(normal(1.0)), lambda i: (), 1000, num_chains=300)
    assert np.all(state.heat >= 0) and np.all(np.isfinite(state.heat))
    if make.keywords["step_size"] > 0.05:
        np.testing.assert_allclose(draws["z"][200:].std(), 1.0, atol=0.1)


def test_a_right_chain_beside_a_bound_says_nothing():
    """Near a share of 0 a gradient may imply a ratio of hundreds. Of 2,000 means over 50 draws,
    0.4 % were above 2; the largest geometric mean was 1.8, where 3 is too hot."""

    def shares():
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("counts", dist.Multinomial(100, p), obs=jnp.array([70, 20, 10]))

    model = numpyro.handlers.reparam(shares, config={"p": GammaSimplexReparam()})
    kernel = SGRLD(model, 0.003, metric=ExpandedMean(), steps_per_sample=5)
    state, _ = run(kernel, lambda i: (), 1000, num_chains=100)
    assert np.all(state.heat < np.inf)
