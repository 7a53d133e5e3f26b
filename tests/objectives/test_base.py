"""The base of all objectives: draws, units, mutable state, memory, and what it refuses."""

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

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.handlers import seed_plates
from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.objectives import (
    IWELBO,
    VRELBO,
    BBAlphaELBO,
    NestedVRELBO,
    Objective,
    ThermodynamicELBO,
)
from numpyro_ext.objectives.base import Draws
from tests.objectives.compare import assert_refuses, assert_same
from tests.objectives.models import (
    LOCAL_PARAMS,
    X_LOCAL,
    floats,
    global_model,
    local_guide,
    local_model,
    mixed_guide,
    mixed_model,
    normal_guide,
    value_and_grad,
)


def draws_of(objective, params, model, guide, *args):
    return Draws(objective, random.key(0), floats(params), model, guide, args, {})


def test_documented_draws():
    draws = draws_of(VRELBO(0.5, 3), LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 4)
    plate_key, rng_key = random.split(random.key(0))
    for k, key in enumerate(random.split(rng_key, 3)):
        assert jnp.array_equal(random.key_data(draws.keys[k]), random.key_data(key))
        plates = seed_plates(local_guide, plate_key)
        guide = numpyro.handlers.seed(plates, random.split(key)[1])
        with numpyro.handlers.substitute(data=LOCAL_PARAMS):
            expected = numpyro.handlers.trace(guide).get_trace(X_LOCAL, 4)
        got = draws.guide_trace(draws.keys[k])
        for name in ("data", "u", "z"):
            np.testing.assert_allclose(got[name]["value"], expected[name]["value"])
    taken = random.key_data(draws.keys)
    assert not np.any(np.all(taken == random.key_data(draws.extra_key), -1))


@pytest.mark.slow
def test_the_noise_of_a_minibatch_under_global_latents_is_warned_of():
    """Where it widens the guide; not in the linear orders, per datum, nor with all rows."""
    params = {"b": 0.7, "m": 0.2, "s": 0.8}

    def evaluate(objective, batch):
        shape_of(objective, global_model, normal_guide, X_LOCAL, batch, params=params)

    for objective in (VRELBO(0.5, 3), IWELBO(3), ThermodynamicELBO(3)):
        name = type(objective).__name__
        remedy = ".*taylor_proxy" * isinstance(objective, VRELBO)
        sentence = rf"{name} .*2 of 6 rows.*too wide{remedy}.*BBAlphaELBO"
        with pytest.warns(InferenceWarning, match=sentence):
            evaluate(objective, 2)
        evaluate(objective, None)  # warnings are errors here
    for objective in (VRELBO(1.0, 3), BBAlphaELBO(0.5, 3), NestedVRELBO(0.5, 3)):
        evaluate(objective, 2)


@pytest.mark.x64
def test_split_adds_up_to_the_log_joint(tol):
    """Per datum: prior, likelihood without the plate scale but with handlers.scale, and log q."""

    def model(x, batch):
        with numpyro.handlers.scale(scale=0.3):
            mixed_model(x, batch)

    draws = draws_of(BBAlphaELBO(0.0), {"c": 0.4}, model, mixed_guide, X_LOCAL, 2)
    particle = draws.particle(draws.keys[0])
    assert draws.layout.plates == ("data",)
    assert (draws.layout.shape, draws.layout.size, draws.layout.scale) == ((2,), 6, 3.0)
    assert draws.layout.subsampled_latents == ()
    w, z = particle.values["w"], particle.values["z"]
    x = X_LOCAL[draws.guide_trace(draws.keys[0])["data"]["value"]]
    close = partial(np.testing.assert_allclose, rtol=tol(1e-5, 1e-12))
    close(particle.log_prior, 0.3 * dist.Normal(0.2, 1.0).log_prob(w))
    log_lik = dist.Normal(w, 1.0).log_prob(z) + dist.Normal(z, 0.8).log_prob(x)
    close(particle.log_lik, 0.3 * log_lik)
    close(particle.log_q_global, dist.Normal(0.4, 0.6).log_prob(w))
    close(particle.log_q_local, dist.Normal(0.4 * x, 0.7).log_prob(z))
    joint = draws_of(VRELBO(1.0), {"c": 0.4}, model, mixed_guide, X_LOCAL, 2)
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

    draws = draws_of(VRELBO(0.5, 4), {}, model, guide, jnp.arange(6.0).reshape(2, 3))
    particle = draws.particle(draws.keys[0])
    assert draws.layout.plates == ("row",)
    assert particle.log_lik.shape == (2,)
    z, noise = particle.values["z"], particle.values["noise"][:, 0]
    log_q = dist.Normal(0.1 * jnp.arange(6.0).reshape(2, 3), 0.5).log_prob(z).sum(1)
    np.testing.assert_allclose(
        particle.log_q_local, log_q + dist.Normal().log_prob(noise), rtol=1e-5
    )


