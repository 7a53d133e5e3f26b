"""Networks of Flax and Equinox through numpyro.contrib.module, in scripts as users have them."""

from functools import cache
import warnings

import arviz as az
import equinox as eqx
from flax import linen, nnx
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.module import (
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
import optax
import pytest

from numpyro_ext.diagnostics import (
    InferenceWarning,
    held_out_log_likelihood,
    predictive_scores,
    restarts,
    to_arviz,
)
from numpyro_ext.guides import AutoDropout, AutoLaplaceGGN, init_to_fan_in
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import BBAlphaELBO
from numpyro_ext.optim import ivon
from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step

N, HIDDEN = 12, 3
X = random.normal(random.key(0), (N, 2))
Y = jnp.sin(X[:, 0])
PRIOR = dist.Normal(0.0, 1.0)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = jnp.tanh(linen.Dense(HIDDEN, name="first")(x))
        return linen.Dense(1, name="last")(hidden)[..., 0]


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(2, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))[..., 0]


def linen_net(prior=PRIOR):
    return random_flax_module("nn", Linen(), prior, input_shape=(1, 2))


def nnx_net(prior=PRIOR):
    return random_nnx_module("nn", Nnx(), prior)


def eqx_net(prior=PRIOR):
    module = eqx.nn.MLP(2, "scalar", HIDDEN, 1, jax.nn.tanh, key=random.key(0))
    return jax.vmap(random_eqx_module("nn", module, prior))


def model_of(net):
    def model(X, y=None, batch=None):
        f = net()
        precision = numpyro.sample("precision", dist.Gamma(6.0, 6.0))
        with numpyro.plate("data", len(X), subsample_size=batch):
            x = numpyro.subsample(X, event_dim=1)
            obs = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f(x), precision**-0.5), obs=obs)

    return model


def fit(model, guide, loss, steps=5):
    svi = SVI(model, guide, optax.adam(1e-2), loss)
    return svi, svi.run(random.key(1), steps, X, Y, batch=4, progress_bar=False)


def at_start(model, guide, loss):
    """The parameters with which a fit would begin."""
    svi = SVI(model, guide, optax.adam(1e-2), loss)
    return svi.get_params(svi.init(random.key(1), X, Y, batch=4))


@pytest.mark.slow
def test_dropout():
    axes = {"nn/first.kernel": -2, "nn/last.kernel": -2}
    model = model_of(nnx_net)
    guide = AutoDropout(model, keep_prob=0.5)
    params = at_start(model, guide, BBAlphaELBO(0.5, 3))
    draws = guide.sample_posterior(random.key(2), params, sample_shape=(40,))
    for site, axis in axes.items():
        kept = jnp.moveaxis(draws[site] != 0, axis, 1)
        assert (kept == kept[..., :1]).all() and 0 < kept.mean() < 1


@pytest.mark.slow
def test_laplace_ggn():
    model = model_of(eqx_net)
    full, last = AutoLaplaceGGN(model), AutoLaplaceGGN(model, structure="last_layer")
    params = at_start(model, full, Trace_ELBO())
    at_start(model, last, Trace_ELBO())
    draws = last.sample_posterior(random.key(4), params, sample_shape=(9,))
    first, of_last = (draws[f"nn/layers[{i}].weight"].std(0) for i in (0, 1))
    assert first.max() < 1e-5 < of_last.min()
    f, g = (guide.linearised_predictive(params, X[:5]) for guide in (full, last))
    assert f.mean.shape == (5,) and jnp.allclose(f.mean, g.mean)
    assert (f.variance > g.variance).all() and (g.variance > 0).all()


@pytest.mark.slow
def test_recipe_of_a_last_layer_normal():
    """A prior on the last layer alone; the rest are parameters of the model."""
    model = model_of(lambda: nnx_net({"last.kernel": PRIOR, "last.bias": PRIOR}))
    svi, run = fit(model, AutoMultivariateNormal(model), Trace_ELBO())
    assert svi.guide.latent_dim == HIDDEN + 2  # with the noise precision
    predictive = Predictive(model, guide=svi.guide, params=run.params, num_samples=3)
    assert predictive(random.key(2), X[:5])["y"].shape == (3, 5)
    # The same model takes the guide whose curvature is in closed form.
    guide = AutoLaplaceGGN(model)
    params = at_start(model, guide, Trace_ELBO())
    first = params["nn$params"]["first"]
    hidden = jnp.tanh(X @ first["kernel"] + first["bias"])
    log_precision = params["auto_loc"][-1]
    features = jnp.concatenate([jnp.ones((N, 1)), hidden], axis=1)  # of bias and kernel
    expected = jnp.exp(log_precision) * features.T @ features + jnp.eye(HIDDEN + 1)
    found = jnp.linalg.inv(guide.get_posterior(params).covariance_matrix)
    assert jnp.allclose(found[:-1, :-1], expected, rtol=1e-3, atol=1e-3)


