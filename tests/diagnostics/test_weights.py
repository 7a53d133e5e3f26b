"""Importance weights of a guide: whether they may be used, and what they change."""

import functools

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest
from scipy.stats import norm, t

from numpyro_ext._model.normal import mean_and_sd
from numpyro_ext.diagnostics import diagnose
from numpyro_ext.diagnostics.checks.draws import _still
from numpyro_ext.diagnostics.checks.weights import (
    KHAT,
    OF_GAP,
    _compare,
    compare_with_weights,
    summarise_weights,
)
from numpyro_ext.diagnostics.comparison import MEAN, SD, SHAPES, unit_root
from numpyro_ext.guides import AutoMixtureNormal
from tests.diagnostics.drawn import rows_of
from tests.scatter import KEYS, assert_errors_are_the_scatter

APART, RHO = 8.0, 0.95
TRIL = np.linalg.cholesky([[1, RHO], [RHO, 1]])


def weighed(log_w, x):
    summary = summarise_weights(log_w, auxiliary=False)
    rows = compare_with_weights({"x": x}, summary)
    return {row.quantity: row for row in [summary.row, *rows]}


def test_moments_with_weights_and_without():
    """Draws of N(0, 1) with weights of N(1, 1), and of N(0, 1.3^2) with those of N(0, 1)."""
    z = np.random.default_rng(0).normal(size=(4000, 2))
    for log_w, draws, shift, ratio in (
        (z[:, 0] - 0.5, z, 1.0, 1.0),
        (-0.5 * (1.3**2 - 1) * z[:, 0] ** 2, 1.3 * z, 0.0, 1.3),
    ):
        rows = weighed(log_w, draws)
        for name, expected in ((MEAN, shift), (SD, ratio)):
            row = rows[name]
            assert row.value == pytest.approx(expected, abs=0.02 + 4 * row.error)
            assert row.error < 0.1
        assert (rows[MEAN].ok, rows[SD].ok) == (shift == 0.0, ratio == 1.0)


def test_errors_of_a_comparison_with_weights_are_its_scatter():
    """Draws of N(0, 1) with weights of N(0.3, 0.9^2), a column for each of 200 keys."""
    x = np.random.default_rng(0).normal(size=(900, KEYS))
    w = norm.pdf(x, 0.3, 0.9) / norm.pdf(x)
    shift, shift_error, ratio, ratio_error = _compare(x, w / w.sum(0))
    assert_errors_are_the_scatter(shift, shift_error)
    assert_errors_are_the_scatter(ratio, ratio_error)
    # Both moments follow from the draws' own mean and sd, which are 0 and 1 but for 900 draws.
    assert np.mean(shift) == pytest.approx(0.3, abs=0.01)
    assert np.mean(ratio) == pytest.approx(1 / 0.9, abs=0.01)


def test_the_gap_of_the_elbo_judges_where_dependence_is_missing():
    """Standard normals for a correlation of .95: the divergence is .5 (tr P - 2 - log |P|) nats,
    8.09, with the precision P. Its limit is .5 + .05 * 2. Each number alone is right."""
    x = np.random.default_rng(0).normal(size=(4000, 2))
    precision = np.linalg.inv(TRIL @ TRIL.T)
    log_w = 0.5 * (np.sum(x**2, 1) - np.einsum("si,ij,sj->s", x, precision, x))
    row = weighed(log_w, x)[OF_GAP]
    expected = 0.5 * (np.trace(precision) - 2 - np.linalg.slogdet(precision)[1])
    assert row.value == pytest.approx(expected, abs=4 * row.error) and row.ok is False
    assert row.error < 0.5 and row.limit == "0.6"
    right = weighed(np.zeros(4000), x)
    assert right[OF_GAP].ok and all(row.ok is not False for row in right.values())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_numbers_have_no_spread_and_nothing_moves_them(dtype):
    """The sum of 10,000 equal numbers is rounded, and so their mean is another number."""
    rng = np.random.default_rng(0)
    equal = np.array([0.1, 1 / 3, -0.7, 1e5 + 0.1], dtype)
    x = np.concatenate([np.tile(equal, (10_000, 1)), rng.normal(size=(10_000, 1))], 1).astype(dtype)
    for y in (x, jnp.asarray(x)):
        (mean, sd), root = mean_and_sd(y), unit_root(jnp.asarray(y))
        first = np.stack([mean, sd])[:, :4]
        np.testing.assert_array_equal(first, [np.asarray(y)[0, :4], 0 * equal])
        np.testing.assert_allclose([mean[4], sd[4]], [x[:, 4].mean(), x[:, 4].std()], atol=1e-5)
        np.testing.assert_array_equal(np.diagonal(root)[:4], 1)
    rows = weighed(0.1 * rng.normal(size=10_000), x)
    # The error of weights with a standard deviation of .1 is .001 sd.
    assert all(rows[name].ok and rows[name].value < 1.1 for name in (MEAN, SD)), rows
    fn = dist.Normal(np.zeros(5), 1.0).to_event(1)
    assert list(_still({"fn": fn, "value": x[0]}, x[None])[0]) == [True] * 4 + [False]


