"""What a draw costs: gradients of the model, and passes over its data."""

import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, BarkerMH
import pytest

from numpyro_ext.diagnostics import InferenceWarning, diagnose, to_arviz
from numpyro_ext.diagnostics._facts import Facts, cost_of
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.judges.chains import Agreement, chain_rows
from numpyro_ext.mcmc import SGLD, SVRG, MinibatchGradient

X = jnp.linspace(-1.0, 1.0, 200)


def model(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=x[i])


def run(kernel, *args, num_samples=600, thinning=1):
    mcmc = MCMC(
        kernel, num_warmup=50, num_samples=num_samples, thinning=thinning, progress_bar=False
    )
    mcmc.run(random.key(0), *args)
    return mcmc


def ran(kernel):
    """A run, as far as its cost is concerned; NUTS itself is in ``test_provoked``."""
    return MCMC(kernel, num_warmup=1, num_samples=2, thinning=2)


FIT = Fit(None, (), {}, {}, [{}])
DRAWS = {"z": np.random.default_rng(0).normal(size=(1, 500))}


def rows(mcmc):
    return {row.quantity: row for row in diagnose(mcmc, num_moves=0).rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gradient", "cost"),
    # 200 rows are 40 batches of 5; SVRG reads all rows in every 20th step.
    [(MinibatchGradient(), 1), (SVRG(20), 2 + 40 / 20)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:the mean of .* times what it should be")
def test_a_draw_costs_the_gradients_of_its_transitions(gradient, cost):
    mcmc = run(SGLD(model, 1e-3, gradient=gradient, steps_per_sample=3), X, 5, thinning=2)
    found = rows(mcmc)
    gradients = 300 * 2 * 3 * cost
    per_gradient = found["smallest ESS"].value / gradients
    assert found["ESS per gradient"].value == pytest.approx(per_gradient)
    assert found["ESS per pass over the data"].value == pytest.approx(40 * per_gradient)
    assert "5 of 200 rows" in found["ESS per gradient"].verdict
    with warnings.catch_warnings():  # of a step that is too large, which is not the matter here
        warnings.simplefilter("ignore", InferenceWarning)
        tree = to_arviz(mcmc, log_likelihood=False)
    assert [row[:2] for row in diagnose(tree).rows] == [row[:2] for row in found.values()]


def test_nuts_says_how_to_see_its_gradients_and_one_gradient_is_one_of_barker():
    assert cost_of(ran(NUTS(model)), FIT).known() == {
        "transitions_per_draw": 2,
        "takes_leapfrogs": 1,
    }
    (row,) = chain_rows(Agreement(DRAWS), {}, Facts(takes_leapfrogs=1))[2:]
    assert "num_steps" in row.verdict
    assert cost_of(ran(BarkerMH(model)), FIT).gradients_per_draw == 2
