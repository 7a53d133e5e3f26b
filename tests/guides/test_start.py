"""Where guides begin: at the modes of their posterior, inside a fixed map of the heaviest one."""

from functools import cache, partial
import pickle
import warnings

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import NUTS, SVI, Predictive, Trace_ELBO, init_to_median
import optax
import pytest

from numpyro_ext._model import mode_search
from numpyro_ext._model.modes import Mode, Modes
from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.guides import (
    AutoAuxiliary,
    AutoHVI,
    AutoImplicit,
    AutoMixtureNormal,
    AutoRealNVPNormal,
    AutoSemiImplicit,
)
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import SemiImplicitELBO
from numpyro_ext.optim import find_modes
from tests.two_modes import in_raw_units as two_modes

small = partial(AutoRealNVPNormal, num_flows=2, hidden_dims=(4,))
ROOT = np.array([[2.0, 0.0, 0.0], [95.0, 31.0, 0.0], [0.0, 0.0, 1e-4]])
CENTER = np.array([3.0, -5000.0, 0.02])
LOG_EVIDENCE = 1.5


def unequal():
    """Normal, with standard deviations from .0001 to 100; the alphabet has another order."""
    pair = dist.MultivariateNormal(CENTER[:2], scale_tril=ROOT[:2, :2])
    numpyro.sample("b", pair)
    numpyro.sample("a", dist.Normal(CENTER[2], ROOT[2, 2]))
    numpyro.factor("mass", LOG_EVIDENCE)


def begun(guide, *args, loss=None, key=0):
    """With Adam as elsewhere, at the start."""
    svi = SVI(guide.model, guide, optax.adam(5e-3), loss or Trace_ELBO())
    return svi, svi.init(random.key(key), *args)


@pytest.mark.parametrize(
    ("make", "loss", "error"),
    [
        (small, None, 1e-4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (partial(AutoMixtureNormal, num_components=1, covariance="full"), None, 1e-4),
                (partial(AutoSemiImplicit, hidden_dims=(4,)), SemiImplicitELBO(), 1e-3),
                (partial(AutoAuxiliary, hidden_dims=(4,)), None, 1e-3),
                # Its reverse model is right where steps are short.
                (partial(AutoHVI, step_size=1e-3, hidden_dims=(4,)), None, 1e-2),
            )
        ),
    ],
)
def test_the_first_loss_is_minus_the_log_evidence_of_a_normal_posterior(make, loss, error):
    """In every draw, because the guide is the posterior."""
    svi, state = begun(make(unequal), loss=loss)
    assert float(jax.jit(svi.evaluate)(state)) == pytest.approx(-LOG_EVIDENCE, abs=error)


@pytest.mark.filterwarnings("ignore:the guide begins at the normal")
def test_a_path_by_scan_with_missing_rows_begins_at_the_modes():
    """A ``scan`` takes one time after the other of the start."""

    def model(y, seen):
        scale = numpyro.sample("scale", dist.LogNormal())

        def step(a, row):
            a = numpyro.sample("a", dist.Normal(0.5 * a, scale))
            numpyro.sample("y", dist.Normal(a, 0.3), obs=row[0], obs_mask=row[1])
            return a, None

        scan(step, 0.0, (y, seen))

    data = jnp.sin(jnp.arange(30.0)), jnp.arange(30) % 3 > 0
    svi, state = begun(AutoRealNVPNormal(model, num_flows=1, hidden_dims=(4,)), *data)
    assert np.isfinite(float(svi.evaluate(state, *data)))


def test_draws_without_a_density_are_those_of_the_posterior():
    """20,000 draws know a mean to .007 sd and a covariance to 1 %."""
    guide = AutoImplicit(unequal, hidden_dims=(4,))
    svi, state = begun(guide)
    z = guide.sample_latent(random.key(1), svi.get_params(state), 20_000)
    xi = np.linalg.solve(ROOT, (np.asarray(z, float) - CENTER).T)
    np.testing.assert_allclose(xi.mean(1), 0, atol=0.03)
    np.testing.assert_allclose(np.cov(xi), np.eye(3), atol=0.05)


@pytest.mark.slow
def test_the_map_stays_in_training_and_goes_on_and_pickles():
    guide = small(unequal)
    svi, start = begun(guide)
    run = partial(svi.run, progress_bar=False)
    whole, half = run(random.key(0), 6), run(random.key(0), 3)
    rest = run(random.key(9), 3, init_state=half.state)
    fixed = {"auto_center", "auto_root"}
    for name, value in whole.params.items():
        np.testing.assert_allclose(rest.params[name], value, rtol=1e-5, atol=1e-6)
        moved = np.any(np.asarray(value) != np.asarray(svi.get_params(start)[name]))
        assert moved == (name not in fixed)
    again, params = pickle.loads(pickle.dumps((guide, whole.params)))
    draws = [
        Predictive(one, params=p, num_samples=4)(random.key(1))
        for one, p in ((guide, whole.params), (again, params))
    ]
    np.testing.assert_array_equal(draws[0]["b"], draws[1]["b"])
    with pytest.raises(ValueError, match="have 'auto_loc' but not 'auto_center' and 'auto_root'"):
        svi.init(random.key(0), init_params={"auto_loc": jnp.zeros(3)})
    del params["auto_root"]
    with pytest.raises(ValueError, match="params has no 'auto_root'"):
        again.sample_posterior(random.key(1), params)


