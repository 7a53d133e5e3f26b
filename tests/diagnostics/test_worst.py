"""A verdict takes evidence: a collapse is found, and what one number at a time does not show."""

import functools

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
import pytest
from scipy.stats import norm, t

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.diagnostics._facts import Facts
from numpyro_ext.diagnostics._points import Points
from numpyro_ext.diagnostics._spread import MoveComparison, mean_and_sd, unit_root
from numpyro_ext.diagnostics.judges.exact_moves import GUIDE, HMCCheck, rows_of_moves
from numpyro_ext.diagnostics.judges.points import _still
from numpyro_ext.diagnostics.judges.stein import particle_facts, particle_rows
from numpyro_ext.diagnostics.judges.weights import khat_rows, reweighted_rows
from numpyro_ext.diagnostics.limits import decide

SD, SHAPE, GAP = (
    "sd against exact moves, worst",
    "shape against exact moves, worst",
    "gap of the ELBO in nats",
)
MEAN, RHO = np.array([1.0, -2.0]), 0.95
TRIL = np.linalg.cholesky([[1, RHO], [RHO, 1]])


def rows_of(diagnosis):
    return {row.quantity: row for row in diagnosis.rows}


@pytest.mark.parametrize(
    ("values", "errors", "ok"),
    [
        ([0.0, 0.1], [0.01, 0.01], True),
        ([0.0, 0.5], [0.01, 0.01], False),
        ([0.0, -0.5], [0.01, 0.01], False),
        # Outside of the limit by less than the error, and by less than chance makes of two.
        ([0.0, 0.21], [0.01, 0.05], None),
        ([0.0, 0.5], [0.01, 0.3], None),
        # No evidence: an error of 0, one that is not a number, and nothing that varies.
        ([0.0, 0.0], [0.01, 0.0], None),
        ([0.0, 0.0], [0.01, np.nan], None),
        ([np.nan, np.nan], [0.0, 0.0], None),
        ([0.0, 0.1], [0.01, 0.11], None),
        # A number that does not vary says nothing of another.
        ([np.nan, 0.1], [np.nan, 0.01], True),
        ([np.nan, 0.5], [np.nan, 0.01], False),
        ([np.inf, 0.1], [np.nan, 0.01], None),
    ],
)
def test_a_verdict_takes_evidence(values, errors, ok):
    assert decide(np.array(values), np.array(errors), (-0.2, 0.2), 0.1)[0] is ok


def still(accepted, between, error):
    zero, n = np.zeros(2), np.zeros((3, 40, 2))
    ratio, error = np.ones(2), np.full(2, error)
    return MoveComparison(ratio, error, zero, error, zero + between, n, np.array(accepted))


@pytest.mark.parametrize(
    ("accepted", "between", "error", "ok"),
    [(0.7, 0.1, 0.01, True), (1.0, 0.1, 0.01, None), (0.7, 1.0, 0.01, None), (0.7, 0.1, 0.0, None)],
    ids=["moved", "steps that are too small", "chains that stay", "no error"],
)
def test_chains_that_do_not_move_judge_nothing(accepted, between, error, ok):
    rows = rows_of_moves(HMCCheck(still(accepted, between, error), str, GUIDE))
    assert [row.ok for row in rows] == [ok, ok]


def test_a_gradient_that_is_no_number_does_not_mark_the_mean():
    of_points = {"implied_sd_ratio": 1.0, "implied_sd_ratio_of": "z", "shift": 0.01}
    rows = particle_rows(50, Facts(num_latents=2, shift_error=np.nan, **of_points))
    assert [row.ok for row in rows] == [True, True, None]


def correlated():
    numpyro.sample("x", dist.MultivariateNormal(jnp.asarray(MEAN, float), scale_tril=TRIL))


@functools.cache
def svi():
    made = SVI(correlated, AutoMultivariateNormal(correlated), optax.adam(0.1), Trace_ELBO())
    made.init(random.key(0))
    return made


def judge(tril, loc=MEAN, key=0, **kwargs):
    params = {"auto_loc": jnp.asarray(loc, float), "auto_scale_tril": jnp.asarray(tril, float)}
    return diagnose(svi(), params, model_args=(), rng_key=random.key(key), **kwargs)


@pytest.mark.slow
def test_the_posterior_itself_is_right():
    found = judge(TRIL)
    assert found.ok and rows_of(found)[SD].ok and rows_of(found)[SHAPE].ok, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loc", "scale"), [(MEAN, 1e-8), ([-44.0, 45.0], 2e-6)], ids=["at the mode", "elsewhere"]
)
def test_a_guide_that_has_collapsed_is_wrong(loc, scale):
    found = judge(scale * np.eye(2), loc)
    assert not found.ok and rows_of(found)[SD].ok is False, found
    assert not judge(scale * np.eye(2), loc, num_moves=0).ok


@pytest.mark.slow
def test_independent_normals_for_correlated_ones_are_wrong():
    """The sd of x0 - x1 is (1 / (1 - .95))^.5 = 4.5 times what it should be. In units of the draws
    the eigenvalues of the posterior's covariance are 1.95 and .05."""
    found = judge(np.eye(2))
    row = rows_of(found)[SD]
    assert row.ok is False and "a linear combination of x[0] and x[1]" in row.verdict, found
    # Of 500 chains each way, of which 4 draws: 2 %.
    assert row.value == pytest.approx(0.05**-0.5, rel=0.15)


