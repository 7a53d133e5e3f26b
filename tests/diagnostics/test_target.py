"""The density by which a fit is judged: a proxy of many rows, or the penalties of a loss."""

from functools import cache
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import potential_energy
import optax
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.potential import Program
from numpyro_ext.data import HostArray
from numpyro_ext.diagnostics import _target, diagnose, evidence_bounds, pareto_khat
from numpyro_ext.diagnostics._fit_of import fit_of
from numpyro_ext.diagnostics.checks import moves
from numpyro_ext.diagnostics.comparison import MEAN, SD
from numpyro_ext.diagnostics.psis import log_weights_of
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO, PosteriorRegularizedELBO, taylor_proxy
from tests.diagnostics.drawn import rows_of

ROWS, MOST = 12_000, 4e9


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(_target, "ROWS", 500)


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
    return svi, proxy.init_params(guide, *data), data, proxy


@pytest.mark.slow
def test_weights_are_those_of_all_rows():
    """Of a guide half as wide again, whose weights differ; both have the same draws, of which the
    farthest have the largest errors."""
    svi, params, data, proxy = fitted()
    params = {**params, "auto_scale_tril": 1.5 * params["auto_scale_tril"]}
    asked = (svi, params, data, {}, 500, random.key(0))
    by_all, by_some = (log_weights_of(*asked, proxy=p) for p in (None, proxy))
    difference = by_some - by_all
    assert np.std(by_all) > 0.3
    assert np.std(difference) < 0.05
    assert np.quantile(np.abs(difference), 0.99) < 0.1
    found = pareto_khat(svi, params, model_args=data, num_samples=500, rng_key=random.key(0))
    assert found.khat == pytest.approx(pareto_khat(by_some).khat, abs=0.05)


@pytest.mark.slow
def test_rows_on_the_host_are_judged_by_an_expansion_at_the_draws(monkeypatch):
    """Of 12,000 rows, which no read takes together; both have the same draws."""
    svi, params, data, proxy = fitted()
    read = []

    def noted(x):
        read.append(len(x))
        return x

    monkeypatch.setattr(Program, "piece_size", 5000)
    plain = SVI(model, svi.guide, optax.adam(0.01), Trace_ELBO())
    host = tuple(HostArray(np.asarray(x), transform=noted) for x in data)
    by_proxy = log_weights_of(plain, params, data, {}, 500, random.key(0), proxy=proxy)
    by_draws = log_weights_of(plain, params, host, {}, 500, random.key(0))
    assert np.std(by_draws - by_proxy) < 0.05
    assert max(read) == 10_000  # at which the noise of an expansion is measured
    bounds = [
        evidence_bounds(plain, params, model_args=args, num_samples=500, proxy=p).values
        for args, p in ((data, proxy), (host, None))
    ]
    np.testing.assert_allclose(bounds[0], bounds[1], atol=0.1)


@pytest.mark.nightly
def test_chains_are_judged_by_the_proxy_that_is_given(monkeypatch):
    _, _, data, proxy = fitted()
    monkeypatch.setattr(moves, "MOST_OPERATIONS", MOST)
    kernel = SGHMC(model, steps_per_sample=10)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=1000, progress_bar=False)
    mcmc.run(random.key(0), *data)
    assert rows_of(diagnose(mcmc, proxy=proxy))[SD].ok is True


@pytest.mark.nightly
def test_a_proxy_that_is_too_noisy_is_not_used():
    svi, params, data, proxy = fitted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        far = taylor_proxy(model, *data, center={"w": 1.5, "half": 2.0})
    arguments = {"model_args": data, "num_samples": 200}
    with pytest.warns(InferenceWarning, match=r"proxy is not used: .* all 12,000 rows; make it"):
        found = pareto_khat(svi, params, proxy=far, **arguments)
    svi.loss.proxy = None
    np.testing.assert_allclose(
        found.log_weights, pareto_khat(svi, params, **arguments).log_weights, rtol=1e-4
    )
    svi.loss.proxy = proxy
    other = {**arguments, "model_args": (data[0] + 1, data[1])}
    with pytest.warns(InferenceWarning, match="proxy of the loss is of another model"):
        assert pareto_khat(svi, params, **other).log_weights.shape == (200,)
    with pytest.raises(ValueError, match="hold other data than those of which the proxy is one"):
        pareto_khat(svi, params, proxy=far, **other)


