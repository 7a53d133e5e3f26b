"""Fits that are repeated: compiled once, from new starts, and exact where the method is."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import pytest

from numpyro_ext.diagnostics import (
    fit_engine,
    fit_mcmc,
    fit_svi,
    simulation_based_calibration,
)
from numpyro_ext.ep import EP
from numpyro_ext.mcmc import SGLD

X = jnp.array([0.5, -1.0, 2.0, 4.0])
RUNS = []


def model(x, batch=None):
    RUNS.append(1)
    z = numpyro.sample("z", dist.Normal(2.0, 1.5))
    with numpyro.plate("data", len(x), subsample_size=batch) as idx:
        numpyro.sample("x", dist.Normal(z, 1.2), obs=x[idx])


PRECISION = 1 / 1.5**2 + 4 / 1.2**2
MEAN = (2.0 / 1.5**2 + 5.5 / 1.2**2) / PRECISION

FITS = {
    "SVI": fit_svi(AutoNormal, optax.adam(0.1), TraceMeanField_ELBO(10), 300),
    "NUTS": fit_mcmc(NUTS, 100, 300),
    "EP": fit_engine(EP, 5),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FITS)
def test_one_compiled_program_serves_all_data(name):
    """The posterior of other data is right too, and the model is not run again for them."""
    counts, posteriors = [], []

    def fit(*args):
        draws = FITS[name](*args)
        counts.append(len(RUNS))
        x = args[2][0]["x"]
        mean = (2.0 / 1.5**2 + x.sum() / 1.2**2) / PRECISION
        posteriors.append((draws["z"] - mean) * PRECISION**0.5)
        return draws

    result = simulation_based_calibration(
        random.key(0), model, fit, X, num_simulations=30, num_samples=30
    )
    # An engine runs the model to look at each data set; a program of its own takes a dozen of runs.
    per_fit = np.diff(counts)
    assert np.all(per_fit[1:] <= (3 if "EP" in name else 0)), per_fit
    z = np.stack(posteriors)
    assert abs(np.mean(z)) < 0.15 and np.std(z) == pytest.approx(1, abs=0.15)
    assert result.p_value > 1e-4


def test_each_fit_of_svi_has_a_start_of_its_own():
    fit = fit_svi(AutoDelta, optax.sgd(0.0), Trace_ELBO(), 1, num_draws=2)
    starts = [fit(key, model, (X,), {})["z"][0] for key in random.split(random.key(1), 4)]
    assert len({float(z) for z in starts}) == 4


def local(y, batch=None):
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y), subsample_size=batch) as idx:
        z = numpyro.sample("z", dist.Normal(m, 1.0))
        numpyro.sample("y", dist.Normal(z, 0.5), obs=y[idx])


def amortised(data, y, batch=None):
    """The exact posterior of z given m = 0; m is not inferred."""
    numpyro.sample("m", dist.Normal(numpyro.param("loc", 0.0), 0.01))
    with numpyro.plate("rows", len(y), subsample_size=batch) as idx:
        numpyro.sample("z", dist.Normal(0.8 * data["y"][idx], 0.2**0.5))


@pytest.mark.nightly
@pytest.mark.parametrize("guide", [AutoNormal, lambda _: amortised], ids=["AutoNormal", "function"])
def test_local_latents_are_drawn_for_all_rows_from_simulated_data(guide):
    """A guide of one's own is given the simulated data before the arguments of the model."""
    run = fit_svi(guide, optax.adam(0.05), Trace_ELBO(), 200, num_draws=200)
    pairs = []

    def fit(rng_key, model, args, kwargs):
        draws = run(rng_key, model, args, kwargs)
        assert draws["z"].shape == (200, 6)
        pairs.append((args[0]["y"], draws["z"].mean(0)))
        return draws

    simulation_based_calibration(
        random.key(2), local, fit, jnp.zeros(6), batch=3, num_simulations=20, num_samples=20
    )
    y, z = (np.stack(x).ravel() for x in zip(*pairs, strict=True))
    assert np.corrcoef(y, z)[0, 1] > 0.9


@pytest.mark.slow
def test_minibatches_of_a_kernel():
    """SGLD is given its step; NUTS would keep one minibatch."""
    draws = fit_mcmc(lambda model: SGLD(model, 0.01), 200, 2000)(
        random.key(4), model, (X,), {"batch": 2}
    )
    # 2000 draws, some 60 transitions from one independent draw to the next: an error of .1.
    assert abs(draws["z"].mean() - MEAN) < 0.45
    with pytest.raises(ValueError, match="NUTS would keep one minibatch of 'data'"):
        fit_mcmc(NUTS, 1, 1)(random.key(0), model, (X,), {"batch": 2})
