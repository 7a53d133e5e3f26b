"""Settings that are found: the laws they rest on, what they give, and what is said where they
fail."""

from functools import cache, partial
import pickle
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.mcmc import (
    PSGLD,
    SGHMC,
    SGLD,
    SGNHT,
    SGRLD,
    ExpandedMean,
    RecipeKernel,
    Settings,
    SGMCMCKernel,
    Whitening,
)
from numpyro_ext.mcmc.laws import (
    choose_sgld,
)
from tests.mcmc.models import NoisyGradient

pytestmark = pytest.mark.slow

NOISE = np.array([0.0, 3.0, 12.0])
METRIC = jnp.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.7]])


def standard():
    numpyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))


HERE = Whitening(jnp.zeros(3), jnp.ones(3))


@cache
def variances(make, chains=400):
    """Of chains of 500 draws with settings found for the noise, what the gradients imply for them
    in the mean, and these settings."""
    kernel = make(standard, gradient=NoisyGradient(NOISE), whitening=HERE, steps_per_sample=10)
    state = kernel.init(random.split(random.key(0), chains), 20, None)

    @jax.jit
    def run(state):
        def body(state, _):
            state = kernel.sample(state)
            implied = getattr(state, "implied_variance_ratio", jnp.ones(()))
            return state, (jnp.mean(state.z["z"] ** 2, 0), jnp.mean(implied))

        state, _ = jax.lax.scan(body, state, length=60)
        return jax.lax.scan(body, state, length=500)[1]

    found, implied = run(state)
    return np.mean(found, 0), float(np.mean(implied)), kernel.settings


@pytest.mark.parametrize("make", [SGLD, SGNHT, PSGLD])
def test_the_predicted_variance_is_that_of_a_simulation(make):
    """On a normal target the law is exact; 200,000 draws know a variance to about 1 %."""
    found, _, settings = variances(make)
    noisiest = found[np.argmax(NOISE)]
    assert abs(noisiest - settings.variance_ratio) < 0.03
    assert np.max(np.abs(found - 1)) < 0.05 + 0.03


HOT = partial(SGRLD, metric=lambda z: METRIC, max_bias=0.3, temperature=2.0)


@pytest.mark.parametrize("make", [SGLD, HOT], ids=["SGLD", "SGRLD"])
def test_the_ratio_that_gradients_imply_is_that_of_the_variances(make):
    """The mean over coordinates, which 600,000 numbers know to about 0.4 %; a quarter of them, of a
    metric that takes long and of six times the bias, to about 0.8 %."""
    long = "metric" in getattr(make, "keywords", {})
    found, implied, settings = variances(make, 100) if long else variances(make)
    T, error = (2.0, 0.008) if long else (1.0, 0.004)
    assert abs(np.mean(found) / T - implied) < 2.5 * error
    assert implied - 1 > 0.4 * (settings.variance_ratio - 1) > 0.01


def test_the_step_of_sgld_solves_its_law():
    choice = choose_sgld(NOISE, 0.05)
    assert choice.step_size == pytest.approx(0.1 / 13.05)
    assert choice.variance_ratio == pytest.approx(1.05)


def badly_scaled(x, y, batch=50):
    """Linear regression with columns of the scales 1e-3, 1 and 50, and its scale."""
    w = numpyro.sample("w", dist.Normal(0.0, 3000.0).expand([3]).to_event(1))
    a_scale = numpyro.sample("a_scale", dist.HalfNormal(10.0))
    with numpyro.plate("rows", len(x), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, a_scale), obs=y[i])


@cache
def data():
    x = np.random.default_rng(0).standard_normal((1000, 3)) * np.array([1e-3, 1.0, 50.0])
    y = x @ np.array([500.0, 2.0, -0.03]) + 0.7 * np.random.default_rng(1).standard_normal(1000)
    b, residuals, _, _ = np.linalg.lstsq(x, y, rcond=None)
    scale = np.sqrt(residuals[0] / 1000)
    sd = scale * np.sqrt(np.diag(np.linalg.inv(x.T @ x)))
    return jnp.asarray(x), jnp.asarray(y), b, sd, scale


@cache
def run(make):
    x, y, *_ = data()
    mcmc = MCMC(
        make(badly_scaled, steps_per_sample=20),
        num_warmup=50,
        num_samples=1000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x, y)
    return mcmc


