"""What every Auto guide promises: one table of constructors, one test per law.

A new guide joins by one line in GUIDES (and in DENSITY if it has log q).
"""

from functools import cache, partial
import pickle

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions.transforms import StickBreakingTransform
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.initialization import init_to_value
from numpyro.infer.util import unconstrain_fn
import optax
import pytest

from numpyro_ext._typing import SamplesLatent
from numpyro_ext.guides import AutoRealNVPNormal


def net_init(rng_key, input_shape):
    """A pair of plain functions: unlike stax's closures it pickles."""
    size = input_shape[-1]
    return (2 * size,), 1e-4 * random.normal(rng_key, (size, 2 * size))


def net_apply(weights, x):
    return jnp.tanh(x) @ weights


GUIDES = {
    "RealNVP": partial(AutoRealNVPNormal, num_flows=2, hidden_dims=(8,)),
}
DENSITY = GUIDES | {
    "RealNVP, own network": partial(
        AutoRealNVPNormal, num_flows=3, network=(net_init, net_apply), prefix="mine"
    ),
}

every_guide = pytest.mark.parametrize("name", GUIDES)
every_density = pytest.mark.parametrize("name", DENSITY)

N = 20
X = jnp.linspace(-1.0, 2.0, N)
Y = 1.5 + 0.7 * X + 0.3 * jnp.sin(17.0 * X)
SITES = {"sigma": (), "mix": (3,), "b": (2, 2), "r": ()}
TRACES = []
STEPS = 40


def model(x, y=None):
    """Positive, simplex, matrix and interval sites; deterministic ones; a minibatch of 5."""
    TRACES.append(1)
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    mix = numpyro.sample(
        "mix",
        dist.TransformedDistribution(
            dist.Normal(jnp.zeros(2), 1.0).to_event(1), StickBreakingTransform()
        ),
    )
    b = numpyro.sample("b", dist.Normal(1.0, 3.0).expand([2, 2]).to_event(2))
    r = numpyro.sample("r", dist.Uniform(-1.0, 4.0))
    mu = numpyro.deterministic("mu", r + x * (mix @ jnp.arange(3.0)) * b[0, 1] + b[1].sum())
    with numpyro.plate("N", len(x), subsample_size=5):
        batch = numpyro.subsample(mu, event_dim=0)
        obs = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(batch, sigma), obs=obs)


def in_support(draws):
    assert (draws["sigma"] > 0).all()
    assert jnp.allclose(draws["mix"].sum(-1), 1.0, atol=1e-5) and (draws["mix"] > 0).all()
    assert ((draws["r"] > -1) & (draws["r"] < 4)).all()
    assert all(jnp.isfinite(value).all() for value in draws.values())


def new_svi(name, the_model=model, **kwargs):
    guide = (GUIDES | DENSITY)[name](the_model, **kwargs)
    return guide, SVI(the_model, guide, optax.adam(3e-2), Trace_ELBO())


@cache
def fitted(name):
    guide, svi = new_svi(name)
    before = len(TRACES)
    result = svi.run(random.key(0), STEPS, X, Y, progress_bar=False)
    assert len(TRACES) - before < STEPS / 2
    return guide, svi, result


def two_dimensional():
    numpyro.sample("a", dist.HalfNormal(2.0))
    numpyro.sample("b", dist.Normal(2.0, 0.5))


@cache
def perturbed(name):
    """A guide of two dimensions at parameters that are far from its start."""
    guide, svi = new_svi(name, two_dimensional, init_scale=0.4)
    start = svi.optim.get_params(svi.init(random.key(0)).optim_state)
    flat, unravel = ravel_pytree(start)
    params = svi.constrain_fn(unravel(flat + 0.3 * random.normal(random.key(1), flat.shape)))
    return guide, svi, params


def close(tree, other, rtol=1e-5, atol=1e-6):
    return jax.tree.all(jax.tree.map(partial(jnp.allclose, rtol=rtol, atol=atol), tree, other))


