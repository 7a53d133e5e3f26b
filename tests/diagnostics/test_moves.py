"""Draws that a Markov chain moves: laws of the moves, and what they find."""

import functools
import math

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax
import pytest

from numpyro_ext.diagnostics import Diagnosis, diagnose
from numpyro_ext.diagnostics._moves import (
    Moved,
    _compare,
    _compare_with_chains,
    _scale_of,
    _Tally,
    move_points,
)
from numpyro_ext.diagnostics.checks import moves
from numpyro_ext.diagnostics.checks.moves import compare_moved
from numpyro_ext.diagnostics.comparison import MEAN, SD, SHAPES, decide, inside
from numpyro_ext.mcmc import SphereReparam
from tests.diagnostics.drawn import rows_of, visited, wrong
from tests.scatter import KEYS, assert_errors_are_the_scatter

LOC, COVARIANCE = np.array([1000.0, -2.0]), np.array([[4.0, 0.9], [0.9, 0.25]])


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


def group(n=2, known=False, **fields):
    """Chains that find nothing wrong but for what is given."""
    at = {"shift": 0.0, "shift_error": 0.01, "ratio": 1.0, "error": 0.01, "between": 0.1}
    arrays = {k: np.broadcast_to(fields.pop(k, x), n).astype(float) for k, x in at.items()}
    between, values = arrays["between"], [arrays[k] for k in at][:4]
    moved = Moved(values, between, **{"accepted": np.array(0.7)} | fields)
    return compare_moved(moved, "abcdefgh".__getitem__, "train longer", shares_known=known)


@pytest.mark.parametrize(
    ("fields", "ok"),
    [
        ({}, True),
        ({"accepted": np.array(1.0)}, None),
        ({"between": 0.9}, None),
        ({"between": 0.9, "known": True}, True),
        ({"error": 0.0, "shift_error": 0.0}, None),
    ],
    ids=["moved", "small steps", "chains that stay", "weights know the shares", "no error"],
)
def test_chains_that_do_not_move_judge_nothing(fields, ok):
    rows = group(**fields).rows()
    assert [row.ok for row in rows] == [ok, ok]
    assert Diagnosis("", tuple(rows)).ok is bool(ok)


@pytest.mark.parametrize(
    ("ratio", "error", "ok"),
    [
        *[(2.9, 1.3, None), (0.4, 0.25, None), (1.3, 0.2, None), (1.2, 0.09, None)],
        *[(1.0, 0.9, None), (1.05, 0.05, True), (2.9, 0.1, False)],
    ],
)
def test_a_spread_that_a_few_draws_make_is_not_judged(ratio, error, ok):
    """Nor are the draws then, though their means are found right."""
    rows = group(5, ratio=np.r_[ratio, np.ones(4)], error=np.r_[error, np.full(4, 0.02)]).rows()
    assert [row.ok for row in rows] == [None if ok is None else True, ok]
    assert Diagnosis("", tuple(rows)).ok is (ok is True)


def test_a_ratio_within_its_error_is_no_reason_to_complain():
    """The number with the largest ratio may be one of a heavy tail, of which nothing is known."""

    def row(*errors, worst=0.6):
        return group(3, ratio=np.array([worst, 1.0, 0.8]), error=np.array(errors)).rows()[1]

    # Of 3 numbers: 1 + sqrt(2 log 3) = 2.48 errors.
    assert math.isclose(row(0.13, 0.01, 0.08).value, 0.6, rel_tol=1e-6)
    assert row(0.13, 0.01, 0.08).ok is None  # far from the limit, and not known better
    assert row(0.13, 0.01, 0.06, worst=0.75).ok is None  # within its error of the limit, .85
    assert row(0.13, 0.01, 0.01, worst=1.0).ok is False  # the 0.8, which is known better
    found = row(0.13, 0.01, 0.04)
    assert found.ok is False and found.error == pytest.approx(0.04)
    assert "sd of c 1.2 times" in found.verdict
    assert row(0.11, 0.01, 0.08).ok is False


@functools.cache
def moves_on_a_gaussian():
    precision, mean = jnp.linalg.inv(COVARIANCE), jnp.asarray(LOC)

    def energy(x):
        grad = precision @ (x - mean)
        return 0.5 * (x - mean) @ grad, grad

    def numbers(x):
        return jnp.stack([x[0], jnp.exp(x[1]), jnp.ones_like(x[0])])

    return jax.jit(lambda x, key: move_points(energy, numbers, x, key, 40, 7))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
