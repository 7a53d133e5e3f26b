"""What holds for every fitted object: one table of constructors, one law per test."""

import pickle

import arviz as az
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import pytest

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.diagnostics import pareto_khat, to_arviz

Y = jnp.asarray(1.5 + 0.8 * np.sin(7.0 * np.arange(20)))
DRAWS = 60


def model(y, batch=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.2, 0.4))
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    numpyro.deterministic("ratio", loc / scale)
    with numpyro.plate("N", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(loc, scale), obs=y[i])


def by_hand(posterior):
    """Log likelihoods and the unconstrained log joint, from the formulas."""
    scale, loc = posterior.scale.to_numpy(), posterior["loc"].to_numpy()
    log_lik = np.asarray(dist.Normal(loc[..., None], scale[..., None]).log_prob(Y))
    lp = dist.Normal(1.0, 2.0).log_prob(loc) + dist.Normal(0.2, 0.4).log_prob(np.log(scale))
    return log_lik, np.asarray(lp) + log_lik.sum(-1)


def custom_guide(y, batch=None):
    loc = numpyro.param("m", 1.4)
    numpyro.sample("loc", dist.Normal(loc, numpyro.param("s", 0.2)))
    numpyro.sample("scale", dist.LogNormal(numpyro.param("t", -0.4), 0.1))


def implicit_guide(y, batch=None):
    noise = numpyro.sample("e", dist.Normal().expand([2]), infer={"is_auxiliary": True})
    numpyro.sample("loc", Implicit(numpyro.param("m", 1.4) + 0.2 * noise[0]))
    numpyro.sample(
        "scale", Implicit(jnp.exp(0.1 * noise[1] - 0.4), support=dist.constraints.positive)
    )


class Particles(AutoNormal):
    def particles(self, params):
        grid = jnp.linspace(-1.0, 1.0, DRAWS)
        return {"loc": 1.4 + 0.3 * jnp.sin(9 * grid), "scale": jnp.exp(0.2 * grid - 0.3)}


class Engine:
    def __init__(self, model):
        self.model, self.guide = model, AutoMultivariateNormal(model)

    def run(self, rng_key, num_steps, *args):
        raise NotImplementedError


def svi_of(guide):
    return SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())


def engine():
    params = {"auto_loc": jnp.array([-0.3, 1.4]), "auto_scale_tril": 0.2 * jnp.eye(2)}
    return Engine(model), params


def mcmc(kernel, batch=None, num_chains=2, **kwargs):
    mcmc = MCMC(
        kernel(model),
        num_warmup=30,
        num_samples=DRAWS,
        num_chains=num_chains,
        progress_bar=False,
        **kwargs,
    )
    mcmc.run(random.key(0), Y, batch)
    return mcmc, None


NORMAL = {
    "scale_auto_loc": jnp.array(-0.3),
    "scale_auto_scale": jnp.array(0.1),
    "loc_auto_loc": jnp.array(1.4),
    "loc_auto_scale": jnp.array(0.2),
}
FITS = {
    "AutoNormal": lambda: (svi_of(AutoNormal(model)), NORMAL),
    "custom guide": lambda: (svi_of(custom_guide), {"m": 1.4, "s": 0.2, "t": -0.4}),
    "implicit guide": lambda: (svi_of(implicit_guide), {"m": 1.4}),
    "particles": lambda: (svi_of(Particles(model)), {}),
    "engine": engine,
    "NUTS, parallel": lambda: mcmc(NUTS, chain_method="parallel"),
}


class Case:
    def __init__(self, name):
        self.obj, self.result = FITS[name]()
        given = {} if self.result is None else {"result": self.result, "model_args": (Y, 5)}
        self.tree = to_arviz(self.obj, num_samples=DRAWS, rng_key=random.key(1), **given)


@pytest.fixture(scope="module", params=FITS)
def case(request):
    return Case(request.param)


@pytest.mark.slow
def test_every_group_is_chain_by_draw_and_has_all_rows(case):
    tree = case.tree
    chains = 2 if isinstance(case.obj, MCMC) else 1
    for group in set(tree.children) - {"observed_data"}:
        for value in tree[group].data_vars.values():
            assert value.dims[:2] == ("chain", "draw")
            assert value.shape[:2] == (chains, DRAWS)
            assert np.all(np.isfinite(value))
    assert set(tree.posterior.data_vars) == {"scale", "loc", "ratio"}
    assert tree.log_likelihood.y.dims == ("chain", "draw", "N")
    assert np.array_equal(tree.observed_data.y, Y)


def test_log_likelihood_and_lp_are_those_of_the_model_on_all_data(case):
    log_lik, lp = by_hand(case.tree.posterior)
    np.testing.assert_allclose(case.tree.log_likelihood.y, log_lik, rtol=1e-4)
    if "lp" in case.tree.sample_stats:
        np.testing.assert_allclose(case.tree.sample_stats.lp, lp, rtol=1e-4)


def test_weights_are_there_exactly_where_a_density_is(case):
    stats, density = case.tree.sample_stats, case.tree.attrs["density"]
    assert ("log_weight" in stats) == ("log_q" in stats) == (density == "exact")
    if density == "exact":
        weight = stats.lp - stats.log_q
        np.testing.assert_allclose(stats.log_weight, weight, rtol=1e-4, atol=1e-4)
        assert np.isfinite(pareto_khat(case.tree).khat)
    else:
        with pytest.raises(IntractableDensityError):
            pareto_khat(case.tree)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")  # sixty draws
def test_the_tree_is_what_arviz_works_on(case):
    assert set(az.summary(case.tree).index) == {"scale", "loc", "ratio"}
    assert az.ess(case.tree)["loc"] > 1
    assert np.isfinite(az.loo(case.tree).elpd)
    copy = pickle.loads(pickle.dumps(case.tree))
    assert copy.identical(case.tree)


def test_names(case):
    attrs = case.tree.attrs
    assert attrs["inference_library"] == "numpyro"
    assert attrs == case.tree.posterior.attrs
    assert {"inference_method", "density"} <= set(attrs)
    assert ("kernel" in attrs) == isinstance(case.obj, MCMC)
    assert ("guide" in attrs) != isinstance(case.obj, MCMC)
    assert ("loss" in attrs) == isinstance(case.obj, SVI)
    assert (attrs["inference_method"] == "engine") == isinstance(case.obj, Engine)