@every_guide
def test_scan_progress_bar_update_and_resuming_agree_without_tracing_again(name):
    _, _, scanned = fitted(name)
    _, svi = new_svi(name)
    both = jax.jit(lambda state, x, y: (svi.update(state, x, y), svi.stable_update(state, x, y)))
    start = state = svi.init(random.key(0), X, Y)
    for i in range(10):
        (state, loss), (stable, stable_loss) = both(state, X, Y)
        assert close((loss, svi.get_params(state)), (stable_loss, svi.get_params(stable)))
        assert close(loss, scanned.losses[i], rtol=1e-4)
        if i == 0:
            before = len(TRACES)
    kept, bad = both(state, X + 1.0, Y * jnp.nan)[1]
    assert len(TRACES) == before
    assert jnp.isnan(bad) and close(svi.get_params(kept), svi.get_params(state), rtol=0.0, atol=0.0)
    assert not close(svi.get_params(start), svi.get_params(state))
    resumed = svi.run(random.key(9), STEPS - 10, X, Y, progress_bar=True, init_state=state)
    assert len(TRACES) - before < STEPS / 2
    assert close(resumed.losses, scanned.losses[10:], rtol=1e-3)
    assert close(resumed.params, scanned.params, rtol=1e-3, atol=1e-3)


@every_guide
def test_training_lowers_the_loss(name):
    _, _, result = fitted(name)
    assert jnp.isfinite(result.losses).all()
    assert jnp.median(result.losses[-10:]) < jnp.median(result.losses[:10]) - 5.0


@every_guide
def test_init_params_are_honoured(name):
    _, svi, result = fitted(name)
    state = svi.init(random.key(5), X, Y, init_params=result.params)
    assert close(svi.get_params(state), result.params)


@every_guide
@pytest.mark.parametrize("sample_shape", [(), (2, 3)])
def test_sample_posterior_has_shape_support_and_deterministic_sites(name, sample_shape):
    guide, _, result = fitted(name)
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=sample_shape)
    shapes = {site: (*sample_shape, *shape) for site, shape in (SITES | {"mu": (N,)}).items()}
    assert jax.tree.map(jnp.shape, draws) == shapes
    in_support(draws)
    slope = (draws["mix"] @ jnp.arange(3.0)) * draws["b"][..., 0, 1]
    mu = (draws["r"] + draws["b"][..., 1, :].sum(-1))[..., None] + slope[..., None] * X
    assert jnp.allclose(draws["mu"], mu, rtol=1e-4, atol=1e-5)


@every_guide
def test_deterministic_sites_follow_the_arguments(name):
    guide, _, result = fitted(name)
    key, shape = random.key(1), (3,)
    stock = guide.sample_posterior(key, result.params, sample_shape=shape)
    same = guide.sample_posterior(key, result.params, X, Y, sample_shape=shape)
    other = guide.sample_posterior(key, result.params, X[:7] + 1.0, y=None, sample_shape=shape)
    assert close(stock, same)
    assert other["mu"].shape == (3, 7) and close(other["b"], stock["b"])
    again = guide.sample_posterior(key, result.params, sample_shape=shape)
    assert close(stock, again)


@every_guide
def test_latent_draws_are_those_of_sample_posterior(name):
    guide, _, result = fitted(name)
    assert isinstance(guide, SamplesLatent)
    latent = guide.sample_latent(random.key(1), result.params, 3)
    assert latent.shape == (3, guide.latent_dim) == (3, 8)
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(3,))
    seeded = handlers.seed(model, 0)
    for k in range(3):
        sites = {site: draws[site][k] for site in SITES}
        flat = ravel_pytree(unconstrain_fn(seeded, (X, Y), {}, sites))[0]
        assert jnp.allclose(jnp.sort(flat), jnp.sort(latent[k]), rtol=1e-3, atol=1e-4)
    assert not jnp.allclose(latent[0], latent[1])


