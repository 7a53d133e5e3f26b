"""What a conversion meets now and then: scopes, loops, lost chains, sites that were summed out."""

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext.diagnostics import pareto_khat, to_arviz
from tests.diagnostics.drawn import visited

X = jnp.array([0.5, -1.0, 2.0])


def run(model, draws, *args):
    """An MCMC that holds these draws."""
    return visited(model, draws, *args, method="mcmc")


def svi_of(model):
    return SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())


def clusters(x):
    with numpyro.plate("K", 2):
        loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
    numpyro.deterministic("gap", loc[1] - loc[0])
    with numpyro.plate("N", 3):
        k = numpyro.sample("k", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        numpyro.deterministic("own", loc[k])
        numpyro.sample("x", dist.Normal(loc[k]), obs=x)
    numpyro.sample("y", dist.Normal(loc.sum()), obs=1.5)


def test_a_site_that_was_summed_out_takes_what_may_depend_on_it():
    draws = {"loc": jnp.array([[-1.0, 1.0], [-2.0, 0.5]])}
    dt = to_arviz(run(clusters, draws, X), posterior_predictive=True)
    assert dt.attrs["marginalized"] == ["k"]
    assert dt.attrs["left_out"] == ["gap", "own", "x", "y"]
    np.testing.assert_allclose(dt.posterior.loc[0], draws["loc"])
    assert set(dt.posterior.data_vars) == {"loc"}
    assert set(dt.observed_data.data_vars) == {"x", "y"}


@pytest.mark.slow
def test_a_minibatch_inside_a_loop_is_refused():
    def looped(x):
        loc = numpyro.sample("loc", dist.Normal())

        def step(carry, row):
            with numpyro.plate("N", 3, subsample_size=1) as i:
                numpyro.sample("x", dist.Normal(loc), obs=row[i])
            return carry, None

        scan(step, 0.0, x)

    x = jnp.stack([X, 1 + X])
    args = {"model_args": (x,), "num_samples": 30}
    params = {"loc_auto_loc": jnp.array(0.0), "loc_auto_scale": jnp.array(1.0)}
    for judge in (to_arviz, pareto_khat):
        with pytest.raises(ValueError, match=r"'N' takes a minibatch of 1 of 3 rows inside scan"):
            judge(svi_of(looped), result=params, **args)
