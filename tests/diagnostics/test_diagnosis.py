"""``diagnose``: every line provoked once, and what it says where nothing is wrong."""

from collections import namedtuple
import pickle
from types import SimpleNamespace

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.mcmc import MCMCKernel
import optax
import pytest

from numpyro_ext.diagnostics import InferenceWarning, diagnose, to_arviz
from numpyro_ext.diagnostics._facts import Facts
from numpyro_ext.diagnostics.judges.losses import loss_rows
from numpyro_ext.diagnostics.judges.stochastic_gradients import sgmcmc_rows
from numpyro_ext.mcmc import SGHMC, Settings
from numpyro_ext.particles import SVGD, AutoParticles

X = jnp.array([0.5, -1.0, 2.0])
EXACT = {"z_auto_loc": jnp.array(0.375), "z_auto_scale": jnp.array(0.5)}
MANY = 1.0 + jnp.sin(jnp.arange(200.0))


def conjugate(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=x[i])


def rows_of(diagnosis):
    return {row.quantity: row for row in diagnosis.rows}


def wrong(diagnosis):
    return [row.quantity for row in diagnosis.rows if row.ok is False]


State = namedtuple("State", "i z kinetic_temperature diverging step_scale rng_key")


class Scripted(MCMCKernel):
    """Independent draws of the posterior, and whatever else a run may report."""

    sample_field = "z"
    default_fields = ("z", "kinetic_temperature", "diverging")
    model = staticmethod(conjugate)
    steps_per_sample = 3
    settings = None

    def __init__(self, *, heat=1.0, diverging=0.0, scale=1.0, still=0.0, lost=0.0, sg=True):
        self.heat, self.share, self.scale = heat, diverging, scale
        self.still, self.lost = still, lost
        self.inference_method = "sgmcmc" if sg else "mcmc"

    def gradients_per_transition(self, rows):
        return 1.0 if self.inference_method == "sgmcmc" else None

    def noise_share(self, state):
        return None

    def temperature_at(self, i):
        return jnp.ones(())

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        zero = jnp.zeros(())
        scale = jnp.asarray(self.scale, float)
        return State(jnp.zeros((), int), {"z": zero + 0.375}, zero, zero > 0, scale, rng_key)

    def sample(self, state, model_args, model_kwargs):
        rng_key, key_z, key_r, key_d, key_l = random.split(state.rng_key, 5)
        z = 0.375 + 0.5 * random.normal(key_z)
        z = self.still * jnp.nan_to_num(state.z["z"]) + (1 - self.still) * z
        z = jnp.where(random.bernoulli(key_l, self.lost), jnp.nan, z)
        heat = self.heat * jnp.mean(random.normal(key_r, (10,)) ** 2)
        diverging = random.bernoulli(key_d, self.share)
        return State(state.i + 3, {"z": z}, heat, diverging, state.step_scale, rng_key)

    def postprocess_fn(self, model_args, model_kwargs):
        return lambda z: z


def run(kernel, *args, num_samples=500, num_warmup=0, num_chains=2, method="vectorized", **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, **kwargs)
    return mcmc


def scripted(*, num_chains=1, settings=None, num_samples=500, **kwargs):
    kernel = Scripted(**kwargs)
    kernel.settings = settings
    return run(kernel, X, num_chains=num_chains, num_samples=num_samples, method="sequential")


@pytest.mark.slow
def test_a_good_run_is_fine_and_its_tree_says_the_same():
    mcmc = scripted()
    found = diagnose(mcmc)
    assert found.ok, found
    assert [row.quantity for row in found.rows] == [
        "kinetic temperature",
        "share of diverging draws",
        "step scale after warmup",
        "largest R-hat",
        "smallest ESS",
        "ESS per gradient",
        "sd against exact moves, worst",
        "shift against exact moves, worst",
        "shape against exact moves, worst",
    ]
    assert rows_of(found)["ESS per gradient"].value == pytest.approx(1 / 3, rel=0.6)
    again = diagnose(to_arviz(mcmc))
    # All but the moves, which need the model.
    assert [row[:2] for row in again.rows] == [row[:2] for row in found.rows[:-3]]
    assert again.title == found.title == "Scripted, 1 x 500 draws"


@pytest.mark.slow
def test_everything_that_a_stochastic_gradient_run_can_show_is_said_and_warned_of():
    mcmc = scripted(heat=4.0, diverging=0.1, scale=0.25)
    found = diagnose(mcmc, num_moves=0)
    shown = ["kinetic temperature", "share of diverging draws", "step scale after warmup"]
    assert wrong(found) == shown
    hot = rows_of(found)["kinetic temperature"]
    assert hot.value == pytest.approx(4.0, abs=4 * hot.error)
    assert "about 2 times too wide" in hot.verdict
    with pytest.warns(InferenceWarning) as record:
        tree = to_arviz(mcmc)
    # One sentence each, with the number and the remedy.
    assert len(record) == 3
    for warning, name in zip(record, shown, strict=True):
        text = str(warning.message)
        row = rows_of(found)[name]
        assert text == f"the {name} is {row.shown} (limit {row.limit}): {row.verdict}"
        assert warning.filename == __file__
    assert wrong(diagnose(tree)) == shown


