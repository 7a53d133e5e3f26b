"""Draws and fits with rows on the host equal those with the array."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext.data import Batches, HostArray
from numpyro_ext.guides import AutoRealNVPNormal, AutoStructuredNormal
from numpyro_ext.mcmc import SGHMC, SGLD, ControlVariate
from numpyro_ext.objectives import VRELBO, taylor_proxy
from numpyro_ext.particles import AutoParticles, RegularizedSVGD

N, BATCH = 400, 20
W = np.array([1.0, -0.5])
X = np.random.default_rng(0).normal([0.5, 0.0], size=(N, 2))
Y = (np.random.default_rng(1).uniform(size=N) < 1 / (1 + np.exp(-X @ W))).astype(np.int32)


def model(x, y, batch=BATCH):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def each_slow(*values):
    return [pytest.param(x, marks=pytest.mark.slow) for x in values]


HOST, ARRAYS = (HostArray(X), HostArray(Y)), (jnp.asarray(X), jnp.asarray(Y))


def chains(kernel, args, method, num):
    mcmc = MCMC(
        kernel,
        num_warmup=20,
        num_samples=30,
        num_chains=num,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(random.key(1), *args)
    return mcmc.get_samples()["w"]


KERNELS = {
    "found": lambda: SGHMC(model),
    "given": lambda: SGHMC(model, 1e-2),
    "anchored": lambda: SGHMC(model, 1e-2, gradient=ControlVariate({"w": jnp.asarray(W)})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_draws(name):
    host, arrays = (chains(KERNELS[name](), args, "sequential", 1) for args in (HOST, ARRAYS))
    np.testing.assert_allclose(host, arrays, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [*each_slow("sequential", "parallel"), "vectorized"])
def test_draws_of_two_chains(method):
    host, arrays = (chains(KERNELS["given"](), args, method, 2) for args in (HOST, ARRAYS))
    np.testing.assert_allclose(host, arrays, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of so few steps
@pytest.mark.parametrize("loss", [Trace_ELBO(2), VRELBO(0.5, 3)])
def test_fits(loss):
    fits = []
    for args in (HOST, ARRAYS):
        svi = SVI(model, AutoNormal(model), optax.adam(0.02), loss)
        fits.append(svi.run(random.key(2), 50, *args, progress_bar=False))
    np.testing.assert_allclose(fits[0].losses, fits[1].losses, rtol=1e-4)
    of_host, of_arrays = (fit.params for fit in fits)
    for name, value in of_arrays.items():
        np.testing.assert_allclose(of_host[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_flow_starts_at_the_same_normal():
    fits = []
    for args in (HOST, ARRAYS):
        svi = SVI(model, AutoRealNVPNormal(model), optax.adam(1e-3), VRELBO(1.0, 2))
        fits.append(svi.run(random.key(2), 20, *args, progress_bar=False).losses)
    np.testing.assert_allclose(fits[0], fits[1], rtol=1e-4)


@pytest.mark.slow
def test_a_chain_and_a_fit_of_a_loader():
    """Each batch once a pass: the mean of two passes is that of the data."""
    rows = random.normal(random.key(3), (N,)) + 2.0

    def mean(x):
        loc = numpyro.sample("loc", dist.Normal(0, 10))
        with numpyro.plate("rows", len(x), subsample_size=x.batch_size) as i:
            numpyro.sample("x", dist.Normal(loc, 1.0), obs=x[i])

    batches = Batches(np.split(np.asarray(rows), N // BATCH))
    mcmc = MCMC(SGLD(mean, 1e-4), num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(random.key(4), batches)
    draws = mcmc.get_samples()["loc"]
    assert abs(draws.mean() - rows.mean()) < 0.2 * N**-0.5 and 0.5 < draws.std() * N**0.5 < 1.5


@pytest.mark.slow
def test_the_rows_of_a_draw_and_of_a_step_are_read_in_one_call():
    """Whatever reads them: a corrected gradient, particles, the model and its proxy."""
    calls = []

    def count(x):
        calls.append(len(x))
        return x

    y = HostArray(Y, transform=count)
    anchored = ControlVariate({"w": jnp.asarray(W)})
    kernel = SGHMC(model, 1e-2, gradient=anchored, steps_per_sample=5)
    state = kernel.init(random.key(0), 0, None, (HOST[0], y))
    calls.clear()
    jax.block_until_ready(jax.jit(kernel.sample)(state, (HOST[0], y)))
    assert calls == [5 * BATCH]
    proxy = taylor_proxy(model, *ARRAYS, center={"w": jnp.asarray(W)})
    guides = {
        AutoNormal(model): VRELBO(1.0, 4, proxy=proxy),
        AutoParticles(model, 8, init_from=None): RegularizedSVGD(proxy=proxy),
    }
    for guide, loss in guides.items():
        svi = SVI(model, guide, optax.adam(1e-3), loss)
        state = svi.init(random.key(0), HOST[0], y)
        step = jax.jit(svi.update).lower(state, HOST[0], y).compile()
        calls.clear()
        jax.block_until_ready(step(state, HOST[0], y))
        assert calls == [BATCH]


@pytest.mark.slow
def test_no_more_than_a_piece_is_read_at_once():
    """By the check of the data, the search for a mode, the settings and the chain."""
    rows = []

    def count(x):
        rows.append(len(x))
        return x

    y = HostArray(np.tile(Y, 400), transform=count)
    x = HostArray(np.tile(X, (400, 1)))
    chains(SGHMC(model), (x, y), "sequential", 1)
    assert max(rows) == 50_000 < len(y)


def test_a_chain_that_goes_on_has_its_own_rows():
    kernel, z, rows = SGLD(model, 1e-2), {"w": jnp.ones(2)}, {"rows": jnp.arange(BATCH)}
    kernel.init(random.key(0), 0, None, HOST)
    others = (HostArray(-X), HOST[1]), (-ARRAYS[0], ARRAYS[1])
    of_host, of_arrays = (kernel.potential(args, None)(z, rows) for args in others)
    np.testing.assert_allclose(of_host, of_arrays, rtol=1e-5)


@pytest.mark.slow
def test_the_structured_guide(monkeypatch):
    """All rows in pieces from the host for the start, and three steps on minibatches of them."""
    monkeypatch.setattr("numpyro_ext._model.mode_search._GROUPS_FROM", 10)
    group = np.arange(N) % 30

    def groups(group, y):
        s = numpyro.sample("s", dist.HalfNormal(1))
        with numpyro.plate("groups", 30):
            own = numpyro.sample("own", dist.Normal(0, s))
        with numpyro.plate("rows", len(y), subsample_size=BATCH) as i:
            numpyro.sample("y", dist.Bernoulli(logits=own[group[i]]), obs=y[i])

    fits = []
    for args in ((HostArray(group), HostArray(Y)), (jnp.asarray(group), jnp.asarray(Y))):
        guide = AutoStructuredNormal(groups)
        svi = SVI(groups, guide, optax.adam(1e-2), Trace_ELBO())
        params = svi.run(random.key(0), 3, *args, progress_bar=False).params
        assert "auto_bend" in params  # from the search for many groups
        fits.append(guide.sample_latent(random.key(1), params, 10))
    np.testing.assert_allclose(*fits, rtol=1e-3, atol=1e-3)
