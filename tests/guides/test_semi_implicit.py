"""`AutoSemiImplicit`: what it draws, what it refuses, and what it fits."""

from functools import cache

from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.diagnostics import pareto_khat, to_arviz
from numpyro_ext.guides import AutoSemiImplicit, IntractableDensityError
from numpyro_ext.objectives import SemiImplicitELBO

LOC = jnp.array([3.0, -20.0])
FACTOR = jnp.array([[0.5, 0.0], [1.9, 0.6244998]])  # standard deviations .5 and 2, correlation .95


def model():
    numpyro.sample("z", dist.MultivariateNormal(LOC, scale_tril=FACTOR))


def start(guide):
    svi = SVI(guide.model, guide, optax.adam(1e-2), SemiImplicitELBO(2, 2))
    return svi, svi.get_params(svi.init(random.key(0)))


@cache
def perturbed(covariance):
    guide = AutoSemiImplicit(
        model, init_scale=0.5, noise_dim=3, hidden_dims=(6,), covariance=covariance
    )
    _, params = start(guide)
    net = params["auto_net$params"]
    return guide, {**params, "auto_net$params": net + random.normal(random.key(1), net.shape)}


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["shared", "conditional"])
def test_draws_are_normal_around_the_mixing_draws(covariance):
    guide, params = perturbed(covariance)
    loc, scale = guide.sample_mixing(random.key(2), params, 5)
    assert loc.shape == scale.shape == (5, 2)
    assert jnp.ptp(loc, axis=0).min() > 0.1
    assert bool(jnp.ptp(scale) == 0.0) == (covariance == "shared")
    normal = guide.conditional(params, (loc, scale))
    assert (normal.batch_shape, normal.event_shape) == ((5,), (2,))
    z = jnp.array([0.3, -0.8])
    expected = dist.Normal(loc, scale).log_prob(z).sum(-1)
    assert jnp.allclose(normal.log_prob(z), expected)


@pytest.mark.parametrize("covariance", ["shared", "conditional"])
def test_latent_draws_are_those_of_the_mixture(covariance):
    guide, params = perturbed(covariance)
    z = guide.sample_latent(random.key(3), params, 20_000)
    psi = guide.sample_mixing(random.key(4), params, 20_000)
    other = guide.conditional(params, psi).sample(random.key(5))
    levels = jnp.array([0.05, 0.25, 0.5, 0.75, 0.95])
    below = (z[:, None] <= jnp.quantile(other, levels, axis=0)).mean(0)
    # Both are Monte Carlo: standard errors of at most .5 sqrt(2 / 20000) = .005.
    assert jnp.abs(below - levels[:, None]).max() < 4 * 0.005


def test_scale_stays_above_its_floor():
    guide, params = perturbed("conditional")
    svi, _ = start(guide)
    low = {name: x - 100.0 * (name == "auto_scale") for name, x in params.items()}
    constrained = svi.constrain_fn(low)
    assert jnp.allclose(constrained["auto_scale"], 1e-3 * 0.5)
    scale = guide.sample_mixing(random.key(0), constrained, 100)[1]
    assert jnp.allclose(scale, 1e-3 * 0.5)


def test_losses_of_a_density_name_the_one_to_use():
    guide, params = perturbed("shared")
    with pytest.raises(IntractableDensityError, match="SemiImplicitELBO"):
        Trace_ELBO().loss(random.key(0), params, model, guide)


def test_density_is_refused_by_name():
    guide, params = perturbed("shared")
    with pytest.raises(IntractableDensityError, match="AutoSemiImplicit has no density"):
        guide.get_posterior(params)
    svi, _ = start(guide)
    with pytest.raises(IntractableDensityError, match="AutoSemiImplicit gives draws without"):
        pareto_khat(svi, params, num_samples=30)
    tree = to_arviz(svi, params, num_samples=30)
    assert tree.attrs["density"] == "none" and "log_weight" not in tree["sample_stats"]


def test_own_network_takes_the_place_of_the_default():
    network = (lambda key, shape: ((2,), jnp.ones(())), lambda weight, x: weight * x**3)
    guide = AutoSemiImplicit(model, network=network, init_scale=0.2)
    _, params = start(guide)
    params = {**params, "auto_net$params": jnp.array([2.0])}
    noise = jnp.array([0.5, -1.5])
    run = substitute(seed(guide, 0), {**params, "_auto_noise": noise})
    site = trace(run).get_trace()["_auto_latent"]
    assert jnp.allclose(site["fn"].base_dist.loc, params["auto_loc"] + 2.0 * noise**3)
    assert jnp.allclose(site["fn"].base_dist.scale, 0.2)