def test_equal_weights_of_draws_that_do_not_vary_say_nothing():
    rows = weighed(np.zeros(1000), np.full((1000, 2), 5.0, np.float32))
    assert all(row.ok is None for name, row in rows.items() if name != KHAT)


def test_weights_that_are_all_but_one_zero_are_wrong():
    one = np.full(1000, -1e4)
    one[3] = 0.0
    some = np.where(np.arange(1000) < 300, -np.inf, 0.0)
    for log_w, words in ((one, "all weights but one are 0"), (some, "30% of the draws do not")):
        summary = summarise_weights(log_w, auxiliary=False)
        assert summary.row.ok is False and words in summary.row.verdict


def two_modes():
    """Standard normals at 0 and 8 along the first axis, of shares .95 and .05."""
    z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real, (), (6,)))
    centres = jnp.zeros((2, 6)).at[1, 0].set(APART)
    each = dist.Normal(centres).log_prob(z).sum(1)
    numpyro.factor("density", jnp.logaddexp(*(jnp.log(jnp.array([0.95, 0.05])) + each)))


@functools.cache
def svi_of_modes():
    guide = AutoMixtureNormal(two_modes, num_components=2, init_from=None)
    svi = SVI(two_modes, guide, optax.adam(0.1), Trace_ELBO())
    return svi, svi.get_params(svi.init(random.key(0)))


def judge_modes(share, scale=1.0):
    svi, params = svi_of_modes()
    params |= {
        "auto_logits": jnp.log(jnp.array([1 - share, share])),
        "auto_loc": jnp.zeros((2, 6)).at[1, 0].set(APART),
        "auto_scale": jnp.full((2, 6), scale),
    }
    return diagnose(svi, params, model_args=(), rng_key=random.key(0))


@pytest.mark.nightly
def test_a_mode_with_the_wrong_share_is_found_by_reweighting():
    """Mean and variance of a mixture of shares 1 - s and s are 8 s and 1 + 64 s (1 - s)."""
    found = rows_of(judge_modes(0.25))
    assert found[KHAT].ok is True
    sd, right = (np.sqrt(1 + APART**2 * s * (1 - s)) for s in (0.25, 0.05))
    shift, ratio = found[MEAN], found[SD]
    assert shift.value == pytest.approx(APART * 0.2 / sd, abs=5 * shift.error)
    assert ratio.value == pytest.approx(sd / right, abs=5 * ratio.error)
    assert shift.ok is False and ratio.ok is False and "z[0]" in shift.verdict
    exact = judge_modes(0.05)
    assert exact.ok, exact


def of(model, guide):
    return diagnose(SVI(model, guide, optax.adam(0.1), Trace_ELBO()), {}, model_args=())


@pytest.mark.slow
def test_one_wide_normal_for_two_modes_is_wrong():
    """Mean and sd are right. The middle half of the normal is +-1.36, where the posterior has a
    share of Phi(-2.1) = .017."""

    def model():
        modes = dist.Normal(jnp.array([-2.0, 2.0]), 0.3)
        numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), modes))

    row = rows_of(of(model, lambda: numpyro.sample("x", dist.Normal(0.0, 4.09**0.5))))[SHAPES]
    # The ratio is .67 over that of a normal with .017 within: .021.
    assert row.ok is False and min(row.value, 1 / row.value) < 0.1


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
