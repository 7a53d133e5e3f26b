"""Velocities as a loss of SVI: gradients, minibatches, amortised guides, errors."""

from functools import cache
import inspect

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext._model.implicit import Implicit
from numpyro_ext.particles import (
    SVGD,
    AutoParticles,
    ParticleField,
    RegularizedSVGD,
    RiemannianSVGD,
    SteinNewton,
)
from numpyro_ext.particles.unit_spread import UnitSpread

DATA = jnp.array([0.3, -1.2, 2.5, 0.9, 1.7, -0.4])
STARTS = jnp.array([[0.2, -1.0], [1.5, 0.4], [-0.7, 0.1], [0.9, 0.8], [2.2, -0.3]])


def model(data=DATA, subsample_size=None):
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    shift = numpyro.param("shift", 0.3)
    width = numpyro.param("width", 1.5, constraint=constraints.positive)
    with numpyro.plate("data", data.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("obs", dist.Normal(loc + shift, scale * width), obs=data[i])


def log_joint(x, shift=0.3, width=1.5):
    """The density of ``model`` in (loc, log scale), written by hand."""
    loc, log_scale = x
    prior = dist.Normal(1.0, 2.0).log_prob(loc) + dist.Normal(0.0, 0.5).log_prob(log_scale)
    return prior + dist.Normal(loc + shift, jnp.exp(log_scale) * width).log_prob(DATA).sum()


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

    def loss_of(rows):
        def one(x):
            loc, log_scale = x
            likelihood = dist.Normal(loc + 0.3, jnp.exp(log_scale) * 1.5).log_prob(DATA[rows])
            prior = dist.Normal(1.0, 2.0).log_prob(loc) + dist.Normal(0.0, 0.5).log_prob(log_scale)
            return prior + 2.0 * likelihood.sum()

        return -jax.vmap(one)(STARTS).mean()

    subsets = jnp.array([[i, j, k] for i in range(6) for j in range(i) for k in range(j)])
    possible = np.asarray(jax.jit(jax.vmap(loss_of))(subsets))
    seen = set()
    update = jax.jit(lambda state: svi.update(state, DATA, 3))
    for _ in range(12):
        state, loss = update(state)
        nearest = np.argmin(np.abs(possible - loss))
        np.testing.assert_allclose(loss, possible[nearest], rtol=1e-5)
        seen.add(int(nearest))
    assert len(seen) > 4


def test_mean_over_minibatches_is_the_full_velocity():
    """SVGD is linear in the gradients, so its mean over minibatches is exact; 4 standard errors."""
    guide = five()
    svi = SVI(model, guide, optax.sgd(1.0), SVGD())
    state = svi.init(random.key(0), DATA, 2, init_params={"auto_particles": STARTS})

    def moved(key):
        new, _ = svi.update(state._replace(rng_key=key), DATA, 2)
        return svi.get_params(new)["auto_particles"] - STARTS

    draws = jax.jit(jax.vmap(moved))(random.split(random.key(1), 2000))
    full = SVGD().velocity(STARTS, score(STARTS))
    error = jnp.abs(draws.mean(0) - full)
    assert jnp.all(error < 4.0 * draws.std(0) / 2000**0.5 + 1e-5)
    assert draws.std(0).max() > 0.1


def test_model_is_evaluated_once_per_particle():
    """Compile-time flops: a step costs the m gradients of the model; its parameters come along.

    The count has a second evaluation that is made only where particles are lost."""
    data = random.normal(random.key(2), (400, 50))

    def regression():
        w = numpyro.sample("w", dist.Normal().expand([50]).to_event(1))
        slope = numpyro.param("slope", jnp.ones(50))
        numpyro.sample("y", dist.Normal(jnp.tanh(data @ (w * slope)), 1.0), obs=jnp.ones(400))

    def loss(params):
        return SVGD().loss(random.key(0), params, regression, Given())

    def log_p(w, slope):
        return -0.5 * jnp.sum((1.0 - jnp.tanh(data @ (w * slope))) ** 2)

    def flops(fn, *args):
        return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]

    params = {"points": jnp.ones((8, 50)), "slope": jnp.ones(50)}
    gradients = flops(jax.vmap(jax.value_and_grad(log_p), (0, None)), *params.values())
    assert flops(jax.value_and_grad(loss), params) < 2.5 * gradients


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


def test_guide_without_sample_latent_is_an_error():
    with pytest.raises(TypeError, match=r"sample_latent.*AutoParticles\(model\)"):
        loss_of(model, STARTS, guide=AutoNormal(model))


def test_annealing_without_a_counter_is_an_error():
    with pytest.raises(ValueError, match="count_steps=True"):
        loss_of(model, STARTS, SVGD(annealing=lambda t: 1.0))


def test_other_number_of_particles_than_the_guide_is_an_error():
    with pytest.raises(ValueError, match=r"num_particles is 3.*5 particles"):
        five().sample_latent(random.key(0), {}, 3)


def test_guide_of_the_wrong_size_is_an_error():
    with pytest.raises(ValueError, match=r"vectors of length 3.*loc, scale take 2"):
        loss_of(model, jnp.zeros((5, 3)))
    with pytest.raises(ValueError, match=r"gave shape \(2,\)"):
        loss_of(model, jnp.zeros(2))


