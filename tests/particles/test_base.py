"""Velocities as a loss of SVI: gradients, minibatches, amortised guides, errors."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext._model.implicit import Implicit
from numpyro_ext.particles import (
    SVGD,
    AutoParticles,
    ParticleField,
)
from numpyro_ext.particles._whitening import CovarianceWhitening
from tests.particles.fixture import DATA, STARTS, log_joint, model, potentials_of_subsets


@jax.jit
def score(x, shift=0.3, width=1.5):
    return jax.vmap(jax.grad(log_joint), (0, None, None))(x, shift, width)


@cache
def five(**options):
    """Guides are set up once: what they remember of the model is the same for all tests."""
    return AutoParticles(model, 5, **options, init_from=None)


class Given:
    """The particles are a parameter, as they are: no model is needed to build it."""

    def sample_latent(self, rng_key, params, num_samples):
        return params["points"]


def step(svi, state, *args, **kwargs):
    return jax.jit(lambda state: svi.update(state, *args, **kwargs))(state)


@pytest.mark.slow
@pytest.mark.x64
def test_sgd_moves_particles_by_the_velocity_and_parameters_by_the_mean_gradient(tol):
    guide = five()
    svi = SVI(model, guide, optax.sgd(0.1), SVGD())
    state = svi.init(random.key(0), init_params={"auto_particles": STARTS})
    state, loss = step(svi, state)
    params = svi.get_params(state)

    value, g = jax.jit(jax.vmap(jax.value_and_grad(log_joint)))(STARTS)
    atol = tol(1e-5, 1e-12)
    np.testing.assert_allclose(loss, -value.mean(), rtol=tol(1e-6, 1e-13))
    v = SVGD().velocity(STARTS, g)
    np.testing.assert_allclose(params["auto_particles"], STARTS + 0.1 * v, atol=atol)
    mean = lambda shift, log_width: jax.vmap(  # noqa: E731
        lambda x: log_joint(x, shift, jnp.exp(log_width))
    )(STARTS).mean()
    d_shift, d_log_width = jax.jit(jax.grad(mean, argnums=(0, 1)))(0.3, jnp.log(1.5))
    np.testing.assert_allclose(params["shift"], 0.3 + 0.1 * d_shift, atol=atol)
    expected = np.exp(np.log(1.5) + 0.1 * d_log_width)
    np.testing.assert_allclose(params["width"], expected, atol=atol)


@pytest.mark.slow
def test_annealing_counts_steps_and_multiplies_the_gradients_that_temperature_divides():
    guide = five(count_steps=True)
    field = SVGD(temperature=4.0, annealing=lambda t: (t + 1.0) / 2.0)
    svi = SVI(model, guide, optax.sgd(0.1), field)
    state = svi.init(random.key(0), init_params={"auto_particles": STARTS})
    update, velocity = jax.jit(svi.update), jax.jit(SVGD().velocity)
    for count, gamma in ((1, 0.5), (2, 1.0)):
        before = svi.get_params(state)
        g = score(before["auto_particles"], before["shift"], before["width"])
        state, _ = update(state)
        moved = svi.get_params(state)["auto_particles"] - before["auto_particles"]
        expected = 0.1 * velocity(before["auto_particles"], gamma / 4.0 * g)
        np.testing.assert_allclose(moved, expected, atol=1e-5)
        assert state.mutable_state == {"auto_step": count}
    # The value does not depend on the step, so that evaluate works without the counter.
    assert jax.eval_shape(svi.evaluate, state).shape == ()
    state = svi.run(random.key(0), 3, progress_bar=False).state
    assert state.mutable_state["auto_step"] == 3


@pytest.mark.slow
def test_all_particles_share_one_minibatch():
    """With half of the data the loss is one of the values that one subset of rows gives to all."""
    guide = five()
    svi = SVI(model, guide, optax.sgd(0.0), SVGD())
    state = svi.init(random.key(0), DATA, 3, init_params={"auto_particles": STARTS})

    possible = np.asarray(potentials_of_subsets()).mean(1)
    seen = set()
    update = jax.jit(lambda state: svi.update(state, DATA, 3))
    for _ in range(12):
        state, loss = update(state)
        nearest = np.argmin(np.abs(possible - loss))
        np.testing.assert_allclose(loss, possible[nearest], rtol=1e-5)
        seen.add(int(nearest))
    assert len(seen) > 4


def loss_of(model, z, field=None, guide=None):
    """The loss alone, without SVI: for errors, and for values."""
    guide = Given() if guide is None else guide
    field = SVGD() if field is None else field
    return field.loss(random.key(0), {"points": z}, model, guide)


def test_value_keeps_its_digits_when_the_surrogate_is_large():
    def far():
        numpyro.sample("x", dist.Normal(3e4, 0.1).expand([2]).to_event(1))

    x = 3e4 + 0.25 * STARTS
    expected = -dist.Normal(3e4, 0.1).log_prob(x).sum(1).mean()
    np.testing.assert_allclose(jax.jit(lambda x: loss_of(far, x))(x), expected, rtol=1e-5)


class AffineGuide:
    """z = loc + scale * noise: a guide of one's own, with no prefix and no base class."""

    def __call__(self, *args, **kwargs):
        loc = numpyro.param("q_loc", jnp.array([0.1, -0.2]))
        scale = numpyro.param("q_scale", jnp.array([0.5, 1.0]))
        noise = numpyro.sample(
            "noise", dist.Normal().expand([2]).to_event(1), infer={"is_auxiliary": True}
        )
        z = loc + scale * noise
        numpyro.sample("loc", Implicit(z[0]))
        numpyro.sample("scale", Implicit(jnp.exp(z[1]), support=constraints.positive))

    def sample_latent(self, rng_key, params, num_samples):
        return params["q_loc"] + params["q_scale"] * random.normal(rng_key, (num_samples, 2))