def test_the_ratio_is_that_of_the_standard_deviations(factor):
    """A Gaussian far from the origin, as N(-2, .25) and exp of it, whose moments are known."""
    noise = np.random.default_rng(0).normal(size=(400, 2)) @ np.linalg.cholesky(COVARIANCE).T
    x = LOC + factor * noise
    found = moves_on_a_gaussian()(jnp.asarray(x, float), random.key(1))
    sd = [2.0, np.sqrt(np.expm1(0.25)) * np.exp(-2 + 0.125)]
    expected = [x[:, 0].std() / sd[0], np.exp(x[:, 1]).std() / sd[1]]
    # 400 chains of some 10 independent draws: 1 %, and 3 % for the heavier tail of exp.
    found_shift, error, ratio, _ = found.values
    np.testing.assert_allclose(ratio[:2], expected, rtol=0.08)
    assert jnp.isnan(ratio[2])
    assert 0.6 < found.accepted < 0.95
    # The chains end at the mean of the posterior, wherever they began.
    mean = np.array([LOC[0], np.exp(-2 + 0.125)])
    sums = np.array([x[:, 0], np.exp(x[:, 1])])
    shift = (mean - sums.mean(1)) / sums.std(1)
    assert np.all(np.abs(found_shift[:2] - shift) < 5 * error[:2] + 0.02)
    assert np.all(error[:2] < 0.2) and jnp.isnan(found_shift[2])
    assert np.all(found.between[:2] < 0.3) and jnp.isnan(found.between[2])


