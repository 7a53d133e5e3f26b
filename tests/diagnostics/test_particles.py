"""Particles that share the noise of their minibatches, or keep the modes that they began in."""

import functools
from types import SimpleNamespace

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.diagnostics._fit import fit_of
from numpyro_ext.diagnostics.checks.gradients import minibatch_noise, rows_of_points
from numpyro_ext.diagnostics.checks.modes import SHARES_OF_MODES
from numpyro_ext.diagnostics.comparison import MEAN
from numpyro_ext.particles import AutoParticles, RegularizedSVGD
from tests.diagnostics.drawn import rows_of

N, BATCH, M = 400, 20, 100
X = jnp.asarray(np.random.default_rng(0).normal(3.0, 1.0, N), float)
SD_OF_Z, MEAN_OF_Z = (N + 1) ** -0.5, X.sum() / (N + 1)


def model(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=x[i])


@functools.cache
def judged(shift, batch=BATCH):
    """Particles with all quantiles of the posterior, moved by ``shift`` of its sds."""
    svi = SVI(model, AutoParticles(model, M, init_from=None), optax.adam(0.1), RegularizedSVGD())
    params = svi.get_params(svi.init(random.key(0), X))
    quantiles = dist.Normal().icdf((jnp.arange(M) + 0.5) / M)
    params["auto_particles"] = (MEAN_OF_Z + SD_OF_Z * (quantiles + shift))[:, None]
    fit = {"result": params, "model_args": (X, batch)}
    found = diagnose(svi, num_moves=0, **fit)
    return rows_of(found), svi, params


@pytest.mark.slow
def test_the_noise_of_a_minibatch_is_that_of_sampling_without_replacement():
    """The gradient is N times the mean of B of N rows: variance N^2 S^2 / B (1 - B / N)."""
    fit = fit_of(*judged(0.0)[1:3], (X, BATCH), {})
    law = SD_OF_Z * N * np.std(X, ddof=1) * ((1 - BATCH / N) / BATCH) ** 0.5
    x = jnp.asarray(fit.draws[0]["z"])[:, None]
    # The sd of 32 batches has an error of 1 / sqrt(62) = 13 %.
    assert minibatch_noise(fit, x) == pytest.approx(law, rel=0.5)
    assert minibatch_noise(fit._replace(minibatch=None), x) == 0


@pytest.mark.nightly
def test_a_shift_that_the_noise_explains_is_told_from_one_that_it_does_not():
    by_noise, *_ = judged(1.0)
    assert by_noise[MEAN].value == pytest.approx(1.0, abs=0.02)
    assert "take a larger batch" in by_noise[MEAN].verdict
    # The noise is 4.4 sds.
    assert "larger batch" not in judged(20.0)[0][MEAN].verdict
    assert "larger batch" not in judged(1.0, None)[0][MEAN].verdict


def test_a_shift_within_the_error_of_as_many_independent_draws_is_fine():
    """Of 100 in one dimension it is 0.1, besides the limit of 0.1."""
    fine, wrong = (judged(shift)[0][MEAN] for shift in (0.15, 0.25))
    assert fine.ok and wrong.ok is False
    assert fine.error == pytest.approx(0.1, rel=0.05)


NAMED = SimpleNamespace(info=SimpleNamespace(slices={"a": slice(0, 1), "b": slice(1, 2)}))


def test_a_gradient_that_is_no_number_does_not_mark_the_mean():
    x = jnp.linspace(-1.0, 1.0, 50)[:, None]
    mean, _ = rows_of_points(x, jnp.where(x > 0.95, jnp.nan, -x), NAMED, 0.2, "")
    assert mean.quantity == MEAN and mean.ok is None


def test_particles_that_agree_in_a_coordinate_are_too_narrow_there():
    x = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    for value in (0.1, 0.25):  # the mean of 0.25 is exact
        x[:, 0] = value
        mean, spread = rows_of_points(jnp.asarray(x), jnp.asarray(-x), NAMED, 0.2, "")
        assert spread.value == 0.0 and spread.ok is False and "most of all in a" in spread.verdict
        # On a standard normal it is the distance of the mean, of the other coordinate.
        expected = abs(x[:, 1].mean()) * x[:, 1].std()
        assert mean.value == pytest.approx(expected, rel=1e-4)


def two_modes_at(gap):
    def model():
        modes = dist.Normal(jnp.array([-gap, gap]), 1.0)
        shares = dist.Categorical(jnp.array([0.95, 0.05]))
        numpyro.sample("z", dist.MixtureSameFamily(shares, modes))

    return model


def normal():
    numpyro.sample("z", dist.Normal(0.0, 30.0))


def diagnosed(model, low, high, gap):
    """All quantiles of two normals, so many of each: all that gradients can say is right."""
    svi = SVI(
        model, AutoParticles(model, low + high, init_from=None), optax.adam(0.1), RegularizedSVGD()
    )
    params = svi.get_params(svi.init(random.key(0)))
    halves = [dist.Normal().icdf((jnp.arange(n) + 0.5) / n) for n in (low, high)]
    params["auto_particles"] = jnp.concatenate([halves[0] - gap, halves[1] + gap])[:, None]
    return diagnose(svi, params, model_args=())


def side_by_side(model, low, high):
    return rows_of(diagnosed(model, low, high, 30.0))


@pytest.mark.nightly
def test_particles_that_keep_the_shares_of_their_start_say_so():
    """A share of .3 where .05 belongs; no short chain crosses the 60 sds between the modes."""
    rows = side_by_side(two_modes_at(30.0), 70, 30)
    row = rows[SHARES_OF_MODES]
    assert row.ok is False
    assert "as many particles are on a side as began there" in row.verdict
    assert rows[MEAN].ok is None  # it depends on the shares, which gradients do not see
    # Where the chains cross, they say that the posterior is not that.
    wide = side_by_side(normal, 50, 50)
    assert SHARES_OF_MODES not in wide


@pytest.mark.nightly
def test_shares_that_short_chains_leave_open_are_not_called_right():
    """Chains cross now and then, and gradients say that all is well."""
    assert not diagnosed(two_modes_at(3.5), 70, 30, 3.5).ok


@pytest.mark.slow
def test_particles_that_are_lost_are_said_to_be_wrong():
    """At 200 the exponential of the site is no number, nor is the gradient there."""

    def model():
        numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        numpyro.factor("exact", 0.0)

    svi = SVI(model, AutoParticles(model, 40, init_from=None), optax.adam(0.1), RegularizedSVGD())
    params = svi.get_params(svi.init(random.key(0)))
    quantiles = dist.Normal().icdf((jnp.arange(40) + 0.5) / 40)
    params["auto_particles"] = jnp.where(quantiles > 1.5, 200.0, quantiles)[:, None]
    assert not diagnose(svi, params, model_args=()).ok
