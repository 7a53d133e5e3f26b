"""Which lines judge the draws of a guide: weights that may be used, and what they change."""

import functools

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import block
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
import optax
import pytest

from numpyro_ext.diagnostics import Diagnosis, diagnose
from numpyro_ext.diagnostics._fit import fit_of
from numpyro_ext.diagnostics._spread import MoveComparison
from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.judges.exact_moves import GUIDE, HMCCheck, rows_of_moves
from numpyro_ext.diagnostics.judges.other_modes import other_modes
from numpyro_ext.diagnostics.judges.weights import khat_rows, reweighted_rows
from numpyro_ext.diagnostics.table import Row
from numpyro_ext.guides import AutoMixtureNormal
from numpyro_ext.objectives import VRELBO, BBAlphaELBO

SHIFT, RATIO = "shift by reweighting, worst", "sd ratio to reweighted, worst"
MOVED, SIDES = "sd against exact moves, worst", "crossing rate between modes"
APART = 8.0


def judge(*args, **kwargs):
    return diagnose(*args, rng_key=random.key(0), **kwargs)


def rows_of(diagnosis):
    return {row.quantity: row for row in diagnosis.rows}


def wrong(diagnosis):
    return [row.quantity for row in diagnosis.rows if row.ok is False]


def two_modes():
    """Standard normals at 0 and 8 along the first axis, of shares .95 and .05."""
    z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real, (), (6,)))
    centres = jnp.zeros((2, 6)).at[1, 0].set(APART)
    each = dist.Normal(centres).log_prob(z).sum(1)
    numpyro.factor("density", jnp.logaddexp(*(jnp.log(jnp.array([0.95, 0.05])) + each)))


@functools.cache
def svi_of_modes():
    svi = SVI(
        two_modes,
        AutoMixtureNormal(two_modes, num_components=2, init_from=None),
        optax.adam(0.1),
        Trace_ELBO(),
    )
    return svi, svi.get_params(svi.init(random.key(0)))


def modes(share, scale=1.0):
    return {
        "auto_logits": jnp.log(jnp.array([1 - share, share])),
        "auto_loc": jnp.zeros((2, 6)).at[1, 0].set(APART),
        "auto_scale": jnp.full((2, 6), scale),
    }


def judge_modes(share, scale=1.0, **kwargs):
    svi, params = svi_of_modes()
    return judge(svi, {**params, **modes(share, scale)}, model_args=(), **kwargs)


@pytest.mark.nightly
def test_a_mode_with_the_wrong_share_is_found_by_reweighting():
    """Mean and variance of a mixture of shares 1 - s and s are 8 s and 1 + 64 s (1 - s)."""
    found = rows_of(judge_modes(0.25))
    assert found["k-hat"].ok is True
    sd, right = (np.sqrt(1 + APART**2 * s * (1 - s)) for s in (0.25, 0.05))
    shift, ratio = found[SHIFT], found[RATIO]
    assert shift.value == pytest.approx(APART * 0.2 / sd, abs=5 * shift.error)
    assert ratio.value == pytest.approx(sd / right, abs=5 * ratio.error)
    assert shift.error < 0.06 and ratio.error < 0.2
    assert shift.ok is False and ratio.ok is False
    assert "a mode has the wrong share" in shift.verdict and "z[0]" in shift.verdict
    # No chain changes sides, but the weights have judged the shares.
    assert found[MOVED].ok and SIDES not in found
    exact = judge_modes(0.05)
    assert exact.ok, exact


@pytest.mark.nightly
def test_shares_that_nothing_has_checked_are_wrong():
    """The log weights of components with .4 of the right sd are .84 times a Gamma(3): k-hat > 1."""
    found = judge_modes(0.25, 0.4)
    rows = rows_of(found)
    assert rows["k-hat"].ok is None and rows["k-hat"].not_judged and RATIO not in rows
    assert {MOVED, SIDES} <= set(wrong(found))
    assert "the share of each side is that of the guide" in rows[SIDES].verdict


def test_moments_with_weights_and_without():
    """Draws of N(0, 1) with weights of N(1, 1), and of N(0, 1.3^2) with those of N(0, 1)."""
    z = np.random.default_rng(0).normal(size=(4000, 2))
    for log_w, draws, shift, ratio in (
        (z[:, 0] - 0.5, z, 1.0, 1.0),
        (-0.5 * (1.3**2 - 1) * z[:, 0] ** 2, 1.3 * z, 0.0, 1.3),
    ):
        usable = khat_rows(log_w, auxiliary=False)[1]
        rows = reweighted_rows({"z": draws}, usable, lambda name: np.zeros(2, int))
        for row, expected in zip(rows[:2], (shift, ratio), strict=True):
            assert row.value == pytest.approx(expected, abs=0.02 + 4 * row.error)
            assert row.error < 0.1
        assert [row.ok for row in rows[:2]] == [shift == 0.0, ratio == 1.0]


