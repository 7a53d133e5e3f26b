"""`AutoHVI`: its steps, its densities, its gradients and its minibatch."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.initialization import init_to_median
from numpyro.primitives import mutable
import optax
import pytest

from numpyro_ext._model.handlers import every_row
from numpyro_ext.guides import AutoHVI
from numpyro_ext.objectives import AuxiliaryELBO, log_weights
from numpyro_ext.objectives.base import Draws
from tests.guides.moved import moved

X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])


def model(x=X):
    """A constrained site, a minibatch and a parameter."""
    b = numpyro.param("b", 0.7, constraint=dist.constraints.positive)
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.5))
    with numpyro.plate("data", len(x), subsample_size=4):
        x = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", dist.Normal(b * loc, scale), obs=x)


def log_joint(u, b, x):
    """log p* of ``(loc, log scale)``, by hand."""
    log_p = dist.Normal(1.0, 2.0).log_prob(u[0])
    log_p += dist.HalfNormal(1.5).log_prob(jnp.exp(u[1])) + u[1]
    return log_p + 6 / 4 * dist.Normal(b * u[0], jnp.exp(u[1])).log_prob(x).sum()


@cache
def perturbed():
    guide = AutoHVI(
        model, num_steps=2, num_leapfrog=2, step_size=0.2, hidden_dims=(4,), init_from=None
    )
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    return guide, svi, moved(svi, 0.3)


def by_hand(z, v, params, x):
    """``z_T`` and the outgoing velocities, one leapfrog step after the other."""
    gradient = jax.grad(lambda z: -log_joint(z, params["b"], x))
    states = []
    for t in range(2):
        eps, w = params["auto_step_size"][t] / jnp.sqrt(params["auto_mass"]), v[t]
        for _ in range(2):
            w = w - 5.0 * jnp.tanh(eps * gradient(z) / 10.0)
            z = z + eps * w
            w = w - 5.0 * jnp.tanh(eps * gradient(z) / 10.0)
        states.append((z, w))
    return states


@jax.jit
def draw_at(params, x):
    """The sites, the rows, the steps by hand, and the log weight."""
    draws = Draws(AuxiliaryELBO(1), random.key(2), params, model, perturbed()[0], (x,), {})
    particle = draws.particle(draws.keys[0])
    sites = {n: s["value"] for n, s in particle.guide_trace.items()}
    idx = particle.model_trace["data"]["value"]
    states = by_hand(sites["_auto_start"], sites["_auto_velocity"], params, x[idx])
    return sites, idx, states, particle.log_weight


@pytest.mark.slow
def test_draw_is_that_of_leapfrog_steps_on_the_minibatch_of_the_model(tol):
    """Also with other arguments than those with which the guide was set up."""
    (guide, _, params), shift = perturbed(), 3.0
    sites, idx, states, log_weight = draw_at(params, X + shift)
    assert jnp.array_equal(sites["data"], idx)
    z = states[-1][0]
    assert jnp.allclose(sites["loc"], z[0], rtol=tol(1e-4, 1e-10))
    assert jnp.allclose(jnp.log(sites["scale"]), z[1], rtol=tol(1e-4, 1e-10))
    start = dist.Normal(params["auto_loc"], params["auto_scale"]).log_prob(sites["_auto_start"])
    log_q = start.sum() + dist.Normal().log_prob(sites["_auto_velocity"]).sum()
    aux = {name: sites[name] for name in ("_auto_start", "_auto_velocity")}
    fn = substitute(seed(guide, 0), {**params, **aux, "data": idx})
    factor = trace(fn).get_trace(X + shift)
    log_r = -factor["auto_reverse"]["fn"].log_factor
    expected = log_joint(z, params["b"], (X + shift)[idx]) + log_r - log_q
    assert jnp.allclose(log_weight, expected, rtol=tol(1e-4, 1e-10))


def normalised():
    u = numpyro.sample("u", dist.Normal(1.0, 0.7))
    numpyro.sample("s", dist.LogNormal(0.3 * u, 0.5))


@cache
def of_normalised():
    options = {"step_size": 0.3, "init_scale": 1.0, "hidden_dims": (4,)}
    guide = AutoHVI(normalised, init_loc_fn=init_to_median, **options)
    svi = SVI(normalised, guide, optax.adam(1e-2), Trace_ELBO())
    return guide, svi, moved(svi, 0.1)


@pytest.mark.slow
def test_log_weights_on_the_extended_space_average_to_the_evidence():
    # This needs the steps to keep volume and every density to be right.
    guide, _, params = of_normalised()
    weights = jnp.exp(log_weights(random.key(2), params, normalised, guide, num_samples=100_000))
    error = weights.std() / 100_000**0.5
    # The parameters are random, and of three sets the largest error was .008.
    assert error < 0.015 and abs(weights.mean() - 1.0) < 4 * error


@pytest.mark.x64
def test_gradient_flows_through_the_gradient_of_the_model(needs_x64):
    guide, _, params = perturbed()

    @jax.jit
    def loss(b, step_size):
        other = {**params, "b": b, "auto_step_size": params["auto_step_size"] * step_size}
        return AuxiliaryELBO(3).loss(random.key(4), other, model, guide)

    gradient = jax.grad(loss, (0, 1))(0.8, 1.0)
    h = 1e-5
    numeric = (loss(0.8 + h, 1.0) - loss(0.8 - h, 1.0)), (loss(0.8, 1 + h) - loss(0.8, 1 - h))
    assert jnp.allclose(jnp.array(gradient), jnp.array(numeric) / (2 * h), rtol=1e-6)


def test_reverse_density_is_that_of_the_factor_on_all_rows():
    guide, _, params = perturbed()
    aux = {"_auto_start": jnp.array([0.3, -0.5]), "_auto_velocity": jnp.full((2, 2), 0.7)}
    fn = substitute(seed(every_row(guide), 0), {**params, **aux})
    factor = trace(fn).get_trace(X)["auto_reverse"]["fn"].log_factor
    assert jnp.allclose(guide.reverse_log_prob(params, aux, {}, X), -factor, rtol=1e-5)


@pytest.mark.slow
def test_every_draw_has_a_minibatch_and_new_arguments_are_followed():
    guide, _, params = perturbed()
    draw = jax.jit(lambda x: guide.sample_posterior(random.key(1), params, x, sample_shape=(3,)))
    one, far = draw(X), draw(X + 3.0)
    assert one["loc"].shape == (3,) and (far["loc"] != one["loc"]).all()
    predicted = Predictive(guide, params=params, num_samples=3)(random.key(1), X[:5] + 3.0)
    assert predicted["loc"].shape == (3,)


def test_without_its_discrete_data_it_draws_from_the_posterior_of_those_that_it_has_seen():
    def coin(x=None):
        p = numpyro.sample("p", dist.Beta(2.0, 1.0))
        with numpyro.plate("data", 4):
            numpyro.sample("x", dist.Bernoulli(p), obs=x)

    guide = AutoHVI(coin, num_steps=1, hidden_dims=(4,), step_size=0.2, init_from=None)
    x = jnp.array([1.0, 1.0, 0.0, 1.0])
    svi = SVI(coin, guide, optax.adam(1e-2), Trace_ELBO())
    draw = substitute(seed(guide, 1), svi.get_params(svi.init(random.key(0), x)))
    assert trace(draw).get_trace()["p"]["value"] == trace(draw).get_trace(x)["p"]["value"]


def with_state():
    numpyro.sample("z", dist.Normal(mutable("m", jnp.zeros(())), 1.0))


def test_mutable_state_is_named():
    with pytest.raises(ValueError, match="the model has the mutable site 'm'"):
        seed(AutoHVI(with_state, init_from=None), 0)()
