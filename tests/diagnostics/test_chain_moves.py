"""Draws of a kernel with a bias, which exact chains move: what is too narrow or off is found."""

import functools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.diagnostics import diagnose
from tests.diagnostics.drawn import visited

SD, SHIFT = "sd against exact moves, worst", "shift against exact moves, worst"
RANGE = "shape against exact moves, worst"
SPREAD = 0.4


def hierarchy():
    """A centred one, whose posterior is known because it has no data."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, SPREAD))
    numpyro.sample("theta", dist.Normal(1.0, tau).expand([4]).to_event(1))


def draws(size=1000, lowest=-np.inf, T=1.0, seed=0):
    """Independent ones of ``p^(1/T)``, without those whose log tau is below ``lowest`` sds.

    In unconstrained space: with theta integrated out, ``u = log tau`` has the exponent
    ``-u^2 / (2 T s^2) + 4 (1 - 1/T) u`` with s = SPREAD, a normal one of mean ``4 (T - 1) s^2``.
    """
    rng = np.random.default_rng(seed)
    log_tau = rng.normal(size=20 * size)
    log_tau = SPREAD * log_tau[log_tau > lowest][:size]
    log_tau = T**0.5 * log_tau + 4 * (T - 1) * SPREAD**2
    tau = np.exp(log_tau)
    theta = 1.0 + T**0.5 * tau[:, None] * rng.normal(size=(size, 4))
    return {"tau": jnp.asarray(tau, float), "theta": jnp.asarray(theta, float)}


@functools.cache
def judged(lowest=-np.inf, T=1.0, told=None, seed=0, num_moves=None):
    chain = visited(hierarchy, draws(lowest=lowest, T=T, seed=seed), T=told or T)
    return diagnose(chain, num_moves=num_moves)


def rows_of(diagnosis):
    return {row.quantity: row for row in diagnosis.rows}


@pytest.mark.slow
def test_draws_of_the_posterior_are_fine():
    found = judged()
    rows = rows_of(found)
    assert found.ok and rows[SD].ok and rows[SHIFT].ok, found
    assert rows[SD].error > 0


def test_a_neck_that_the_chain_does_not_enter_is_found():
    """Without tau below its median: its logarithm is a half-normal, whose mean is .8 sds too high
    and whose sd is .6 of the right one. All other lines are right."""
    found = judged(lowest=0.0)
    wrong = [row.quantity for row in found.rows if row.ok is False]
    assert SHIFT in wrong and set(wrong) <= {SD, SHIFT, RANGE}, found
    assert "tau" in rows_of(found)[SHIFT].verdict


@pytest.mark.nightly
def test_tempered_draws_are_compared_with_moves_of_their_temperature():
    # It is wider, so that 40 moves are too few to judge it.
    right = judged(T=1.5, num_moves=160)
    assert right.ok, right
    wrong = judged(T=1.5, told=1.0, num_moves=160)
    assert rows_of(wrong)[SD].ok is False


@pytest.mark.slow
def test_draws_of_an_exploration_are_left_out():
    right, wide = draws(500), draws(500, T=4.0)
    both = {name: jnp.concatenate([wide[name], right[name]]) for name in right}
    sampling = jnp.arange(1000) >= 500
    rows = rows_of(diagnose(visited(hierarchy, both, sampling=sampling)))
    assert rows[SD].ok and rows[SHIFT].ok
    # All of them together are no stationary chain, and worth few independent draws.
    assert not rows_of(diagnose(visited(hierarchy, both)))[SD].ok


def test_what_is_not_judged_says_why(monkeypatch):
    def row(**kwargs):
        return rows_of(diagnose(visited(hierarchy, draws(**kwargs.pop("draws", {})), **kwargs)))[SD]

    changing = row(T=lambda i: 1.0 + 0.1 * i)
    assert changing.ok is None and "no temperature, or several" in changing.verdict
    few = row(draws={"size": 20})
    assert few.ok is None and "below 50" in few.verdict
    monkeypatch.setattr("numpyro_ext.diagnostics.limits.MOST_OPERATIONS", 1000)
    dear = row()
    assert dear.ok is None and "num_moves=40 runs them" in dear.verdict


def test_exact_kernels_have_no_such_line():
    mcmc = visited(hierarchy, draws(), method="mcmc")
    assert SD not in rows_of(diagnose(mcmc))


@pytest.mark.parametrize("size", [1, 3])
def test_a_temperature_without_an_error_is_not_judged(size):
    mcmc = visited(hierarchy, draws(size), fields=("kinetic_temperature",))
    row = rows_of(diagnose(mcmc))["kinetic temperature"]
    assert row.ok is None and row.error is None
    assert "takes 4 draws" in row.verdict
