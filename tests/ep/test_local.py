"""Latent sites inside the plate of the data are integrated out of their row."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.ep import (
    EP,
    DistributedEP,
    ImportanceSampling,
    NUTSProjection,
    Quadrature,
)
from tests.ep.models import MEANS, VARIANCES, WEIGHTS

Y = jnp.array([0.3, 2.5, -1.0, 4.0])


def labelled():
    """Fixture B with its labels as sites."""
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("rows", 2) as idx:
        k = numpyro.sample("k", dist.Categorical(probs=WEIGHTS[idx]))
        at = idx, k
        numpyro.factor("f", dist.Normal(MEANS[at], jnp.sqrt(VARIANCES[at])).log_prob(theta))


def effects(y, num=1):
    """A local effect in each row, or several."""
    theta = numpyro.sample("theta", dist.Normal(0.4, 2.0))
    with numpyro.plate("rows", len(y)) as idx:
        z = numpyro.sample("z", dist.Normal(theta, 1.5))
        for k in range(num - 1):
            z = z + numpyro.sample(f"extra_{k}", dist.Normal())
        numpyro.sample("y", dist.Normal(z, 0.6), obs=y[idx])


@pytest.mark.slow
def test_discrete_local_sites_are_summed_out():
    result = EP(labelled).run(random.key(0), 60, progress_bar=False)
    sd = result.params["auto_scale_tril"][0, 0]
    np.testing.assert_allclose(result.params["auto_loc"], 0.5623159697, rtol=1e-4)
    np.testing.assert_allclose(sd**2, 0.5521639916, rtol=1e-4)
    np.testing.assert_allclose(-result.losses[-1], -3.3044138541, rtol=1e-4)


def exact(y, v, m=0.4):
    """Mean and sd of theta ~ N(m, 4), and log Z, of y ~ N(theta, v)."""
    y, n = np.asarray(y, float), len(y)
    precision = 0.25 + n / v
    S, r = v * np.eye(n) + 4.0, y - m
    log_z = -0.5 * (r @ np.linalg.solve(S, r) + np.linalg.slogdet(2 * np.pi * S)[1])
    return (m / 4 + y.sum() / v) / precision, precision**-0.5, log_z


def masked(y, mask, whole=True):
    """Local effects and their observations, or the effects alone, in the rows of a mask."""
    theta = numpyro.sample("theta", dist.Normal(0.4, 2.0))
    with numpyro.plate("rows", len(y)) as idx:
        with numpyro.handlers.mask(mask=mask[idx]):
            z = numpyro.sample("z", dist.Normal(theta, 1.2))
        with numpyro.handlers.mask(mask=mask[idx] if whole else True):
            numpyro.sample("y", dist.Normal(z, 0.9), obs=y[idx])


SEEN = jnp.array([True, True, False, True])


@pytest.mark.slow
def test_a_continuous_local_site_is_integrated_out_of_the_rows_that_are_seen():
    ep = EP(masked, schedule="parallel")
    result = ep.run(random.key(0), 40, Y, SEEN, progress_bar=False)
    mean, sd, log_z = exact(Y[SEEN], 1.5**2)
    np.testing.assert_allclose(result.params["auto_loc"], mean, rtol=1e-3)
    np.testing.assert_allclose(result.params["auto_scale_tril"][0, 0], sd, rtol=1e-3)
    np.testing.assert_allclose(-result.losses[-1], log_z, rtol=1e-4)


def test_data_of_a_local_site_without_a_prior_are_refused():
    with pytest.raises(ValueError, match="'z' is masked in rows whose data"):
        EP(masked).init(random.key(0), Y, SEEN, False)


@pytest.mark.slow
def test_several_local_sites_are_integrated_with_the_row():
    """There is a fixed point, because the points are the same in each sweep."""
    ep = EP(effects, schedule="parallel")
    result = ep.run(random.key(0), 40, Y, 3, progress_bar=False)
    mean, sd, log_z = exact(Y, 1.5**2 + 2 + 0.6**2)
    assert result.state.report.converged
    assert abs(result.params["auto_loc"][0] - mean) < 0.05 * sd
    np.testing.assert_allclose(result.params["auto_scale_tril"][0, 0], sd, rtol=0.03)
    assert abs(-result.losses[-1] - log_z) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("projection", "mean_error", "sd_error"),
    [
        (ImportanceSampling(4096), 0.01, 0.01),
        pytest.param(NUTSProjection(100, 4000), 0.15, 0.08, marks=pytest.mark.nightly),
    ],
    ids=["ImportanceSampling", "NUTSProjection"],
)
def test_tilted_moments_over_local_sites(projection, mean_error, sd_error):
    """u ~ N(m, S) and y | u, z ~ N(a u + z_1 + 2 z_2, .3^2) with z ~ N(0, diag(1, .25)): y given u
    has variance 2.09."""
    a, y = jnp.array([1.0, -0.5]), 1.7
    m, S = jnp.array([0.5, -1.0]), jnp.array([[1.0, 0.4], [0.4, 0.5]])

    def log_factor(u, z):
        prior = dist.Normal(0, jnp.array([1.0, 0.5])).log_prob(z).sum()
        return prior + dist.Normal(a @ u + z[0] + 2 * z[1], 0.3).log_prob(y)

    def project(key):
        return projection.project(log_factor, m, S, 1.0, rng_key=key, local=2)

    computed = jax.jit(project)(random.key(0))
    assert computed.ok
    cov = np.linalg.inv(np.linalg.inv(S) + computed.site_precision)
    mean = cov @ (np.linalg.solve(S, m) + computed.site_shift)
    exact_cov = np.linalg.inv(np.linalg.inv(S) + np.outer(a, a) / 2.09)
    exact_mean = exact_cov @ (np.linalg.solve(S, m) + a * y / 2.09)
    sd = np.sqrt(np.diag(exact_cov))
    assert np.all(np.abs(mean - exact_mean) < mean_error * sd)
    np.testing.assert_allclose(np.sqrt(np.diag(cov)), sd, rtol=sd_error)
    if projection.has_normaliser:
        log_z = dist.Normal(a @ m, jnp.sqrt(2.09 + a @ S @ a)).log_prob(y)
        np.testing.assert_allclose(computed.log_normaliser, log_z, atol=0.01)


@pytest.mark.parametrize(
    "engine",
    [
        lambda: EP(effects, projection=Quadrature()),
        lambda: EP(effects, power=0.5),
        lambda: DistributedEP(effects, partition=2),
    ],
)
def test_where_several_local_coordinates_cannot_be(engine):
    with pytest.raises(ValueError, match="a row has 2 coordinates of the local latent sites"):
        engine().init(random.key(0), Y, 2)
