"""Expectation propagation against fixed points by quadrature, exact posteriors, and laws."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import ADF, EP
from numpyro_ext.ep.normal import Site, plus, product_of
from tests.ep.models import (
    LOGISTIC,
    PROBIT,
    X_LINEAR,
    Y_LINEAR,
    Y_SCALE,
    exact_linear,
    fit,
    linear,
    logistic,
    mixture,
    probit,
    unknown_scale,
)

pytestmark = pytest.mark.filterwarnings("ignore:power is:UserWarning")


def moments_of(params):
    """Mean and covariance of the guide, or variances if it is diagonal."""
    if "auto_scale" in params:
        return params["auto_loc"], params["auto_scale"] ** 2
    L = params["auto_scale_tril"]
    return params["auto_loc"], L @ L.T


# What the moment equations give in double precision, by quadrature on fine grids: the mean, the
# entries (11, 12, 22) of the covariance, and log Z.
A, B, C, D = (probit, *PROBIT), (mixture,), (logistic, *LOGISTIC), (unknown_scale, Y_SCALE)
D_HALF = (unknown_scale, Y_SCALE, True)
FIXED_POINTS = {
    "A": (A, {}, [0.8289471274], [0.1911711265], -5.1082801339),
    "A, parallel": (A, {"schedule": "parallel"}, [0.8289471274], [0.1911711265], -5.1082801339),
    "A, VI": (A, {"power": 0.0}, [0.8274601803], [0.1826260856], -5.1171745238),
    "A, 2": (A, {"power": 2.0}, [0.8297876433], [0.1989621009], -5.1002543834),
    "B": (B, {"tol": 1e-10}, [0.5623159697537458], [0.5521639916], -3.3044138540554),
    "C": (
        C,
        {},
        [0.5992165598, 0.3129476696],
        [0.6022079936, -0.1191776423, 0.7163568844],
        -6.1894010779,
    ),
    "C, diagonal": (
        C,
        {"family": "diagonal", "schedule": "parallel"},
        [0.60724076, 0.31916077],
        [0.62722078, 0.73726464],
        None,
    ),
    "D": (
        D,
        {"schedule": "parallel"},
        [0.90538542, 0.18004848],
        [0.21215591, -0.00796081, 0.07636429],
        -11.07806918,
    ),
    "D, VI": (
        D,
        {"power": 0.0, "schedule": "parallel"},
        [0.9073532283, 0.1779682603],
        [0.1978059983, -0.0061233459, 0.0684238875],
        -11.1091449976,
    ),
    "D, HalfNormal": (
        D_HALF,
        {"schedule": "parallel"},
        [0.90147262, 0.20464536],
        [0.22108623, -0.00960514, 0.08747585],
        -11.37934690,
    ),
}


@pytest.mark.x64
@pytest.mark.parametrize("name", FIXED_POINTS)
def test_fixed_points(name, needs_x64):
    (model, *args), options, mean, second, log_z = FIXED_POINTS[name]
    ep = EP(model, **{"tol": 1e-9, **options})
    result = fit(ep, *args, num_steps=150)
    m, V = moments_of(result.params)
    V = V if V.ndim == 1 else V[np.triu_indices(len(V))]
    np.testing.assert_allclose(m, mean, rtol=3e-8, atol=1e-7)
    np.testing.assert_allclose(V, second, rtol=3e-7, atol=1e-7)
    report = result.state.report
    assert report.converged and report.skipped == 0
    # On the way, rounding decides where nodes are placed, and so whether they resolve a factor.
    assert ep.update(result.state, *args)[0].report.num_inaccurate == report.num_inaccurate
    if log_z is not None:
        np.testing.assert_allclose(-result.losses[-1], log_z, rtol=3e-9)
    # It is a parallel sweep, which is one more program after a serial fit.
    if log_z is not None and (name == "A" or options.get("schedule") == "parallel"):
        np.testing.assert_allclose(ep.log_evidence(result.state, *args), log_z, rtol=3e-9)


@pytest.mark.x64
def test_adf_is_one_pass_whose_evidence_stays(needs_x64):
    adf = ADF(probit)
    result = fit(adf, *PROBIT, num_steps=1)
    m, V = moments_of(result.params)
    np.testing.assert_allclose([m[0], V[0, 0]], [0.9355546600, 0.2213291625], rtol=1e-8)
    np.testing.assert_allclose(adf.log_evidence(result.state), -5.3636630648, rtol=1e-9)
    again = fit(adf, *PROBIT, num_steps=5)
    np.testing.assert_allclose(again.losses[-1], 3.63834, atol=1e-5)
    np.testing.assert_allclose(adf.log_evidence(again.state), -5.3636630648, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"power": 0.4, "schedule": "parallel"}, marks=pytest.mark.x64),
        {"power": 0.0},
    ],
)
def test_normal_rows_are_exact_after_one_sweep(options, tol):
    ep = EP(linear, damping=1.0, tol=1e-12, **options)
    state = ep.init(random.key(0), X_LINEAR, Y_LINEAR)
    mean, V, log_z = exact_linear()
    for _ in range(2):  # a further sweep changes nothing
        state, loss = ep.update(state, X_LINEAR, Y_LINEAR)
        m, cov = moments_of(ep.get_params(state))
        np.testing.assert_allclose(m, mean, atol=tol(2e-5, 1e-8))
        np.testing.assert_allclose(cov, V, atol=tol(2e-5, 1e-8))
    np.testing.assert_allclose(-loss, log_z, rtol=tol(3e-5, 1e-8))


def with_sites(ep, state, shift, precision):
    """The state with these sites of the rows."""
    total = product_of(state.table.groups[0].basis, Site(shift, precision))
    sites = Site(shift, precision), *state.sites[1:]
    return state._replace(total=plus(state.prior, total), sites=sites)


@pytest.mark.x64
def test_the_evidence_is_stationary_at_a_fixed_point(needs_x64):
    """Central differences in all 16 numbers of the sites, at power .6; and a saddle."""
    ep = EP(probit, power=0.6, schedule="parallel", tol=1e-11)
    state = fit(ep, *PROBIT, num_steps=200).state
    shape = state.sites[0].shift.shape

    def evidence(x):
        shift, precision = x[:8].reshape(shape), x[8:].reshape(*shape, 1)
        return ep.log_evidence(with_sites(ep, state, shift, precision), *PROBIT)

    at = jnp.concatenate([state.sites[0].shift.ravel(), state.sites[0].precision.ravel()])
    h = 1e-4 * jnp.eye(16)
    each = jax.jit(jax.vmap(evidence))
    up, down, middle = each(at + h), each(at - h), evidence(at)
    np.testing.assert_allclose((up - down) / 2e-4, 0, atol=3e-7)
    curvature = (up - 2 * middle + down) / 1e-8
    assert np.all(np.abs(curvature) > 1e-4)


@pytest.mark.x64
def test_separable_rows_settle_by_adaptive_damping(needs_x64):
    """Equal rows Phi(c t) with t ~ N(0, 100), where a constant d of 1 or .8 cycles for ever."""
    ep = EP(lambda x, y: probit(x, y, 10.0), schedule="parallel", tol=1e-8)
    for c, mean, variance in [(3.0, 9.47719, 11.0546), (1.0, 9.81950, 11.2597)]:
        result = fit(ep, jnp.full(40, c), jnp.ones(40), num_steps=400)
        m, V = moments_of(result.params)
        assert result.state.report.converged
        np.testing.assert_allclose([m[0], V[0, 0]], [mean, variance], rtol=1e-5)


@pytest.mark.nightly
def test_units_of_a_site_change_nothing():
    """The directions of a row mix a coefficient of any unit with a log scale, of which single
    precision leaves 1e-3 standard deviations."""

    def regression(X, y, unit):
        w = numpyro.sample("w", dist.Normal(0, 10 * unit).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.LogNormal(jnp.log(unit), 1))
        with numpyro.plate("rows", len(X)) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, scale), obs=y[i])

    n = np.arange(12.0)
    X = jnp.stack([np.sin(1.3 * n), 3 * np.cos(0.7 * n) + 0.5], 1)
    y = X @ jnp.array([1.0, -0.5]) + 0.5 * np.cos(2.1 * n)
    ep, computed = EP(regression), []
    for unit in (1.0, 1e-6, 1e6):
        result = fit(ep, X, y * unit, unit, num_steps=15)
        assert result.state.report.converged
        m, V = moments_of(result.params)
        units = np.array([unit, unit, 1.0])
        computed.append(((m - np.array([0, 0, np.log(unit)])) / units, V / units / units[:, None]))
    (m, V), *others = computed
    sd = np.sqrt(np.diag(V))
    for mean, cov in others:
        assert np.all(np.abs(mean - m) < 0.005 * sd)
        np.testing.assert_allclose(cov / sd / sd[:, None], V / sd / sd[:, None], atol=0.005)


@pytest.mark.slow
def test_a_mean_far_from_zero_settles_at_what_rounding_leaves():
    """126,000 standard deviations from 0, which single precision has to a hundredth of one."""
    y = np.random.default_rng(11).normal(1000.0, 0.05, 40)

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(900, 200))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(mean, 0.05), obs=y)

    ep = EP(model, schedule="parallel")
    result = ep.run(random.key(1), 20, jnp.asarray(y), progress_bar=False)
    sd, limit = 0.05 / 40**0.5, ep.convergence(result.state)["limit"]
    assert result.state.report.converged
    assert limit == pytest.approx(0.5 * 2**-23 * 1000 / sd, rel=0.01)
    loc = float(result.params["auto_loc"][0])
    assert abs(loc - y.mean()) < 0.05 * sd


def test_a_saved_state_goes_on():
    ep = EP(logistic, schedule="parallel")
    whole = fit(ep, *LOGISTIC, num_steps=30)
    with pytest.warns(InferenceWarning, match=r"has not converged in 2 sweeps: the residual is"):
        part = fit(ep, *LOGISTIC, num_steps=2)
    rest = ep.run(random.key(9), 28, *LOGISTIC, progress_bar=False, init_state=part.state)
    np.testing.assert_allclose(rest.params["auto_loc"], whole.params["auto_loc"], rtol=1e-5)
    assert len(part.losses) + len(rest.losses) == len(whole.losses)
