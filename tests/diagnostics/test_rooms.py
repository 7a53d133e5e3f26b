"""Fits of the other rooms, handed to ArviZ."""

import arviz as az
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI
import optax
import pytest

from numpyro_ext._model.implicit import IntractableDensityError
from numpyro_ext.diagnostics import (
    InferenceWarning,
    maximum_mean_discrepancy,
    pareto_khat,
    to_arviz,
)
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.particles import SVGD, AutoParticles

X = jax.random.normal(random.key(0), (40, 2)) * jnp.array([1.0, 0.6])
Y = X @ jnp.array([0.7, -1.5]) + 0.5 * jax.random.normal(random.key(1), (40,))


def model(x, y, batch=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    numpyro.deterministic("snr", w / scale)
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, scale), obs=y[i])


def check(dt, chains, draws):
    w, scale = dt.posterior.w.to_numpy(), dt.posterior.scale.to_numpy()
    assert w.shape == (chains, draws, 2)
    expected = dist.Normal(w @ np.asarray(X).T, scale[..., None]).log_prob(Y)
    np.testing.assert_allclose(dt.log_likelihood.y, expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(dt.posterior.snr, w / scale[..., None], rtol=1e-4)
    assert np.array_equal(dt.observed_data.y, Y)
    assert len(az.summary(dt)) == 5


@pytest.mark.slow
def test_stochastic_gradient_hmc_on_minibatches():
    kernel = SGHMC(model, 0.01, friction=5.0, steps_per_sample=5)
    mcmc = MCMC(
        kernel,
        num_warmup=50,
        num_samples=50,
        num_chains=2,
        thinning=2,
        progress_bar=False,
        chain_method="vectorized",
    )
    start = {"w": jnp.array([[0.6, -1.4]] * 2), "scale": jnp.full(2, -0.7)}
    mcmc.run(random.key(3), X, Y, 20, init_params=start)
    dt = to_arviz(mcmc, block_size=16)
    check(dt, 2, 25)
    assert dt.attrs["kernel"] == "SGHMC"
    assert dt.attrs["inference_method"] == "sgmcmc"
    assert {"lp", "lp_minibatch", "grad_norm", "step_size"} <= set(dt.sample_stats.data_vars)
    with pytest.raises(IntractableDensityError, match="kernel_stein"):
        pareto_khat(mcmc)


@pytest.mark.slow
def test_particles_moved_by_svgd():
    guide = AutoParticles(model, num_particles=12, init_from=None)
    svi = SVI(model, guide, optax.adam(0.05), SVGD(), batch=20)
    result = svi.run(random.key(4), 200, X, Y, progress_bar=False)
    with pytest.warns(InferenceWarning, match="implied sd ratio|shift in sds"):  # so early
        dt = to_arviz(svi, result=result, model_args=(X, Y), num_samples=77)
    check(dt, 1, 12)
    for name, value in guide.particles(result.params).items():
        if name in ("w", "scale"):
            np.testing.assert_allclose(dt.posterior[name][0], value, rtol=1e-6)
    assert dt.attrs["inference_method"] == "particles"
    assert dt.attrs["loss"] == "SVGD"
    assert dt.attrs["density"] == "none"
    with pytest.raises(IntractableDensityError, match="AutoParticles"):
        pareto_khat(svi, result=result, model_args=(X, Y))
    assert maximum_mean_discrepancy(dt, dt, statistic="v") == pytest.approx(0.0, abs=1e-5)
