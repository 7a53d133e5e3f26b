"""The curvature of more than 512 numbers: a matrix where a gradient costs more than a product with
it."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext._model import mode_search, surface
from numpyro_ext._model.mode_search import search_model
from numpyro_ext._model.surface import surface_of
from numpyro_ext.guides import AutoSplineNormal, AutoStructuredNormal
from numpyro_ext.optim import find_modes


def regression(x, y):
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ b, sd), obs=y)


def separated(x, y):
    """A logistic regression of few rows, with a skewed posterior."""
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def columns(rows, k, seed=0):
    """Neighbours are correlated by .47, and the units are unequal."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, k))
    x = x + 0.7 * np.roll(x, 1, axis=1)
    x *= np.geomspace(0.5, 2, k) / x.std(axis=0)
    return x, x @ rng.normal(size=k) / k**0.5 + rng.normal(size=rows)


def of_regression(x, y):
    """Means and sds of the coefficients, by the density of the noise's sd on a grid."""
    sums, product, each = x.T @ x, x.T @ y, []
    for sd in np.exp(np.linspace(-0.5, 0.5, 201)):
        precision = sums / sd**2 + np.eye(len(sums))
        mean, cov = np.linalg.solve(precision, product) / sd**2, np.linalg.inv(precision)
        log_p = 0.5 * product @ mean / sd**2 - 0.5 * np.linalg.slogdet(precision)[1]
        log_p += -0.5 * y @ y / sd**2 - (len(y) - 1) * np.log(sd) - 0.5 * sd**2
        each.append((log_p, mean, np.diagonal(cov)))
    log_p, means, variances = (np.array(part) for part in zip(*each, strict=True))
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ means
    return mean, (p @ (variances + (means - mean) ** 2)) ** 0.5


@pytest.fixture
def few_are_many(monkeypatch):
    """As if 16 numbers were 512."""
    for module in (surface, mode_search):
        monkeypatch.setattr(module, "DENSE_UP_TO", 16)


def test_a_regression_has_the_scales_of_its_posterior(few_are_many):
    x, y = columns(150, 30)
    modes = find_modes(regression, x, y)
    mean, sds = of_regression(x, y)
    mode = modes.heaviest
    assert mode.is_matrix and not modes.problems
    # Its own sd is 30 / 150 too small at the mode, which the normal of greatest ELBO mends.
    b = slice(1, 31)
    np.testing.assert_allclose(mode.sds[b], sds, rtol=0.04)
    assert np.max(np.abs(mode.center[b] - mean) / sds) < 0.05


def test_it_agrees_with_the_search_of_fewer_numbers(monkeypatch):
    x, y = columns(150, 30)
    y = y > 0
    dense = find_modes(separated, x, y).heaviest
    for module in (surface, mode_search):
        monkeypatch.setattr(module, "DENSE_UP_TO", 16)
    large = find_modes(separated, x, y).heaviest
    assert large.is_matrix
    # Normals of greatest ELBO, from 64 draws of which each measures it.
    assert large.elbo > dense.elbo - 0.3
    np.testing.assert_allclose(large.sds, dense.sds, rtol=0.06)
    assert np.max(np.abs(large.center - dense.center) / dense.sds) < 0.2


def test_it_is_taken_where_a_gradient_costs_more(few_are_many):
    def is_dense(model, *args):
        _, potential = search_model(random.key(0), model, args, {}, starts=1)
        return surface_of(potential).ends_dense

    def apart(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    assert not is_dense(apart, jnp.zeros(300))
    assert is_dense(regression, *columns(150, 30))
    assert not is_dense(regression, *columns(150, 10))  # which is so all along


def flat(x, y):
    """Known noise, and a prior so wide that it is 1e-8 of the curvature of a column."""
    b = numpyro.sample("b", dist.Normal(0.0, 300.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)


@pytest.mark.parametrize("most", [16, 512])
@pytest.mark.parametrize("rows", [1000, 20])
def test_directions_that_no_row_sees_are_as_wide_as_the_prior(monkeypatch, most, rows):
    for module in (surface, mode_search):
        monkeypatch.setattr(module, "DENSE_UP_TO", most)
    x, y = np.random.default_rng(0).normal(size=(rows, 31)), np.zeros(rows)
    x[:, 1] = x[:, 0]
    modes = find_modes(flat, x, y)
    cov = np.linalg.inv(x.T @ x + np.eye(31) / 300**2)
    assert len(modes.modes) == 1 and not modes.problems
    np.testing.assert_allclose(modes.heaviest.sds, np.diagonal(cov) ** 0.5, rtol=0.01)


def scaled(x, y):
    """A product, of which only the product is known: a ridge of hyperbolas."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(a * (x @ b), 0.3), obs=y)


@pytest.mark.filterwarnings("ignore::numpyro_ext.diagnostics.InferenceWarning")
def test_it_goes_on_where_steps_of_newton_are_short(few_are_many, monkeypatch):
    """With the fit that has the diagonal alone, and the better of both is taken."""
    elbos = {}

    def watch(name):
        real = getattr(mode_search, name)

        def fit(*args):
            found = real(*args)
            elbos[name] = found.elbo
            return found

        monkeypatch.setattr(mode_search, name, fit)

    watch("fit_by_curvature")
    watch("fit_normal")
    monkeypatch.setattr(mode_search, "unfinished", lambda fit: ("not converged",))
    x = np.random.default_rng(0).normal(size=(800, 160)) / 160**0.5
    y = x @ np.random.default_rng(1).normal(size=160)
    mode = find_modes(scaled, x, y).heaviest
    assert len(elbos) == 2 and mode.elbo == pytest.approx(max(elbos.values()), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("guide", [AutoStructuredNormal, AutoSplineNormal])
def test_guides_of_six_hundred_columns(guide):
    x, y = columns(3000, 600)
    mean, sds = of_regression(x, y)
    fitted = guide(regression)
    svi = SVI(regression, fitted, optax.adam(1e-3), Trace_ELBO())
    params = svi.run(random.key(0), 500, x, y, progress_bar=False).params
    draws = fitted.sample_posterior(random.key(1), params, sample_shape=(4000,))["b"]
    # The standard error of an sd is 1.1 %, and of a mean .016 sds.
    ratio = np.std(draws, axis=0) / sds
    assert 0.88 < np.min(ratio) and np.max(ratio) < 1.12 and abs(np.median(ratio) - 1) < 0.04
    off = (np.mean(draws, axis=0) - mean) / sds
    assert np.max(np.abs(off)) < 0.5 and np.sqrt(np.mean(off**2)) < 0.1
