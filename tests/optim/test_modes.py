"""The modes of a posterior: places, shares, what they cost, and what is said about them."""

from functools import cache
import pickle
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.optim import find_modes
from tests.two_modes import LOCS, SDS, SHARES, in_raw_units


def two_modes():
    """Two sites whose order is not the alphabet's, in raw units; log of the mass is 1.5."""
    in_raw_units()
    numpyro.factor("mass", 1.5)


@cache
def found():
    with pytest.warns(
        InferenceWarning, match=r"different modes, .* with 0\.66, 0\.34 of their mass"
    ):
        return find_modes(two_modes)


def test_two_modes_have_the_shares_of_their_masses():
    """Apart by 13 standard deviations, each a normal: Laplace's formula is exact."""
    modes = found()
    assert [x.share for x in modes.modes] == pytest.approx(SHARES, abs=1e-3)
    assert modes.log_evidence == pytest.approx(1.5, abs=1e-3)
    for mode, loc, sd in zip(modes.modes, LOCS, SDS, strict=True):
        covariance = np.array([[sd**2, 300 * sd**2], [300 * sd**2, (300 * sd) ** 2 + 2500]])
        np.testing.assert_allclose(mode.factor, np.linalg.cholesky(covariance), rtol=1e-3)
        assert mode.distance([loc, 300 * loc]) < 0.1
        assert mode.departure < 0.01 and mode.copy_of is None and not mode.variational
    assert modes.whitening.center is modes.modes[0].center


def test_draws_are_those_of_the_mixture_in_the_flat_order():
    """20,000 draws know a share to .003 and a mean to .01 of its standard deviation."""
    modes = found()
    sites = modes.unravel(modes.sample(random.key(0), (20_000,)))
    assert list(sites) == ["z", "a"] and sites["a"].shape == (20_000,)
    z, a = np.asarray(sites["z"]), np.asarray(sites["a"])
    left = z < 0
    assert left.mean() == pytest.approx(0.66, abs=0.015)
    for here, loc, sd in ((left, -2.0, 0.3), (~left, 2.0, 0.15)):
        assert z[here].mean() == pytest.approx(loc, abs=0.05 * sd)
        assert z[here].std() == pytest.approx(sd, rel=0.05)
        assert (a - 300 * z)[here].std() == pytest.approx(50, rel=0.05)
    assert modes.sample(random.key(1)).shape == (2,)


@pytest.mark.parametrize(("num", "heavier"), [(1, 1), (2, 1), (3, 2), (4, 3), (50, 33), (200, 132)])
def test_each_mode_has_its_share_of_what_begins_there(num, heavier):
    """By the largest remainders of .66 and .34: of two, .68 is more than .32."""
    which = found().apportion(num)
    assert len(which) == num and np.sum(which == 0) == heavier


def test_the_problems_have_a_kind_and_the_record_is_a_table_and_pickles():
    modes = pickle.loads(pickle.dumps(found()))
    assert [problem.kind for problem in modes.problems] == ["several modes"]
    table = str(modes)
    assert f"{found().row_gradients:,} gradients of a row" in table and modes.problems[0] in table
    assert "0.660" in table and "0.340" in table
    assert repr(modes) == "Modes(2 coordinates, shares 0.66, 0.34)"


def exchanged(y):
    """The two locations may be exchanged: both modes are as high, to the last digit."""
    loc = numpyro.sample("loc", dist.Normal(0, 10.0).expand([2]).to_event(1))
    parts = dist.MixtureSameFamily(dist.Categorical(jnp.full(2, 0.5)), dist.Normal(loc, 1.0))
    numpyro.sample("y", parts, obs=y)


@pytest.mark.slow
def test_copies_by_a_permutation_are_named():
    y = np.random.default_rng(0).standard_normal(60) + 4.0 * (np.arange(60) % 2)
    with pytest.warns(InferenceWarning, match="copies of each other, as it seems"):
        modes = find_modes(exchanged, jnp.asarray(y))
    assert [x.copy_of for x in modes.modes] == [None, 0]
    np.testing.assert_allclose([x.share for x in modes.modes], 0.5, atol=0.01)


def funnel():
    """Centred: the density has no mode, and grows without bound where tau vanishes."""
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    with numpyro.plate("groups", 10):
        theta = numpyro.sample("theta", dist.Normal(0.0, tau))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=jnp.linspace(-2.0, 2.0, 10))