@pytest.mark.slow
def test_a_fit_by_a_proxy_of_other_data_is_wrong():
    """It has been trained with the proxy; one row of 12,000 is another."""
    svi, params, (x, y), _ = fitted()
    found = diagnose(svi, params, model_args=(x, y.at[11].add(30.0)), num_samples=50, num_moves=0)
    line = rows_of(found)["problems"]
    assert line.ok is False and not found.ok
    assert "of 1 of 12,000 rows is another" in line.verdict


# Fits with penalties of expectations are judged by what the penalties ask for. The posterior is
# N(0.5, 0.5). With 3 (m - 2)^2 the best normal has m = 0.5 - 0.5 h'(m) = 1.625, and the variance of
# the posterior.


def conjugate(x):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    numpyro.deterministic("f", 2.0 * z - 1.0)
    with numpyro.plate("rows", 1):
        numpyro.sample("x", dist.Normal(z, 1.0), obs=jnp.reshape(x, 1))


def penalised(loc, base=None):
    """A guide at ``loc`` with 3 (m - 2)^2 at the mean of f, 2 m - 1."""
    penalties = {"f": lambda mean: 0.75 * (mean - 3.0) ** 2}
    loss = PosteriorRegularizedELBO(base or Trace_ELBO(), penalties, 5)
    svi = SVI(conjugate, AutoNormal(conjugate), optax.adam(0.1), loss)
    svi.init(random.key(0), 1.0)
    return svi, {"z_auto_loc": jnp.asarray(loc), "z_auto_scale": jnp.asarray(0.5**0.5)}


@pytest.mark.nightly
@pytest.mark.parametrize(("loc", "right"), [(1.625, True), (0.5, False)])
def test_the_optimum_of_the_penalty_is_right_and_the_posterior_is_wrong(loc, right):
    """With the slope at the mean m of the guide, the best mean is 6.5 - 3 m."""
    rows = rows_of(diagnose(*penalised(loc), model_args=(1.0,), num_samples=400))
    assert rows[MEAN].ok is right and rows[SD].ok


@pytest.mark.x64
@pytest.mark.parametrize("base", [Trace_ELBO(), VRELBO(1.0, 3)], ids=["NumPyro", "ours"])
def test_the_model_that_is_judged_has_the_slopes_of_the_training(base):
    """U(z) + h'(E f) f(z), of each restart at its own mean; 20,000 draws know E f to 0.01."""
    svi, first = penalised(1.625, base)
    _, second = penalised(0.5)
    fit = fit_of(svi, [first, second], (1.0,))
    tilted = _target.by_penalties(fit, svi.loss)
    assert tilted.problems == ()
    for loc, params in zip((1.625, 0.5), tilted.params, strict=True):
        slope = float(params["_slope of f"])
        np.testing.assert_allclose(slope, 1.5 * (2 * loc - 1 - 3), atol=5 * 1.5 * 2**0.5 / 141)
        z = jnp.array([-0.7, 1.3])
        substituted = numpyro.handlers.substitute(tilted.model, data=params)
        found = [potential_energy(substituted, (1.0,), {}, {"z": each}) for each in z]
        plain = [potential_energy(conjugate, (1.0,), {}, {"z": each}) for each in z]
        expected = np.array(plain) + slope * (2 * z - 1)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_proxy_cannot_stand_in_for_penalties():
    with pytest.raises(ValueError, match=r"no proxy stands in for the penalties"):
        diagnose(*penalised(1.625), model_args=(1.0,), proxy=object())
