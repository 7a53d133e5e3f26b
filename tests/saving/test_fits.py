"""Another process goes on with a fit in a file, and what does not belong to it is refused."""

import os
from pathlib import Path
import pickle
import subprocess
import sys

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax
import pytest

from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoRealNVPNormal, posterior_as_prior
from numpyro_ext.mcmc import SGLD, SVRG
from numpyro_ext.saving import load, save
from numpyro_ext.saving.container import read
from tests.ep.models import Y_SCALE, unknown_scale
from tests.saving.cases import CASES, SMALL

FEW = ["Adam of NumPyro"]


def check_cases(folder, names):
    """What a process goes on to, and one that has its files alone, bit by bit. NumPyro's ELBO adds
    up the sites in the order of a set of names, which is another in each process by default."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "0"}
    environment["JAX_ENABLE_X64"] = str(int(jax.config.jax_enable_x64))
    for task in ("write", "load"):
        command = [sys.executable, "-m", "tests.saving.cases", task, str(folder), *names]
        subprocess.run(command, check=True, env=environment, timeout=900)
    for name in names:
        expected, found = (read(folder / f"{name}, {task}.npz") for task in ("write", "load"))
        assert len(expected) == len(found) > 0
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b, name)


@pytest.mark.slow
def test_another_process_goes_on_with_the_same_numbers(tmp_path):
    check_cases(tmp_path, FEW)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")  # of so few steps
@pytest.mark.parametrize("kind", ["kernel", "ensemble", "engine", "guide"])
def test_another_process_goes_on_with_every_member(tmp_path, kind):
    kinds = ("kernel", "ensemble", "engine")
    names = [
        name
        for name in CASES
        if name not in FEW
        and (name.startswith(kind) if kind in kinds else not name.startswith(kinds))
    ]
    check_cases(tmp_path, names)


def one(x, y=None, size=2, prior=None):
    w = numpyro.sample("w", (prior or dist.Normal(0.0, 1.0)).expand([size]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ w[:1], 1.0), obs=y)


def svi_of(model=one, guide=AutoNormal, optim=None, **options):
    return SVI(model, guide(model, **options), optim or optax.adam(0.1), Trace_ELBO())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("fits") / "fit.npz"
    svi = svi_of()
    state = svi.init(random.key(0), *SMALL)
    save(path, svi, state)
    return path, svi.get_params(state)


def test_what_belongs_to_another_fit_is_refused(saved):
    path, _ = saved

    def of_size(x, y=None):
        one(x, y, size=3)

    def positive(x, y=None):
        one(x, y, prior=dist.LogNormal(0.0, 1.0))

    def one_more(x, y=None):
        numpyro.sample("more", dist.Normal())
        one(x, y)

    for other, words in (
        (svi_of(of_size), r"site 'w' it has shape \(2,\) on Real, and this model has shape \(3,\)"),
        (svi_of(one_more), r"site 'more' it has no such site, and this model has shape \(\)"),
        (svi_of(positive), "on Real, and this model has shape .* on Positive"),
        (svi_of(guide=AutoMultivariateNormal), "AutoNormal, and load was given SVI with AutoMult"),
        (svi_of(optim=optax.sgd(0.1, 0.9)), r"state.optim_state.* in the file, and .* here"),
        (AutoNormal(one), "SVI with AutoNormal, and load was given AutoNormal"),
    ):
        with pytest.raises(ValueError, match=words):
            load(path, other, *SMALL)


def test_a_method_without_a_result(tmp_path):
    path = tmp_path / "fit.npz"
    for method, result, error, words in (
        (svi_of(), None, TypeError, "no result of this SVI"),
        (MCMC(SGLD(one, 0.1), num_warmup=1, num_samples=1), None, ValueError, "has not run"),
        (MCMC(SGLD(one, 0.1), num_warmup=1, num_samples=1), {}, TypeError, "has its draws itself"),
    ):
        with pytest.raises(error, match=words):
            save(path, method, result)
    assert not path.exists()


def test_other_rows_do_where_no_number_depends_on_them(saved):
    """As in production, where the data of the fit are not: the guide draws the same."""
    path, params = saved
    svi = svi_of()
    state = load(path, svi, jnp.ones((1, 1)))
    draws = svi.guide.sample_posterior(random.key(1), svi.get_params(state), sample_shape=(4,))
    numpyros = AutoNormal(one)
    numpyro.handlers.seed(numpyros, 0)(*SMALL)
    expected = numpyros.sample_posterior(random.key(1), params, sample_shape=(4,))
    np.testing.assert_array_equal(draws["w"], expected["w"])


@pytest.mark.slow
def test_a_loaded_fit_is_a_prior_for_other_rows(tmp_path):
    """In closed form: rows of a known scale, of two days."""
    y = jnp.array([0.5, -1.0, 2.0, 0.3, 1.0])

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])

    engine = EP(model)
    save(tmp_path / "day.npz", engine, engine.run(random.key(0), 5, y[:3], progress_bar=False))
    yesterday = EP(model)
    fit = load(tmp_path / "day.npz", yesterday, y[3:])
    today = EP(model, prior=(yesterday, fit)).run(random.key(1), 5, y[3:], progress_bar=False)
    precision = 1 / 4 + len(y)
    np.testing.assert_allclose(today.params["auto_loc"][0], y.sum() / precision, rtol=1e-4)
    np.testing.assert_allclose(today.params["auto_scale_tril"][0, 0], precision**-0.5, rtol=1e-4)


@pytest.mark.slow
def test_a_pickled_engine_is_a_prior_without_its_rows():
    """With what its guide has read; an engine without it would have to read rows again."""
    engine = EP(unknown_scale)
    fit = engine.run(random.key(0), 40, Y_SCALE, progress_bar=False)
    again = pickle.loads(pickle.dumps(engine))
    before, after = (posterior_as_prior(unknown_scale, (e, fit)) for e in (engine, again))
    np.testing.assert_array_equal(before.normal.center, after.normal.center)
    draws = [e.guide.sample_posterior(random.key(1), fit.params) for e in (engine, again)]
    np.testing.assert_array_equal(draws[0]["mu"], draws[1]["mu"])


@pytest.mark.slow
def test_sums_over_rows_belong_to_these_rows(tmp_path):
    """A chain whose state has gradients of all rows goes on with the same rows alone."""

    def model(x):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(x), subsample_size=2) as i:
            numpyro.sample("x", dist.Normal(mu, 1.0), obs=x[i])

    def kernel():
        return SGLD(model, 1e-3, gradient=SVRG(3))

    first, x = kernel(), jnp.arange(6.0)
    save(tmp_path / "chain.npz", first, first.init(random.key(0), 0, None, (x,), {}))
    state = load(tmp_path / "chain.npz", kernel(), jnp.arange(6.0))
    assert state.gradient.z["mu"].shape == ()
    with pytest.raises(ValueError, match="sums over all rows of other data"):
        load(tmp_path / "chain.npz", kernel(), x + 1)


@pytest.mark.slow
def test_a_network_of_another_width_is_refused(tmp_path):
    svi = svi_of(guide=AutoRealNVPNormal, hidden_dims=(4,))
    save(tmp_path / "flow.npz", svi, svi.init(random.key(0), *SMALL))
    with pytest.raises(ValueError, match=r"state.* is an array of .* in the file"):
        load(tmp_path / "flow.npz", svi_of(guide=AutoRealNVPNormal, hidden_dims=(5,)), *SMALL)