@pytest.mark.slow
def test_without_a_mode_it_is_the_normal_of_greatest_elbo():
    with pytest.warns(InferenceWarning, match="come from a variational fit instead"):
        modes = find_modes(funnel)
    (only,) = modes.modes
    assert only.variational and modes.problems[-1].kind == "no mode" and only.share == 1.0
    # tau has its mass around .9: by a grid, log tau has mean -.12 and standard deviation .44.
    sd = np.linalg.norm(only.factor[0])
    assert float(only.center[0]) == pytest.approx(-0.12, abs=0.35) and 0.2 < sd < 0.6


@pytest.mark.slow
def test_no_mode_is_no_problem_where_the_posterior_is_near_normal():
    """A centred density has no mode where measurements vary by less than 4 of their variances."""
    y = np.linspace(-3.15, 3.15, 20)  # of variance 3.7, with errors of variance 1

    def model():
        tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
        with numpyro.plate("groups", 20):
            theta = numpyro.sample("theta", dist.Normal(0.0, tau))
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (only,) = find_modes(model).modes
    assert only.variational
    log_tau = np.linspace(-4, 3, 2001)
    variance = 1 + np.exp(2 * log_tau)
    log_p = log_tau - 11 * np.log(variance) - np.sum(y**2) / (2 * variance)  # 1 / variance: prior
    p = np.exp(log_p - log_p.max())
    mean = np.sum(p * log_tau) / p.sum()
    sd = np.sqrt(np.sum(p * (log_tau - mean) ** 2) / p.sum())
    # Of the normal of greatest ELBO the sd is a little too small, and 64 draws fit it.
    assert abs(float(only.center[0]) - mean) < 0.3 * sd and 0.7 < only.sds[0] / sd < 1.1


def test_starts_at_given_values_are_one_search():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        modes = find_modes(two_modes, init_params={"z": 1.5, "a": 400.0})
    (only,) = modes.modes
    assert float(only.center[0]) == pytest.approx(2.0, abs=0.02)
    assert modes.row_gradients < found().row_gradients / 3


def counts(x, y):
    """Raw columns: from a start within 2 of 0, most means are exp(+-hundreds)."""
    b = numpyro.sample("b", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(x @ b)).to_event(1), obs=y)


@pytest.mark.slow
def test_where_a_search_leads_nowhere_another_begins_near_the_median():
    """The mode and the covariance are those of Newton's method in double precision."""
    rng = np.random.default_rng(0)
    x = np.stack([np.ones(5000), rng.normal(300, 100, 5000), rng.standard_normal(5000)], 1)
    b = np.array([0.5, 0.002, -0.3])
    y = rng.poisson(np.exp(x @ b))
    for _ in range(20):
        rate = np.exp(x @ b)
        precision = (x.T * rate) @ x + np.eye(3) / 100
        b = b + np.linalg.solve(precision, x.T @ (y - rate) - b / 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mode = find_modes(counts, jnp.asarray(x), jnp.asarray(y)).heaviest
    root = np.linalg.cholesky(precision)
    assert np.linalg.norm(root.T @ (np.asarray(mode.center, float) - b)) < 0.1
    xi = root.T @ np.asarray(mode.factor, float)
    np.testing.assert_allclose(xi @ xi.T, np.eye(3), atol=0.02)


@pytest.mark.slow
def test_a_density_without_a_bound_ends_in_a_normal_of_greatest_elbo():
    """Centred effects whose spread has a density at 0: there is no mode, and no curvature."""

    def schools(y, error):
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        spread = numpyro.sample("spread", dist.HalfCauchy(5))
        with numpyro.plate("schools", len(y)):
            effect = numpyro.sample("effect", dist.Normal(mean, spread))
            numpyro.sample("y", dist.Normal(effect, error), obs=y)

    y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    error = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    with pytest.warns(InferenceWarning, match="variational fit instead"):
        mode = find_modes(schools, y, error).heaviest
    # The evidence, by the trapezoidal rule over the mean and the log of the spread.
    mean, log_spread = np.linspace(-30, 30, 601)[:, None], np.linspace(-9, 6, 601)
    variance = np.exp(2 * log_spread[:, None]) + np.asarray(error, float) ** 2
    each = (np.asarray(y) - mean[..., None]) ** 2 / variance + np.log(2 * np.pi * variance)
    prior = mean**2 / 50 + np.log(5 * np.sqrt(2 * np.pi)) - log_spread
    prior += np.log(np.pi / 2 * 5 * (1 + np.exp(2 * log_spread) / 25))
    log_p = -each.sum(-1) / 2 - prior
    evidence = np.log(np.sum(np.exp(log_p + 40)) * 0.1 * 0.025) - 40
    assert mode.variational and evidence - 1.5 < mode.elbo < evidence + 0.3


def local(x):
    with numpyro.plate("rows", len(x), subsample_size=2):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", dist.Normal(z, 1.0), obs=numpyro.subsample(x, 0))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: find_modes(two_modes, starts=0), ValueError, "starts is 0"),
        (lambda: find_modes(local, jnp.ones(4)), ValueError, "'z'"),
        (lambda: find_modes(two_modes, init_params={"z": 0.0}), ValueError, "init_params has"),
    ],
)
def test_bad_input_is_refused_by_a_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_traced_arguments_are_refused_by_a_sentence():
    with pytest.raises(ValueError, match=r"is traced.* call find_modes outside"):
        jax.jit(lambda y: find_modes(exchanged, y).heaviest.center)(jnp.ones(3))
    with pytest.raises(ValueError, match=r"rng_key is traced.* call find_modes outside"):
        jax.jit(lambda key: find_modes(exchanged, jnp.ones(3), rng_key=key).beyond)(random.key(0))


