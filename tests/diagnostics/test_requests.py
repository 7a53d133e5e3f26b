"""Calls of the diagnostics that lack something, and data that they cannot compare."""

import arviz as az
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest
from scipy.special import ndtr

from numpyro_ext.diagnostics import (
    diagnose,
    evidence_bounds,
    pareto_khat,
    plot_diagnosis,
    predictive_scores,
    site_names,
    to_arviz,
)
from numpyro_ext.diagnostics.checks.losses import loss_row, nearer
from numpyro_ext.diagnostics.checks.weights import KHAT
from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoRealNVPNormal, FlowGuide
from numpyro_ext.optim import find_modes
from tests.diagnostics.drawn import drawing, rows_of, visited


def mean_of(x):
    loc = numpyro.sample("loc", dist.Normal())
    with numpyro.plate("rows", 3):
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=x)


X = jnp.array([0.5, -1.0, 2.0])
SVI_OF_MEAN = SVI(mean_of, AutoNormal(mean_of), optax.adam(0.1), Trace_ELBO())
PARAMS = {"loc_auto_loc": jnp.array(0.4), "loc_auto_scale": jnp.array(0.5)}


@pytest.mark.parametrize(
    "judge", [diagnose, to_arviz, pareto_khat, predictive_scores, evidence_bounds]
)
def test_a_fit_without_its_arguments_is_told_of_model_args(judge):
    with pytest.raises(TypeError, match=r"takes \(x\): .* required argument: 'x'; .*model_args="):
        judge(SVI_OF_MEAN, PARAMS)


def test_a_fit_is_no_diagnosis():
    with pytest.raises(TypeError, match=r"is a SVI; pass what diagnose returned"):
        plot_diagnosis(SVI_OF_MEAN)


def test_an_array_of_words_is_told_to_become_codes():
    words = np.array(["a", "b", "c"])
    with pytest.raises(ValueError, match=r"site 'x' are words.*np.unique"):
        find_modes(mean_of, words)
    with pytest.raises(TypeError, match=r"computes with an array of words.*np.unique"):
        find_modes(lambda x: mean_of(jnp.log(x)), words)


def test_data_given_as_none_are_told_from_a_discrete_latent_site():
    def counts(x=None):
        rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
        with numpyro.plate("rows", 3):
            numpyro.sample("x", dist.Poisson(rate), obs=x)

    with pytest.raises(ValueError, match=r"'x' is discrete; .*If it is data, .*pass the data"):
        find_modes(counts)


def test_ep_names_an_improper_prior_and_data_of_other_rows():
    def improper(x):
        loc = numpyro.sample("loc", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", dist.Normal(loc, 1.0), obs=x)

    with pytest.raises(ValueError, match=r"prior of latent site 'loc' is improper"):
        EP(improper).run(random.key(0), 1, X, progress_bar=False)
    with pytest.raises(ValueError, match=r"'x' have shape \(2,\), .* in the plate 'rows' of 3"):
        EP(mean_of).run(random.key(0), 1, X[:2], progress_bar=False)


def censored(bounds):
    loc = numpyro.sample("loc", dist.Normal())
    with numpyro.plate("rows", len(bounds)):
        no = jnp.zeros(len(bounds))
        fn = dist.IntervalCensoredDistribution(dist.Normal(loc, 1.0), no, no)
        numpyro.sample("x", fn, obs=bounds)


def test_censored_rows_have_log_densities_and_no_predictive_scores():
    bounds = jnp.array([[0.0, 1.0], [-1.0, 0.5], [0.3, 2.0], [1.0, 1.5]])
    loc = np.array([0.1, 0.3, -0.2, 0.4])
    mcmc = visited(censored, {"loc": loc}, bounds)
    low, high = (ndtr(np.asarray(bounds)[:, i] - loc[:, None]) for i in (0, 1))
    found = to_arviz(mcmc).log_likelihood["x"].to_numpy()[0]
    np.testing.assert_allclose(found, np.log(high - low), rtol=1e-4)
    with pytest.raises(ValueError, match=r"'x' have shape \(4, 2\) and its draws \(4,\)"):
        predictive_scores(mcmc)


def test_draws_outside_of_a_support_that_depends_on_another_site_are_wrong():
    """NumPyro's guides keep the support of their start: half of these draws are above ``top``."""

    def model():
        top = numpyro.sample("top", dist.TruncatedNormal(5.0, 0.1, low=0.0))
        numpyro.sample("u", dist.Uniform(0.0, top))

    svi = drawing(model, {"top": (5.0, 0.1), "u": (5.0, 0.1)})
    row = rows_of(diagnose(svi, {}, model_args=(), num_moves=0))[KHAT]
    assert row.ok is False and "do not have a density under the model" in row.verdict


def test_a_nearer_start_is_an_argument_of_the_guide():
    t, model = np.arange(1000.0), mean_of
    assert "init_from=" in loss_row([-t], nearer(AutoRealNVPNormal(model))).verdict
    normal = loss_row([-t], nearer(AutoNormal(model))).verdict
    assert "init_params=" in normal and "init_from" not in normal
    network = FlowGuide(model, stax.Dense(4), plate="rows", features=lambda x: x[:, None])
    for guide in (network, lambda x: None):
        assert "init_params=" in loss_row([-t], nearer(guide)).verdict


# Names with a slash.


def scoped(x, clash=False):
    loc = numpyro.sample("net/loc", dist.Normal().expand([2]).to_event(1))
    numpyro.sample("net:loc" if clash else "free", dist.Normal())
    with numpyro.plate("data/rows", len(x), subsample_size=None):
        numpyro.sample("net/x", dist.Normal(loc[0], 1.0), obs=x)


DRAWS = {"net/loc": np.arange(8.0).reshape(4, 2), "free": np.array([1.0, 3.0, 2.0, 5.0])}


def test_names_with_a_slash_have_a_name_that_can_be_reversed(tmp_path):
    mcmc = visited(scoped, DRAWS, X)
    names = {"dims": {"net/loc": ["which/one"]}, "coords": {"data/rows": ["a", "b", "c"]}}
    tree = to_arviz(mcmc, **names)
    assert set(tree.posterior) == {"net:loc", "free"}
    assert tree.posterior["net:loc"].dims[-1] == "which:one"
    assert list(tree.log_likelihood["net:x"].coords["data:rows"].values) == ["a", "b", "c"]
    back = {name.replace("/", ":"): name for name in ("net/loc", "net/x", "data/rows", "which/one")}
    assert site_names(tree) == back
    az.summary(tree)
    assert site_names(to_arviz(visited(mean_of, {"loc": np.ones(4)}, X))) == {}


def test_names_that_would_be_one_are_refused():
    draws = {"net/loc": np.ones((4, 2)), "net:loc": np.zeros(4)}
    mcmc = visited(scoped, draws, X, True)
    with pytest.raises(ValueError, match=r"'net/loc' and 'net:loc', which would be one"):
        to_arviz(mcmc)