@every_guide
def test_latent_draws_are_differentiable_in_every_parameter(name):
    guide, _, params = perturbed(name)
    gradient = jax.grad(lambda p: jnp.sin(guide.sample_latent(random.key(1), p, 5)).sum())(params)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


@every_guide
def test_predictive_from_guide_and_from_model(name):
    guide, _, result = fitted(name)
    posterior = Predictive(guide, params=result.params, num_samples=6)(random.key(1), X, Y)
    in_support({site: posterior[site] for site in SITES})
    predicted = Predictive(model, guide=guide, params=result.params, num_samples=6)(
        random.key(1), X
    )
    assert predicted["y"].shape == (6, 5) and predicted["mu"].shape == (6, N)
    assert jnp.isfinite(predicted["y"]).all()


@every_guide
def test_median_and_quantiles_are_those_of_the_draws(name):
    guide, _, result = fitted(name)
    params = result.params
    median = guide.median(params)
    assert jax.tree.map(jnp.shape, median) == SITES | {"mu": (N,)}
    levels = [0.05, 0.5, 0.95]
    quantiles = guide.quantiles(params, levels)
    assert jax.tree.map(jnp.shape, quantiles) == {s: (3, *shape) for s, shape in SITES.items()} | {
        "mu": (3, N)
    }
    in_support(median)
    in_support(quantiles)
    assert close(jax.tree.map(lambda q: q[1], quantiles), median, rtol=1e-4)
    draws = guide.sample_posterior(random.key(7), params, sample_shape=(4000,))
    for site in ("sigma", "b", "r"):
        below = (draws[site][:, None] <= quantiles[site]).mean(0)
        expected = jnp.array(levels).reshape(3, *(1,) * len(SITES[site]))
        # Both are Monte Carlo: standard error at most .5 sqrt(1 / 4000 + 1 / 10000) = .0094.
        assert jnp.abs(below - expected).max() < 4 * 0.0094


@every_guide
def test_pickled_guide_draws_the_same(name):
    guide, _, result = fitted(name)
    again = pickle.loads(pickle.dumps(guide))
    key = random.key(3)
    assert close(
        again.sample_posterior(key, result.params, sample_shape=(2,)),
        guide.sample_posterior(key, result.params, sample_shape=(2,)),
    )
    fresh = pickle.loads(pickle.dumps(GUIDES[name](model)))
    svi = SVI(model, fresh, optax.adam(1e-2), Trace_ELBO())
    assert svi.get_params(svi.init(random.key(0), X, Y)).keys() == result.params.keys()


@pytest.mark.x64
@every_guide
def test_parameters_and_draws_have_the_default_precision(name):
    guide, _, params = perturbed(name)
    wanted = jnp.zeros(()).dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {wanted}
    draws = guide.sample_posterior(random.key(0), params, sample_shape=(2,))
    assert {leaf.dtype for leaf in jax.tree.leaves(draws)} == {wanted}


@pytest.mark.x64
@every_guide
def test_starts_at_a_normal_around_init_loc(name):
    init = init_to_value(values={"a": jnp.exp(0.7), "b": -1.2})
    guide, svi = new_svi(name, two_dimensional, init_scale=0.25, init_loc_fn=init)
    params = svi.get_params(svi.init(random.key(0)))
    z = guide.sample_latent(random.key(1), params, 20_000)
    z = (z - jnp.array([0.7, -1.2])) / 0.25
    # Monte Carlo: 1 / sqrt(20000) = .007 for means and covariances, sqrt(2) more for variances.
    assert jnp.abs(z.mean(0)).max() < 0.03
    assert jnp.abs(z.T @ z / len(z) - jnp.eye(2)).max() < 0.04


def discrete():
    numpyro.sample("x", dist.Normal())
    numpyro.sample("which", dist.Bernoulli(0.3))


def local():
    with numpyro.plate("rows", 10, subsample_size=4):
        numpyro.sample("own", dist.Normal())


def nothing():
    numpyro.sample("y", dist.Normal(), obs=0.0)