@pytest.mark.slow
def test_the_mass_beyond_the_modes_is_that_of_a_grid():
    """A chain that flips between two states, seen at times so far apart that it may have flipped
    any number of times in between: at large rates the likelihood is flat up to the prior. The error
    of the estimate is about 0.05, of which the test allows four."""
    stayed, left = np.array([24, 30]), np.array([20, 20])

    def flips():
        with numpyro.plate("state", 2):
            rate = numpyro.sample("rate", dist.LogNormal(0.0, 3.0))
        p = rate / rate.sum() * -jnp.expm1(-rate.sum())
        numpyro.sample("left", dist.Binomial(stayed + left, p).to_event(1), obs=left)

    with pytest.warns(InferenceWarning, match=r"0\.\d+ \+- 0\.\d+ of the mass lies where"):
        modes = find_modes(flips)
    (mode,) = modes.modes
    t = np.linspace(-20.0, 20.0, 2001)
    log_rates = np.stack(np.meshgrid(t, t, indexing="ij"), -1)
    rates = np.exp(log_rates)
    total = rates.sum(-1, keepdims=True)
    p = -rates / total * np.expm1(-total)
    terms = left * np.log(p) + stayed * np.log1p(-np.minimum(p, 1 - 1e-12)) - log_rates**2 / 18
    w = np.exp(terms.sum(-1) - terms.sum(-1).max())
    xi = np.linalg.solve(np.asarray(mode.factor), (log_rates - np.asarray(mode.center))[..., None])
    exact = np.sum(w[np.sum(xi[..., 0] ** 2, -1) > 2 + 4 * 2]) / w.sum()
    assert exact == pytest.approx(0.343, abs=1e-3)
    assert modes.beyond == pytest.approx(exact, abs=4 * modes.beyond_error)
    assert modes.beyond_error < 0.1
    assert f"{modes.beyond:.2f} +- {modes.beyond_error:.1g} of the mass lies beyond" in str(modes)


@pytest.mark.parametrize("size", [1, 30])
def test_nothing_lies_beyond_a_normal(size):
    def normal():
        numpyro.sample("z", dist.Normal(3.0, 2.0).expand([size]).to_event(1))

    modes = find_modes(normal)
    exact = {1: 0.0099, 30: 0.0007}[size]  # 1 - F(n + 4 sqrt(2 n)) of chi-squared
    assert modes.beyond == pytest.approx(exact, abs=max(4 * modes.beyond_error, 1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("key", [0, 1])
def test_heavy_tails_are_named_where_the_mass_beyond_is_not_known(key):
    """A Cauchy in five dimensions has most of its mass far from the normal at its mode, where few
    draws find it and each has a large weight: with the second key these do for an estimate."""

    def cauchy():
        numpyro.sample("z", dist.MultivariateStudentT(1.0, jnp.zeros(5), jnp.eye(5)))

    with pytest.warns(InferenceWarning, match=r"the mass (beyond|lies)"):
        modes = find_modes(cauchy, rng_key=random.key(key))
    assert modes.problems[-1].kind == "mass beyond"
    assert np.isnan(modes.beyond) == ("not known: one of 2,000 draws" in modes.problems[-1])
