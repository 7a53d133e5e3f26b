"""Steps in units of the posterior: the step, what it does not depend on, and a fit of SVI."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_value
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
import numpyro.optim
import optax
import pytest

from numpyro_ext.objectives import IWELBO, VRELBO, taylor_proxy
from numpyro_ext.optim import whitened

DENSE = {"auto_loc": np.array([2.0, -1.0]), "auto_scale_tril": np.array([[3.0, 0.0], [-4.0, 0.5]])}
SITES = {
    "w_auto_loc": np.array([[1.0, 2.0]]),
    "w_auto_scale": np.array([[0.1, 1e-3]]),
    "b_auto_loc": np.array(5.0),
    "b_auto_scale": np.array(20.0),
    "other": np.array(7.0),
}


@pytest.mark.x64
def test_a_step_is_a_a_transposed_times_the_gradient():
    gradient = {"auto_loc": np.array([1.0, 2.0]), "auto_scale_tril": np.ones((2, 2))}
    optim = whitened(optax.sgd(0.1), DENSE)
    steps, _ = optim.update(gradient, optim.init(DENSE), DENSE)
    a = DENSE["auto_scale_tril"]
    np.testing.assert_allclose(steps["auto_loc"], -0.1 * a @ a.T @ [1.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(steps["auto_scale_tril"], -0.1 * np.ones((2, 2)), rtol=1e-6)


def test_adam_moves_each_site_by_its_own_scale():
    optim = whitened(optax.adam(0.01), SITES)
    gradient = jax.tree.map(lambda x: np.full(np.shape(x), -3.0), SITES)
    steps, _ = optim.update(gradient, optim.init(SITES), SITES)
    np.testing.assert_allclose(steps["w_auto_loc"], [[1e-3, 1e-5]], rtol=1e-4)
    np.testing.assert_allclose(steps["b_auto_loc"], 0.2, rtol=1e-4)
    for plain in ("w_auto_scale", "b_auto_scale", "other"):
        np.testing.assert_allclose(steps[plain], np.full(np.shape(SITES[plain]), 0.01), rtol=1e-4)


@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.adamw(0.1, weight_decay=0.3)])
def test_the_path_does_not_depend_on_the_units(inner):
    """The loss 1/2 |A^-1 (mu - m)|^2 has the same path in xi for every A; weight decay, which
    reads the parameters, too."""

    def path(factor):
        start = {"auto_loc": jnp.array([5.0, 5.0]), "auto_scale_tril": factor}
        inverse = jnp.linalg.inv(factor)
        goal = start["auto_loc"] + factor @ jnp.array([1.0, -2.0])

        def loss(params):
            return jnp.sum((inverse @ (params["auto_loc"] - goal)) ** 2) / 2

        optim, params, state = whitened(inner, start), start, None
        state, kept = optim.init(params), []
        for _ in range(20):
            steps, state = optim.update(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, steps)
            params["auto_scale_tril"] = factor
            kept.append(inverse @ (params["auto_loc"] - start["auto_loc"]))
        return np.array(kept)

    odd = jnp.array([[30.0, 0.0], [-2.0, 0.05]])
    np.testing.assert_allclose(path(odd), path(jnp.eye(2)), atol=2e-3)


@pytest.fixture(scope="module")
def counts():
    """4,000 counts with columns of which one is 100 times the other, at posterior sds of 1e-2 and
    1e-4, and the exact answer by the curvature of the likelihood, which is nearly normal."""
    x = jnp.stack([jnp.ones(4000), 100 * (1 + jnp.sin(jnp.arange(4000.0)))], 1)
    y = random.poisson(random.key(0), jnp.exp(x @ jnp.array([0.5, 0.002]))).astype(float)

    def model(x, y, batch=128):
        w = numpyro.sample("w", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
        with numpyro.plate("rows", len(x), subsample_size=batch) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(x[i] @ w)), obs=y[i])

    return model, (x, y), taylor_proxy(model, x, y)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [AutoMultivariateNormal, AutoDiagonalNormal, AutoNormal])
def test_every_normal_guide_trains_in_them(counts, family):
    """What is left is the distance of mode and mean, below .05 sd here, and for mean field the
    noise of its gradient, which the falling rate averages."""
    model, data, proxy = counts
    guide = family(model, init_loc_fn=init_to_value(values=proxy.center))
    start = proxy.init_params(guide)
    optim = whitened(optax.adam(optax.cosine_decay_schedule(0.02, 1000)), start)
    loss = VRELBO(1.0, 16, gradient="stl", proxy=proxy)
    fit = SVI(model, guide, optim, loss).run(
        random.key(1), 1000, *data, init_params=start, progress_bar=False
    )
    draws = guide.sample_posterior(random.key(2), fit.params, sample_shape=(4000,))["w"]
    truth, cov = proxy.location, proxy.factor @ proxy.factor.T
    sds = jnp.sqrt(jnp.diag(cov))
    if family is not AutoMultivariateNormal:
        sds = 1 / jnp.sqrt(jnp.diag(jnp.linalg.inv(cov)))
    assert np.max(np.abs((draws.mean(0) - truth) / sds)) < 0.15  # MC error 0.016
    np.testing.assert_allclose(draws.std(0) / sds, 1, atol=0.06)  # MC error 0.011


@pytest.mark.slow
@pytest.mark.parametrize("loss", [VRELBO(0.0, 4, gradient="dreg"), IWELBO(10, gradient="dreg")])
def test_orders_below_one_need_them(counts, loss):
    """400 steps at a constant 0.01, which is a hundred posterior sds of the second coordinate."""
    model, data, proxy = counts
    loss.proxy = proxy
    guide = AutoMultivariateNormal(model, init_loc_fn=init_to_value(values=proxy.center))
    start = proxy.init_params(guide)
    fit = SVI(model, guide, whitened(optax.adam(0.01), start), loss).run(
        random.key(1), 400, *data, init_params=start, progress_bar=False
    )
    q = guide.get_posterior(fit.params)
    sds = jnp.linalg.norm(proxy.factor, axis=1)
    np.testing.assert_allclose((q.mean - proxy.location) / sds, 0, atol=0.1)
    np.testing.assert_allclose(jnp.sqrt(jnp.diag(q.covariance_matrix)) / sds, 1, atol=0.1)


@pytest.mark.parametrize(
    ("optimizer", "params", "sentence"),
    [
        (numpyro.optim.Adam(0.01), DENSE, "optimizer is a Adam; it must be an optax"),
        (optax.adam(0.01), {"auto_loc": np.ones(2)}, "init_params has no mean with a scale"),
        (optax.adam(0.01), "mode", "it is str"),
    ],
)
def test_what_cannot_be_is_a_sentence(optimizer, params, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        whitened(optimizer, params)


def test_the_parameters_of_another_guide_are_a_sentence():
    with pytest.raises(ValueError, match="which is not a parameter of this run"):
        whitened(optax.adam(0.01), DENSE).init(SITES)