@pytest.mark.parametrize("name", ["kinetic_temperature", "implied_variance_ratio"])
@pytest.mark.parametrize(
    ("mean", "spread", "num", "ok"),
    [(1.0, 0.3, 2000, True), (1.4, 0.3, 2000, False), (20.0, 2.0, 10, None)],
)
def test_a_level_outside_of_its_limit_by_less_than_its_error_is_not_judged(
    name, mean, spread, num, ok
):
    """The error of independent values is their standard deviation over the root of their number."""
    x = np.random.default_rng(0).lognormal(0, spread, (2, num))
    x = mean * x / np.mean(x)
    (found,) = sgmcmc_rows({name: x}, Facts(temperature=1.0))
    assert found.ok is ok, found
    assert found.value == pytest.approx(mean)
    assert found.error == pytest.approx(np.std(x) / x.size**0.5, rel=0.3)
    assert ("not judged" in found.verdict) is (found.error > 0.1) is (ok is None)


def test_the_level_of_the_temperature_is_that_of_the_settings_found():
    low = 1 / (1 - 0.5**2 / 4)
    law = 1.05 * low
    settings = Settings(0.5, variance_ratio=1.05, kinetic_temperature=(low, law))
    found = diagnose(scripted(heat=law, settings=settings, num_samples=2000), num_moves=0)
    assert found.ok, found
    assert rows_of(found)["kinetic temperature"].limit == "1.07 to 1.12 +- 10%"
    hot = diagnose(scripted(heat=law, num_samples=2000), num_moves=0)
    assert wrong(hot) == ["kinetic temperature"]


def test_slower_than_predicted_is_not_near_normal():
    settings = Settings(0.01, transitions=3.0)
    run = scripted(still=0.95, settings=settings, num_samples=20_000)
    found = diagnose(run, num_moves=0)
    row = rows_of(found)["transitions per independent draw"]
    # An autoregression with coefficient .95 is worth (1 - .95) / (1 + .95) of its draws; over 200
    # keys the estimate from 20,000 scatters by 13 %.
    assert row.value == pytest.approx(3 * 39, rel=4 * 0.13)
    assert row.ok is False
    assert "reparametrise" in row.verdict


def test_chains_that_differ_and_divergences_of_an_exact_kernel():
    mcmc = scripted(diverging=0.01, sg=False, still=0.999, num_chains=2)
    found = diagnose(mcmc, num_moves=0)
    assert wrong(found) == ["divergences", "largest R-hat", "smallest ESS"]
    assert "kinetic temperature" not in rows_of(found)


def test_a_site_that_never_moves_and_draws_that_are_not_finite():
    assert "sites that never move" in wrong(diagnose(scripted(still=1.0, sg=False)))
    row = rows_of(diagnose(scripted(lost=0.1, sg=False)))["share of draws not finite"]
    assert row.value == pytest.approx(0.1, abs=0.05)
    assert row.ok is False


@pytest.mark.filterwarnings("ignore:the mean of .* times what it should be")
def test_gradient_noise_heats_sghmc_and_its_temperature_says_so():
    kernel = SGHMC(conjugate, 0.05, friction=1.0)
    start = {"z": jnp.full(2, 1.0)}
    mcmc = run(kernel, MANY, 5, num_warmup=500, num_samples=2000, init_params=start)
    row = rows_of(diagnose(mcmc, num_moves=0))["kinetic temperature"]
    assert row.ok is False
    # The law: T + eps^2 s^2 coth(C eps / 2) / 4, at the end of a step over 1 - eps^2 h / 4.
    s2, h = 200**2 / 5 * float(np.var(MANY)), 201.0
    law = (1 + 0.05**2 / 4 * s2 / np.tanh(0.025)) / (1 - 0.05**2 * h / 4)
    assert row.value == pytest.approx(law, abs=5 * row.error)
    with pytest.warns(InferenceWarning, match=r"kinetic temperature .* step_size=None"):
        to_arviz(mcmc, log_likelihood=False)


SVI_OF_CONJUGATE = SVI(conjugate, AutoNormal(conjugate), numpyro.optim.Adam(0.1), Trace_ELBO())


def of_svi(params, losses=None, **kwargs):
    rest = {"model_args": (X,), "num_samples": 500, **kwargs}
    result = params if losses is None else SimpleNamespace(params=params, losses=losses)
    return diagnose(SVI_OF_CONJUGATE, result=result, **rest)


@pytest.mark.slow
def test_an_exact_fit_is_fine():
    noise = np.random.default_rng(0).normal(size=1000)
    found = of_svi(EXACT, 5.8 + noise)
    assert found.ok, found
    elbo = rows_of(found)["ELBO (order 1)"]
    assert elbo.value == pytest.approx(-5.7937128, abs=1e-4)
    assert elbo.ok is None


