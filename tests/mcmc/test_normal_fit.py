"""The departure of a posterior from its normal approximation."""

import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.reparam import LocScaleReparam
from numpyro.primitives import mutable
import pytest
from scipy.stats import multivariate_normal

from numpyro_ext._model.modes import Mode, of_kind
from numpyro_ext._model.normal_fit import NormalMeasure, _slope, fit_normal, median_and_error
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.problems import advice, far_problem
from numpyro_ext._model.read import read_model
from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.optim import find_modes
from tests.scatter import KEYS, assert_errors_are_the_scatter

QUARTIC = 0.3


def quartic():
    """U = z^2 / 2 + a z^4 / 4: its mode is 0, with curvature 1."""
    z = numpyro.sample("z", dist.Normal(0, 1).expand([1]).to_event(1))
    numpyro.factor("quartic", -QUARTIC * z[0] ** 4 / 4)


def shape_of(model, center, factor):
    potential = Potential(model, read_model(model, (), {}), {}, (), {})
    fit = Mode(jnp.asarray(center), jnp.asarray(factor))
    return NormalMeasure(random.key(0), potential)(fit)


def test_departure_and_stiffness_of_a_quartic():
    found = shape_of(quartic, [0.0], [[1.0]])
    xi = np.asarray(random.normal(random.key(0), (64, 2, 1)), float)[:, 0, 0]
    assert found.departure == pytest.approx(np.median((QUARTIC * xi**3) ** 2), rel=1e-3)
    assert found.stiffness == pytest.approx(np.sort(1 + 3 * QUARTIC * xi**2)[60], rel=1e-3)


def test_the_worst_error_is_that_of_one_coordinate_among_many():
    def model():
        z = numpyro.sample("z", dist.Normal(0, 1).expand([20]).to_event(1))
        numpyro.factor("quartic", -QUARTIC * z[3] ** 4 / 4)

    found = shape_of(model, np.zeros(20), np.eye(20))
    xi = np.asarray(random.normal(random.key(0), (64, 2, 20)), float)[:, 0, 3]
    assert found.worst_error == pytest.approx(np.mean(np.abs(QUARTIC * xi**3)), rel=1e-3)
    assert found.departure == pytest.approx(np.median((QUARTIC * xi**3) ** 2) / 20, rel=1e-3)


def test_the_elbo_and_its_slope_are_those_of_the_divergence_of_two_normals():
    """The posterior is N(0, I), with evidence 1: there z = c + a xi has b = a c + (a^2 - 1) xi."""

    def model():
        numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))

    c, a = np.array([0.5, -1.0]), np.array([1.2, 0.6])
    for factor in (np.diag(a), a):
        found = shape_of(model, c, factor)
        elbo = np.sum(np.log(a) + 0.5 - (a**2 + c**2) / 2)
        assert abs(found.elbo - elbo) < 4 * found.elbo_error + 1e-5
        slope = np.sqrt(np.sum((a * c) ** 2) + np.sum((a**2 - 1) ** 2) / 2)
        assert abs(found.slope - slope) < 4 * found.slope_error < 2
    exact = shape_of(model, [0.0, 0.0], np.eye(2))
    assert abs(exact.elbo) < 1e-5 and exact.slope < 1e-3 and exact.departure < 1e-6


@pytest.mark.parametrize("dense", [True, False])
def test_the_slope_is_without_bias_and_its_error_is_its_scatter(dense):
    """With b = v + M xi the natural gradient is v for the mean and the symmetric part of M."""
    rng, v = np.random.default_rng(0), np.array([1.0, -0.5, 0.3])
    M = np.array([[0.8, 0.9, 0.0], [-0.2, -0.6, 0.4], [0.3, 0.0, 0.5]]) * (
        1 if dense else np.eye(3)
    )
    expected = v @ v + np.sum(((M + M.T) / 2) ** 2) / 2
    xi = rng.normal(size=(KEYS, 64, 3))
    lengths, errors = np.transpose([_slope(x, v + x @ M.T, dense) for x in xi])
    assert abs(np.mean(lengths**2) - expected) < 4 * np.std(lengths**2) / KEYS**0.5
    assert_errors_are_the_scatter(lengths, errors)