def weighed(log_w, x):
    rows, usable, *_ = khat_rows(log_w, auxiliary=False)
    rows += reweighted_rows({"x": x}, usable, lambda name: np.zeros(x.shape[1], int))
    return {row.quantity: row for row in rows}


def test_the_gap_of_the_elbo_judges_where_dependence_is_missing():
    """Standard normals for a correlation of .95: the divergence is .5 (tr P - 2 - log |P|) nats,
    8.09, with the precision P. Its limit is .5 + .05 * 2. Each number alone is right."""
    x = np.random.default_rng(0).normal(size=(4000, 2))
    precision = np.linalg.inv(TRIL @ TRIL.T)
    log_w = 0.5 * (np.sum(x**2, 1) - np.einsum("si,ij,sj->s", x, precision, x))
    row = weighed(log_w, x)[GAP]
    expected = 0.5 * (np.trace(precision) - 2 - np.linalg.slogdet(precision)[1])
    assert row.value == pytest.approx(expected, abs=4 * row.error) and row.ok is False
    assert row.error < 0.5 and row.limit == "0.6"
    right = weighed(np.zeros(4000), x)
    assert right[GAP].ok and all(row.ok is not False for row in right.values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_numbers_have_no_spread_and_nothing_moves_them(dtype):
    """The sum of 10,000 equal numbers is rounded, and so their mean is another number."""
    rng = np.random.default_rng(0)
    equal = np.array([0.1, 1 / 3, -0.7, 1e5 + 0.1], dtype)
    x = np.concatenate([np.tile(equal, (10_000, 1)), rng.normal(size=(10_000, 1))], 1).astype(dtype)
    for y in (x, jnp.asarray(x)):
        (mean, sd), root = mean_and_sd(y), unit_root(jnp.asarray(y))
        np.testing.assert_array_equal(
            np.stack([mean, sd])[:, :4], [np.asarray(y)[0, :4], 0 * equal]
        )
        np.testing.assert_allclose([mean[4], sd[4]], [x[:, 4].mean(), x[:, 4].std()], atol=1e-5)
        np.testing.assert_array_equal(np.diagonal(root)[:4], 1)
    rows = weighed(0.1 * rng.normal(size=10_000), x)
    # The error of weights with a standard deviation of .1 is .001 sd.
    assert all(row.ok and row.value < 1.1 for name, row in rows.items() if "worst" in name), rows
    fn = dist.Normal(np.zeros(5), 1.0).to_event(1)
    assert list(_still({"fn": fn, "value": x[0]}, x[None])[0]) == [True] * 4 + [False]


def test_particles_that_agree_in_a_coordinate_are_too_narrow_there():
    x = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    for value in (0.1, 0.25):  # the mean of 0.25 is exact
        x[:, 0] = value
        facts = particle_facts(Points(jnp.asarray(x), jnp.asarray(-x), str))
        assert (facts.implied_sd_ratio, facts.implied_sd_ratio_of) == (0.0, "0")
        # On a standard normal it is the distance of the mean, of the other coordinate.
        assert facts.shift == pytest.approx(abs(x[:, 1].mean()) * x[:, 1].std(), rel=1e-4)


def test_weights_that_are_all_but_one_zero_are_wrong():
    one = np.full(1000, -1e4)
    one[3] = 0.0
    some = np.where(np.arange(1000) < 300, -np.inf, 0.0)
    for log_w, said in ((one, "all weights but one are 0"), (some, "30% of the draws do not")):
        (row,), usable, *_ = khat_rows(log_w, auxiliary=False)
        assert row.ok is False and said in row.verdict and usable is None


def test_equal_weights_of_draws_that_do_not_vary_say_nothing():
    x = np.full((1000, 2), 5.0, np.float32)
    found = weighed(np.zeros(1000), x)
    assert all(row.ok is None for name, row in found.items() if name != "k-hat")


def two_modes():
    modes = dist.Normal(jnp.array([-2.0, 2.0]), 0.3)
    numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), modes))


def normal():
    numpyro.sample("x", dist.Normal(0.0, (4 + 0.3**2) ** 0.5))


def of(model, guide):
    return diagnose(SVI(model, guide, optax.adam(0.1), Trace_ELBO()), {}, model_args=())


@pytest.mark.slow
def test_one_wide_normal_for_two_modes_is_wrong():
    """Mean and sd are right. The middle half of the normal is +-1.36, where the posterior has a
    share of Phi(-2.1) = .017."""
    found = of(two_modes, normal)
    rows = rows_of(found)
    assert rows["shape by reweighting, worst"].ok is False and rows[SHAPE].ok is False, found
    # The ratio is .67 over that of a normal with .017 within: .021.
    assert rows[SHAPE].value < 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("df", [1.0, 2.5])
def test_an_exact_guide_with_heavy_tails_is_right(df):
    def student(scale=2.0):
        numpyro.sample("x", dist.StudentT(df, 3.0, scale))

    found = of(student, student)
    assert found.ok and rows_of(found)[SD].ok, found
    wide = of(student, functools.partial(student, 4.0))
    # The posterior's share of the middle half of the guide, which is twice as wide.
    share = 2 * t.cdf(2 * t.ppf(0.75, df), df) - 1
    expected = norm.ppf(0.5 + share / 2) / norm.ppf(0.75)
    row = rows_of(wide)[SD]
    assert row.ok is False and row.value == pytest.approx(expected, abs=5 * row.error), wide
    assert row.error < 0.05 * expected
