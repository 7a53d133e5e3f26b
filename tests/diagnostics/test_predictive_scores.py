"""Scores of fits against closed forms of their predictions, and on networks."""

from types import SimpleNamespace

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import pytest
from scipy import stats
from scipy.special import ndtr

from numpyro_ext.diagnostics import (
    RegressionScores,
    brier_score,
    expected_calibration_error,
    held_out_log_likelihood,
    log_predictive_density,
    predictive_scores,
    predictive_uncertainty,
    regression_calibration,
    reliability_bins,
)
from numpyro_ext.diagnostics.predictive_scores import _log_densities
from numpyro_ext.mcmc import SGLD
from numpyro_ext.particles import SVGD, AutoParticles
from tests.diagnostics.drawn import visited
from tests.scatter import KEYS, assert_errors_are_the_scatter

LOC, SD, NOISE = 1.3, 0.4, 0.5
LINE = np.linspace(-2.0, 3.0, 40)
X, Y = jnp.asarray(LINE), jnp.asarray(LOC * LINE + 0.6 * np.sin(9.0 * np.arange(40.0)))
SLOPE = {"slope_auto_loc": jnp.array(LOC), "slope_auto_scale": jnp.array(SD)}


def line(x, y=None, batch=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(x, event_dim=0)
        y = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(slope * x, NOISE), obs=y)


def svi_of(model, guide=AutoNormal, **kwargs):
    return SVI(model, guide(model), optax.adam(0.02), Trace_ELBO(), **kwargs)


