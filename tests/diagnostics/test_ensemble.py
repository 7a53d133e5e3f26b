"""Draws of an ensemble: what judges them, and when they are wrong."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.diagnostics.checks.chains import Agreement
from numpyro_ext.particles import EnsembleLangevin, ParVI


def wide():
    numpyro.sample("x", dist.Normal(jnp.arange(30.0), 2.0).to_event(1))


def drawn(dynamics, num_samples, num_warmup=10, key=0, **start):
    mcmc = MCMC(
        ParVI(wide, optim=dynamics, steps_per_sample=10, **start),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=50,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(key))
    return diagnose(mcmc)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_the_effective_size_of_many_short_chains_is_exact(correlation):
    rng, (m, n) = np.random.default_rng(0), (350, 5)
    x = rng.normal(size=(m, n))
    for i in range(1, n):
        x[:, i] = correlation * x[:, i - 1] + (1 - correlation**2) ** 0.5 * x[:, i]
    lags = np.arange(1, n)
    exact = m * n / (1 + 2 * np.sum((1 - lags / n) * correlation**lags))
    (found,) = Agreement({"x": x}, independent=True).ess
    # The variance of 350 means is known up to a factor of 1 +- (2 / 350)^1/2.
    assert abs(found / exact - 1) < 4 * (2 / m) ** 0.5


@pytest.mark.slow
def test_fewer_particles_than_twice_the_numbers_are_right():
    found = drawn(EnsembleLangevin(), 30)
    assert found.ok and "largest R-hat" in {row.quantity for row in found.rows}


@pytest.mark.slow
def test_particles_at_one_time_are_judged_by_moves_alone():
    """The least of 30 sds, each of 50 draws, is called wrong at two keys of twelve."""
    wrong = 0
    for key in range(4):
        found = drawn(EnsembleLangevin(), 1, key=key)
        assert "largest R-hat" not in {row.quantity for row in found.rows}
        wrong += any(row.ok is False for row in found.rows)
    assert wrong <= 2


@pytest.mark.slow
def test_particles_that_have_not_left_their_start_are_wrong():
    found = drawn(EnsembleLangevin(1e-3), 30, init_from=None)
    wrong = {row.quantity for row in found.rows if row.ok is False}
    assert "largest R-hat" in wrong and not found.ok


@pytest.mark.slow
def test_a_step_that_is_not_stable_is_a_problem():
    found = drawn(EnsembleLangevin(20.0), 30, num_warmup=0)
    problems = [row for row in found.rows if row.quantity == "problems"]
    assert not found.ok and "smaller step_size" in problems[0].verdict