@jax.jit
def compared_with_chains(draws_each):
    """For each key 600 draws of N(0, 1), of which so many in a row are one; and chains of 40 draws
    from 100 of them, each draw of which has a correlation of 0.1 with the start."""

    def compare(rng_key):
        key_points, key_chains = random.split(rng_key)
        x = random.normal(key_points, (600, 1))[jnp.arange(600) // draws_each]
        starts, noise = x[::6], random.normal(key_chains, (100, 40, 1))
        scale = _scale_of(x, 1e-7)
        y = 0.1 * starts[:, None] + 0.99**0.5 * noise
        here, scaled = ((v - scale.centre) / scale.unit for v in (starts, y))
        shares = jnp.moveaxis(inside(y, scale.levels), 0, 2).mean(1)
        tally = _Tally(scaled.mean(1), (scaled**2).mean(1), shares, jnp.ones(100))
        return _compare_with_chains(x, here, scale, tally, jnp.full(1, draws_each, float))

    return jax.vmap(compare)(random.split(random.key(0), KEYS))


@pytest.mark.parametrize("draws_each", [1, 5])
def test_errors_of_moved_draws_are_their_scatter(draws_each):
    moved = compared_with_chains(draws_each)
    assert_errors_are_the_scatter(*moved.values[:2])
    assert_errors_are_the_scatter(*moved.values[2:])
    assert_errors_are_the_scatter(*moved.widths)


@pytest.mark.parametrize("draws_each", [1, 5])
def test_errors_of_a_combination_are_the_scatter_of_its_log_ratio(draws_each):
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(KEYS, 600 // draws_each, 2)), draws_each, 1)
    y = rng.normal(size=(KEYS, 100, 4, 2))
    compared = np.array([_compare(*pair, draws_each) for pair in zip(x, y, strict=True)])
    assert_errors_are_the_scatter(compared[:, 0], compared[:, 1])


@pytest.mark.slow
def test_chains_between_two_modes_do_not_mix_and_say_so():
    """Modes at +-10 of shares .3 and .7 for .95 and .05: the points keep their shares."""
    side = jnp.where(jnp.arange(400) < 120, 10.0, -10.0)[:, None]
    x = random.normal(random.key(0), (400, 1)) + side

    def U(z):
        return -jnp.logaddexp(jnp.log(19.0) - 0.5 * (z[0] - 10) ** 2, -0.5 * (z[0] + 10) ** 2)

    run = jax.jit(
        lambda: move_points(jax.value_and_grad(U), lambda z: z, x, random.key(1), 40, 400)
    )
    found = run()
    # All variance but that of a mode, 1, is between the chains, of which one or two may cross.
    np.testing.assert_allclose(found.between, 1 - 1 / (1 + 400 * 0.21), atol=0.03)
    np.testing.assert_allclose(found.values[0], 0.0, atol=0.05)


@pytest.mark.nightly
def test_draws_that_cannot_be_left_are_said_to_be_so():
    """A density that is not a number anywhere but at the points themselves."""
    x = random.normal(random.key(0), (100, 2))

    def energy(z):
        return jnp.where(jnp.any(jnp.all(z == x, axis=1)), 0.0, jnp.nan), z

    found = move_points(energy, lambda z: z, x, random.key(0), 4, 100)
    (row,) = compare_moved(found, "ab".__getitem__, "train longer").rows()
    assert row.ok is False and "does not leave the draws" in row.verdict


def correlated():
    tril = np.linalg.cholesky([[1, 0.95], [0.95, 1]])
    numpyro.sample("x", dist.MultivariateNormal(jnp.array([1.0, -2.0]), scale_tril=tril))


@functools.cache
def svi_of_correlated():
    svi = SVI(correlated, AutoMultivariateNormal(correlated), optax.adam(0.1), Trace_ELBO())
    svi.init(random.key(0))
    return svi


def judge(tril, loc=(1.0, -2.0), **kwargs):
    params = {"auto_loc": jnp.asarray(loc, float), "auto_scale_tril": jnp.asarray(tril, float)}
    return diagnose(svi_of_correlated(), params, model_args=(), **kwargs)


@pytest.mark.slow
def test_the_posterior_itself_is_right():
    found = judge(np.linalg.cholesky([[1, 0.95], [0.95, 1]]))
    assert found.ok and rows_of(found)[SD].ok and rows_of(found)[SHAPES].ok, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loc", "scale"), [((1.0, -2.0), 1e-8), ([-44.0, 45.0], 2e-6)], ids=["at the mode", "elsewhere"]
)
def test_a_guide_that_has_collapsed_is_wrong(loc, scale):
    found = judge(scale * np.eye(2), loc)
    assert not found.ok and rows_of(found)[SD].ok is False, found
    assert not judge(scale * np.eye(2), loc, num_moves=0).ok


@pytest.mark.slow
def test_independent_normals_for_correlated_ones_are_wrong():
    """The sd of x0 - x1 is (1 / (1 - .95))^.5 = 4.5 times what it should be. In units of the draws
    the eigenvalues of the posterior's covariance are 1.95 and .05."""
    row = rows_of(judge(np.eye(2)))[SD]
    assert row.ok is False and "a linear combination of x[0] and x[1]" in row.verdict
    # Of 500 chains each way, of which 4 draws: 2 %.
    assert row.value == pytest.approx(0.05**-0.5, rel=0.15)


@pytest.mark.nightly
def test_what_is_computed_from_latents_is_judged_too():
    """A guide that is 1.15 times too wide may pass, but not the cube of its draws."""

    def model():
        x = numpyro.sample("x", dist.Normal(0.0, 2.0))
        numpyro.deterministic("cube", x**3)
        numpyro.deterministic("curve", x * jnp.ones(101))

    guide = AutoNormal(model)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0)))
    for factor, ok in ((1.0, True), (1.15, False)):
        params |= {"x_auto_loc": jnp.zeros(()), "x_auto_scale": jnp.asarray(2.0 * factor)}
        found = diagnose(svi, params)
        row = rows_of(found)[SD]
        # The sd of 10,000 cubes is off by 3 %, that of the chains by 5 %.
        assert (row.ok, found.ok) == (ok, ok), found
        assert ok or ("cube" in row.verdict and 1.3 < row.value < 1.75)


def halving(x):
    z = numpyro.sample("z", dist.Normal())
    # A loop of unknown length, which JAX differentiates in forward mode only.
    loc = lax.while_loop(lambda y: jnp.abs(y) > 1, lambda y: y / 2, z)
    numpyro.sample("x", dist.Normal(loc), obs=x)


@pytest.mark.slow
def test_a_model_without_a_reverse_gradient_is_judged_by_moves_too():
    guide = lambda x: numpyro.sample("z", dist.Normal(0.2, 5.0))  # noqa: E731
    svi = SVI(halving, guide, optax.adam(1e-2), Trace_ELBO())
    row = rows_of(diagnose(svi, {}, model_args=(0.4,), num_samples=200))[SD]
    assert row.ok is False and row.value > 2, row  # a standard deviation of 1 at most, and 5


SPREAD = 0.4


