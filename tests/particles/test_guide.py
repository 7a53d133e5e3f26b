"""AutoParticles: what it draws, how it starts, and what it refuses."""

import copy
from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.initialization import init_to_feasible, init_to_sample, init_to_value
import optax
import pandas as pd
import pytest

from numpyro_ext.guides import IntractableDensityError
from numpyro_ext.particles import SVGD, AutoParticles

pytestmark = pytest.mark.filterwarnings("ignore:7 particles for 4 latent dimensions")


def model():
    low = numpyro.sample("low", dist.Normal(-1.0, 0.5))
    width = numpyro.sample("width", dist.Gamma(2.0, 3.0).expand([2]))
    numpyro.deterministic("high", low + width)
    # The support depends on another site.
    numpyro.sample("inside", dist.Uniform(low, low + width[0]))


@cache
def started(num_particles=7, **options):
    guide = AutoParticles(model, num_particles, **options, init_from=None)
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


@pytest.mark.slow
def test_each_particle_starts_at_its_own_draw_plus_noise():
    n, sd = 3000, (0.5**2 + 0.4**2) ** 0.5
    guide, params = started(num_particles=n, init_loc_fn=init_to_sample, init_scale=0.4)
    sites, x = guide.particles(params), params["auto_particles"]
    assert len(np.unique(np.asarray(sites["low"]))) > n - 10
    assert abs(sites["low"].mean() + 1.0) < 4 * sd / n**0.5
    assert abs(sites["low"].std() - sd) < 4 * sd / (2 * n) ** 0.5
    # log of a Gamma(2, 3): mean digamma(2) - log 3.
    assert (
        abs(x[:, 1:3].mean() - (0.4227843 - np.log(3.0)))
        < 4 * ((0.6449341 + 0.16) / (2 * n)) ** 0.5
    )


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
    guide, _ = started()
    trace = handlers.trace(handlers.seed(copy.copy(guide), 0)).get_trace()
    expected = {"auto_particles", "low", "width", "inside"}
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


def test_stock_loss_is_an_error_instead_of_a_collapse():
    guide, params = started()
    with pytest.raises(IntractableDensityError, match=r"particle_step.*RegularizedSVGD"):
        Trace_ELBO().loss(random.key(0), params, model, guide)
    with pytest.raises(IntractableDensityError, match="no density"):
        guide.get_posterior({})


SAME = init_to_value(values={"low": -1.0, "width": jnp.ones(2), "inside": -0.5})


@pytest.mark.parametrize("init_loc_fn", [init_to_feasible, SAME])
def test_equal_particles_are_an_error(init_loc_fn):
    with pytest.raises(ValueError, match=r"same point.*init_scale"):
        started(init_loc_fn=init_loc_fn)


def test_equal_or_misshapen_init_params_are_errors():
    guide, _ = started()
    for value, words in (
        (jnp.ones((7, 4)), "same point"),
        (jnp.ones((7, 2)), r"must be \(7, 4\)"),
        (jnp.ones((2, 4)), r"must be \(7, 4\)"),
    ):
        with pytest.raises(ValueError, match=words), handlers.seed(rng_seed=0):
            handlers.substitute(guide, {"auto_particles": value})()


def test_deterministic_sites_follow_the_arguments():
    def line(x):
        slope = numpyro.sample("slope", dist.Normal(2.0, 1.0))
        height = numpyro.param("height", 1.5, constraint=constraints.positive)
        numpyro.deterministic("y", height + slope * x)

    guide = AutoParticles(line, 5, init_from=None)
    x = jnp.arange(3.0)
    svi = SVI(line, guide, optax.sgd(0.0), SVGD())
    params = svi.get_params(svi.init(random.key(0), x))

    def draws(*args):
        return guide.sample_posterior(random.key(1), params, *args, sample_shape=(4,))

    # NumPyro would apply the constraint of the height a second time: exp(1.5).
    for sites, at in ((draws(), x), (draws(10.0 + jnp.arange(2.0)), 10.0 + jnp.arange(2.0))):
        np.testing.assert_allclose(sites["y"], 1.5 + sites["slope"][:, None] * at, rtol=1e-5)
    np.testing.assert_allclose(
        guide.particles(params)["y"], 1.5 + params["auto_particles"] * x, rtol=1e-5
    )


@pytest.mark.parametrize("options", [{}, {"init_from": None}])
def test_a_latent_site_of_a_plate_has_its_values_in_each_particle(options):
    def grouped():
        with numpyro.plate("groups", 6):
            numpyro.sample("effect", dist.Normal(1, 2))

    guide = AutoParticles(grouped, 20, **options)
    svi = SVI(grouped, guide, optax.sgd(0.0), SVGD())
    params = svi.get_params(svi.init(random.key(0)))
    assert guide.particles(params)["effect"].shape == (20, 6)


@pytest.mark.parametrize("kind", [np.asarray, pd.Series], ids=["array", "series"])
def test_a_loss_sees_data_that_have_changed_in_place(kind):
    """Although the guide keeps the potential that it has read."""

    def of_rows(x):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", dist.Normal(loc, 1.0), obs=jnp.asarray(x))

    x, guide = kind(np.zeros(3)), AutoParticles(of_rows, 5, init_from=None)
    svi = SVI(of_rows, guide, optax.sgd(0.0), SVGD())
    params = svi.get_params(svi.init(random.key(0), x))
    before = SVGD().loss(random.key(1), params, of_rows, guide, x)
    x[:] = 2.0
    after = SVGD().loss(random.key(1), params, of_rows, guide, x)
    loc = params["auto_particles"][:, 0]
    change = 3 * jnp.mean((2.0 - loc) ** 2 - loc**2) / 2
    np.testing.assert_allclose(after - before, change, rtol=1e-4)