def closed_form(x=X, y=Y):
    """Of slope ~ N(LOC, SD^2): scores by their definitions, and the transform of each row."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    sd = np.sqrt(NOISE**2 + SD**2 * x**2)
    u = ndtr((y - LOC * x) / sd)
    z = (y - LOC * x) / sd
    found = {
        "rmse": np.mean((y - LOC * x) ** 2) ** 0.5,
        "rmse_of_constant": y.std(),
        "log_density": np.mean(-0.5 * z**2 - np.log(sd) - 0.5 * np.log(2 * np.pi)),
        "noise_sd": NOISE,
        "network_sd": SD * np.mean(x**2) ** 0.5,
        "sd": np.mean(sd**2) ** 0.5,
    }
    return found, u


@pytest.fixture(scope="module")
def exact():
    """2,000 draws: sd of a mean of slopes .009, of their sd .0063."""
    svi = svi_of(line, batch=25)
    given = {"model_args": (X, Y), "num_samples": 2000}
    return svi, given, predictive_scores(svi, SLOPE, **given)


@pytest.mark.slow
@pytest.mark.x64
def test_scores_of_a_known_posterior(exact):
    expected, u = closed_form()
    _, _, scores = exact
    assert isinstance(scores, RegressionScores)
    for name, value in expected.items():
        assert getattr(scores, name) == pytest.approx(value, rel=0.03, abs=0.02), name
    calibration = regression_calibration(pit=u)
    assert scores.calibration_error == pytest.approx(calibration.error, abs=3e-3)
    assert scores.perfect_calibration_error == pytest.approx(0.183333 / 40, rel=1e-4)
    central = np.abs(2 * u - 1)
    for level, share in ((0.5, scores.coverage_50), (0.9, scores.coverage_90)):
        near = np.mean(np.abs(central - level) < 0.03)
        assert abs(share - np.mean(central <= level)) <= near + 1e-6
    covariance = NOISE**2 * jnp.eye(40) + SD**2 * jnp.outer(X, X)
    joint = dist.MultivariateNormal(LOC * X, covariance).log_prob(Y) / 40
    assert scores.joint_log_density == pytest.approx(float(joint), abs=0.02)


@pytest.mark.slow
def test_each_score_alone_says_the_same(exact):
    svi, given, scores = exact
    for kind, value in (
        ("pointwise", scores.log_density),
        ("joint", scores.joint_log_density),
    ):
        alone = log_predictive_density(svi, SLOPE, kind=kind, **given)
        assert alone == pytest.approx(value, abs=0.01)  # other draws
    calibration = regression_calibration(svi, SLOPE, **given)
    assert calibration.error == scores.calibration_error
    assert calibration.sharpness == pytest.approx(scores.sd**2, rel=1e-6)
    for score in (brier_score, expected_calibration_error, predictive_uncertainty):
        with pytest.raises(ValueError, match="site 'y' has numbers and no classes"):
            score(svi, SLOPE, **given)


@pytest.mark.nightly
def test_fewer_rows_than_the_minibatch_and_every_kind_of_fit(exact):
    """13 rows where the run took 25 at a time, with each source of draws."""
    rows = (X[:13], Y[:13])
    expected, _ = closed_form(*rows)
    draws = LOC + SD * jax.scipy.special.ndtri((jnp.arange(200) + 0.5) / 200)

    class Fixed(AutoParticles):
        def particles(self, params):
            return {"slope": draws}

    mcmc = MCMC(SGLD(line, 1e-3), num_warmup=0, num_samples=20, progress_bar=False)
    mcmc.run(random.key(0), X, Y, batch=25)
    chain = predictive_scores(mcmc, model_args=rows)
    assert chain.title == "SGLD, 20 draws: numbers 'y', 13 observations"
    slopes = mcmc.get_samples()["slope"][:, None]
    by_hand = predictive_scores(dist.Normal(slopes * rows[0], NOISE), y=rows[1])
    assert chain[1:] == pytest.approx(by_hand[1:], rel=1e-4)
    particles = SVI(line, Fixed(line, num_particles=2), optax.adam(0.1), SVGD(), batch=25)
    for obj, result, what in (
        (exact[0], SLOPE, "AutoNormal by Trace_ELBO, 1,000 draws"),
        (particles, {}, "Fixed by SVGD, 200 draws"),
    ):
        scores = predictive_scores(obj, result, model_args=rows)
        assert scores.title == f"{what}: numbers 'y', 13 observations"
        for name, value in expected.items():
            assert getattr(scores, name) == pytest.approx(value, rel=0.06, abs=0.03), (what, name)


def test_the_exploration_of_a_cyclical_schedule_predicts_nothing():
    slopes = np.array([100.0, 2.0, -50.0, 2.5])
    sampling = jnp.array([False, True, False, True])
    mcmc = visited(line, {"slope": slopes}, X, Y, sampling=sampling)
    whole = visited(line, {"slope": slopes[1::2]}, X, Y)
    for score in (predictive_scores, held_out_log_likelihood):
        found, expected = (score(one, model_args=(X, Y)) for one in (mcmc, whole))
        assert np.allclose(
            np.array(found[1:], float), np.array(expected[1:], float), equal_nan=True
        )
    lost = visited(line, {"slope": slopes}, X, Y, sampling=~sampling & sampling)
    with pytest.raises(ValueError, match="all 4 draws belong to the exploration of the cyclical"):
        predictive_scores(lost, model_args=(X, Y))


def test_points_are_evaluated_once_and_a_list_of_them_is_an_ensemble():
    """Slopes 1 and 2: the network part is that of two points, and the joint density is a mixture
    of two."""
    svi = svi_of(line, AutoDelta)
    ensemble = [{"slope_auto_loc": jnp.array(z)} for z in (1.0, 2.0)]
    scores = predictive_scores(svi, ensemble, model_args=(X, Y))
    assert scores.title.startswith("AutoDelta by Trace_ELBO, 2 x 1 draw:")
    rms = float(jnp.mean(X**2)) ** 0.5
    assert scores.network_sd == pytest.approx(0.5 * rms, rel=1e-5)
    each = dist.Normal(jnp.array([[1.0], [2.0]]) * X, NOISE).log_prob(Y)
    assert scores.joint_log_density == pytest.approx(
        float(jax.nn.logsumexp(each.sum(1)) - jnp.log(2.0)) / 40, rel=1e-5
    )
    alone = predictive_scores(svi, ensemble[0], model_args=(X, Y))
    assert alone.network_sd == 0
    assert alone.joint_log_density == pytest.approx(alone.log_density, rel=1e-6)


def test_a_distribution_stands_for_a_fit():
    slopes = LOC + SD * random.normal(random.key(1), (2000,))
    expected, _ = closed_form()
    normal = predictive_scores(dist.Normal(slopes[:, None] * X, NOISE), y=Y)
    for name, value in expected.items():
        assert getattr(normal, name) == pytest.approx(value, rel=0.05, abs=0.03), name
    single = predictive_scores(dist.Normal(LOC * X, NOISE), y=Y)
    assert (single.network_sd, single.noise_sd) == (0, pytest.approx(NOISE))


@pytest.mark.nightly
def test_rows_of_several_numbers_counts_and_masks():
    """No cdf, no plate, a vector with correlation: by draws of the site; of counts half a step."""
    mean = jnp.stack([X, -X], -1)
    scale_tril = jnp.linalg.cholesky(jnp.array([[0.5, 0.3], [0.3, 0.4]]))
    y = mean + 0.3 * jnp.stack([Y - LOC * X, Y - LOC * X], -1)
    full = predictive_scores(dist.MultivariateNormal(mean[None], scale_tril=scale_tril), y=y)
    parts = dist.Normal(mean, jnp.array([0.5, 0.4]) ** 0.5).to_event(1)
    each = predictive_scores(parts.expand((1, 40)), y=y)
    for name in ("rmse", "sd", "coverage_90"):
        assert getattr(full, name) == pytest.approx(getattr(each, name), rel=0.1)
    assert np.isnan(each.gaussian_bound)
    assert each.log_density == pytest.approx(float(parts.log_prob(y).mean()), rel=1e-5)
    counts = predictive_scores(dist.Poisson(jnp.full((1, 3), 2.0)), y=np.array([1, 2, 4]))
    assert counts.title.endswith("counts 'y', 3 observations")
    assert counts.noise_sd == pytest.approx(2**0.5)
    seen = jnp.arange(40) % 3 > 0
    masked = predictive_scores(dist.Normal(LOC * X, NOISE).mask(seen).expand((1, 40)), y=Y)
    kept = predictive_scores(dist.Normal(LOC * X[seen], NOISE), y=Y[seen])
    assert masked[1:] == pytest.approx(kept[1:], rel=1e-5)


def two_sites(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(slope * x, NOISE), obs=y)
        numpyro.sample("s", dist.Bernoulli(logits=slope * x), obs=None if y is None else y > 0)


def one_class(x, s=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("s", dist.Bernoulli(logits=slope * x), obs=s)


def test_scores_of_classes_are_those_of_their_probabilities():
    """Bernoulli with a slope of two values: every number by hand."""
    svi = svi_of(two_sites, AutoDelta)
    ensemble = [{"slope_auto_loc": jnp.array(z)} for z in (0.5, 2.0)]
    scores = predictive_scores(svi, ensemble, model_args=(X, Y), site="s")
    p = np.asarray(jax.nn.sigmoid(jnp.array([[0.5], [2.0]]) * X), float)
    probs, labels = np.stack([1 - p, p], -1), np.asarray(Y > 0).astype(int)
    mean = probs.mean(0)
    right = mean[np.arange(40), labels]
    assert scores.accuracy == np.mean(right > 0.5)
    assert scores.accuracy_of_constant == max(labels.mean(), 1 - labels.mean())
    assert scores.log_density == pytest.approx(np.log(right).mean(), rel=1e-5)
    joint = np.log(np.mean(np.prod(probs[:, np.arange(40), labels], 1))) / 40
    assert scores.joint_log_density == pytest.approx(joint, rel=1e-5)
    assert scores.brier == pytest.approx(brier_score(probs, labels), rel=1e-5)
    assert scores.calibration_error == pytest.approx(
        expected_calibration_error(probs, labels), rel=1e-4
    )
    split = predictive_uncertainty(probs)
    for name, value in zip(("entropy", "aleatoric", "epistemic"), split, strict=True):
        assert getattr(scores, name) == pytest.approx(value.mean(), rel=1e-4)
    # The labels of new rows are not known, and are not needed.
    svi_of_labels = svi_of(one_class, AutoDelta)
    svi_of_labels.init(random.key(0), X, jnp.asarray(labels))
    new = predictive_uncertainty(svi_of_labels, ensemble, model_args=(X,))
    np.testing.assert_allclose(new, split, rtol=1e-4, atol=1e-6)
    text = str(scores)
    for part in ("of the most frequent class", "of a perfect model", "epistemic"):
        assert part in text
    given = {"model_args": (X, Y), "site": "s"}
    assert brier_score(svi, ensemble, **given) == scores.brier
    assert expected_calibration_error(svi, ensemble, **given) == scores.calibration_error
    assert reliability_bins(svi, ensemble, **given).count.sum() == 40
    with pytest.raises(ValueError, match=r"has classes; .* expected_calibration_error"):
        regression_calibration(svi, ensemble, **given)


def with_local(y):
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("y", dist.Normal(z), obs=y)


def test_bad_input(exact):
    svi, _, _ = exact
    cases = [
        ((X,), {}, "obj is a .*; it must be a numpyro.infer.SVI"),
        ((svi, SLOPE), {"model_args": (X, Y), "y": Y}, "y is for a distribution; pass"),
        ((svi, SLOPE), {"model_args": (X, Y), "site": "t"}, "site is 't'"),
        ((svi, SLOPE), {"model_args": (X, Y), "num_samples": 10**8}, "would take 64.0 GB"),
        ((dist.Normal(jnp.zeros((4, 3)), 1.0),), {"y": [1.0]}, r"has shape \(4, 3\) and y \(1,\)"),
        ((dist.Normal(jnp.zeros((4, 1)), 1.0),), {"y": [np.nan]}, "y has 1 NaN"),
        ((dist.Categorical(jnp.ones((1, 2)) / 2),), {"y": [2]}, "y has the value 2"),
        ((dist.Multinomial(3, jnp.ones(2) / 2),), {"y": [1, 2]}, "'y' is a Multinomial"),
    ]
    for args, kwargs, sentence in cases:
        with pytest.raises((ValueError, TypeError), match=sentence):
            predictive_scores(*args, **kwargs)
    local = svi_of(with_local)
    params = {"z_auto_loc": jnp.zeros(40), "z_auto_scale": jnp.ones(40)}
    with pytest.raises(ValueError, match=r"'z' belongs to one row of 'y'.*held_out_log_likelihood"):
        predictive_scores(local, params, model_args=(Y,))
    kernel = NUTS(potential_fn=lambda z: z**2)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), init_params=jnp.zeros(()))
    with pytest.raises(TypeError, match="potential function"):
        predictive_scores(mcmc)


def test_a_prediction_that_is_nan_is_named():
    logits = jnp.array([[0.0, 1.0, jnp.nan], [0.1, 0.2, 0.3]])
    with numpyro.validation_enabled(False), pytest.raises(ValueError, match="in 1 of 2 draws"):
        predictive_scores(dist.Bernoulli(logits=logits), y=np.zeros(3))


def test_draws_that_are_nan_are_named_although_a_bernoulli_has_a_density_there():
    def coin(x, y):
        w = numpyro.sample("w", dist.Normal())
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=w * x), obs=y)

    x, y = jnp.ones(3), jnp.zeros(3, int)
    mcmc = MCMC(SGLD(coin, 1e-3), num_warmup=1, num_samples=4, progress_bar=False)
    mcmc.run(random.key(0), x, y)
    mcmc._states["z"]["w"] = mcmc._states["z"]["w"].at[0, 1].set(jnp.nan)
    for score in (predictive_scores, log_predictive_density):
        with pytest.raises(ValueError, match="1 of 4 draws of site 'w' are NaN"):
            score(mcmc, model_args=(x, y))


def test_the_error_of_a_mean_log_density_is_its_scatter():
    """Rows of a normal by 3 draws each; their mean is over 50 rows of one key."""
    log_lik = np.random.default_rng(0).normal(size=(KEYS, 3, 50)) + np.linspace(-2, 0, 3)[:, None]
    values, errors, _ = np.transpose([_log_densities(SimpleNamespace(log_lik=x)) for x in log_lik])
    assert_errors_are_the_scatter(values, errors)


@pytest.mark.parametrize("rate", [1e6, 1e7])
def test_a_perfect_prediction_of_large_counts_is_calibrated(rate):
    """By SciPy in double precision: JAX's gammainc has a coverage of 0 at a rate of 1e7."""
    y = np.random.default_rng(3).poisson(rate, 400)
    scores = predictive_scores(dist.Poisson(rate * jnp.ones((1, 400))), y=y)
    assert abs(scores.coverage_90 - 0.9) < 4 * (0.09 / 400) ** 0.5
    log_p = stats.poisson(np.float32(rate)).logpmf(y).mean()
    assert scores.log_density == pytest.approx(log_p, rel=1e-5)


def large_counts(y):
    log_rate = numpyro.sample("log_rate", dist.Normal(16.0, 1.0))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(log_rate)), obs=y)


def test_the_log_density_of_large_counts_has_its_digits():
    """In single precision a row of a rate of 9e6 is off by a dozen nats."""
    y = np.random.default_rng(4).poisson(np.exp(16.0), 30)
    svi = svi_of(large_counts, AutoDelta)
    found = log_predictive_density(svi, {"log_rate_auto_loc": jnp.array(16.0)}, model_args=(y,))
    rate = float(jnp.exp(jnp.array(16.0)))
    assert found == pytest.approx(stats.poisson(rate).logpmf(y).mean(), rel=1e-4)
