"""Modes without draws: what a search finds, how much mass it gives them, and what it leaves."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext._model.mode_search import Problem
from numpyro_ext.diagnostics import diagnose
from numpyro_ext.diagnostics._fit import fit_of
from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.judges.other_modes import QUANTITY, _descend, unvisited_rows
from numpyro_ext.mcmc import Settings
from tests.diagnostics.drawn import visited

LOCS = np.array([[3.0, -200.0], [5.0, -170.0]])
SDS = np.array([[0.1, 2.0], [0.3, 1.0]])


def two_modes(share):
    """Normals of shares 1 - share and share, 20 deviations of the first apart."""
    z = numpyro.sample("z", dist.Normal(0.0, 1e3).expand([2]).to_event(1))
    logs = dist.Normal(jnp.asarray(LOCS), jnp.asarray(SDS)).to_event(1).log_prob(z)
    logs = logs + jnp.log(jnp.array([1.0 - share, share]))
    numpyro.factor("modes", jax.nn.logsumexp(logs))


def of_modes(share, size=1000):
    rng = np.random.default_rng(0)
    k = (rng.random(size) < share).astype(int)
    return {"z": jnp.asarray(LOCS[k] + SDS[k] * rng.normal(size=(size, 2)), float)}


def drawing(model, sites):
    """An SVI whose guide draws these normal sites, ``{site: (loc, scale)}``; its result is {}."""

    def guide(*args):
        for name, (loc, scale) in sites.items():
            numpyro.sample(name, dist.Normal(loc, scale).to_event())

    return SVI(model, guide, optax.sgd(0.1), Trace_ELBO())


def lines(model, draws, *args):
    """Those of draws of any law."""
    shapes = {name: (jnp.zeros(x.shape[1:]), 1.0) for name, x in draws.items()}
    svi = drawing(model, shapes)
    context = FitContext(svi, fit_of(svi, {}, args, None), {}, random.key(0))
    return unvisited_rows(context, draws, None, random.key(1))


@pytest.mark.x64
def test_a_descent_ends_at_the_minimum():
    """Of a quadratic it is A^{-1} b; Rosenbrock's valley ends at (1, 1)."""
    A = jnp.array([[2.0, 0.9, 0.0], [0.9, 1.0, 0.2], [0.0, 0.2, 50.0]])
    b = jnp.array([1.0, -2.0, 30.0])
    of_quadratic = jax.vmap(partial(_descend, lambda x: x @ A @ x / 2 - b @ x))
    end = jax.jit(of_quadratic)(30 * random.normal(random.key(0), (8, 3)))
    away = np.asarray(end.x) - np.linalg.solve(A, b)
    # The gradient is A times the distance.
    assert np.all(end.gradient < 0.1)
    np.testing.assert_allclose(np.linalg.norm(away @ A, axis=1), end.gradient, atol=0.01)

    starts = jnp.array([[-1.2, 1.0], [2.0, 5.0], [-3.0, -4.0]])
    valley = partial(_descend, lambda x: 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2)
    np.testing.assert_allclose(jax.jit(jax.vmap(valley))(starts).x, 1.0, atol=0.1)


@pytest.mark.slow
def test_a_mode_without_draws_is_named_with_its_mass():
    """The masses by normal approximations are right here. Of 1,000 draws the median of the
    potential has the error 1 / sqrt(1000), and half the log determinant as well: together 4.5 % of
    the ratio of the masses, which is .007 of the share."""
    first = {"z": (LOCS[0], SDS[0])}
    found = diagnose(drawing(two_modes, first), result={}, model_args=(0.2,))
    (row,) = [row for row in found.rows if row.quantity == QUANTITY]
    assert row.ok is False and not found.ok
    assert row.value == pytest.approx(0.2, abs=0.035)
    assert "a mode at z[0] = 5, z[1] = -170," in row.verdict
    wrong = [row.quantity for row in found.rows if row.ok is False]
    assert wrong == [QUANTITY], found


@pytest.mark.slow
@pytest.mark.parametrize(("share", "of_draws"), [(0.2, 0.2), (0.01, 0.0)])
def test_modes_with_draws_and_modes_of_little_mass_are_not_named(share, of_draws):
    assert lines(two_modes, of_modes(of_draws), share) == []


@pytest.mark.slow
def test_a_copy_of_the_mode_is_not_judged():
    """The sign of both numbers is free."""

    def model():
        z = numpyro.sample("z", dist.Normal(0, 10).expand([2]).to_event(1))
        numpyro.factor("product", -0.5 * ((z[0] * z[1] - 4.0) / 0.2) ** 2)
        numpyro.factor("square", -0.5 * ((z[0] ** 2 - 4.0) / 0.2) ** 2)

    z0 = 2.0 + 0.05 * np.random.default_rng(0).normal(size=1000)
    z1 = 4.0 / z0 + 0.1 * np.random.default_rng(1).normal(size=1000)
    (row,) = lines(model, {"z": jnp.asarray(np.stack([z0, z1], 1), float)})
    assert row.ok is None and row.not_judged
    assert "same answer with other labels or signs" in row.verdict


@pytest.mark.nightly
def test_a_funnel_and_a_bound_have_no_mode_to_name():
    """The density of a centred hierarchy is unbounded in its neck; that of a half-normal has its
    mode at the bound."""

    def model(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        theta = numpyro.sample("theta", dist.Normal(0, tau).expand([6]).to_event(1))
        numpyro.sample("y", dist.Normal(theta, 3.0).to_event(1), obs=y)

    rng = np.random.default_rng(0)
    tau = np.abs(rng.normal(size=1000))
    y, sd = np.linspace(-1, 1, 6), tau[:, None] * 3 / np.sqrt(tau[:, None] ** 2 + 9)
    theta = sd**2 * y / 9 + sd * rng.normal(size=(1000, 6))
    draws = {"tau": jnp.asarray(tau, float), "theta": jnp.asarray(theta, float)}
    assert not lines(model, draws, jnp.asarray(y, float))


SEVERAL = Problem("searches from 4 points ended at different modes.", "several modes")


def chains(draws, share):
    mcmc = visited(partial(two_modes, share), draws)
    mcmc.sampler.settings = Settings(0.1, problems=(SEVERAL,))
    return {row.quantity: row for row in diagnose(mcmc).rows}


def test_chains_that_have_been_in_all_modes_make_the_notice_of_several_an_information():
    row = chains(of_modes(0.2), 0.2)["problems of the settings"]
    assert row.ok is None and not row.limit and "no mode was found without draws" in row.verdict


@pytest.mark.nightly
def test_chains_that_have_not_are_told_so_twice():
    rows = chains(of_modes(0.0), 0.2)
    assert rows["problems of the settings"].ok is False and rows[QUANTITY].ok is False