def test_the_error_of_the_elbo_is_its_scatter():
    potential = Potential(quartic, read_model(quartic, (), {}), {}, (), {})
    measure, fit = NormalMeasure(random.key(0), potential), Mode(jnp.array([0.4]), jnp.eye(1))
    measured = []
    for key in random.split(random.key(1), KEYS):
        measure.rng_key = key
        measured.append(measure(fit))
    elbos, errors = zip(*((x.elbo, x.elbo_error) for x in measured), strict=True)
    # The error is itself known from 64 draws with a tail.
    assert_errors_are_the_scatter(elbos, errors, within=0.35)


def test_the_fit_of_a_normal_posterior_is_exact():
    """Sticking the landing has no noise there. Raw units, correlated, from afar."""
    root = np.array([[20.0, 0.0], [0.03, 0.01]])

    def model():
        law = dist.MultivariateNormal(jnp.array([300.0, 2.0]), scale_tril=jnp.asarray(root))
        numpyro.sample("z", law)
        numpyro.factor("evidence", 7.0)

    potential = Potential(model, read_model(model, (), {}), {}, (), {})
    measure = NormalMeasure(random.key(0), potential)
    worse, better = (jnp.zeros(2), jnp.ones(2)), (jnp.array([250.0, 1.0]), jnp.array([10.0, 0.1]))
    found = fit_normal(random.key(1), potential, measure, [worse, better])
    assert found.elbo == pytest.approx(7.0, abs=0.05) and found.slope < 0.3
    assert np.linalg.norm(np.linalg.solve(root, found.center - jnp.array([300.0, 2.0]))) < 0.2
    np.testing.assert_allclose(np.linalg.solve(root, found.factor), np.eye(2), atol=0.2)


@pytest.mark.slow
def test_a_fit_of_many_groups_comes_to_a_normal_posterior_that_is_far_away():
    """101 numbers, of which the mean of all groups begins 45 of its standard deviations away."""
    y = 5.0 + np.random.default_rng(0).normal(size=100)

    def model():
        mean = numpyro.sample("mean", dist.Normal(0, 20))
        with numpyro.plate("groups", 100):
            level = numpyro.sample("level", dist.Normal(mean, 0.5))
            numpyro.sample("y", dist.Normal(level, 1), obs=y)

    potential = Potential(model, read_model(model, (), {}), {}, (), {})
    measure = NormalMeasure(random.key(0), potential)
    start = jnp.zeros(101), jnp.full(101, 0.05)
    found = fit_normal(random.key(1), potential, measure, [start])
    evidence = multivariate_normal(np.zeros(100), 400 + 1.25 * np.eye(100)).logpdf(y)
    assert found.slope < 1 and found.elbo == pytest.approx(evidence, abs=1)


