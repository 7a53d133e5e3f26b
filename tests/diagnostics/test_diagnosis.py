"""``diagnose``: every line provoked once, and what it says where nothing is wrong."""

from collections import namedtuple
import pickle
from types import SimpleNamespace

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import block
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from numpyro.infer.mcmc import MCMCKernel
import optax
import pytest

from numpyro_ext.diagnostics import Diagnosis, InferenceWarning, diagnose
from numpyro_ext.diagnostics.checks.chains import row_of_mean
from numpyro_ext.diagnostics.checks.losses import loss_row
from numpyro_ext.diagnostics.comparison import MEAN, SD, SHAPES
from numpyro_ext.diagnostics.table import MOST_ROWS, Row, merge_rows, shorten
from numpyro_ext.mcmc import SGHMC, Settings
from numpyro_ext.objectives import VRELBO
from numpyro_ext.particles import SVGD, AutoParticles
from tests.diagnostics.drawn import rows_of, wrong
from tests.scatter import KEYS, assert_errors_are_the_scatter

X = jnp.array([0.5, -1.0, 2.0])
EXACT = {"z_auto_loc": jnp.array(0.375), "z_auto_scale": jnp.array(0.5)}
MANY = 1.0 + jnp.sin(jnp.arange(200.0))


def conjugate(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=x[i])


State = namedtuple("State", "i z kinetic_temperature diverging rng_key")


class Scripted(MCMCKernel):
    """Independent draws of the posterior, and whatever else a run may report."""

    sample_field = "z"
    default_fields = ("z", "kinetic_temperature", "diverging")
    model = staticmethod(conjugate)
    steps_per_sample = 3
    if_hot = "take a smaller step"

    def __init__(self, *, heat=1.0, diverging=0.0, still=0.0, lost=0.0, sg=True, settings=None):
        self.heat, self.share, self.settings = heat, diverging, settings
        self.still, self.lost = still, lost
        self.inference_method = "sgmcmc" if sg else "mcmc"

    def temperature_at(self, i):
        return jnp.ones(())

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        zero = jnp.zeros(())
        return State(jnp.zeros((), int), {"z": zero + 0.375}, zero, zero > 0, rng_key)

    def sample(self, state, model_args, model_kwargs):
        rng_key, key_z, key_r, key_d, key_l = random.split(state.rng_key, 5)
        z = 0.375 + 0.5 * random.normal(key_z)
        z = self.still * jnp.nan_to_num(state.z["z"]) + (1 - self.still) * z
        z = jnp.where(random.bernoulli(key_l, self.lost), jnp.nan, z)
        heat = self.heat * jnp.mean(random.normal(key_r, (10,)) ** 2)
        diverging = random.bernoulli(key_d, self.share)
        return State(state.i + 3, {"z": z}, heat, diverging, rng_key)

    def postprocess_fn(self, model_args, model_kwargs):
        return lambda z: z