def discrete():
    numpyro.sample("k", dist.Poisson(2.0))
    numpyro.sample("x", dist.Normal())


def mutable():
    numpyro.primitives.mutable("state", jnp.zeros(()))
    numpyro.sample("x", dist.Normal())


def local_latents():
    with numpyro.plate("rows", 4, subsample_size=2) as i:
        z = numpyro.sample("z", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(z, 0.1), obs=jnp.array([-3.0, -1.0, 1.0, 5.0])[i])


def minibatch_in_scan():
    x = numpyro.sample("x", dist.Normal())

    def body(carry, _):
        with numpyro.plate("rows", 6, subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(x, 1.0), obs=DATA[i])
        return carry, None

    scan(body, None, None, length=3)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (discrete, "latent site 'k' is discrete"),
        (mutable, "mutable site 'state'"),
        (local_latents, "'z' is local to the subsampled plate 'rows'"),
        (minibatch_in_scan, "plate 'rows' takes a minibatch of 2 of 6 rows inside scan"),
        (lambda: model(DATA, 7), "subsample_size 7 but only 6 rows"),
    ],
)
def test_models_that_particles_cannot_run_on_are_errors(bad, words):
    with pytest.raises(ValueError, match=words):
        loss_of(bad, jnp.ones((5, 2)))
    with pytest.raises(ValueError, match=words):
        handlers.seed(AutoParticles(bad, 5, init_from=None), 0)()


def test_data_that_are_not_finite_are_named():
    guide = AutoParticles(model, 5, init_from=None)
    with pytest.raises(ValueError, match="see site 'obs'"):
        handlers.seed(guide, 0)(DATA.at[2].set(jnp.nan))

    def whole(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    params = {"auto_particles": jnp.ones((5, 1))}
    with pytest.raises(ValueError, match="observed site 'y' have 1 NaN"):
        SVGD().loss(
            random.key(0),
            params,
            whole,
            AutoParticles(whole, 5, init_from=None),
            DATA.at[2].set(jnp.nan),
        )


@pytest.mark.parametrize("field", [SVGD, RegularizedSVGD, RiemannianSVGD, SteinNewton])
def test_arguments_that_a_field_does_not_take_are_pythons_own_error(field):
    """In the name of the field, not of its base; the tests' type checker would speak first."""
    init = inspect.unwrap(field.__init__)
    for option in ("vectorize_particles", "multi_sample_guide", "sum_sites", "temp"):
        words = rf"^{field.__name__}.__init__\(\) got an unexpected keyword argument '{option}'"
        with pytest.raises(TypeError, match=words):
            init(object.__new__(field), **{option: True})


def test_shared_arguments_are_in_the_signature_of_every_field():
    """Those that a field has no use for are left out, and the first arguments may be positional."""
    shared = ["kernel", "num_particles", "temperature", "annealing", "proxy"]
    shared += ["block_size", "precondition"]
    for field, names in {
        ParticleField: shared,
        SVGD: [*shared, "blocks"],
        RegularizedSVGD: [*shared, "eta"],
        SteinNewton: [*shared[:5], "damping"],
        RiemannianSVGD: ["metric_fn", *shared[:6]],
    }.items():
        parameters = inspect.signature(field).parameters
        assert sorted(parameters) == sorted(names)
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == [name for name in names if name in ("metric_fn", "kernel")]
        assert parameters["temperature"].default == 1.0
    assert inspect.signature(RegularizedSVGD).parameters["precondition"].default == "covariance"


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


def test_a_class_in_place_of_a_loss_and_the_summary_of_one():
    guide = AutoParticles(model, 5, init_from=None)
    svi = SVI(model, guide, optax.sgd(0.1), SVGD)
    state = svi.init(random.key(0), DATA)
    for call in (svi.update, svi.evaluate):
        with pytest.raises(TypeError, match=r"the loss is a class.*loss=VRELBO\(\)"):
            call(state, DATA)
    rbf = "kernel=RBF(bandwidth='median_distance', factor=1.0)"
    assert repr(SVGD()) == f"SVGD({rbf}, temperature=1.0)"
    assert repr(SVGD(num_particles=3)) == f"SVGD({rbf}, num_particles=3, temperature=1.0)"


@pytest.mark.parametrize("where", [None, [False] * 10 + [True] * 50], ids=["all", "a group"])
def test_a_coordinate_in_which_all_particles_agree_keeps_its_own_unit(where):
    """In single precision the mean of so many equal numbers is another number."""
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    x[10:, 0], where = 0.1, None if where is None else jnp.array(where)
    x[:10, 0] = 0.1 if where is None else 7.0
    units, here = UnitSpread.of(jnp.asarray(x), where), slice(0 if where is None else 10, 60)
    assert (units.scale[0], units.mean[0]) == (1.0, np.float32(0.1))
    np.testing.assert_allclose(units.scale[1], x[here, 1].std(), rtol=1e-5)
    np.testing.assert_array_equal(units.points(jnp.asarray(x))[here, 0], 0.0)