@every_guide
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (discrete, "'which' is discrete"),
        (local, "'own' is local to the subsampled plate 'rows'"),
        (nothing, "no latent sample site"),
    ],
    ids=["discrete", "local", "nothing"],
)
def test_models_that_do_not_fit_are_named(name, bad, match):
    _, svi = new_svi(name, bad)
    with pytest.raises(ValueError, match=match):
        svi.init(random.key(0))


@every_guide
def test_a_guide_without_its_model_or_params_says_so(name):
    guide, _, result = fitted(name)
    fresh = GUIDES[name](model)
    with pytest.raises(ValueError, match="has not seen its model"):
        fresh.sample_posterior(random.key(0), result.params)
    with pytest.raises(ValueError, match=f"params has no '{guide.prefix}_loc'"):
        guide.median({"other_loc": 0.0})
    with pytest.raises(ValueError, match=r"quantiles is \[0.5, 1.5\]"):
        guide.quantiles(result.params, [0.5, 1.5])
    with pytest.raises(ValueError, match="num_samples is None"):
        guide.sample_latent(random.key(0), result.params)
    with pytest.raises(ValueError, match="init_scale is -1"):
        GUIDES[name](model, init_scale=-1.0)


@pytest.mark.x64
@every_density
def test_density_integrates_to_one(name):
    guide, _, params = perturbed(name)
    assert isinstance(guide, AutoContinuous)
    posterior = guide.get_posterior(params)
    draws = posterior.sample(random.key(2), (20_000,))
    low, high = draws.min(0), draws.max(0)
    low, high = low - 0.5 * (high - low), high + 0.5 * (high - low)
    axes = [jnp.linspace(low[i], high[i], 601) for i in range(2)]
    grid = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1)
    log_q = posterior.log_prob(grid.reshape(-1, 2))
    cell = (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0])
    assert jnp.abs(jnp.exp(log_q).sum() * cell - 1.0) < 1e-3


@pytest.mark.x64
@every_density
def test_density_of_own_draw_of_foreign_value_and_by_autodiff_agree(name, tol):
    guide, _, params = perturbed(name)
    posterior, transform = guide.get_posterior(params), guide.get_transform(params)
    z, cached = posterior.sample_with_intermediates(random.key(3), (6,))
    own = posterior.log_prob(z, cached)
    foreign = posterior.log_prob(jnp.array(z))
    base = guide.get_base_dist().sample(random.key(3), (6,))
    assert jnp.allclose(jax.vmap(transform)(base), z, rtol=1e-6)
    log_det = jnp.linalg.slogdet(jax.vmap(jax.jacobian(transform))(base))[1]
    expected = guide.get_base_dist().log_prob(base) - log_det
    assert jnp.allclose(own, expected, atol=tol(2e-5, 1e-11))
    assert jnp.allclose(foreign, expected, atol=tol(2e-5, 1e-11))


@pytest.mark.x64
@every_density
def test_inverse_of_forward_is_identity(name, tol):
    guide, _, params = perturbed(name)
    transform = guide.get_transform(params)
    e = guide.get_base_dist().sample(random.key(4), (50,))
    assert jnp.allclose(transform.inv(transform(e)), e, atol=tol(1e-5, 1e-9))


@every_density
def test_loss_is_the_mean_of_log_q_minus_log_p(name):
    guide, _, params = perturbed(name)
    objective = Trace_ELBO(20_000)
    loss = jax.jit(lambda p: objective.loss(random.key(5), p, two_dimensional, guide))(params)
    z = guide.sample_latent(random.key(6), params, 20_000)
    log_p = dist.HalfNormal(2.0).log_prob(jnp.exp(z[:, 0])) + z[:, 0]
    log_p += dist.Normal(2.0, 0.5).log_prob(z[:, 1])
    terms = guide.get_posterior(params).log_prob(z) - log_p
    assert jnp.abs(loss - terms.mean()) < 5 * terms.std() * (2 / 20_000) ** 0.5
