"""Particles that share the noise of their minibatches, or keep the modes that they began in."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.diagnostics.comparison import MEAN
from numpyro_ext.particles import AutoParticles, RegularizedSVGD
from tests.diagnostics.drawn import rows_of

N, M = 400, 100
X = jnp.asarray(np.random.default_rng(0).normal(3.0, 1.0, N), float)
SD_OF_Z, MEAN_OF_Z = (N + 1) ** -0.5, X.sum() / (N + 1)


def model(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=x[i])


def judged(shift):
    """Particles with all quantiles of the posterior, moved by ``shift`` of its sds."""
    svi = SVI(model, AutoParticles(model, M, init_from=None), optax.adam(0.1), RegularizedSVGD())
    params = svi.get_params(svi.init(random.key(0), X))
    quantiles = dist.Normal().icdf((jnp.arange(M) + 0.5) / M)
    params["auto_particles"] = (MEAN_OF_Z + SD_OF_Z * (quantiles + shift))[:, None]
    return rows_of(diagnose(svi, params, model_args=(X, 20)))


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "ok"), [(0.0, True), (1.0, False)])
def test_particles_of_the_posterior_are_right_and_shifted_ones_are_not(shift, ok):
    row = judged(shift)[MEAN]
    assert row.ok is ok and row.value == pytest.approx(shift, abs=4 * row.error)


def two_modes_at(gap):
    def model():
        modes = dist.Normal(jnp.array([-gap, gap]), 1.0)
        shares = dist.Categorical(jnp.array([0.95, 0.05]))
        numpyro.sample("z", dist.MixtureSameFamily(shares, modes))

    return model


def diagnosed(model, low, high, gap):
    """All quantiles of two normals, so many of each: all that gradients can say is right."""
    svi = SVI(
        model, AutoParticles(model, low + high, init_from=None), optax.adam(0.1), RegularizedSVGD()
    )
    params = svi.get_params(svi.init(random.key(0)))
    halves = [dist.Normal().icdf((jnp.arange(n) + 0.5) / n) for n in (low, high)]
    params["auto_particles"] = jnp.concatenate([halves[0] - gap, halves[1] + gap])[:, None]
    return diagnose(svi, params, model_args=())


@pytest.mark.nightly
def test_particles_that_keep_the_shares_of_their_start_are_not_called_right():
    """A share of .3 where .05 belongs; no short chain crosses the 60 sds between the modes."""
    found = diagnosed(two_modes_at(30.0), 70, 30, 30.0)
    assert rows_of(found)[MEAN].ok is None and not found.ok


@pytest.mark.nightly
def test_shares_that_short_chains_leave_open_are_not_called_right():
    """Chains cross now and then."""
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