def test_nothing_is_tuned_and_means_and_standard_deviations_are_right():
    """40,000 transitions: at least 1,000 independent draws, so 0.03 sd and 2 % by chance alone."""
    _, _, b, sd, scale = data()
    samples = run(SGHMC).get_samples()
    w = np.asarray(samples["w"])
    assert np.max(np.abs(w.mean(0) - b) / sd) < 0.12
    np.testing.assert_allclose(w.std(0) / sd, 1.0, atol=0.09)
    assert samples["a_scale"].mean() == pytest.approx(scale, rel=0.01)
    assert samples["a_scale"].std() == pytest.approx(scale / np.sqrt(2000), rel=0.1)


@cache
def chains_by(method):
    options = {"num_chains": 2, "chain_method": method, "progress_bar": False}
    mcmc = MCMC(SGLD(standard, steps_per_sample=3), num_warmup=4, num_samples=10, **options)
    mcmc.run(random.key(3))
    return mcmc


def test_a_pickled_run_with_settings_that_were_found_goes_on():
    mcmc = chains_by("vectorized")
    after, last = [], mcmc.last_state
    for run in (mcmc, pickle.loads(pickle.dumps(mcmc))):
        run.post_warmup_state = last
        run.run(random.key(5))
        after.append(run.get_samples()["z"])
        assert run.sampler.settings.step_size == mcmc.sampler.settings.step_size
    np.testing.assert_allclose(after[0], after[1], rtol=1e-4)
    assert float(mcmc.last_state.i.max()) == 3 * 24


def test_chains_start_at_draws_of_the_normal_approximation():
    x, y, b, sd, _ = data()
    kernel = SGHMC(badly_scaled)
    state = kernel.init(random.split(random.key(0), 500), 10, None, (x, y))
    w = np.asarray(state.z["w"])
    np.testing.assert_allclose(w.std(0) / sd, 1.0, atol=0.15)  # 500 draws: 3 %
    assert np.max(np.abs(w.mean(0) - b) / sd) < 0.2


def test_the_report_prints_and_pickles():
    settings = run(SGHMC).sampler.settings
    assert isinstance(settings, Settings)
    text = str(settings)
    assert text.startswith("SGHMC: settings found") and "ControlVariate" in text
    assert len(text.splitlines()) < 15
    again = pickle.loads(pickle.dumps(settings))
    assert str(again) == text
    assert pickle.loads(pickle.dumps(run(SGHMC).sampler)).settings.step_size == settings.step_size


def test_a_given_friction_and_a_given_estimator_stay():
    x, y, *_ = data()
    kernel = SGHMC(badly_scaled, friction=7.0)
    kernel.init(random.key(0), 10, None, (x, y))
    assert kernel.settings.friction == 7.0
    kernel = SGLD(standard, gradient=NoisyGradient(NOISE))
    kernel.init(random.key(0), 10, None)
    assert isinstance(kernel.gradient, NoisyGradient)
    assert kernel.settings.noise == pytest.approx(12.0, rel=0.25)


def positive():
    numpyro.sample("rate", dist.Gamma(jnp.array([20.0, 50.0]), jnp.array([2.0, 100.0])).to_event(1))


def test_a_kernel_with_a_metric_of_z_finds_its_step():
    """Gamma(a, b) has the mean a/b and the standard deviation sqrt(a)/b."""
    kernel = SGRLD(positive, metric=ExpandedMean(), steps_per_sample=10)
    options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=100, num_samples=2500, **options)
    mcmc.run(random.key(0))
    rate = np.asarray(mcmc.get_samples()["rate"])
    mean, sd = np.array([10.0, 0.5]), np.array([20.0**0.5 / 2, 50.0**0.5 / 100])
    assert np.max(np.abs(rate.mean(0) - mean) / sd) < 0.2
    np.testing.assert_allclose(rate.std(0), sd, rtol=0.12)


def eight_schools_centred():
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
        effect = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
        numpyro.sample("y", dist.Normal(theta, sigma), obs=effect)


def test_a_posterior_without_a_mode_warns_and_goes_on():
    kernel = SGHMC(eight_schools_centred)
    with pytest.warns(InferenceWarning, match="variational fit instead; reparametrise"):
        state = kernel.init(random.key(0), 10, None)
    assert kernel.settings.problems
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in state.z.values())


def test_steps_that_must_be_tiny_are_told_to_reparametrise():
    kernel = SGLD(badly_scaled, max_bias=1e-5)
    with pytest.warns(InferenceWarning, match=r"transitions; .*\(LocScaleReparam, the other way"):
        kernel.init(random.key(0), 10, None, data()[:2])
    assert kernel.settings.transitions > 10_000