# One table with 40 rows to learn from and 13 to predict.
@jax.jit
def table():
    x = random.normal(random.key(7), (53, 2)) * jnp.array([1.0, 0.5])
    y = x[:, 0] - 2 * x[:, 1] + 0.2 * random.normal(random.key(8), (53,))
    return (x[:40], y[:40]), (x[40:], y[40:])


TRAIN, TEST = table()
STEPS, START = 400, init_to_fan_in()


def trained(make_guide, loss, optim=None, **kwargs):
    optim = optax.adam(0.05) if optim is None else optim
    return lambda model: SVI(model, make_guide(model, **kwargs), optim, loss)


def particles(model):
    guide = AutoParticles(model, 28, init_loc_fn=START)
    return SVI(model, guide, particle_step(STEPS), RegularizedSVGD())


NARROW = {"init_loc_fn": START, "init_scale": 0.02}
METHODS = {
    "adam": trained(AutoNormal, Trace_ELBO(4), **NARROW),
    "ivon": trained(AutoNormal, Trace_ELBO(4), ivon(0.05), **NARROW),
    "dropout": trained(AutoDropout, Trace_ELBO(4), keep_prob=0.9, init_loc_fn=START),
    "laplace": trained(AutoLaplaceGGN, Trace_ELBO()),
    "ensemble": trained(AutoDelta, Trace_ELBO(), init_loc_fn=START),
    "particles": particles,
    "SGHMC": lambda model: MCMC(SGHMC(model), num_warmup=200, num_samples=100, progress_bar=False),
}


@cache
def fitted(method):
    """A fit and its result. What a method knows of a network are the names and shapes of its sites,
    so that one kind of module serves for all."""
    model = model_of(linen_net)
    fit = METHODS[method](model)
    if method == "SGHMC":
        with warnings.catch_warnings():  # of several modes, at most keys
            warnings.simplefilter("ignore", InferenceWarning)
            fit.run(random.key(9), *TRAIN, batch=20)
        return fit, None
    options = {"batch": 20, "progress_bar": False}
    if method != "ensemble":
        return fit, fit.run(random.key(9), STEPS, *TRAIN, **options)
    return fit, restarts(lambda: METHODS[method](model), random.key(9), 2, STEPS, *TRAIN, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.nightly if m == "SGHMC" else ()) for m in METHODS],
)
def test_one_name_changes_the_method(method):
    """It predicts better than the constant."""
    scores = predictive_scores(*fitted(method), model_args=TEST, num_samples=100)
    assert scores.count == 13
    assert scores.rmse < 0.8 * scores.rmse_of_constant
    known = [scores.log_density, scores.joint_log_density, scores.calibration_error, scores.sd]
    assert np.isfinite(known).all()
    assert scores.network_sd > 0


# A point, as of each member of an ensemble, has no spread for ArviZ to divide by; 28 particles of
# 14 weights are too narrow, and say so.
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::numpyro_ext.diagnostics.InferenceWarning")
@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto:UserWarning")
@pytest.mark.parametrize("method", ["adam", "dropout", "particles", "SGHMC"])
def test_arviz_takes_the_fit(method):
    fit, result = fitted(method)
    options = {"model_args": TRAIN, "posterior_predictive": True, "num_samples": 60}
    tree = to_arviz(fit, result, **options)
    assert np.isfinite(az.summary(tree, var_names=["precision"])["mean"]).all()
    rows = tree.log_likelihood["y"]
    assert rows.shape[2:] == (40,)
    if method == "dropout":  # a few masks are no tail that could be smoothed
        unseen = held_out_log_likelihood(fit, result, model_args=TEST)
        assert np.isfinite(unseen).all() and len(unseen) == 13
    else:
        loo = az.loo(tree)
        # Leaving a row out makes it less likely.
        whole = np.log(np.exp(rows.values.astype(float)).mean((0, 1))).sum()
        assert np.isfinite(loo.elpd) and loo.elpd <= whole + 1e-3
    az.plot_ppc_pit(tree, backend="none")
    az.plot_dist(tree, var_names=["precision"], backend="none")
