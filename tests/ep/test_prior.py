"""Yesterday's posterior is today's prior, by one argument of every engine."""

from functools import cache

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.ep import ADF, EP, StochasticEP
from numpyro_ext.ep.ep import serial_sweep
from tests.ep.models import Y_SCALE, unknown_scale

X = random.normal(random.key(0), (12, 2))
Y = X @ jnp.array([1.0, 2.0]) + 0.8 * random.normal(random.key(1), (12,))
DAYS = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]


def linear(X, y):
    """Two sites, not in the order of the alphabet, whose posterior is correlated."""
    b = numpyro.sample("b", dist.Normal(0.5, 2.0))
    a = numpyro.sample("a", dist.Normal(jnp.array([0.4, -1.0]), jnp.array([1.5, 0.7])).to_event(1))
    with numpyro.plate("rows", len(X)) as idx:
        numpyro.sample("y", dist.Normal(X[idx] @ a + b, 0.8), obs=y[idx])


def exact(days, factor=1.0):
    """Mean and precision where the precision of each evening is multiplied by the factor."""
    precision, shift = jnp.diag(jnp.array([4.0, 2.25, 0.49]) ** -1), 0.0
    shift = precision @ jnp.array([0.5, 0.4, -1.0])
    for k, (x, y) in enumerate(days):
        power = factor if k else 1.0
        rows = jnp.concatenate([jnp.ones((len(x), 1)), x], 1)
        precision = power * precision + rows.T @ rows / 0.64
        shift = power * shift + rows.T @ y / 0.64
    return jnp.linalg.solve(precision, shift), precision


def stream(make, factor=1.0, steps=1):
    fit, total = None, 0.0
    for day in DAYS:
        engine = make(linear, prior=fit, forgetting_factor=factor)
        fit = engine, engine.run(random.key(0), steps, *day, progress_bar=False)
        if make is not averaged:
            total += float(engine.log_evidence(fit[1].state, *day))
    return fit, total


@cache
def of_ep():
    return stream(EP, steps=2)


def averaged(model, **options):
    return StochasticEP(model, batch_size=4, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has not converged")
@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (EP, 1.0),
        pytest.param(EP, 0.6, marks=pytest.mark.nightly),
        (ADF, 1.0),
        pytest.param(averaged, 1.0, marks=pytest.mark.nightly),
    ],
    ids=["EP", "EP that forgets", "ADF", "averaged EP"],
)
def test_days_have_the_posterior_of_all_rows(make, factor):
    """Of normal rows, for which a step or two are exact; forgetting is a power of a posterior."""
    steps = 2 if make is EP else 1
    (_, result), _ = of_ep() if (make, factor) == (EP, 1) else stream(make, factor, steps)
    mean, precision = exact(DAYS, factor)
    root = result.params["auto_scale_tril"]
    np.testing.assert_allclose(result.params["auto_loc"], mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(root @ root.T, jnp.linalg.inv(precision), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_evidences_of_the_days_add_up():
    rows = jnp.concatenate([jnp.ones((12, 1)), X], 1)
    cov = 0.64 * jnp.eye(12) + rows * jnp.array([4.0, 2.25, 0.49]) @ rows.T
    log_z = dist.MultivariateNormal(rows @ jnp.array([0.5, 0.4, -1.0]), cov).log_prob(Y)
    np.testing.assert_allclose(of_ep()[1], log_z, rtol=1e-4)


@pytest.mark.slow
def test_a_constrained_site_is_normal_where_it_is_unconstrained():
    """The second day has an exact normal prior, and no factors of it, whatever the first one had;
    a HalfNormal, here, is a factor that EP approximates."""
    first = EP(unknown_scale)
    params = first.get_params(first.init(random.key(0), Y_SCALE, True))
    second = EP(unknown_scale, prior=(first, params), forgetting_factor=0.5)
    state = second.init(random.key(0), Y_SCALE[:2] + 1, True)
    assert [len(group.index) for group in state.table.groups] == [2]
    root = params["auto_scale_tril"]
    half = jnp.linalg.inv(root @ root.T) / 2
    np.testing.assert_allclose(state.prior.precision, half, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(state.prior.shift, half @ params["auto_loc"], atol=1e-4)


@pytest.mark.slow
def test_a_third_day_compiles_nothing():
    """Counted within one test: between two of them programs may be forgotten (``conftest.py``)."""
    fit, programs = None, []
    for day in DAYS:
        engine = EP(linear, prior=fit, forgetting_factor=0.7)
        fit = engine, engine.run(random.key(0), 2, *day, progress_bar=False)
        programs.append(serial_sweep._cache_size())
    assert programs[2] == programs[1] > 0