def mean_of(x):
    w = numpyro.sample("w", dist.Normal(0.0, 1e6).expand([2]).to_event(1))
    numpyro.sample("x", dist.Normal(w, 1e-3).expand(x.shape).to_event(2), obs=x)


@pytest.mark.slow
def test_a_second_init_on_other_data_begins_at_their_mode_and_keys_share_one():
    """The posterior is normal around the mean of the rows, of scale .001 / sqrt(4)."""
    guide, x = small(mean_of), jnp.array([[3.0, -70.0]] * 4)
    svi = SVI(mean_of, guide, optax.adam(5e-3), Trace_ELBO())
    keys = random.split(random.key(0), 3)
    for rows in (x, x - 4.0):
        many = jax.vmap(lambda key, rows=rows: svi.init(key, rows))(keys)
        inside = jax.jit(lambda key, rows=rows: svi.init(key, rows))(keys[0])
        for params in (svi.get_params(many), svi.get_params(inside)):
            center = np.asarray(params["auto_center"]).reshape(-1, 2)
            np.testing.assert_allclose(center, rows[:1].repeat(len(center), 0), atol=1e-3)
            scale = np.asarray(params["auto_root"]).reshape(-1, 2, 2)[0]
            np.testing.assert_allclose(np.diag(scale), 5e-4, rtol=1e-3)


def names_of(guide, *args):
    svi, state = begun(guide, *args)
    return set(svi.get_params(state))


USUAL = {"auto_loc", "auto_scale", "auto_net__0$params", "auto_net__1$params"}


def wide():
    numpyro.sample("w", dist.Normal().expand([2049]).to_event(1))


def with_network():
    z = numpyro.sample("z", dist.Normal().expand([2]).to_event(1))
    net = numpyro.module("net", stax.Dense(1), (2,))
    numpyro.sample("y", dist.Normal(net(z)[0], 1.0), obs=1.0)


@pytest.mark.parametrize(
    ("model", "options", "own"),
    [
        (unequal, {"init_loc_fn": init_to_median}, set()),
        (unequal, {"init_scale": 0.1}, set()),
        (unequal, {"init_from": None}, set()),
        (wide, {}, set()),
        (with_network, {}, {"net$params"}),
    ],
)
def test_without_a_search_the_parameters_are_the_usual_ones(model, options, own):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names_of(small(model, **options)) == USUAL | own


@pytest.mark.slow
def test_traced_arguments_and_a_search_that_fails_warn_and_begin_as_usual(monkeypatch):
    x = jnp.array([[0.3, -0.7]] * 4)
    svi = SVI(mean_of, small(mean_of), optax.adam(5e-3), Trace_ELBO())
    with pytest.warns(InferenceWarning, match="is traced, while modes are found from numbers"):
        state = jax.jit(svi.init)(random.key(0), x)
    guide = small(mean_of, init_from=None)
    usual = svi.get_params(SVI(mean_of, guide, svi.optim, Trace_ELBO()).init(random.key(0), x))
    params = svi.get_params(state)
    np.testing.assert_allclose(params["auto_loc"], usual["auto_loc"], rtol=1e-6)
    np.testing.assert_allclose(params["auto_scale_tril"], 0.1 * np.eye(2), rtol=1e-6)
    np.testing.assert_array_equal(params["auto_root"], np.eye(2))

    def fail(*args, **kwargs):
        raise ValueError("no curvature.")

    monkeypatch.setattr(mode_search, "search_model", fail)
    with pytest.warns(InferenceWarning, match="search for a mode failed: no curvature"):
        begun(small(unequal))

    def stop(*args, **kwargs):
        raise NotImplementedError

    monkeypatch.setattr(mode_search, "search_model", stop)
    with pytest.warns(InferenceWarning, match="failed: NotImplementedError. Give another init_loc"):
        begun(small(unequal))


@cache
def modes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_modes(two_modes)


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_a_mixture_has_components_at_each_mode_with_its_share(covariance):
    assert [mode.share for mode in modes().modes] == pytest.approx([0.66, 0.34], abs=2e-3)
    guide = AutoMixtureNormal(two_modes, covariance=covariance)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svi, state = begun(guide)
    weights, normals = guide.components(svi.get_params(state))
    left = np.asarray(normals.mean)[:, 0] < 0
    assert np.sum(np.asarray(weights)[left]) == pytest.approx(0.66, abs=2e-3)
    assert np.sum(left) == 3  # of five
    # Spread by .7 of the mode's own scale, which 5 draws exceed twice at one key in a million.
    for here, center, sd in ((left, -2.0, 0.3), (~left, 2.0, 0.15)):
        assert np.all(np.abs(np.asarray(normals.mean)[here, 0] - center) < 4 * sd)