def scripted(*, num_chains=1, num_samples=500, **kwargs):
    how = {"num_chains": num_chains, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(Scripted(**kwargs), num_warmup=0, num_samples=num_samples, **how)
    mcmc.run(random.key(0), X)
    return mcmc


def row(ok, name="x", verdict="so.", of_draws=True):
    return Row(name, 1.0, None, "1", ok, verdict, of_draws)


def test_silence_is_no_verdict():
    nothing = "nothing could compare the draws with the posterior"
    for rows, ok, text in (
        ([row(True)], True, "no problems found"),
        ([row(None)], False, nothing),
        ([row(None), row(True)], True, "no problems found"),
        ([row(None), row(True, of_draws=False)], False, nothing),
        ([row(True, of_draws=False)], True, "no problems found"),
        ([row(None, of_draws=False)], False, nothing),
        ([], False, nothing),
        ([row(None), row(False)], False, "1 of 2 is wrong"),
    ):
        found = Diagnosis("title", tuple(rows))
        assert found.ok is ok
        assert str(found).startswith(f"title: {text}")
        assert ("?" in str(found)) is any(each.ok is None for each in rows)


def test_several_checks_of_one_quantity_are_one_line():
    by = [row(True, verdict="right (by weights)."), row(True, verdict="right (by moves).")]
    assert merge_rows(by)[0].verdict == "right (by weights)."
    (unjudged,) = merge_rows([row(None, verdict="not judged."), *by])
    assert unjudged.ok and "by weights" in unjudged.verdict
    (bad,) = merge_rows([*by, row(None), row(False, verdict="bad.")])
    assert bad.ok is False and bad.verdict == "bad."
    assert [x.quantity for x in merge_rows([row(True, "a"), row(True, "b"), row(None, "a")])] == [
        *"ab"
    ]


def test_a_table_has_at_most_eight_lines_and_keeps_those_that_are_wrong():
    rows = [row(ok, str(k)) for k, ok in enumerate([True] * 4 + [None] * 2 + [False] * 6)]
    kept = shorten(rows)
    assert [x.quantity for x in kept] == ["4", "5", *map(str, range(6, 12))]
    assert len(kept) == MOST_ROWS and shorten(rows[:3]) == tuple(rows[:3])


@pytest.mark.slow
def test_a_good_run_is_fine():
    found = diagnose(scripted())
    assert found.ok, found
    names = ["kinetic temperature", "largest R-hat", "smallest ESS", MEAN, SD, SHAPES]
    assert [x.quantity for x in found.rows] == names
    assert found.title == "Scripted, 1 x 500 draws"


@pytest.mark.slow
def test_everything_that_a_stochastic_gradient_run_can_show_is_said():
    found = diagnose(scripted(heat=4.0, diverging=0.1), num_moves=0)
    assert wrong(found) == ["divergences", "kinetic temperature"]
    hot = rows_of(found)["kinetic temperature"]
    assert hot.value == pytest.approx(4.0, abs=4 * hot.error)
    assert "about 2 times too wide" in hot.verdict


@pytest.mark.parametrize(
    ("mean", "spread", "num", "ok"),
    [
        (1.0, 0.3, 2000, True),
        (1.4, 0.3, 2000, False),
        (1.3, 2.0, 10, None),
        (1.0, 0.3, 3, None),
    ],
)
def test_a_level_outside_of_its_limit_by_less_than_its_error_is_not_judged(mean, spread, num, ok):
    """The error of n independent values is their sd over the root of n; 3 draws have none."""
    x = np.random.default_rng(0).lognormal(0, spread, (2, num))
    x = mean * x / np.mean(x)
    found = row_of_mean("x", x, "1", (1.0, 1.0), 0.1, "right.", "wrong.")
    assert found.ok is ok and found.value == pytest.approx(mean)
    if num > 3:
        assert found.error == pytest.approx(np.std(x) / x.size**0.5, rel=0.3)
    else:
        assert "need 4 draws" in found.verdict


def test_the_level_of_the_temperature_is_that_of_the_settings_found():
    low = 1 / (1 - 0.5**2 / 4)
    law = 1.05 * low
    settings = Settings(0.5, variance_ratio=1.05, kinetic_temperature=(low, law))
    found = diagnose(scripted(heat=law, settings=settings, num_samples=2000), num_moves=0)
    assert found.ok, found
    assert rows_of(found)["kinetic temperature"].limit == "1.07 to 1.12 +- 10%"
    hot = diagnose(scripted(heat=law, num_samples=2000), num_moves=0)
    assert wrong(hot) == ["kinetic temperature"]


def test_chains_that_differ_and_divergences_of_an_exact_kernel():
    found = diagnose(scripted(diverging=0.01, sg=False, still=0.999, num_chains=2), num_moves=0)
    assert wrong(found) == ["divergences", "largest R-hat", "smallest ESS"]
    assert "start at the modes" in rows_of(found)["smallest ESS"].verdict


def test_a_run_that_is_nearly_long_enough_says_how_much_longer_it_takes():
    """An autoregression with coefficient a is worth (1 - a) / (1 + a) of its draws, here 130 of the
    400 that ten chains need; from ten times as long on, the advice is another one."""
    found = diagnose(scripted(sg=False, still=0.9, num_chains=10, num_samples=250))
    line = rows_of(found)["smallest ESS"]
    times = float(line.verdict.split("about ")[1].split(" times")[0])
    assert 1.1 < times < 10 and times == pytest.approx(int(line.limit) / line.value, rel=0.06)


def test_a_site_that_never_moves_and_draws_that_are_not_finite():
    assert "sites that do not vary" in wrong(diagnose(scripted(still=1.0, sg=False)))
    line = rows_of(diagnose(scripted(lost=0.1, sg=False)))["draws not finite"]
    assert line.value == pytest.approx(0.1, abs=0.05) and line.ok is False


@pytest.mark.filterwarnings("ignore:the mean of .* times what it should be")
@pytest.mark.filterwarnings("ignore:the mean of .* times what it should be")
def test_gradient_noise_heats_sghmc_and_its_temperature_says_so():
    how = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    kernel = SGHMC(conjugate, 0.05, friction=1.0)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=2000, **how)
    mcmc.run(random.key(0), MANY, 5, init_params={"z": jnp.full(2, 1.0)})
    line = rows_of(diagnose(mcmc, num_moves=0))["kinetic temperature"]
    assert line.ok is False
    # The law: T + eps^2 s^2 coth(C eps / 2) / 4, at the end of a step over 1 - eps^2 h / 4.
    s2, h = 200**2 / 5 * float(np.var(MANY)), 201.0
    law = (1 + 0.05**2 / 4 * s2 / np.tanh(0.025)) / (1 - 0.05**2 * h / 4)
    assert line.value == pytest.approx(law, abs=5 * line.error)