@pytest.mark.slow
def test_losses_that_fall_rise_or_are_lost():
    noise = np.random.default_rng(0).normal(size=1000)

    def row_of(losses):
        return loss_rows([losses], is_right=False)[0]

    falling = row_of(noise - 0.01 * np.arange(1000))
    # 200 steps of .01 from the middle of one fifth to that of the next.
    assert falling.value == pytest.approx(-2.0, abs=4 * falling.error)
    assert falling.ok is False and "still falling" in falling.verdict
    assert "rose" in row_of(noise + 0.01 * np.arange(1000)).verdict
    noise[-1] = np.nan  # a step that was skipped
    assert row_of(noise).ok
    noise[-9::2] = np.nan
    assert row_of(noise).ok is False and "1% of the losses are not" in row_of(noise).verdict


@pytest.mark.slow
def test_a_narrow_guide_has_bad_weights_and_different_restarts_a_large_rhat():
    narrow = {**EXACT, "z_auto_scale": jnp.array(0.1)}
    found = of_svi(narrow)
    assert wrong(found) == ["sd against exact moves, worst", "shape against exact moves, worst"]
    assert rows_of(found)["k-hat"].ok is None
    # Log weights with a standard deviation of (3 - .375) / .5 = 5.25: one draw carries the sum.
    far = {**EXACT, "z_auto_loc": jnp.array(3.0)}
    assert "says little" in rows_of(of_svi(far))["bound of order 0"].verdict
    assert "largest R-hat" in wrong(of_svi([EXACT, far]))


@pytest.mark.nightly
def test_units_are_judged_one_by_one():
    def local(x):
        with numpyro.plate("N", len(x)):
            numpyro.sample("x", dist.Normal(numpyro.sample("z", dist.Normal())), obs=x)

    x = jnp.linspace(-1.0, 1.0, 10)
    # The posterior of a unit is N(x / 2, 1 / 2); two of ten units have a tenth of its sd.
    scale = np.sqrt(0.5) * np.where(np.arange(10) < 2, 0.1, 1.0)
    params = {"z_auto_loc": x / 2, "z_auto_scale": jnp.asarray(scale, float)}
    svi = SVI(local, AutoNormal(local), numpyro.optim.Adam(0.1), Trace_ELBO())
    found = diagnose(svi, result=params, model_args=(x,))
    (row,) = (row for row in found.rows if row.quantity.startswith("share of units"))
    assert row.value == pytest.approx(0.2)
    assert row.ok is None and row.error < 0.1


def two(x):
    w = numpyro.sample("w", dist.Normal(jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])).to_event(1))
    numpyro.sample("x", dist.Normal(w[0], 1.0), obs=x)


@pytest.mark.slow
def test_the_implied_sd_ratio_of_particles_is_the_right_one_on_a_gaussian():
    guide = AutoParticles(two, num_particles=20, init_from=None)
    svi = SVI(two, guide, optax.adam(0.1), SVGD())
    params = svi.get_params(svi.init(random.key(0), 0.3))
    noise = np.random.default_rng(0).normal(size=(20, 2))
    noise = (noise - noise.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(noise.T, ddof=0))).T
    sd = np.array([1 / np.sqrt(5.0), 3.0])  # of the posterior: 1 / .25 + 1 and 1 / 9
    mean = np.array([(4 + 0.3) / 5, -2.0])
    for factor, ok in ((1.0, True), (0.5, False)):
        particles = jnp.asarray(mean + factor * noise * sd, float)
        found = diagnose(svi, result={**params, "auto_particles": particles}, model_args=(0.3,))
        row = rows_of(found)["implied sd ratio, worst"]
        assert row.value == pytest.approx(factor, rel=1e-4)
        assert (row.ok, found.ok) == (ok, ok)
    shifted = jnp.asarray(mean + noise * sd + 2 * sd, float)
    found = diagnose(svi, result={**params, "auto_particles": shifted}, model_args=(0.3,))
    assert wrong(found) == ["shift in sds", "shift against exact moves, worst"]
    assert rows_of(found)["shift in sds"].value == pytest.approx(2.0, rel=1e-3)
    with pytest.warns(InferenceWarning, match="the shift in sds is 2"):
        tree = to_arviz(svi, result={**params, "auto_particles": shifted}, model_args=(0.3,))
    # All but the moves and the Stein discrepancy, which need the model.
    assert [row[:2] for row in diagnose(tree).rows] == [row[:2] for row in found.rows[:-3]]


@pytest.mark.slow
def test_the_table_prints_converts_and_pickles():
    found = of_svi({**EXACT, "z_auto_scale": jnp.array(0.1)})
    text = str(found)
    assert text == repr(found)
    assert text.startswith(
        "AutoNormal by Trace_ELBO, 1 x 500 draws: 2 of 6 are wrong, 1 not judged\n"
    )
    assert all(len(line) <= 100 for line in text.splitlines())
    frame = found.to_frame()
    assert list(frame.index) == [row.quantity for row in found.rows]
    assert not frame.loc["sd against exact moves, worst", "ok"]
    assert pickle.loads(pickle.dumps(found)) == found