def test_a_flow_says_that_there_is_another_mode():
    guide = small(two_modes)
    with pytest.warns(InferenceWarning, match=r"begins at the heaviest of several modes: .*0\.66"):
        begun(guide)


RAW = np.random.default_rng(0).normal(size=(300, 12)) * np.geomspace(1, 3000, 12)
RAW = (RAW + np.linspace(0, 9000, 12)).astype(np.float32)
ETA = (RAW - RAW.mean(0)) @ (0.1 / RAW.std(0))
RAW_COUNTS = jnp.asarray(np.random.default_rng(1).poisson(np.exp(1 + ETA)), float)


def raw_columns(x, y):
    """Of which no point within 2 of 0 has a finite density: exp of some ten thousand."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([12]).to_event(1))
    a = numpyro.sample("a", dist.Normal(0, 500))
    numpyro.sample("y", dist.Poisson(jnp.exp(a + x @ w)), obs=y)


@cache
def of_raw_columns():
    """The mode by iterated weighted least squares in double precision."""
    X, y = np.column_stack([RAW.astype(float), np.ones(300)]), np.asarray(RAW_COUNTS, float)
    precision = np.diag([1.0] * 12 + [1 / 500**2])
    unit = np.append(RAW.std(0), 1.0)
    beta = np.append(0.1 / RAW.std(0), 1 - RAW.mean(0) @ (0.1 / RAW.std(0)))
    for _ in range(50):
        mu = np.exp(X @ beta)
        H = X.T @ (mu[:, None] * X) + precision
        g = X.T @ (y - mu) - precision @ beta
        beta = beta + np.linalg.solve(H / np.outer(unit, unit), g / unit) / unit
    return beta, np.linalg.cholesky(np.linalg.inv(H / np.outer(unit, unit))) / unit[:, None]


@pytest.mark.slow
def test_a_guide_that_is_given_a_start_asks_for_no_other():
    center, factor = of_raw_columns()
    modes = Modes((Mode(jnp.asarray(center), jnp.asarray(factor)),), (("w", (12,)), ("a", ())))
    guide = small(raw_columns, init_from=modes)
    svi, state = begun(guide, RAW, RAW_COUNTS)
    np.testing.assert_allclose(svi.get_params(state)["auto_center"], center, rtol=1e-5)
    with pytest.raises(ValueError, match=r"density and gradient; give init_from=find_modes\(model"):
        begun(small(raw_columns, init_from=None), RAW, RAW_COUNTS)


@pytest.mark.slow
def test_modes_are_a_strategy_of_numpyros_kernels():
    center, factor = of_raw_columns()
    modes = Modes((Mode(jnp.asarray(center), jnp.asarray(factor)),), (("w", (12,)), ("a", ())))
    kernel = NUTS(raw_columns, init_strategy=modes)
    state = kernel.init(random.key(0), 1, None, (RAW, RAW_COUNTS), {})
    np.testing.assert_allclose(state.z["w"], center[:12], rtol=1e-5)
    assert np.isfinite(state.potential_energy)
    with pytest.raises(ValueError, match=r"init_strategy=find_modes\(model, \*args\)"):
        SGHMC(raw_columns, 0.01).init(random.key(0), 0, None, (RAW, RAW_COUNTS), {})


@pytest.mark.nightly
@pytest.mark.parametrize("key", range(8))
def test_a_flow_is_right_on_raw_columns(key):
    """Against the normal at the mode, and the shift of the mean intercept from it: the sum of the
    rates is known, to which the variance 13 / sum y of their logarithms would add its half."""
    center, factor = of_raw_columns()
    guide = AutoRealNVPNormal(raw_columns)
    svi = SVI(raw_columns, guide, optax.adam(1e-3), Trace_ELBO(8))
    result = svi.run(random.key(key), 1000, RAW, RAW_COUNTS, progress_bar=False)
    draws = np.asarray(guide.sample_latent(random.key(9), result.params, 4000), float)
    xi = np.linalg.solve(factor, (draws - center).T)
    shift = np.append(np.zeros(12), -0.5 * 13 / RAW_COUNTS.sum() ** 0.5)
    np.testing.assert_allclose(xi.mean(1), shift, atol=0.1)
    np.testing.assert_allclose(xi.std(1), 1, atol=0.1)


def test_the_first_call_of_a_guide_is_few_programs(caplog):
    """Most of them the model's own operations, which NumPyro runs one by one; with the guide's own
    there were 53. The lengths are those of no other test, so that nothing is compiled before."""

    def model(y):
        sd = numpyro.sample("sd", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 23):
            level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("rows", 69):
            numpyro.sample("y", dist.Normal(sd * level[np.arange(69) % 23], 1), obs=y)

    y = np.random.default_rng(0).normal(size=69)
    mode = Mode(jnp.zeros(24), jnp.eye(24))
    modes = Modes((mode,), (("sd", ()), ("level", (23,))))
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        begun(small(model, init_from=modes), y)
    compiled = [x for x in caplog.messages if x.startswith("Finished XLA compilation")]
    assert 0 < len(compiled) <= 40
