"""Particles at which the density is not finite: they stay, are counted, and the others go on."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.particles import SVGD, AutoParticles, ParVI, RegularizedSVGD, SteinNewton
from numpyro_ext.particles.base import find_lost
from numpyro_ext.scores import RBF

ONE_OF = "^1 of {} particles are where the log density is NaN or a derivative of it is not finite"


def model(batch=8):
    """N(0, 1) below 20, and beyond a square root that is NaN, with a slope that is NaN."""
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("rows", 8, subsample_size=batch):
        numpyro.factor("hole", 0.0 * jnp.sqrt(20.0 - z))


def start(m, far=50.0):
    """Standard normal quantiles around 1, with the last particle far out."""
    x = 1.0 + dist.Normal().icdf((jnp.arange(m) + 0.5) / m)
    return x.at[-1].set(far)[:, None]


def test_the_next_of_the_others_in_turn_stand_in():
    steep = float(jnp.finfo(jnp.result_type(float)).max) ** 0.6  # its square is no number
    log_p = jnp.array([0.0, jnp.nan, 1.0, 2.0, -jnp.inf])
    lost, seen = find_lost(log_p, jnp.array([0, 0, jnp.inf, steep, 0]))
    assert lost.tolist() == [False, True, True, True, False]
    assert seen.tolist() == [0, 0, 4, 0, 4]


@pytest.mark.slow
@pytest.mark.parametrize("field", [SVGD(RBF(1.0)), SteinNewton(RBF(1.0))])
def test_a_step_is_that_of_the_others(field):
    """Also with ``stable_update``."""
    x = start(4)
    svi = SVI(model, AutoParticles(model, 4, init_from=None), optax.sgd(0.1), field)
    state = svi.init(random.key(0), init_params={"auto_particles": x})
    with pytest.warns(InferenceWarning, match=ONE_OF.format(4)):
        state, loss = jax.block_until_ready(jax.jit(svi.stable_update)(state))
    found = svi.get_params(state)
    seen = x[jnp.array([0, 1, 2, 0])]  # the first one stands in
    hessian = (-jnp.ones((4, 1, 1)),) if field.needs_hessian else ()
    moved = seen + 0.1 * field.velocity(seen, -seen, *hessian)
    np.testing.assert_allclose(found["auto_particles"], [*moved[:3], x[3]], rtol=1e-5)
    expected = -dist.Normal().log_prob(x[:3]).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "off"),
    # Four standard errors of the mean of 29 draws.
    [(RegularizedSVGD(), 0.1), (None, 0.75)],
    ids=["field", "draws"],
)
def test_the_ensemble_goes_on_without_it(field, off):
    kernel = ParVI(model, field, init_from=None)
    x = start(30)[:, 0]
    fine = {"z": x.at[-1].set(19.9)}
    state = kernel.init(random.split(random.key(0), 30), 200, fine, (4,), {})
    state = state._replace(z={"z": x}, z_grad=state.z_grad.at[-1].set(jnp.nan))
    run = jax.jit(lambda s: jax.lax.fori_loop(0, 201, lambda _, s: kernel.sample(s, (4,), {}), s))
    with pytest.warns(InferenceWarning, match=ONE_OF.format(30)):
        state = jax.block_until_ready(run(state))
    x = state.z["z"]
    assert state.diverging.tolist() == 29 * [False] + [True] and x[-1] == 50.0
    assert abs(x[:-1].mean()) < off and abs(x[:-1].std() - 1.0) < off


@pytest.mark.slow
def test_where_all_are_lost_nothing_moves():
    svi = SVI(model, AutoParticles(model, 3, init_from=None), optax.sgd(0.1), SVGD())
    x = start(3) + 100.0
    state = svi.init(random.key(0), init_params={"auto_particles": x})
    with pytest.warns(InferenceWarning, match="which leaves the parameters as they are"):
        state, loss = jax.block_until_ready(jax.jit(svi.update)(state))
    found = svi.get_params(state)
    assert jnp.isnan(loss)
    np.testing.assert_array_equal(found["auto_particles"], x)