def row(ok, limit="1", of_draws=True):
    return Row("x", 1.0, None, limit, ok, "so.", of_draws)


def test_silence_is_no_verdict():
    for rows, ok, text in (
        ([row(True)], True, "no problems found"),
        ([row(None)], False, "the draws could not be judged, 1 not judged"),
        ([row(None), row(True)], True, "no problems found, 1 not judged"),
        ([row(None), row(True, of_draws=False)], False, "the draws could not be judged, 1 not"),
        ([row(None, limit=""), row(True, of_draws=False)], True, "no problems found"),
        ([row(None, of_draws=False)], False, "nothing could be judged"),
        ([row(None, limit="")], False, "the draws could not be judged"),
        ([], False, "nothing could be judged"),
        ([row(None), row(False)], False, "1 of 2 is wrong, 1 not judged"),
    ):
        found = Diagnosis("title", tuple(rows))
        assert found.ok is ok
        assert str(found).startswith(f"title: {text}")
        assert ("?" in str(found)) is any(one.not_judged for one in rows)


X = jnp.array([0.5, -1.0, 2.0])


def two(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    u = numpyro.sample("u", dist.Normal(z))
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(u), obs=x[i])


def by_hand(x):
    numpyro.sample("z", dist.Delta(0.3))
    numpyro.sample("u", dist.Normal(numpyro.param("m", 0.4), 0.5))


@pytest.mark.parametrize(
    ("ratio", "error", "ok"),
    [
        *[(2.9, 1.3, None), (0.4, 0.25, None), (1.3, 0.2, None), (1.2, 0.09, None)],
        *[(1.0, 0.9, None), (1.05, 0.05, True), (2.9, 0.1, False)],
    ],
)
def test_a_spread_that_a_few_draws_make_is_not_judged(ratio, error, ok):
    """Nor are the draws then, though their means are found right."""
    n, still = 5, np.zeros((3, 4, 5))
    spread = MoveComparison(
        ratio=np.r_[ratio, np.ones(n - 1)],
        error=np.r_[error, np.full(n - 1, 0.02)],
        shift=np.zeros(n),
        shift_error=np.full(n, 0.01),
        between=np.zeros(n),
        ends=still,
        accepted=np.array(0.7),
    )
    rows = rows_of_moves(HMCCheck(spread, str, GUIDE, shares_known=True))
    assert [row.ok for row in rows] == [ok, None if ok is None else True]
    assert Diagnosis("", tuple(rows)).ok is (ok is True)


@pytest.mark.slow
def test_a_site_without_spread_is_no_posterior():
    guide = AutoGuideList(two)
    guide.append(AutoDelta(block(two, hide=["u"])))
    guide.append(AutoNormal(block(two, hide=["z"])))
    for one in (guide, by_hand):
        svi = SVI(two, one, optax.adam(0.1), Trace_ELBO())
        params = svi.get_params(svi.init(random.key(0), X))
        found = judge(svi, params, model_args=(X,), num_moves=0)
        assert "sites that do not vary" in wrong(found)
        assert "'z' are the same: a Delta" in rows_of(found)["sites that do not vary"].verdict


def test_a_point_is_an_estimate_that_cannot_be_judged():
    svi = SVI(two, AutoDelta(two), optax.adam(0.1), Trace_ELBO())
    params = {"z_auto_loc": jnp.array(0.4), "u_auto_loc": jnp.array(0.4)}
    found = judge(svi, params, model_args=(X,))
    assert wrong(found) == [] and not found.ok
    assert "no posterior" in rows_of(found)["spread of the draws"].verdict


@pytest.mark.slow
@pytest.mark.parametrize("given", [(X, 1), (X,)], ids=["with the batch", "without"])
def test_the_noise_of_minibatches_is_named(given):
    """A guide that is 3 times too wide, as orders other than 1 make it."""
    params = {"z_auto_loc": 0.3, "z_auto_scale": 2.4, "u_auto_loc": 0.43, "u_auto_scale": 1.6}
    params = {name: jnp.array(x) for name, x in params.items()}
    for loss, named in ((VRELBO(0.5, num_particles=2), True), (BBAlphaELBO(0.5), False)):
        svi = SVI(two, AutoNormal(two), optax.adam(0.1), loss)
        svi.init(random.key(0), X, 1)
        found = judge(svi, params, model_args=given, num_moves=0)
        verdict = rows_of(found)[RATIO].verdict
        assert rows_of(found)[RATIO].ok is False
        assert ("VRELBO takes the noise of its minibatches (1 of 3 rows" in verdict) is named
        assert ("richer guide" in verdict) is not named


def test_other_modes_are_not_searched_for_where_a_line_is_wrong():
    svi = SVI(two, by_hand, optax.adam(0.1), Trace_ELBO())
    context = FitContext(svi, fit_of(svi, {"m": 0.4}, (X,), None), {}, random.key(0))
    assert other_modes(context, [row(False)]) == []