def hierarchy():
    """A centred one, whose posterior is known because it has no data."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, SPREAD))
    numpyro.sample("theta", dist.Normal(1.0, tau).expand([4]).to_event(1))


def draws(size=1000, lowest=-np.inf, T=1.0):
    """Independent ones of ``p^(1/T)``, without those whose log tau is below ``lowest`` sds.

    In unconstrained space: with theta integrated out, ``u = log tau`` has the exponent
    ``-u^2 / (2 T s^2) + 4 (1 - 1/T) u`` with s = SPREAD, a normal one of mean ``4 (T - 1) s^2``.
    """
    rng = np.random.default_rng(0)
    log_tau = rng.normal(size=20 * size)
    log_tau = SPREAD * log_tau[log_tau > lowest][:size]
    tau = np.exp(T**0.5 * log_tau + 4 * (T - 1) * SPREAD**2)
    theta = 1.0 + T**0.5 * tau[:, None] * rng.normal(size=(size, 4))
    return {"tau": jnp.asarray(tau, float), "theta": jnp.asarray(theta, float)}


def judged(lowest=-np.inf, T=1.0, told=None, num_moves=None):
    return diagnose(visited(hierarchy, draws(lowest=lowest, T=T), T=told or T), num_moves=num_moves)


@pytest.mark.slow
def test_chains_of_the_posterior_are_fine():
    found = judged()
    rows = rows_of(found)
    assert found.ok and rows[SD].ok and rows[MEAN].ok and rows[SD].error > 0, found


@pytest.mark.slow
def test_a_neck_that_the_chain_does_not_enter_is_found():
    """Without tau below its median: its logarithm is a half-normal, whose mean is .8 sds too high
    and whose sd is .6 of the right one. All other lines are right."""
    found = judged(lowest=0.0)
    assert MEAN in wrong(found) and set(wrong(found)) <= {SD, MEAN, SHAPES}, found
    assert "tau" in rows_of(found)[MEAN].verdict


@pytest.mark.nightly
def test_tempered_draws_are_compared_with_moves_of_their_temperature():
    # It is wider, so that 40 moves are too few to judge it.
    right = judged(T=1.5, num_moves=160)
    assert right.ok, right
    assert rows_of(judged(T=1.5, told=1.0, num_moves=160))[SD].ok is False


@pytest.mark.slow
def test_draws_of_an_exploration_are_left_out():
    right, wide = draws(500), draws(500, T=4.0)
    both = {name: jnp.concatenate([wide[name], right[name]]) for name in right}
    sampling = jnp.arange(1000) >= 500
    rows = rows_of(diagnose(visited(hierarchy, both, sampling=sampling)))
    assert rows[SD].ok and rows[MEAN].ok


def test_moves_that_are_dear_are_made_from_fewer_draws_or_say_how_long_they_take(monkeypatch):
    def row(**kwargs):
        return rows_of(diagnose(visited(hierarchy, draws(**kwargs.pop("draws", {})), **kwargs)))[SD]

    changing = row(T=lambda i: 1.0 + 0.1 * i)
    assert changing.ok is None and "no temperature, or several" in changing.verdict
    few = row(draws={"size": 20})
    assert few.ok is None and "below 50" in few.verdict
    monkeypatch.setattr(moves, "MOST_OPERATIONS", 1000)
    monkeypatch.setattr(moves, "SPEED", 100)
    dear = row()
    assert dear.ok is None and "from each of 32 draws would take about" in dear.verdict
    assert "seconds of a core; num_moves=40 runs them" in dear.verdict


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "ok"), [(1.0, True), (0.6, False)])
def test_roots_of_probabilities_are_judged_without_their_signs(scale, ok):
    """Draws at all mirror images, between which no chain moves, since the density is 0 there."""

    def model():
        numpyro.sample("p", dist.Dirichlet(alpha))

    alpha, rng = np.array([4.0, 9.0, 7.0]), np.random.default_rng(0)
    roots = np.sqrt(rng.dirichlet(alpha, 2000))
    middle = roots.mean(0)
    roots = middle + scale * (roots - middle)
    roots /= np.linalg.norm(roots, axis=-1, keepdims=True)
    fn = reparam(model, config={"p": SphereReparam()})
    signs = rng.choice([-1.0, 1.0], (2000, 3))
    draws = visited(fn, {"p_sphere": signs * roots})
    row = rows_of(diagnose(draws))[SD]
    assert row.ok is ok, row
