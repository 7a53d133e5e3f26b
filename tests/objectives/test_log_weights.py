"""The engine: draws, units, mutable state, memory, and what it refuses."""

from functools import partial
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.objectives import VRELBO, BBAlphaELBO
from numpyro_ext.objectives._log_weights import Engine
from tests.objectives.models import (
    LOCAL_PARAMS,
    X_LOCAL,
    floats,
    local_guide,
    local_model,
    mixed_guide,
    mixed_model,
    normal_guide,
    value_and_grad,
)


def engine_of(objective, params, model, guide, *args, **options):
    return Engine(objective, random.key(0), floats(params), model, guide, args, {}, **options)


def test_documented_draws():
    engine = engine_of(VRELBO(0.5, 3), LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 4)
    plate_key, rng_key = random.split(random.key(0))
    for k, key in enumerate(random.split(rng_key, 3)):
        assert jnp.array_equal(random.key_data(engine.keys[k]), random.key_data(key))
        hidden = ["sample", "prng_key", "control_flow"]
        plates = numpyro.handlers.seed(local_guide, plate_key, hide_types=hidden)
        guide = numpyro.handlers.seed(plates, random.split(key)[1])
        with numpyro.handlers.substitute(data=LOCAL_PARAMS):
            expected = numpyro.handlers.trace(guide).get_trace(X_LOCAL, 4)
        got = engine.guide_trace(engine.keys[k])
        for name in ("data", "u", "z"):
            np.testing.assert_allclose(got[name]["value"], expected[name]["value"])
    taken = random.key_data(engine.keys)
    assert not np.any(np.all(taken == random.key_data(engine.extra_key), -1))


def test_one_minibatch_for_all_particles_although_the_guide_has_no_plate():
    def model(x):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", 100, subsample_size=3) as index:
            numpyro.deterministic("index", index)
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x[index])

    engine = engine_of(VRELBO(), {"m": 0.0, "s": 1.0}, model, normal_guide, jnp.arange(100.0))
    batches = [
        engine.model_trace(key, engine.guide_trace(key))["data"]["value"].tolist()
        for key in engine.keys[:3]
    ]
    assert batches[0] == batches[1] == batches[2]


@pytest.mark.x64
def test_split_adds_up_to_the_log_joint(tol):
    """Per datum: prior, likelihood without the plate scale but with handlers.scale, and log q."""

    def model(x, batch):
        with numpyro.handlers.scale(scale=0.3):
            mixed_model(x, batch)

    engine = engine_of(VRELBO(), {"c": 0.4}, model, mixed_guide, X_LOCAL, 2, per_datum=True)
    particle = engine.particle(engine.keys[0])
    assert engine.layout.plates == ("data",)
    assert (engine.layout.shape, engine.layout.size, engine.layout.scale) == ((2,), 6, 3.0)
    assert engine.layout.subsampled_latents == ()
    w, z = particle.values["w"], particle.values["z"]
    x = X_LOCAL[engine.guide_trace(engine.keys[0])["data"]["value"]]
    close = partial(np.testing.assert_allclose, rtol=tol(1e-5, 1e-12))
    close(particle.log_prior, 0.3 * dist.Normal(0.2, 1.0).log_prob(w))
    log_lik = dist.Normal(w, 1.0).log_prob(z) + dist.Normal(z, 0.8).log_prob(x)
    close(particle.log_lik, 0.3 * log_lik)
    close(particle.log_q_global, dist.Normal(0.4, 0.6).log_prob(w))
    close(particle.log_q_local, dist.Normal(0.4 * x, 0.7).log_prob(z))
    joint = engine_of(VRELBO(), {"c": 0.4}, model, mixed_guide, X_LOCAL, 2)
    whole = joint.particle(joint.keys[0])
    close(
        whole.log_weight,
        particle.log_prior
        - particle.log_q_global
        + 3 * jnp.sum(particle.log_lik - particle.log_q_local),
    )
    assert joint.layout.plates == ()
    assert {site for site, _ in joint.layout.subsampled_latents} == {"z"}