SVI_OF_CONJUGATE = SVI(conjugate, AutoNormal(conjugate), numpyro.optim.Adam(0.1), Trace_ELBO())


def of_svi(params, losses=None, **kwargs):
    rest = {"model_args": (X,), "num_samples": 500, **kwargs}
    result = params if losses is None else SimpleNamespace(params=params, losses=losses)
    return diagnose(SVI_OF_CONJUGATE, result=result, **rest)


@pytest.mark.slow
def test_the_remedy_of_a_guide_that_minibatches_made_too_wide_is_that_of_its_loss():
    """Twice as wide as the posterior, as an order of 1/2 would make it on minibatches."""
    guide = AutoNormal(conjugate)
    svi = SVI(conjugate, guide, optax.sgd(0.0), VRELBO(0.5))
    params = {"z_auto_loc": MANY.sum() / 201, "z_auto_scale": jnp.array(2 / 201**0.5)}
    with pytest.warns(InferenceWarning, match="takes the noise of a minibatch"):
        svi.update(svi.init(random.key(0), MANY, 10), MANY, 10)
    found = diagnose(svi, params, model_args=(MANY, 10), num_samples=1000)
    row = rows_of(found)[SD]
    assert row.ok is False and "proxy=taylor_proxy(model, *args)" in row.verdict, found


@pytest.mark.slow
def test_an_exact_fit_is_fine_though_its_loss_may_still_fall():
    noise = np.random.default_rng(0).normal(size=1000)
    found = of_svi(EXACT, 5.8 + noise)
    assert found.ok and "change of the loss" in rows_of(found), found
    falling = of_svi(EXACT, noise - 0.01 * np.arange(1000))
    assert falling.ok and "change of the loss" not in rows_of(falling)


def test_losses_that_fall_rise_or_are_lost():
    noise, t = np.random.default_rng(0).normal(size=1000), np.arange(1000)
    falling = loss_row([noise - 0.01 * t])
    # 200 steps of .01 from the middle of one fifth to that of the next.
    assert falling.value == pytest.approx(-2.0, abs=4 * falling.error)
    assert falling.ok is False and "run about 1,000 steps more" in falling.verdict
    # A fall that halves in every fifth, from 1.6 in the last one, takes four of them to .1.
    halving = 0.1 * noise + 1.6 * 2**5 * np.exp2(-t / 200)
    assert "run about 1,000 steps more" in loss_row([halving]).verdict
    assert "find_modes(model, *args)" in loss_row([noise - t]).verdict
    assert "rose" in loss_row([noise + 0.01 * t]).verdict
    noise[-1] = np.nan  # a step that was skipped
    assert loss_row([noise]).ok
    noise[-9::2] = np.nan
    assert loss_row([noise]).ok is False and "1% of the losses are not" in loss_row([noise]).verdict


def test_the_error_of_a_change_of_the_loss_is_its_scatter():
    losses = 100.0 + np.random.default_rng(0).gamma(2.0, 3.0, size=(KEYS, 250))
    rows = [loss_row([x]) for x in losses]
    assert_errors_are_the_scatter([row.value for row in rows], [row.error for row in rows])


