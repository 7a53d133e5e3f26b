"""AutoParticles: what it draws, how it starts, and what it refuses."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.initialization import init_to_feasible, init_to_sample, init_to_value
import optax
import pytest

from numpyro_ext.guides import IntractableDensityError
from numpyro_ext.particles import SVGD, AutoParticles


def model():
    low = numpyro.sample("low", dist.Normal(-1.0, 0.5))
    width = numpyro.sample("width", dist.Gamma(2.0, 3.0).expand([2]))
    numpyro.deterministic("high", low + width)
    # The support depends on another site.
    numpyro.sample("inside", dist.Uniform(low, low + width[0]))


@cache
def started(num_particles=7, **options):
    guide = AutoParticles(model, num_particles, **options)
    svi = SVI(model, guide, optax.sgd(0.0), SVGD())
    return guide, svi.get_params(svi.init(random.key(3)))


def test_is_an_automatic_guide_with_one_parameter():
    guide, params = started(prefix="p")
    assert isinstance(guide, AutoContinuous)
    assert {k: v.shape for k, v in params.items()} == {"p_particles": (7, 4)}
    latent = guide.sample_latent(random.key(0), params)
    np.testing.assert_array_equal(latent, params["p_particles"])
    np.testing.assert_array_equal(guide.sample_latent(random.key(1), params, 7), latent)


def test_particles_are_constrained_in_order_with_deterministic_sites():
    guide, params = started()
    sites = guide.particles(params)
    assert set(sites) == {"low", "width", "high", "inside"}
    assert sites["width"].shape == (7, 2)
    assert jnp.all(sites["width"] > 0)
    np.testing.assert_allclose(sites["high"], sites["low"][:, None] + sites["width"], rtol=1e-6)
    assert jnp.all((sites["inside"] > sites["low"]) & (sites["inside"] < sites["high"][:, 0]))
    # Each site is its own slice of the latent vector.
    raw = jax.vmap(guide.unpack)(params["auto_particles"])
    np.testing.assert_array_equal(sites["low"], raw["low"])
    np.testing.assert_allclose(sites["width"], jnp.exp(raw["width"]), rtol=1e-6)


def test_each_particle_starts_at_its_own_draw():
    guide, params = started(num_particles=2000, init_loc_fn=init_to_sample)
    sites = guide.particles(params)
    assert len(np.unique(np.asarray(sites["low"]))) > 1990
    assert abs(sites["low"].mean() + 1.0) < 4 * 0.5 / 2000**0.5
    assert abs(sites["width"].mean() - 2.0 / 3.0) < 4 * (2.0 / 9.0) ** 0.5 / 4000**0.5


def test_init_scale_adds_noise_in_unconstrained_space():
    start = {"low": -1.0, "width": jnp.ones(2), "inside": -0.5}
    options = {"init_loc_fn": init_to_value(values=start), "init_scale": 0.3}
    _, params = started(num_particles=3000, **options)
    x = params["auto_particles"]
    assert jnp.all(jnp.abs(x.std(0) - 0.3) < 4 * 0.3 / 6000**0.5)
    assert jnp.all(jnp.abs(x.mean(0) - jnp.array([-1.0, 0.0, 0.0, 0.0])) < 0.03)


def test_call_picks_one_particle_uniformly():
    guide, params = started()
    draws = Predictive(guide, params=params, num_samples=7000)(random.key(1))
    sites = guide.particles(params)
    for name in ("low", "inside"):
        counts = (draws[name][:, None] == sites[name][None]).sum(0)
        assert counts.sum() == 7000
        assert jnp.all(jnp.abs(counts - 1000) < 4.5 * (7000 * 6 / 49) ** 0.5)
    picked = jnp.argmax(draws["low"][:, None] == sites["low"][None], axis=1)
    np.testing.assert_array_equal(draws["width"], sites["width"][picked])


def test_guide_trace_holds_only_its_own_sites():
    guide = AutoParticles(model, 3, count_steps=True)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
    expected = {"auto_particles", "auto_step", "low", "width", "inside"}
    assert {name for name, site in trace.items() if site["type"] != "prng_key"} == expected


@pytest.mark.parametrize("n", [3, 7, 16])
def test_sample_posterior_repeats_a_permutation(n):
    guide, params = started()
    draws = guide.sample_posterior(random.key(2), params, sample_shape=(n,))
    sites = guide.particles(params)
    counts = np.asarray((draws["low"][:, None] == sites["low"][None]).sum(0))
    assert counts.sum() == n
    assert set(counts) <= {n // 7, -(-n // 7)}
    other = guide.sample_posterior(random.key(5), params, sample_shape=(n,))
    assert not np.array_equal(other["low"], draws["low"])
    np.testing.assert_allclose(draws["high"], draws["low"][:, None] + draws["width"], rtol=1e-6)


def test_sample_shapes():
    guide, params = started()
    assert guide.sample_posterior(random.key(2), params)["width"].shape == (2,)
    several = guide.sample_posterior(random.key(2), params, sample_shape=(3, 5))
    assert several["width"].shape == (3, 5, 2)
    assert guide.sample_posterior(random.key(2), params, sample_shape=(0,))["low"].shape == (0,)


def test_median_and_quantiles_are_those_of_the_particles():
    guide, params = started()
    sites = guide.particles(params)
    median, quantiles = guide.median(params), guide.quantiles(params, [0.1, 0.5])
    assert set(median) == {"low", "width", "inside"}
    for name, value in median.items():
        np.testing.assert_allclose(value, np.median(sites[name], axis=0), rtol=1e-6)
        np.testing.assert_allclose(quantiles[name][1], value, rtol=1e-6)
        expected = np.quantile(np.asarray(sites[name]), 0.1, axis=0)
        np.testing.assert_allclose(quantiles[name][0], expected, rtol=1e-5)


def test_stock_loss_is_an_error_instead_of_a_collapse():
    guide = AutoParticles(model, 4)
    with pytest.raises(IntractableDensityError, match="SVGD"):
        SVI(model, guide, optax.sgd(0.1), Trace_ELBO()).run(random.key(0), 1, progress_bar=False)
    with pytest.raises(IntractableDensityError, match="no density"):
        guide.get_posterior({})


@pytest.mark.parametrize(
    "options",
    [
        {"init_loc_fn": init_to_feasible},
        {"init_loc_fn": init_to_value(values={"low": 0.0, "width": jnp.ones(2), "inside": 0.5})},
    ],
)
def test_equal_particles_are_an_error_that_names_init_scale(options):
    with pytest.raises(ValueError, match=r"same point.*init_scale"):
        started(**options)
    _, params = started(num_particles=1, **options)
    assert params["auto_particles"].shape == (1, 4)


def test_equal_or_misshapen_init_params_are_errors():
    svi = SVI(model, AutoParticles(model, 3), optax.sgd(0.1), SVGD())
    for value, words in (
        (jnp.ones((3, 4)), "same point"),
        (jnp.ones((3, 2)), r"must be \(3, 4\)"),
        (jnp.ones((2, 4)), r"must be \(3, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            svi.init(random.key(0), init_params={"auto_particles": value})


def test_local_latents_in_a_subsampled_plate_are_an_error():
    def local():
        with numpyro.plate("data", 10, subsample_size=5):
            numpyro.sample("z", dist.Normal())

    with pytest.raises(ValueError, match="'z' is local to the subsampled plate 'data'"):
        SVI(local, AutoParticles(local, 3), optax.sgd(0.1), SVGD()).init(random.key(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_particles": 0}, "num_particles is 0"),
        ({"init_scale": -1.0}, "init_scale is -1.0"),
    ],
)
def test_bad_input_is_one_clear_sentence(options, words):
    with pytest.raises(ValueError, match=words):
        AutoParticles(model, **options)