def test_plates_at_other_dimensions_in_the_guide():
    def model(x):
        with numpyro.plate("row", 2, dim=-2), numpyro.plate("column", 3, dim=-1):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with numpyro.plate("row", 2, dim=-2):
            numpyro.sample("noise", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
            with numpyro.plate("column", 3, dim=-1):
                numpyro.sample("z", dist.Normal(0.1 * x, 0.5))

    engine = engine_of(VRELBO(0.5, 4), {}, model, guide, jnp.arange(6.0).reshape(2, 3))
    particle = engine.particle(engine.keys[0])
    assert engine.layout.plates == ("row",)
    assert particle.log_lik.shape == (2,)
    z, noise = particle.values["z"], particle.values["noise"][:, 0]
    log_q = dist.Normal(0.1 * jnp.arange(6.0).reshape(2, 3), 0.5).log_prob(z).sum(1)
    np.testing.assert_allclose(
        particle.log_q_local, log_q + dist.Normal().log_prob(noise), rtol=1e-5
    )


def test_score_of_the_sites_without_reparameterisation():
    class Scored(VRELBO):
        can_infer_discrete = True

    def model():
        with numpyro.plate("data", 3):
            k = numpyro.sample("k", dist.Bernoulli(0.3))
            numpyro.sample("z", dist.Normal(1.0 * k, 1.0))

    def guide():
        with numpyro.plate("data", 3):
            k = numpyro.sample("k", dist.Bernoulli(jnp.array([0.2, 0.5, 0.9])))
            numpyro.sample("z", dist.Normal(0.5 * k, 1.0))

    engine = engine_of(Scored(), {}, model, guide)
    particle = engine.particle(engine.keys[0])
    assert engine.layout.not_reparameterized == ("k",)
    exact = dist.Bernoulli(jnp.array([0.2, 0.5, 0.9])).log_prob(particle.values["k"])
    np.testing.assert_allclose(particle.log_q_score, exact, rtol=1e-6)


def test_some_values_given_and_the_rest_drawn():
    """What a nested bound needs: global values kept, local ones redrawn with inner keys."""
    engine = engine_of(VRELBO(), {"c": 0.4}, mixed_model, mixed_guide, per_datum=True)
    first = engine.particle(engine.keys[0])
    other = engine.particle(engine.keys[1], values={"w": first.values["w"]})
    assert other.values["w"] == first.values["w"]
    assert jnp.all(other.values["z"] != first.values["z"])
    np.testing.assert_allclose(other.log_q_global, first.log_q_global)


@pytest.mark.x64
@pytest.mark.parametrize("gradient", ["standard", "single", "dreg"])
def test_vectorization_does_not_change_the_draws(gradient, tol):
    ways = (True, False, partial(jax.lax.map, batch_size=2))
    losses = [VRELBO(0.5, 3, gradient=gradient, vectorize_particles=way) for way in ways]
    first, *others = value_and_grad(losses, LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 2)
    for other in others:
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(x, y, rtol=tol(5e-5, 1e-11))


@pytest.mark.x64
def test_full_minibatch_is_the_full_data(tol):
    x = X_LOCAL
    for loss in (VRELBO(0.5, 3), BBAlphaELBO(0.5, 3)):
        full, mini = jax.jit(
            lambda loss=loss: [
                loss.loss(random.key(0), {"c": 0.4}, mixed_model, mixed_guide, x, m)
                for m in (None, 6)
            ]
        )()
        np.testing.assert_allclose(full, mini, rtol=tol(1e-6, 1e-13))


def test_independent_bounds_are_unbiased_in_the_minibatch():
    keys = random.split(random.key(0), 3000)

    def values(key):
        loss = VRELBO(-0.5, 3)
        return [
            loss.loss(key, LOCAL_PARAMS, local_model, local_guide, X_LOCAL, m) for m in (None, 2)
        ]

    full, mini = jax.jit(jax.vmap(values))(keys)
    error = float(np.sqrt((full.var() + mini.var()) / len(keys)))
    assert abs(full.mean() - mini.mean()) < 4 * error


@pytest.mark.parametrize("num_particles", [4, 256])
def test_memory_of_a_gradient_does_not_grow_with_the_particles(num_particles):
    weight = jnp.ones((64, 64)) / 64

    def model():
        w = numpyro.param("w", weight)
        with numpyro.plate("data", 16):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(64), 1.0).to_event(1))
            numpyro.sample(
                "x", dist.Normal(jnp.tanh(z @ w), 1.0).to_event(1), obs=jnp.ones((16, 64))
            )

    def guide():
        m = numpyro.param("m", 0.0)
        with numpyro.plate("data", 16):
            numpyro.sample("z", dist.Normal(m + jnp.zeros(64), 1.0).to_event(1))

    loss = VRELBO(0.5, num_particles, vectorize_particles=False)
    grad = jax.jit(jax.grad(lambda p: loss.loss(random.key(0), p, model, guide)))
    compiled = grad.lower({"m": jnp.array(0.0), "w": weight}).compile()
    # A residual of one particle has 16 x 64 floats; what may grow are 16 weights and a key for each.
    allowed = 60 * 16 * 64 * 4 + num_particles * 4 * 16 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < allowed


# Mutable state.


def counting_model(x):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    seen = numpyro.primitives.mutable(
        "seen", {"mean": jnp.zeros(2), "count": jnp.zeros((), jnp.int32)}
    )
    seen["mean"] = 0.9 * seen["mean"] + 0.1 * x
    seen["count"] = seen["count"] + 1
    numpyro.sample("x", dist.Normal(z, 1.0), obs=x[0])


def counting_guide(x):
    last = numpyro.primitives.mutable("last", {"z": jnp.zeros(())})
    normal_guide()
    last["z"] = last["z"] + 1.0