def test_units_are_the_same_where_the_guide_has_the_plates_in_another_order():
    def model():
        with numpyro.plate("row", 2, dim=-2), numpyro.plate("column", 3, dim=-1):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=jnp.ones((2, 3)))

    def guide():
        with numpyro.plate("row", 2, dim=-1), numpyro.plate("column", 3, dim=-2):
            noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        with numpyro.plate("row", 2, dim=-2), numpyro.plate("column", 3, dim=-1):
            numpyro.sample("z", dist.Normal(noise.T, 0.5))

    draws = draws_of(VRELBO(0.5, 4), {}, model, guide)
    particle = draws.particle(draws.keys[0])
    z, noise = particle.values["z"], particle.values["noise"]
    assert (z.shape, noise.shape, draws.layout.shape) == ((2, 3), (3, 2), (2, 3))
    log_q = dist.Normal().log_prob(noise).T + dist.Normal(noise.T, 0.5).log_prob(z)
    np.testing.assert_allclose(particle.log_q_local, log_q, rtol=1e-5)


@pytest.mark.slow
def test_vectorization_does_not_change_the_draws():
    """jax.pmap is NumPyro's example of a callable; the tests have two devices."""
    ways = (True, False, jax.pmap)
    losses = [VRELBO(0.5, 2, vectorize_particles=way) for way in ways]
    first, *others = value_and_grad(losses, LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 2)
    for other in others:
        assert_same(other, first, 5e-5)


def test_a_draw_is_not_computed_in_each_sum_that_reads_it():
    def model():
        numpyro.sample("z", dist.Normal(jnp.zeros(7), 1.0).to_event(1))

    def guide():
        loc = numpyro.param("loc", jnp.zeros(7))
        numpyro.sample("z", dist.Normal(loc, 2.0).to_event(1))

    def operations(fn, *args):
        text = jax.jit(fn).lower(*args).compile().as_text()
        return sum("erf_inv" in line for line in text.splitlines())

    key = random.key(0)
    once = operations(lambda key: random.normal(key, (5, 7)), key)
    loss = jax.value_and_grad(lambda loc: VRELBO(0.0, 5).loss(key, {"loc": loc}, model, guide))
    assert 0 < operations(loss, jnp.zeros(7)) <= 1.2 * once  # otherwise 3.9 times


def test_memory_of_a_gradient_does_not_grow_with_the_particles():
    num_particles = 256
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
    # A residual of one particle has 16 x 64 floats; 16 weights and a key each may grow.
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


@pytest.mark.slow
def test_mutable_state_of_many_particles_is_that_of_as_many_steps():
    x = jnp.array([1.0, 2.0])
    states = []
    for num_particles, gradient, progress_bar in ((1, "standard", False), (3, "dreg", True)):
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


# An objective of one's own.


class ExpectedLogJoint(Objective):
    """Needs no log q."""

    def estimate(self, draws):
        log_p, state = draws.each(lambda particle: particle.log_prior + jnp.sum(particle.log_lik))
        return -jnp.mean(log_p), state


def test_an_objective_that_needs_no_log_q_takes_an_implicit_guide():
    def model():
        numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(1.0, 2.0), obs=0.5)

    def guide():
        scale = numpyro.param("scale", 1.0)
        noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        numpyro.sample("z", Implicit(scale * noise))

    loss = ExpectedLogJoint(4)
    value, grad = value_and_grad(loss, {"scale": 0.7}, model, guide)
    noise = jax.vmap(lambda key: draws_of(loss, {"scale": 0.7}, model, guide).values(key)["noise"])(
        draws_of(loss, {"scale": 0.7}, model, guide).keys
    )
    log_p = dist.Normal().log_prob(0.7 * noise) + dist.Normal(1.0, 2.0).log_prob(0.5)
    np.testing.assert_allclose(-value, log_p.mean(), rtol=1e-5)
    np.testing.assert_allclose(grad["scale"], (0.7 * noise**2).mean(), rtol=1e-5)
    with pytest.raises(IntractableDensityError, match="SVGD"):
        shape_of(VRELBO(), model, guide, params={"scale": 0.7})


def test_what_is_declared_is_refused_before_anything_is_drawn():
    class NothingIsDrawn(Objective):
        def estimate(self, draws):
            raise AssertionError

    def coin(x, batch):
        local_guide(x, batch)
        numpyro.sample("coin", dist.Bernoulli(0.5), infer={"is_auxiliary": True})

    for declared, guide, sentence in (
        ({}, coin, r"guide site 'coin' \(Bernoulli.* NothingIsDrawn has no gradient"),
        (
            {"can_infer_discrete": True},
            coin,
            "NothingIsDrawn: latent site 'u' lies in the subsampled",
        ),
        ({"upper_bound": True}, local_guide, "NothingIsDrawn: the model has the param site 'b'"),
    ):
        loss = NothingIsDrawn(3)
        vars(loss).update(declared)
        with pytest.raises(ValueError, match=sentence):
            shape_of(loss, local_model, guide, X_LOCAL, 2, params=LOCAL_PARAMS)


