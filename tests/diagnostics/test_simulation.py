"""Ranks of true values among the draws of fits: uniform if these are exact, and named if not."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import log_density
import pytest

from numpyro_ext.diagnostics import InferenceWarning, simulation_based_calibration

N = 400
LOC, SCALE, NOISE = map(
    jnp.asarray, (np.linspace(-3, 5, N), np.geomspace(0.1, 10, N), np.linspace(0.5, 2, N))
)
X = jnp.zeros((2, N))


def many_means(x):
    """400 conjugate problems at once, off the origin and of unequal scales."""
    z = numpyro.sample("z", dist.Normal(LOC, SCALE).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.Normal(z, NOISE).to_event(1), obs=x)


def exact(width=1.0, shift=0.0):
    """The posterior, ``width`` times as wide, and moved by ``shift`` standard deviations."""

    @jax.jit
    def draws(rng_key, x):
        precision = 1 / SCALE**2 + 2 / NOISE**2
        mean = (LOC / SCALE**2 + x.sum(0) / NOISE**2) / precision
        sd = precision**-0.5
        return {"z": mean + shift * sd + width * sd * random.normal(rng_key, (50, N))}

    return lambda rng_key, model, args, kwargs: draws(rng_key, args[0]["x"])


def calibrate(fit, model=many_means, *args, key=0, size=200, draws=50, **kwargs):
    args = args or ((X,) if model is many_means else ())
    return simulation_based_calibration(
        random.key(key), model, fit, *args, num_simulations=size, num_samples=draws, **kwargs
    )


@pytest.mark.slow
def test_p_values_of_the_exact_posterior_are_uniform():
    """400 of them: a share of .05 +- .011 is below .05, and the Bonferroni line is a p-value."""
    result = calibrate(exact())
    p = result.p_values["z"]
    assert p.shape == (N,) and abs(np.mean(p < 0.05) - 0.05) < 4 * 0.011
    assert abs(np.mean(p) - 0.5) < 4 * 0.29 / N**0.5
    assert result.p_value == pytest.approx(min(1.0, p.min() * N)) and result.p_value > 1e-3
    ranks, pit = result.ranks["z"], result.pit["z"]
    assert ranks.shape == (200, N) and ranks.min() == 0 and ranks.max() == 50
    np.testing.assert_array_equal(np.floor(pit * 51), ranks)
    np.testing.assert_array_equal(result.dataset["prior_sbc"]["z"].values[0], pit)
    assert "200 simulations, ranks among 50 draws" in str(result)


def test_half_the_standard_deviation_is_always_found():
    """And .8 of it in .70 of the problems, with an error of .023."""
    result = calibrate(exact(0.5), key=1)
    assert np.all(result.p_values["z"] < 1e-4)
    assert "heaped at both ends: the draws are too narrow" in str(result)
    share = np.mean(calibrate(exact(0.8), key=2).p_values["z"] < 0.05)
    assert abs(share - 0.70) < 0.1


@pytest.mark.parametrize(
    ("fit", "words"),
    [
        (exact(2.0), "heaped in the middle: the draws are too wide"),
        (exact(shift=0.7), "a slope: the draws are too high"),
        (exact(shift=-0.7), "a slope: the draws are too low"),
    ],
    ids=["wide", "high", "low"],
)
def test_other_shapes_are_named(fit, words):
    assert words in str(calibrate(fit, key=3, size=100))


@pytest.mark.nightly
def test_constant_numbers_and_discrete_sites_are_left_out():
    """A Cholesky factor has entries that never vary; their ranks are ties, broken at random."""

    def model(y):
        numpyro.sample("L", dist.LKJCholesky(2, 2.0))
        numpyro.sample("kind", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(0, 1), obs=y)

    @jax.jit
    def prior(rng_key):
        return {"L": dist.LKJCholesky(2, 2.0).sample(rng_key, (500,))}

    result = calibrate(lambda rng_key, *_: prior(rng_key), model, 0.3, size=100)
    np.testing.assert_array_equal(np.isnan(result.p_values["L"]), [[True, True], [False, False]])
    # The mean of 100 ranks between 0 and 50 has a standard deviation of 1.5.
    assert abs(np.mean(result.ranks["L"][:, 0, 0]) - 25) < 6 and result.p_value > 1e-4
    assert result.notes == ("left out, because it is discrete: 'kind'",)
    assert result.notes[0] in str(result) and "\n  all   2 " in str(result)


def seen_by_the_fit(model, *args, truth=None, **kwargs):
    """The model and its arguments, as the fit of the last simulation gets them."""
    seen = {}

    def fit(rng_key, model, args, kwargs):
        seen.update(model=model, args=args, kwargs=kwargs)
        return {"z": random.normal(rng_key, (10,))}

    calibrate(fit, model, *args, size=20, draws=10, **kwargs)
    return seen["model"], seen["args"], seen["kwargs"]


def rows_model(x, y=None, batch=None):
    z = numpyro.sample("z", dist.Normal(1.0, 2.0))
    with numpyro.plate("rows", len(x), subsample_size=batch) as idx:
        target = None if y is None else jnp.asarray(y)[idx]
        numpyro.sample("y", dist.Normal(z * x[idx], 0.5), obs=target)


@pytest.mark.parametrize("batch", [None, 2])
def test_the_fit_sees_simulated_data_in_every_minibatch(batch):
    """The density is that of the rows; the arguments stay as they are."""
    x, y = jnp.array([0.5, -1.0, 2.0, 0.1]), np.array([0.1, 0.2, 0.3, 0.7])
    model, (data, x_seen, y_seen), kwargs = seen_by_the_fit(rows_model, x, y, batch=batch)
    assert x_seen is x and y_seen is y and kwargs == {"batch": batch}
    assert np.all(np.asarray(data["y"]) != np.float32(y))
    rows = jnp.array([3, 1])
    given = {"z": jnp.array(0.7), **({} if batch is None else {"rows": rows})}
    rows = jnp.arange(4) if batch is None else rows
    found, _ = log_density(model, (data, x, y), kwargs, given)
    lik = dist.Normal(0.7 * x[rows], 0.5).log_prob(data["y"][rows])
    expected = dist.Normal(1, 2).log_prob(0.7) + lik.sum() * 4 / len(rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_joint_draws_follow_the_model():
    """Without data, in the scope of the call: the variance of y is 4 x^2 + .25, error 10 %."""
    x, found = jnp.array([0.5, -1.0, 2.0]), []

    def fit(rng_key, model, args, kwargs):
        found.append(args[0]["y"])
        return {"z": random.normal(rng_key, (10,))}

    calibrate(fit, rows_model, x, size=200, draws=10, observed_sites=["y"])
    y = np.stack(found)
    np.testing.assert_allclose(np.var(y, 0), 4 * x**2 + 0.25, rtol=0.4)
    assert np.corrcoef(y[:, 1], y[:, 2])[0, 1] < -0.9
    np.testing.assert_allclose(np.mean(y, 0), x, atol=4 * (4 * 4.25 / 200) ** 0.5)


def test_data_of_any_shape_and_missing_entries():
    """Data of a single distribution without a plate are many; NaN stays."""

    def model(x, y, w):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(z, 1), obs=x)
        numpyro.sample("y", dist.Normal(z, 1).expand([3]).mask(~jnp.isnan(y)), obs=y)
        numpyro.sample("w", dist.Normal(z, 1), obs=jnp.log(w))

    y = jnp.array([0.5, jnp.nan, 1.0])
    _, (data, *_), _ = seen_by_the_fit(model, jnp.ones(4), y, 3.0 * jnp.ones(()))
    assert data["x"].shape == (4,) and len(np.unique(data["x"])) == 4
    np.testing.assert_array_equal(np.isnan(data["y"]), [False, True, False])
    assert data["w"] != np.log(3.0)


def walk(y=None):
    z = numpyro.sample("z", dist.LogNormal(0, 0.5))

    def step(h, y):
        h = numpyro.sample("h", dist.Normal(h, z))
        numpyro.sample("y", dist.Normal(h, 0.5), obs=y)
        return h, None

    scan(step, 0.0, y, length=5)


@pytest.mark.nightly
@pytest.mark.parametrize("given", [True, False])
def test_data_inside_a_loop(given):
    """A loop that carries the data is no use of them elsewhere."""
    args = (jnp.zeros(5),) if given else ()

    def fit(rng_key, model, args, kwargs):
        sites = {"z": jnp.array(0.8), "h": jnp.array([0.1, 0.5, -0.3, 0.2, 1.0])}
        fitted = trace(seed(substitute(model, data=sites), 0)).get_trace(*args, **kwargs)
        np.testing.assert_array_equal(fitted["y"]["value"], args[0]["y"])
        assert fitted["y"]["is_observed"]
        return {"z": jnp.exp(0.5 * random.normal(rng_key, (10,))), "h": jnp.zeros((10, 5))}

    calibrate(fit, walk, *args, size=20, draws=10, observed_sites=["y"])


def centred(y, lagged):
    z = numpyro.sample("z", dist.Normal(y.mean(), 1))
    numpyro.sample("y", dist.Normal(z + lagged, 1), obs=y)


def test_a_prior_and_covariates_that_the_data_make_are_those_of_the_given_data():
    """z ~ N(1, 1), as the given data say, whatever was simulated."""
    y = jnp.array([0.0, 2.0])
    model, (data, *args), _ = seen_by_the_fit(centred, y, y / 2)
    found, _ = log_density(model, (data, *args), {}, {"z": jnp.array(0.7)})
    lik = dist.Normal(0.7 + y / 2, 1).log_prob(data["y"]).sum()
    np.testing.assert_allclose(found, dist.Normal(1, 1).log_prob(0.7) + lik, rtol=1e-5)


def with_param(y):
    z = numpyro.sample("z", dist.Normal(numpyro.param("a", 0.0), 1))
    numpyro.sample("y", dist.Normal(z, 1), obs=y)


def with_factor(y):
    z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.factor("penalty", -(z**2))
    numpyro.sample("y", dist.Normal(z, 1), obs=y)


def discrete(y):
    z = numpyro.sample("z", dist.Bernoulli(0.3))
    numpyro.sample("y", dist.Normal(z, 1), obs=y)


def two(x, y):
    z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("x", dist.Normal(z, 1), obs=x)
    numpyro.sample("y", dist.Normal(z, 1), obs=y)


Y = jnp.array([0.5, -1.0, 2.0])


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "message"),
    [
        (with_param, (Y,), {}, "the param site 'a' of the model has no prior"),
        (with_factor, (Y,), {}, "draws from the prior do not follow the factor 'penalty'"),
        (discrete, (Y,), {}, r"no continuous latent site, but \['z'\]"),
        (rows_model, (Y,), {}, "observes no site on these arguments; pass its data, or obs"),
        (two, (Y, Y), {"observed_sites": ["x"]}, r"those that are observed, \['x', 'y'\]"),
        (two, (Y, Y), {"observed_sites": ["x", "y", "q"]}, r"is \['x', 'y', 'q'\]; it must hold"),
    ],
)
def test_models_that_cannot_be_simulated(model, args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        calibrate(exact(), model, *args, **kwargs)


@pytest.mark.parametrize(
    ("z", "message"),
    [
        (np.zeros((9, N)), "at least num_samples=10 of shape"),
        (np.zeros((10, 3)), r"shape \(10, 3\) at site 'z'"),
        (np.full((10, N), np.nan), "draws of site 'z' that are not finite"),
    ],
)
def test_fits_that_return_something_else(z, message):
    with pytest.raises(ValueError, match=message):
        calibrate(lambda *_: {"z": z}, size=20, draws=10)


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="single precision")
def test_draws_that_are_rounded_to_an_end_of_the_support_are_named():
    """Of a gamma of concentration 0.01 two fifths are below the smallest number."""

    def model(x):
        z = numpyro.sample("z", dist.Gamma(0.01, 1.0))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    with pytest.raises(ValueError, match=r"'z' are rounded to an end of its support in"):
        calibrate(None, model, 1.0)


def test_correlated_draws_are_warned_of():
    def fit(rng_key, model, args, kwargs):
        return {"z": jnp.cumsum(random.normal(rng_key, (50, N)), 0)}

    with pytest.warns(InferenceWarning, match=r"the 50 draws of each fit are correlated \(0\."):
        calibrate(fit, size=20, draws=50)