@pytest.mark.slow
def test_a_narrow_guide_and_different_restarts():
    narrow = {**EXACT, "z_auto_scale": jnp.array(0.1)}
    found = of_svi(narrow)
    # Its weights may not be used, and other lines judge the draws.
    assert wrong(found) == [SD, SHAPES] and "k-hat" not in rows_of(found)
    far = {**EXACT, "z_auto_loc": jnp.array(3.0)}
    assert "largest R-hat" in wrong(of_svi([EXACT, far]))


def two(x):
    w = numpyro.sample("w", dist.Normal(jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])).to_event(1))
    numpyro.sample("x", dist.Normal(w[0], 1.0), obs=x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "shift", "expected"), [(1.0, 0.0, []), (0.5, 0.0, [SD, SHAPES]), (1.0, 2.0, [MEAN])]
)
def test_particles_are_judged_by_moves(factor, shift, expected):
    """Of 20 each of 20 trajectories counts: the ratio is known to 7 %."""
    guide = AutoParticles(two, num_particles=20, init_from=None)
    svi = SVI(two, guide, optax.adam(0.1), SVGD())
    params = svi.get_params(svi.init(random.key(0), 0.3))
    noise = np.random.default_rng(0).normal(size=(20, 2))
    noise = (noise - noise.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(noise.T, ddof=0))).T
    sd = np.array([1 / np.sqrt(5.0), 3.0])  # of the posterior: 1 / .25 + 1 and 1 / 9
    mean = np.array([(4 + 0.3) / 5, -2.0])
    params["auto_particles"] = jnp.asarray(mean + (factor * noise + shift) * sd, float)
    found = diagnose(svi, params, model_args=(0.3,))
    rows = rows_of(found)
    assert set(wrong(found)) <= set(expected) and wrong(found)[:1] == expected[:1], found
    assert rows[SD].value == pytest.approx(factor, rel=0.3) or shift
    assert rows[MEAN].value == pytest.approx(shift, abs=0.3)


def test_particles_that_are_too_few_for_their_dimension_are_wrong():
    few = SVI(two, AutoParticles(two, num_particles=3, init_from=None), optax.adam(0.1), SVGD())
    with pytest.warns(InferenceWarning):
        params = few.get_params(few.init(random.key(0), 0.3))
    assert "number of particles" in wrong(diagnose(few, params, model_args=(0.3,), num_moves=0))


def latents(x):
    z = numpyro.sample("z", dist.Normal())
    u = numpyro.sample("u", dist.Normal(z))
    numpyro.sample("x", dist.Normal(u).expand([3]).to_event(1), obs=x)


def by_hand(x):
    numpyro.sample("z", dist.Delta(0.3))
    numpyro.sample("u", dist.Normal(0.4, 0.5))


@pytest.mark.slow
def test_a_site_without_spread_is_no_posterior():
    guide = AutoGuideList(latents)
    guide.append(AutoDelta(block(latents, hide=["u"])))
    guide.append(AutoNormal(block(latents, hide=["z"])))
    for each in (guide, by_hand):
        svi = SVI(latents, each, optax.adam(0.1), Trace_ELBO())
        params = svi.get_params(svi.init(random.key(0), X))
        line = rows_of(diagnose(svi, params, model_args=(X,), num_moves=0))[
            "sites that do not vary"
        ]
        assert line.ok is False and "'z' are the same: a Delta" in line.verdict


def test_a_point_is_an_estimate_that_cannot_be_judged():
    svi = SVI(latents, AutoDelta(latents), optax.adam(0.1), Trace_ELBO())
    params = {"z_auto_loc": jnp.array(0.4), "u_auto_loc": jnp.array(0.4)}
    found = diagnose(svi, params, model_args=(X,))
    assert wrong(found) == [] and not found.ok
    assert "a point estimate" in rows_of(found)["sites that do not vary"].verdict


@pytest.mark.slow
def test_the_table_prints_converts_and_pickles():
    found = of_svi({**EXACT, "z_auto_scale": jnp.array(0.1)})
    text = str(found)
    assert text == repr(found)
    assert text.startswith("AutoNormal by Trace_ELBO, 1 x 500 draws: 2 of 3 are wrong\n")
    assert all(len(line) <= 100 for line in text.splitlines())
    frame = found.to_frame()
    assert list(frame.index) == [x.quantity for x in found.rows]
    assert not frame.loc[SD, "ok"]
    assert pickle.loads(pickle.dumps(found)) == found