def two_modes(x):
    loc = numpyro.sample("loc", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=20) as i:
        parts = dist.Normal(loc, 0.6)
        mixture = dist.MixtureSameFamily(dist.Categorical(jnp.full(2, 0.5)), parts)
        numpyro.sample("x", mixture, obs=x[i])


def cubic(x, y):
    b = numpyro.sample("b", dist.Normal(0, 10).expand([4]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=40) as i:
        numpyro.sample("y", dist.Normal(jnp.vander(x[i], 4) @ b, 0.3), obs=y[i])


def test_data_without_noise_are_no_sign_of_several_modes():
    """The posterior is normal, and the gradients of rows vanish at its mode, so that a correction
    by them does nothing."""
    x = jnp.linspace(-1, 1, 400)
    kernel = SGHMC(cubic)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.init(random.key(0), 10, None, (x, jnp.vander(x, 4) @ jnp.array([3, 0.5, -2, 1.0])))
    assert not kernel.settings.control_variate and kernel.settings.noise > 0.1


def test_a_correction_that_does_nothing_far_from_normal_warns():
    """Coordinates so wide that they hold both modes."""
    x = 2.0 * (jnp.arange(100) % 2 * 2 - 1) + 0.6 * random.normal(random.key(3), (100,))
    kernel = SGHMC(two_modes, whitening=Whitening(jnp.zeros(2), 2 * jnp.eye(2)))
    with pytest.warns(InferenceWarning, match="corrected at the center is about as noisy as"):
        kernel.init(random.key(0), 10, None, (x,))


class Descent(SGMCMCKernel):
    """It has no law."""

    state_class = SGLD.state_class

    def step(self, rng_key, state, z, grad_fn, eps, T):
        raise AssertionError("no chain starts")


@pytest.mark.parametrize("make", [Descent, partial(RecipeKernel, diffusion=jnp.ones_like)])
def test_a_kernel_without_a_law_requires_a_step_at_once(make):
    with pytest.raises(ValueError, match=r"step_size is None, but .* has no law by which"):
        make(standard, None)


def test_settings_are_arguments_of_another_kernel():
    found = run(SGHMC).sampler
    again = SGHMC(badly_scaled, steps_per_sample=20, **found.settings.arguments)
    assert found.finds_settings and not again.finds_settings
    for name in found.settings.arguments:
        assert getattr(found, name) is None, "what was found is not written over what was given"
        assert type(getattr(again, name)) is type(found.in_use(name))
    assert repr(found) == "SGHMC(model=badly_scaled, steps_per_sample=20)"
    assert "gradient=ControlVariate" in repr(again) and "friction=" in repr(again)


def test_a_mass_without_a_step_is_an_error():
    with pytest.raises(ValueError, match="whitening that is found takes the place of a mass"):
        SGHMC(standard, mass=2.0).init(random.key(0), 10, None)


def test_no_warning_where_all_is_well():
    x, y, *_ = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SGNHT(badly_scaled).init(random.key(0), 10, None, (x, y))


def test_settings_leave_the_scale_of_many_effects_where_it_is():
    """Of 200 effects around 0 with one datum each, the data have the variance s^2 + 1.

    The least effective sample size of s was 680 at six keys, so that its mean is off by 0.04 sd; a
    gradient that feels each effect a little too wide moves it by 0.30 sd, with ABOBA at this step.
    """
    y = jnp.asarray(np.random.default_rng(0).normal(size=200) * 2**0.5)

    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 200):
            u = numpyro.sample("u", dist.Normal(0, s))
            numpyro.sample("y", dist.Normal(u, 1.0), obs=y)

    s = np.linspace(0.01, 3, 4000)
    log_p = -(s**2) / 2 - 100 * np.log(s**2 + 1) - np.sum(np.asarray(y) ** 2) / (s**2 + 1) / 2
    p = np.exp(log_p - log_p.max())
    mean = p @ s / p.sum()
    sd = (p @ (s - mean) ** 2 / p.sum()) ** 0.5
    kernel = SGHMC(model, steps_per_sample=10)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=2000, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceWarning)  # there is no joint mode
        mcmc.run(random.key(0), y)
    draws = np.asarray(mcmc.get_samples()["s"])
    assert kernel.settings.integrator == "baoab"
    assert abs(draws.mean() - mean) < 0.15 * sd
    assert abs(draws.std() / sd - 1) < 0.15
