"""The guide of an engine."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import Predictive
import pytest
from scipy.special import logsumexp

from numpyro_ext.diagnostics import to_arviz
from numpyro_ext.ep import EP, ImportanceSampling, NUTSProjection

# What the guide draws inside the plate of the data.

RANDOM = jnp.array([0.3, 2.5, -1.0, 4.0])


def observed(y, obs_mask=None, num=4):
    """A local effect in each row, whose posterior is normal."""
    theta = numpyro.sample("theta", dist.Normal(0.4, 2.0))
    with numpyro.plate("rows", num) as idx:
        z = numpyro.sample("z", dist.Normal(theta, 1.5))
        numpyro.deterministic("twice", 2 * z)
        fn = dist.Normal(z, 0.6)
        if obs_mask is not None:
            numpyro.sample("y", fn, obs=y[idx], obs_mask=obs_mask[idx])
        else:
            numpyro.sample("y", fn, obs=None if y is None else y[idx])


@cache
def fitted():
    ep = EP(observed, schedule="parallel")
    return ep, ep.run(random.key(0), 20, RANDOM, progress_bar=False)


def exact(y):
    """Means and covariance of (theta, z)."""
    n = len(y)
    precision = np.diag([0.25 + n * 1.5**-2, *np.full(n, 1.5**-2 + 1 / 0.36)])
    precision[0, 1:] = precision[1:, 0] = -(1.5**-2)
    cov = np.linalg.inv(precision)
    return cov @ np.append(0.4 / 4, np.asarray(y) / 0.36), cov


def assert_draws(draws, mean, cov):
    """4,000 draws: a mean is off by .016 sds, an sd by 1.1 %, and a correlation by .016."""
    sd = np.sqrt(np.diag(cov))
    assert np.all(np.abs(draws.mean(0) - mean) < 0.08 * sd)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.06)
    np.testing.assert_allclose(np.corrcoef(draws.T), cov / np.outer(sd, sd), atol=0.08)


def joined(draws, *names):
    return np.concatenate([np.reshape(draws[name], (4000, -1)) for name in names], 1)


@pytest.mark.slow
def test_local_sites_are_drawn_given_their_row():
    ep, fit = fitted()
    draws = ep.guide.sample_posterior(random.key(1), fit.params, sample_shape=(4000,))
    assert_draws(joined(draws, "theta", "z"), *exact(RANDOM))
    np.testing.assert_allclose(draws["twice"], 2 * draws["z"], rtol=1e-5)
    assert set(ep.guide.median(fit.params)) == {"theta"}


@pytest.mark.slow
def test_new_rows_are_drawn_given_their_observations():
    ep, fit = fitted()
    y = jnp.array([5.0, -2.0, 1.0])
    sites = ["theta", "z"]
    predictive = Predictive(
        observed, guide=ep.guide, params=fit.params, num_samples=4000, return_sites=sites
    )
    draws = predictive(random.key(1), y, num=3)
    loc, scale = fit.params["auto_loc"][0], fit.params["auto_scale_tril"][0, 0]
    # theta is from the fit, which has not seen these rows.
    share = 2.25 / (2.25 + 0.36)
    mean = np.append(loc, share * np.asarray(y) + (1 - share) * loc)
    slopes = np.append(1.0, np.full(3, 1 - share))
    cov = scale**2 * np.outer(slopes, slopes) + np.diag([0, *np.full(3, share * 0.36)])
    assert_draws(joined(draws, *sites), mean, cov)


@pytest.mark.slow
def test_rows_without_observations_have_their_prior():
    ep, fit = fitted()
    predictive = Predictive(observed, guide=ep.guide, params=fit.params, num_samples=4000)
    predicted = predictive(random.key(1), None, num=2)
    by_guide = ep.guide.sample_posterior(
        random.key(1), fit.params, None, num=2, sample_shape=(4000,)
    )
    loc, scale = fit.params["auto_loc"][0], fit.params["auto_scale_tril"][0, 0]
    assert set(by_guide) == {"theta", "z", "twice"}
    for z in (predicted["z"], by_guide["z"]):
        cov = scale**2 + 2.25 * np.eye(2)
        assert_draws(np.asarray(z), np.full(2, loc), cov)
    # The observation's own noise is in the prediction.
    np.testing.assert_allclose(predicted["y"].var(0), scale**2 + 2.25 + 0.36, rtol=0.12)


COUNTS = jnp.array([0, 2, 1, 14, 3, 1, 9, 2])


def with_outliers(y):
    eta = numpyro.sample("eta", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)) as idx:
        outlier = numpyro.sample("outlier", dist.Bernoulli(0.2))
        numpyro.sample("y", dist.Poisson(jnp.exp(eta + 2.0 * outlier)), obs=y[idx])


@cache
def counted():
    ep = EP(with_outliers, schedule="parallel")
    return ep, ep.run(random.key(0), 30, COUNTS, progress_bar=False)


@pytest.mark.slow
def test_discrete_local_sites_are_drawn_by_their_probabilities():
    """Beside a grid of eta. A share of 4,000 draws is off by at most .008."""
    ep, fit = counted()
    draws = ep.guide.sample_posterior(random.key(1), fit.params, sample_shape=(4000,))
    eta = np.linspace(-3, 3, 2001)[:, None]
    y = np.asarray(COUNTS)
    parts = np.stack([np.log(p) + y * (eta + b) - np.exp(eta + b) for p, b in ((0.8, 0), (0.2, 2))])
    log_lik = np.logaddexp(*parts)
    w = np.exp(log_lik.sum(1) - eta[:, 0] ** 2 / 2 - np.max(log_lik.sum(1)))
    share = (w / w.sum()) @ np.exp(parts[1] - log_lik)
    assert draws["outlier"].dtype == jnp.int32
    np.testing.assert_allclose(draws["outlier"].mean(0), share, atol=0.05)


@pytest.mark.slow
def test_weights_have_the_integral_over_local_sites():
    """Sites that are drawn exactly drop out of the weights, which q(theta) alone has."""
    ep, result = fitted()
    tree = to_arviz(ep, result, model_args=(RANDOM,), num_samples=400)
    weights = tree["sample_stats"]["log_weight"].to_numpy()
    assert tree.attrs["density"] == "exact"
    assert float(weights.std()) < 0.02
    # Their mean is the evidence, to a standard error of .02.
    assert abs(logsumexp(weights) - np.log(400) + float(result.losses[-1])) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("projection", [ImportanceSampling(256), NUTSProjection(40)])
def test_several_coordinates_are_drawn_together(projection):
    """500 draws of a correlated normal: a mean is off by .045 sds, an sd by 3.2 %."""
    mean, cov = jnp.array([1.0, -3.0]), jnp.array([[1.0, 0.6], [0.6, 0.5]])
    target = dist.MultivariateNormal(mean, cov)

    def draw(rng_key):
        return projection.draw(lambda z: target.log_prob(z) + 1.3, 2, rng_key)

    z, log_z = jax.jit(jax.vmap(draw))(random.split(random.key(0), 500))
    sd = np.sqrt(np.diag(cov))
    assert np.all(np.abs(z.mean(0) - mean) < 0.22 * sd)
    np.testing.assert_allclose(z.std(0), sd, rtol=0.16)
    np.testing.assert_allclose(np.corrcoef(z.T)[0, 1], 0.6 / sd.prod(), atol=0.1)
    if projection.has_normaliser:
        np.testing.assert_allclose(log_z, 1.3, atol=0.2)
