"""A fit is evaluated on the model that it was fitted to, or an error says what is missing."""

import pickle

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext.diagnostics import diagnose, evidence_bounds, to_arviz
from numpyro_ext.ep import EP
from numpyro_ext.mcmc import SGLD
from numpyro_ext.particles import ParVI, RegularizedSVGD

X = jnp.array([0.5, -1.0, 2.0])


def shifted(x):
    """Given the shift w, z is normal with mean ``sum(x - w) / 4`` and sd 1/2."""
    w = numpyro.param("w", lambda key: 3 * random.normal(key))
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x)):
        numpyro.sample("x", dist.Normal(z + w), obs=x)


def run(kernel, keys, **options):
    options = {"num_warmup": 200, "num_samples": 600, "progress_bar": False, **options}
    mcmc = MCMC(kernel, **options)
    for key in keys:
        mcmc.run(random.key(key), X)
    return mcmc


def nuts(keys, **options):
    return run(NUTS(shifted), keys, **options)


def sgld(keys, **options):
    return run(SGLD(shifted, 0.02, steps_per_sample=20), keys, **options)


def particles(keys):
    options = {"num_samples": 1, "num_chains": 20, "chain_method": "vectorized"}
    return run(ParVI(shifted, RegularizedSVGD(), init_from=None), keys, **options)


TWO = {"num_chains": 2, "chain_method": "sequential"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fit", "chains"),
    [
        (lambda: nuts([0], **TWO), 1),
        (lambda: sgld([0, 1]), 1),
        (lambda: particles([0, 1]), 20),
    ],
    ids=["NUTS chains", "SGLD again", "ParVI again"],
)
def test_draws_are_evaluated_at_the_parameters_that_the_chains_had(fit, chains):
    """The differences of the log likelihoods give w; the mean of z gives it within 0.04.

    Later chains of NUTS start with the potential at a w of their own, and may stay where they are.
    """
    dt = to_arviz(fit())
    lik, z = dt.log_likelihood["x"].to_numpy(), dt.posterior["z"].to_numpy()
    x = np.asarray(X)
    # log N(x | m, 1) - log N(y | m, 1) = (x - y) m - (x^2 - y^2) / 2
    m = ((lik[..., 2] - lik[..., 1]) + (x[2] ** 2 - x[1] ** 2) / 2) / (x[2] - x[1])
    w = np.mean(m - z)
    np.testing.assert_allclose(m - z, w, atol=1e-3)
    np.testing.assert_allclose(w, (x.sum() - 4 * z[:chains].mean()) / 3, atol=0.25)


@pytest.mark.slow
def test_parameters_that_are_not_known_are_refused():
    parallel = nuts([0], num_chains=2, chain_method="parallel", num_samples=5)
    unpickled = pickle.loads(pickle.dumps(nuts([0])))
    for mcmc in (parallel, unpickled):
        with pytest.raises(ValueError, match=r"'w' of the model had in this fit .*='vectorized'"):
            to_arviz(mcmc)
    kept = pickle.loads(pickle.dumps(sgld([0])))
    assert kept.sampler.params["w"] == sgld([0]).sampler.params["w"]


@pytest.mark.slow
def test_a_parameter_that_starts_at_a_constant_is_known():
    """Engines hold it there."""

    def held(x):
        scale = numpyro.param("scale", 2.0, constraint=dist.constraints.positive)
        z = numpyro.sample("z", dist.Normal())
        with numpyro.plate("N", len(x)):
            numpyro.sample("x", dist.Normal(z, scale), obs=x)

    engine = EP(held)
    result = engine.run(random.key(0), 10, X, progress_bar=False)
    dt = to_arviz(engine, result, model_args=(X,), num_samples=5)
    expected = dist.Normal(dt.posterior["z"].to_numpy()[..., None], 2.0).log_prob(X)
    np.testing.assert_allclose(dt.log_likelihood["x"], expected, rtol=1e-5)


def counted(x):
    """The mutable shift is the number of runs so far."""
    shift = numpyro.primitives.mutable("shift", {"value": jnp.array(0.0)})
    shift["value"] = shift["value"] + 1.0
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x)):
        numpyro.sample("x", dist.Normal(z + shift["value"]), obs=x)


@pytest.mark.slow
def test_a_state_of_svi_is_a_result_and_a_params_dict_without_mutable_state_is_none():
    guide = AutoNormal(numpyro.handlers.block(counted, hide=["shift"]))
    svi = SVI(counted, guide, optax.sgd(0.0), Trace_ELBO())
    result = svi.run(random.key(0), 5, X, progress_bar=False)
    given = {"model_args": (X,), "num_samples": 30}
    dt = to_arviz(svi, result.state, **given)
    runs = result.state.mutable_state["shift"]["value"] + 1
    assert runs == 7  # of init, of five updates, and this one
    z = dt.posterior["z"].to_numpy()[..., None]
    expected = dist.Normal(z + runs).log_prob(X)
    np.testing.assert_allclose(dt.log_likelihood["x"], expected, rtol=1e-5)
    assert str(evidence_bounds(svi, result.state, **given)) == str(
        evidence_bounds(svi, result, **given)
    )
    for fn in (to_arviz, evidence_bounds, diagnose):
        with pytest.raises(ValueError, match=r"mutable site 'shift' .* pass result=state"):
            fn(svi, svi.get_params(result.state), **given)


def local(y):
    with numpyro.plate("data", len(y)):
        x = numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(x), obs=y)


@pytest.mark.parametrize("rows", [1, 2])
def test_draws_of_other_rows_are_refused(rows):
    svi = SVI(local, AutoNormal(local), optax.sgd(0.0), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), X))
    words = rf"'x' have shape \(3,\), and on these .* \({rows},\).* training data alone"
    for fn in (to_arviz, diagnose):
        with pytest.raises(ValueError, match=words):
            fn(svi, params, model_args=(X[:rows],))
    mcmc = MCMC(NUTS(local), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), X)
    with pytest.raises(ValueError, match=words):
        to_arviz(mcmc, model_args=(X[:rows],))