# Bad input.


def shape_of(objective, model, guide, *args, params=None):
    params = {"m": 0.0, "s": 1.0} if params is None else params
    return jax.eval_shape(lambda: objective.loss(random.key(0), params, model, guide, *args))


def normal_model():
    numpyro.sample("z", dist.Normal(0.0, 1.0))


def test_auxiliary_sites_need_a_gradient_unless_they_are_masked_noise():
    def guide(mask):
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("coin", dist.Bernoulli(0.5), infer={"is_auxiliary": True})
        normal_guide()

    with pytest.raises(ValueError, match="'coin'"):
        shape_of(VRELBO(), normal_model, partial(guide, True))
    shape_of(VRELBO(), normal_model, partial(guide, False))


def test_a_model_may_leave_the_value_of_a_parameter_to_the_guide():
    """As with Trace_ELBO; and its data are looked at all the same."""

    def model(x):
        m = numpyro.param("m")
        with numpyro.plate("rows", 2):
            numpyro.sample("x", dist.Exponential(2 * m), obs=x)

    def guide(x):
        numpyro.param("m", 0.25, constraint=dist.constraints.positive)

    svi, x = SVI(model, guide, optax.sgd(0.1), VRELBO(1.0, 1)), jnp.array([1.0, 3.0])
    loss = jax.jit(svi.update)(svi.init(random.key(0), x), x)[1]
    np.testing.assert_allclose(loss, -2 * np.log(0.5) + 0.5 * 4.0, rtol=1e-6)
    with pytest.raises(ValueError, match="the data of the observed site 'x' have 1 NaN"):
        svi.evaluate(svi.init(random.key(0), x), x.at[1].set(jnp.nan))


def test_guide_that_leaves_the_subsampled_plate():
    def guide(x, batch):
        for name in ("u", "z"):
            numpyro.sample(name, dist.LogNormal(jnp.zeros(2), 1.0))

    with pytest.raises(
        ValueError, match="'u' lies in the subsampled plate 'data' in the model but not"
    ):
        shape_of(VRELBO(1.0), local_model, guide, X_LOCAL, 2, params=LOCAL_PARAMS)


def test_guide_plate_of_another_size():
    """Otherwise the model would take the guide's rows, and drop 150 without a word."""

    def model(x):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("x", dist.Normal(w, 1.0), obs=numpyro.subsample(x, event_dim=0))

    def guide(x):
        with numpyro.plate("data", 200, 50):
            numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        numpyro.sample("w", dist.Normal(numpyro.param("m", 0.0), 1.0))

    sentence = "'data' has 200 of 200 rows in the model but 50 of 200 in the guide"
    assert_refuses(sentence, VRELBO(), {}, model, guide, jnp.arange(200.0))


def test_a_guide_that_does_not_cover_the_model_and_data_with_nan():
    def empty(x):
        pass

    def model(x):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("x", dist.Normal(0.0, scale), obs=x)

    def guide(x):
        numpyro.sample("scale", dist.LogNormal(0.0, 0.1))

    def real(x):
        numpyro.sample("scale", dist.Normal(1.0, 0.1))

    x = jnp.array([1.0, 2.0])
    for loss in (VRELBO(), BBAlphaELBO()):
        assert_refuses("the model has no sample site", loss, {}, empty, empty, x)
        assert_refuses("'scale' .*missing in the guide", loss, {}, model, empty, x)
        assert_refuses("'scale' has the support Positive", loss, {}, model, real, x)
        assert_refuses("'x' have 1 NaN", loss, {}, model, guide, x.at[0].set(jnp.nan))


@pytest.mark.parametrize("loss", [VRELBO(1.0), BBAlphaELBO(0.5)])
def test_a_count_without_a_density_is_named_before_the_first_step_that_is_compiled(loss):
    """One of 200, which 9 of 10 minibatches do not have."""

    def model(y):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 2.0))
        with numpyro.plate("rows", len(y), subsample_size=20) as i:
            numpyro.sample("y", dist.Poisson(rate), obs=y[i])

    def guide(y):
        numpyro.sample("rate", dist.LogNormal(numpyro.param("m", 0.0), 0.1))

    y = jnp.ones(200).at[77].set(-1.0)
    svi = SVI(model, guide, optax.adam(0.01), loss)
    state = svi.init(random.key(0), y)
    with pytest.raises(ValueError, match="'y' has no density at 1 of its 200 values, such as -1"):
        jax.jit(lambda state: svi.update(state, y))(state)


def test_what_is_wrong_with_minibatches_depends_on_the_order():
    plates = {"rows": (1000, 10)}
    problem = VRELBO(0.5).noise_problem(plates)
    assert "10 of 1000 rows of the plate 'rows'" in problem and "proxy=taylor_proxy" in problem
    assert VRELBO(0.5).noise_problem({}) is None
    assert VRELBO(1.0).noise_problem(plates) is None
    assert BBAlphaELBO(0.5).noise_problem(plates) is None