@pytest.mark.slow
def test_guide_that_draws_its_latents_is_trained_along_the_field():
    guide = AffineGuide()
    loss = SVGD(num_particles=7)
    svi = SVI(model, guide, optax.sgd(0.1), loss)
    state = svi.init(random.key(0))
    params = svi.get_params(state)
    new, _ = step(svi, state)
    # The draw of the update, repeated by hand: the second key of the step is the guide's.
    key_guide = random.split(random.split(state.rng_key)[1])[1]
    z = guide.sample_latent(key_guide, params, 7)
    noise = random.normal(key_guide, (7, 2))
    v = SVGD().velocity(z, score(z))
    moved = svi.get_params(new)
    np.testing.assert_allclose(moved["q_loc"], params["q_loc"] + 0.1 * v.sum(0), atol=1e-5)
    expected = params["q_scale"] + 0.1 * (v * noise).sum(0)
    np.testing.assert_allclose(moved["q_scale"], expected, atol=1e-5)


def test_wrong_guides_are_errors():
    with pytest.raises(ValueError, match="count_steps=True"):
        loss_of(model, STARTS, SVGD(annealing=lambda t: 1.0))
    with pytest.raises(ValueError, match=r"num_particles is 3.*5 particles"):
        five().sample_latent(random.key(0), {}, 3)
    with pytest.raises(ValueError, match=r"vectors of length 3.*loc, scale take 2"):
        loss_of(model, jnp.zeros((5, 3)))


def local_latents():
    with numpyro.plate("rows", 4, subsample_size=2) as i:
        z = numpyro.sample("z", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(z, 0.1), obs=jnp.array([-3.0, -1.0, 1.0, 5.0])[i])


def test_a_local_latent_site_is_an_error():
    words = "'z' is local to the subsampled plate 'rows'"
    with pytest.raises(ValueError, match=words):
        loss_of(local_latents, jnp.ones((5, 2)))
    with pytest.raises(ValueError, match=words):
        handlers.seed(AutoParticles(local_latents, 5, init_from=None), 0)()


@pytest.mark.slow
def test_a_field_of_ones_own_needs_only_its_velocity():
    class Ascent(ParticleField):
        def resolved_velocity(self, kernel, x, grad_log_p):
            return grad_log_p

    guide = five()
    svi = SVI(model, guide, optax.sgd(0.1), Ascent())
    state, _ = step(svi, svi.init(random.key(0), init_params={"auto_particles": STARTS}))
    g = score(STARTS)
    np.testing.assert_allclose(svi.get_params(state)["auto_particles"], STARTS + 0.1 * g, atol=1e-5)
    with handlers.seed(rng_seed=0):
        assert set(guide()) == {"loc", "scale"}


@pytest.mark.parametrize("where", [None, [False] * 10 + [True] * 50], ids=["all", "a group"])
def test_a_coordinate_in_which_all_particles_agree_keeps_its_own_unit(where):
    """In single precision the mean of so many equal numbers is another number."""
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    x[10:, 0], where = 0.1, None if where is None else jnp.array(where)
    x[:10, 0] = 0.1 if where is None else 7.0
    units, here = (
        CovarianceWhitening.from_particles(jnp.asarray(x), where),
        slice(0 if where is None else 10, 60),
    )
    assert (units.factor.scale[0], units.center[0]) == (1.0, np.float32(0.1))
    np.testing.assert_allclose(units.factor.scale[1], x[here, 1].std(), rtol=1e-5)
    np.testing.assert_array_equal(units.points(jnp.asarray(x))[here, 0], 0.0)
