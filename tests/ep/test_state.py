"""A state has the prior, the rows and the evidence of the arguments of a call."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import ADF, EP
from tests.ep.models import LOGISTIC

X = np.column_stack([np.sin(3.0 * np.arange(30)), np.cos(2.0 * np.arange(30)), np.ones(30)])
Y = jnp.asarray(1.3 * X[:, 0] + 0.3 * X[:, 2] + 0.5 * np.sin(7.0 * np.arange(30) ** 2), float)
X = jnp.asarray(X, float)
SCALES = jnp.array([0.7, 1.0, 2.0])
OTHER = jax.jit(lambda: (X[:, jnp.array([2, 0, 1])] + 0.3, jnp.cos(5.0 * jnp.arange(30))))()


def regression(X, y, scales, noise):
    """A prior scale for each coefficient: automatic relevance determination."""
    w = numpyro.sample("w", dist.Normal(0.0, scales).to_event(1))
    with numpyro.plate("rows", len(X)) as idx:
        numpyro.sample("y", dist.Normal(X[idx] @ w, noise), obs=y[idx])


def exact(X, y, scales, noise):
    """Mean and covariance."""
    X, y, scales = (np.asarray(x, np.float64) for x in (X, y, scales))
    P = np.diag(scales**-2.0) + X.T @ X / noise**2
    return np.linalg.solve(P, X.T @ y / noise**2), np.linalg.inv(P)


def exact_evidence(X, y, scales, noise):
    S = noise**2 * jnp.eye(len(y)) + (X * scales**2) @ X.T
    return -0.5 * (y @ jnp.linalg.solve(S, y) + jnp.linalg.slogdet(2 * jnp.pi * S)[1])


@cache
def fitted():
    ep = EP(regression, schedule="parallel")
    return ep, ep.run(random.key(0), 40, X, Y, SCALES, 0.6, progress_bar=False)


def close(params, *args):
    mean, cov = exact(*args)
    sd = np.sqrt(np.diag(cov))
    assert np.all(np.abs(params["auto_loc"] - mean) < 1e-2 * sd)
    L = params["auto_scale_tril"]
    np.testing.assert_allclose(np.sqrt(np.diag(L @ L.T)), sd, rtol=2e-3)


@pytest.mark.slow
def test_arguments_are_checked_again_unless_nothing_can_have_changed(monkeypatch):
    """Arrays of NumPy may have changed in place, and a state may be of another fit."""
    checked = []

    def counted(plan, state, arrays):
        checked.append(arrays)
        return state, jnp.array(True)

    monkeypatch.setattr("numpyro_ext.ep.base.on_arguments", counted)
    monkeypatch.setattr(EP, "sweep", lambda self, plan, state, arrays: (state, 0.0))
    ep, rest = EP(regression), (Y, SCALES, jnp.asarray(0.6))
    state = ep.init(random.key(0), X, *rest)
    ep.update(ep.update(state, X, *rest)[0], X, *rest)
    assert len(checked) == 0
    other = state._replace(prior=jax.tree.map(lambda x: x + 1, state.prior))
    for call, (given, rows) in enumerate([(other, X), (state, X), (state, jnp.copy(X))]):
        ep.update(given, rows, *rest)
        assert len(checked) == call + 1
    for call in (4, 5):
        ep.update(state, np.asarray(X), *rest)
        assert len(checked) == call


@pytest.mark.slow
def test_a_run_goes_on_with_another_prior():
    ep, result = fitted()
    args = X, Y, SCALES / 5, 0.6
    again = ep.run(random.key(3), 40, *args, init_state=result.state, progress_bar=False)
    assert again.state.report.converged and again.state.i > result.state.i
    close(again.params, *args)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [OTHER, (X[:20], Y[:20])])
def test_a_run_does_not_go_on_with_rows_in_other_directions(rows):
    ep, result = fitted()
    with pytest.raises(ValueError, match="the state belongs to other data"):
        ep.run(random.key(3), 40, *rows, SCALES, 0.6, init_state=result.state, progress_bar=False)
    ep.init(random.key(0), X, Y, SCALES, 0.6)


@pytest.mark.slow
def test_a_compiled_step_has_the_prior_of_its_arguments():
    ep, result = fitted()
    step = jax.jit(lambda state, scales: ep.update(state, X, Y, scales, 0.6))
    state, _ = step(result.state, SCALES / 5)
    close(ep.get_params(state), X, Y, SCALES / 5, 0.6)


@pytest.mark.slow
def test_a_compiled_step_on_rows_in_other_directions_has_no_loss():
    ep, result = fitted()
    step = jax.jit(lambda X, y: ep.update(result.state, X, y, SCALES, 0.6))
    state, loss = step(*OTHER)
    assert np.isnan(loss) and state.report.skipped == 30
    assert np.isfinite(step(X, Y)[1])


@pytest.mark.slow
def test_the_evidence_belongs_to_its_arguments():
    """With sites that are exact for any prior; within .01 % in float32."""
    ep, result = fitted()
    for scales in (SCALES, SCALES / 5):
        computed = ep.log_evidence(result.state, X, Y, scales, 0.6)
        np.testing.assert_allclose(computed, exact_evidence(X, Y, scales, 0.6), rtol=1e-4)


@pytest.mark.slow
def test_the_evidence_is_differentiable_in_every_argument():
    ep, result = fitted()
    args = X, Y, SCALES, 0.6
    computed = jax.jit(jax.grad(partial_of(ep.log_evidence, result.state), (0, 1, 2, 3)))(*args)
    expected = jax.grad(exact_evidence, (0, 1, 2, 3))(*args)
    for a, b in zip(computed, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=5e-3 * np.max(np.abs(b)))


def partial_of(fn, state):
    return lambda *args: fn(state, *args)


def logistic(X, y, scale):
    """Beside a term of the prior that is not normal."""
    bias = numpyro.sample("bias", dist.StudentT(4.0, 0.3, scale))
    w = numpyro.sample("w", dist.Normal(0.0, scale).expand([2]).to_event(1))
    with numpyro.plate("rows", len(X)) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=X[idx] @ w + bias), obs=y[idx])


@pytest.mark.x64
@pytest.mark.parametrize("options", [{"power": 0.5}, {"family": "diagonal"}])
def test_the_gradient_is_the_slope_of_fits_nearby(options, needs_x64):
    """Central differences, of the scale and of all features along one direction."""
    ep = EP(logistic, schedule="parallel", tol=1e-10, **options)
    X, y = LOGISTIC
    move = jnp.cos(jnp.arange(14.0)).reshape(7, 2)

    def refit(h, k):
        args = X + k * h * move, y, 1.5 + h * (1 - k)
        return -ep.run(random.key(0), 300, *args, progress_bar=False).losses[-1]

    state = ep.run(random.key(0), 300, X, y, 1.5, progress_bar=False).state
    computed = jax.jit(jax.grad(partial_of(ep.log_evidence, state), (0, 2)))(X, y, 1.5)
    for k, value in ((0, computed[1]), (1, jnp.sum(computed[0] * move))):
        expected = (refit(1e-3, k) - refit(-1e-3, k)) / 2e-3
        np.testing.assert_allclose(value, expected, rtol=1e-4)


@pytest.mark.slow
def test_sites_of_other_data_give_a_warning_and_no_quiet_evidence():
    ep, result = fitted()
    with pytest.warns(InferenceWarning, match="the sites belong to other arguments"):
        ep.log_evidence(result.state, X, -Y, SCALES, 0.6)
    with pytest.raises(ValueError, match="the state belongs to other data"):
        ep.log_evidence(result.state, *OTHER, SCALES, 0.6)
    compiled = jax.jit(partial_of(ep.log_evidence, result.state))
    assert np.isnan(compiled(*OTHER, SCALES, 0.6))


def test_adf_goes_on():
    """A second pass counts the rows again, and its evidence is that of a first one."""
    adf, args = ADF(regression), (X, Y, SCALES, 0.6)
    first = adf.run(random.key(0), 1, *args, progress_bar=False)
    both = adf.run(random.key(0), 1, *args, init_state=first.state, progress_bar=False)
    close(both.params, jnp.concatenate([X, X]), jnp.concatenate([Y, Y]), SCALES, 0.6)
    np.testing.assert_allclose(adf.log_evidence(both.state), exact_evidence(*args), rtol=1e-3)