@pytest.mark.slow
def test_a_fit_begins_at_the_prior_where_a_start_near_0_is_far_from_all_mass():
    """Counts with an offset, whose level is -6.3: by NUTS within 0.02 of it, with sd 0.2."""
    rng = np.random.default_rng(1)
    group, days = np.repeat(np.arange(8), 12), rng.uniform(50, 400, 96)
    y = rng.poisson(days * np.exp(-6.3 + 0.45 * rng.normal(size=8)[group]))

    def model():
        mean = numpyro.sample("mean", dist.Normal(-6, 2))
        s = numpyro.sample("s", dist.LogNormal(-1, 0.7))
        with numpyro.plate("groups", 8):
            level = numpyro.sample("level", dist.Normal(mean, s))
        numpyro.sample("y", dist.Poisson(days * jnp.exp(level[group])), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modes = find_modes(model)
    (only,) = modes.modes
    assert only.variational and only.slope < 1 and not of_kind(modes.problems, "not converged")
    assert only.log_evidence == only.elbo
    assert float(only.center[0]) == pytest.approx(-6.3, abs=0.5)


def eight_schools():
    """With offsets in units of tau. The mode is far from the mass in log tau."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = mu + tau * numpyro.sample("theta_trans", dist.Normal(0, 1))
        sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
        effect = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
        numpyro.sample("y", dist.Normal(theta, sigma), obs=effect)


@pytest.mark.nightly
def test_a_variational_fit_replaces_a_mode_that_is_far_from_normal():
    kernel = SGHMC(eight_schools)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.init(random.key(0), 10, None)
    # Exact, by a grid over tau: log tau has mean 0.80 and standard deviation 1.17.
    assert float(jnp.log(kernel.settings.center["tau"])) == pytest.approx(0.80, abs=0.3)
    assert 0.1 < kernel.settings.step_size < 0.45


def rounded(x):
    numpyro.sample("y", dist.Normal(x(4 * numpyro.sample("z", dist.Normal(0, 1))), 1.0), obs=3.0)


def normalised(x):
    """With a mutable site, as batch normalisation has."""
    mutable("averages", {"mean": jnp.zeros(())})
    rounded(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "part", "why"),
    [
        (rounded, jnp.floor, "compared or rounded"),
        (normalised, jnp.floor, "batch normalisation"),
        (rounded, lambda x: jnp.maximum(x, 0), None),
    ],
)
def test_a_density_that_jumps_is_told_from_one_that_bends(model, part, why):
    """And batch normalisation, whose density is steep, is not said to compare or round."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        find_modes(model, part)
    said = [str(one.message) for one in seen if "the density jumps" in str(one.message)]
    assert bool(said) is (why is not None)
    for words in ("compared or rounded", "batch normalisation"):
        assert any(words in text for text in said) is (words == why)


def test_many_smooth_coordinates_far_from_normal_do_not_jump():
    """Logistic ones, at the scale of greatest ELBO, where the slopes along a draw cancel."""

    def model():
        numpyro.sample("z", dist.Logistic(0.0, 1.0).expand([600]).to_event(1))

    found = shape_of(model, np.zeros(600), np.full(600, 1.77))
    assert not of_kind(found.problems, "density jumps")


def test_a_model_that_is_reparametrised_is_not_told_to_be():
    centred = read_model(eight_schools)
    config = {"theta_trans": LocScaleReparam(0)}
    moved = read_model(numpyro.handlers.reparam(eight_schools, config=config))
    assert advice(centred).startswith("reparametrise the model (LocScaleReparam for hierarchies)")
    assert advice(moved).startswith("change centered in the LocScaleReparam of 'theta_trans'")


def banana(y):
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(a * jnp.exp(3 * b), 0.01), obs=y)


@pytest.mark.slow
def test_a_posterior_that_no_normal_fits_warns():
    kernel = SGHMC(banana)
    with pytest.warns(InferenceWarning, match="gradients around the center are far from those of"):
        kernel.init(random.key(0), 10, None, (jnp.array(2.0),))


def test_the_error_of_a_median_is_its_scatter():
    """Of 64 departures, lognormal with a variance of 1 of the logarithm."""
    x = np.exp(np.random.default_rng(0).normal(size=(KEYS, 64)))
    medians, errors = np.transpose([median_and_error(y) for y in x])
    assert_errors_are_the_scatter(medians, errors)


@pytest.mark.parametrize(
    ("error", "worst", "said"), [(0.02, 0.67, False), (0.02, 0.81, True), (0.0005, 0.67, True)]
)
def test_a_departure_above_its_limit_by_chance_is_said_only_of_a_coordinate_far_off(
    error, worst, said
):
    """The relative error is 0.32, of which 0.316 is the limit."""
    how = {"departure": 0.1024, "departure_error": error, "worst_error": worst}
    fit = Mode(jnp.zeros(1), jnp.eye(1), **how)
    problems = far_problem(fit, read_model(eight_schools), str)
    assert bool(problems) is said and all("along mu" in problem for problem in problems)
