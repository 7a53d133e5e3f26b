"""What every engine promises: guides, conversion, pickling, and a sentence for a wrong call."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal
import pytest

from numpyro_ext.diagnostics import InferenceWarning, diagnose
from numpyro_ext.ep import EP, ClosedForm
from tests.ep.models import LOGISTIC, PROBIT, Y_SCALE, linear, logistic, probit, unknown_scale


@pytest.fixture(scope="module")
def fitted():
    """A model whose sites are not in the order of the alphabet."""
    ep = EP(unknown_scale, schedule="parallel")
    return ep, ep.run(random.key(0), 40, Y_SCALE, progress_bar=False)


def test_the_parameters_fit_numpyros_guide(fitted):
    ep, result = fitted
    guide = AutoMultivariateNormal(unknown_scale)
    numpyro.handlers.seed(guide, 0)(Y_SCALE)
    ours, theirs = jax.jit(lambda p: (ep.guide.median(p), guide.median(p)))(result.params)
    assert set(theirs) == set(ours)
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-6)


@pytest.mark.slow
def test_diagnosis(fitted):
    """A residual above its limit has a line, unless the draws are found right."""
    ep, result = fitted
    short = result.state._replace(report=result.state.report._replace(residual=jnp.array(0.2)))
    for state, ok in ((result.state, True), (short, False)):
        diagnosis = diagnose(
            ep, result._replace(state=state), model_args=(Y_SCALE,), num_samples=200, num_moves=0
        )
        assert [row.ok for row in diagnosis.rows if row.quantity == "residual"] == [ok]
    # Where the draws are found right, it says nothing of them.
    diagnosis = diagnose(ep, result._replace(state=short), model_args=(Y_SCALE,))
    assert diagnosis.ok and all(row.quantity != "residual" for row in diagnosis.rows)


@pytest.mark.slow
def test_a_model_may_look_at_its_data():
    """Then the arrays are part of the compiled program; the answer is the same."""

    def grouped(groups, y):
        J = len(np.unique(np.asarray(groups)))
        theta = numpyro.sample("theta", dist.Normal(0.5, 1.5).expand([J]).to_event(1))
        with numpyro.plate("rows", len(y)) as idx:
            numpyro.sample("y", dist.Normal(theta[jnp.asarray(groups)[idx]], 1.0), obs=y[idx])

    ep = EP(grouped, schedule="parallel")
    groups, y = np.array([0, 1, 1, 0]), jnp.array([0.3, -1.0, 2.0, 0.9])
    result = ep.run(random.key(0), 30, groups, y, progress_bar=False)
    expected = (0.5 / 2.25 + np.array([1.2, 1.0])) / (1 / 2.25 + 2)
    np.testing.assert_allclose(result.params["auto_loc"], expected, atol=1e-3)


@pytest.mark.slow
def test_ranks():
    """1 for a regression, D for few coordinates, and none for a constant."""

    def constant(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([4]).to_event(1))
        with numpyro.plate("rows", len(y)) as idx:
            numpyro.sample("y", dist.Normal(theta[0] * (y[idx] > 0), 1.0), obs=y[idx])

    y = jnp.array([1.0, -1.0, 2.0])
    ep = EP(constant)
    state = ep.init(random.key(0), y)
    assert [g.basis.shape for g in state.table.groups] == [(3, 1, 4)]
    np.testing.assert_allclose(jnp.abs(state.table.groups[0].basis[0, 0]), [1, 0, 0, 0], atol=1e-5)
    state, _ = ep.update(state, y)
    assert float(jnp.abs(state.sites[0].precision[1])[0, 0]) < 1e-6
    assert EP(logistic).init(random.key(0), *LOGISTIC).table.groups[0].basis.shape == (7, 1, 2)


@pytest.mark.slow
def test_a_closed_form_is_used_in_all_coordinates():
    """The normal rows of a regression, by their own formula."""
    X = jnp.array([[1.0, 0.3], [-0.4, 2.0], [0.8, -1.1]])
    y = jnp.array([0.7, -2.9, 1.5])

    def closed(shift, precision, index, power):
        T = jnp.outer(X[index], X[index]) / 0.64 * power
        cov = jnp.linalg.inv(precision + T)
        mean = cov @ (shift + power * X[index] * y[index] / 0.64)
        return mean, cov, jnp.nan

    ep = EP(linear, projection=ClosedForm(closed), damping=1.0)
    result = ep.run(random.key(0), 3, X, y, progress_bar=False)
    P = np.array([1.5, 0.7]) ** -2.0
    expected = np.linalg.solve(
        np.diag(P) + X.T @ X / 0.64, P * np.array([0.4, -1.0]) + X.T @ y / 0.64
    )
    np.testing.assert_allclose(result.params["auto_loc"], expected, atol=1e-4)


def test_a_power_above_1_warns_at_construction():
    with pytest.warns(InferenceWarning, match="power is 2, above 1"):
        EP(probit, power=2)


def test_an_engine_that_has_not_read_its_model():
    with pytest.raises(ValueError, match="has not read its model; call init"):
        EP(probit).update(None, *PROBIT)