def test_upstream_drops_mutable_state_of_many_particles():
    x = jnp.array([1.0, 2.0])
    states = []
    for num_particles, gradient, progress_bar in (
        (1, "standard", False),
        (3, "standard", True),
        (3, "single", False),
        (3, "dreg", False),
    ):
        loss = VRELBO(0.5, num_particles, gradient=gradient)
        svi = SVI(counting_model, counting_guide, optax.adam(0.1), loss)
        start = svi.init(random.key(0), x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = svi.run(random.key(0), 4, x, progress_bar=progress_bar)
        states.append(result.state.mutable_state)
        assert jax.tree.structure(states[-1]) == jax.tree.structure(start.mutable_state)
        for new, old in zip(
            jax.tree.leaves(states[-1]), jax.tree.leaves(start.mutable_state), strict=True
        ):
            assert (new.shape, new.dtype) == (old.shape, old.dtype)
    for state in states:
        # init itself runs model and guide once
        assert state["seen"]["count"] == 1 + 4
        assert state["last"]["z"] == 1 + 4
        np.testing.assert_allclose(state["seen"]["mean"], (1 - 0.9**5) * x, rtol=1e-5)


def test_no_mutable_state_is_none():
    result = VRELBO().loss_with_mutable_state(random.key(0), LOCAL_PARAMS, local_model, local_guide)
    assert result["mutable_state"] is None


# Bad input.


def shape_of(objective, model, guide, *args, params=None):
    params = {"m": 0.0, "s": 1.0} if params is None else params
    return jax.eval_shape(lambda: objective.loss(random.key(0), params, model, guide, *args))


def normal_model():
    numpyro.sample("z", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize("objective", [VRELBO(), VRELBO(gradient="dreg"), BBAlphaELBO()])
def test_site_without_a_gradient(objective):
    def model():
        with numpyro.plate("data", 2):
            k = numpyro.sample("k", dist.Bernoulli(0.3))
            numpyro.sample("x", dist.Normal(1.0 * k, 1.0), obs=jnp.zeros(2))

    def guide():
        with numpyro.plate("data", 2):
            numpyro.sample("k", dist.Bernoulli(numpyro.param("p", 0.4)))

    with pytest.raises(ValueError, match=r"'k' \(BernoulliProbs\) is not reparameterised.*VIMCO"):
        shape_of(objective, model, guide, params={"p": 0.4})


def test_auxiliary_sites_need_a_gradient_unless_they_are_masked_noise():
    def guide(mask):
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("coin", dist.Bernoulli(0.5), infer={"is_auxiliary": True})
        normal_guide()

    with pytest.raises(ValueError, match="'coin'"):
        shape_of(VRELBO(), normal_model, partial(guide, True))
    shape_of(VRELBO(), normal_model, partial(guide, False))


def test_latent_that_the_guide_misses():
    def model():
        normal_model()
        numpyro.sample("y", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="latent site 'y' of the model is missing in the guide"):
        shape_of(VRELBO(), model, normal_guide)


def test_model_without_sample_sites_and_without_latents():
    with pytest.raises(ValueError, match="the model has no sample site"):
        shape_of(VRELBO(), lambda: None, lambda: None)

    def likelihood():
        numpyro.sample("x", dist.Normal(numpyro.param("m", 0.0), 1.0), obs=2.0)

    # Nothing latent is maximum likelihood, as with Trace_ELBO.
    value, grad = value_and_grad(VRELBO(0.5, 3), {"m": 0.5}, likelihood, lambda: None)
    np.testing.assert_allclose(-value, dist.Normal(0.5, 1.0).log_prob(2.0), rtol=1e-6)
    np.testing.assert_allclose(grad["m"], -1.5, rtol=1e-6)


def test_subsample_larger_than_its_plate():
    with pytest.raises(ValueError, match="plate 'data' has subsample_size 9 but only 6 rows"):
        shape_of(VRELBO(), local_model, local_guide, X_LOCAL, 9, params=LOCAL_PARAMS)


@pytest.mark.parametrize("objective", [VRELBO(), VRELBO(gradient="stl"), BBAlphaELBO()])
def test_implicit_guide(objective):
    def model():
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", 2):
            numpyro.sample("x", dist.Normal(z, 1.0), obs=jnp.zeros(2))

    def guide():
        noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        numpyro.sample("z", Implicit(jnp.tanh(noise)))

    with pytest.raises(IntractableDensityError, match="SVGD"):
        shape_of(objective, model, guide, params={})


def test_guide_that_leaves_the_subsampled_plate():
    def guide(x, batch):
        for name in ("u", "z"):
            numpyro.sample(name, dist.LogNormal(jnp.zeros(2), 1.0))

    with pytest.raises(
        ValueError, match="'u' lies in the subsampled plate 'data' in the model but not"
    ):
        shape_of(VRELBO(1.0), local_model, guide, X_LOCAL, 2, params=LOCAL_PARAMS)
