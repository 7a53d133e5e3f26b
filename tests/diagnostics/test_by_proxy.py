"""Some rows and a proxy that stand in for all rows, in the weights and the moves."""

from functools import cache
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.diagnostics import _by_proxy, diagnose, limits, pareto_khat
from numpyro_ext.diagnostics._fit import FitRequest
from numpyro_ext.diagnostics.psis import log_weights_of
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO, taylor_proxy

ROWS, MOST = 12_000, 4e9


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(_by_proxy, "ROWS", 500)


def model(x, y, batch=100):
    """Counts, with a positive site, a deterministic one and an observation outside of the rows."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0))
    s = numpyro.deterministic("s", 2 * numpyro.sample("half", dist.Gamma(3.0, 2.0)))
    numpyro.sample("z", dist.Normal(w, 1.0), obs=0.3)
    with numpyro.plate("rows", len(x), subsample_size=batch) as i:
        numpyro.sample("y", dist.Poisson(s * jnp.exp(x[i] * w)), obs=y[i])


@cache
def fitted():
    """A guide that stands where the proxy is, and so is nearly the posterior."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(ROWS)
    data = jnp.asarray(x), jnp.asarray(rng.poisson(1.5 * np.exp(0.5 * x)).astype(float))
    proxy = taylor_proxy(model, *data)
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, optax.adam(0.01), VRELBO(0.5, proxy=proxy))
    return svi, proxy.init_params(guide), data, proxy


@pytest.mark.slow
def test_weights_are_those_of_all_rows():
    """Of a guide half as wide again, whose weights differ; both have the same draws, of which the
    farthest have the largest errors."""
    svi, params, data, proxy = fitted()
    params = {**params, "auto_scale_tril": 1.5 * params["auto_scale_tril"]}
    asked = FitRequest(svi, params, data, {}, 500, random.key(0))
    by_all, by_some = (log_weights_of(asked, p) for p in (None, proxy))
    difference = by_some - by_all
    assert np.std(by_all) > 0.3
    assert np.std(difference) < 0.05
    assert np.quantile(np.abs(difference), 0.99) < 0.1
    found = pareto_khat(svi, params, model_args=data, num_samples=500, rng_key=random.key(0))
    assert found.khat == pytest.approx(pareto_khat(by_some).khat, abs=0.05)


@pytest.mark.nightly
def test_chains_are_judged_by_the_proxy_that_is_given(monkeypatch):
    _, _, data, proxy = fitted()
    monkeypatch.setattr(limits, "MOST_OPERATIONS", MOST)
    kernel = SGHMC(model, steps_per_sample=10)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=1000, progress_bar=False)
    mcmc.run(random.key(0), *data)
    judged = {row.quantity: row.ok for row in diagnose(mcmc, proxy=proxy).rows}
    assert judged["sd against exact moves, worst"] is True
    assert judged["noise of the proxy in nats"] is True


@pytest.mark.nightly
def test_a_proxy_that_is_too_noisy_is_not_used():
    svi, params, data, proxy = fitted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        far = taylor_proxy(model, *data, center={"w": 1.5, "half": 2.0})
    arguments = {"model_args": data, "num_samples": 200}
    with pytest.warns(InferenceWarning, match=r"proxy is not used: .* all 12,000 rows; move it"):
        found = pareto_khat(svi, params, proxy=far, **arguments)
    svi.loss.proxy = None
    np.testing.assert_allclose(
        found.log_weights, pareto_khat(svi, params, **arguments).log_weights, rtol=1e-4
    )
    svi.loss.proxy = proxy
    other = {**arguments, "model_args": (data[0] + 1, data[1])}
    with pytest.warns(InferenceWarning, match="proxy is of another model or of other data"):
        assert pareto_khat(svi, params, **other).log_weights.shape == (200,)
    with pytest.raises(ValueError, match="hold other data than those of which the proxy is one"):
        pareto_khat(svi, params, proxy=far, **other)


@pytest.mark.slow
def test_a_fit_by_a_proxy_of_other_data_is_wrong():
    """It has been trained with the proxy; one row of 12,000 is another."""
    svi, params, (x, y), _ = fitted()
    found = diagnose(svi, params, model_args=(x, y.at[11].add(30.0)), num_samples=50, num_moves=0)
    line = found.rows[0]
    assert line.quantity == "proxy of the loss" and line.ok is False and not found.ok
    assert "of 1 of 12,000 rows is another" in line.verdict
