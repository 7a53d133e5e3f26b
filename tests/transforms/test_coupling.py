"""`AffineCoupling`: values by hand, Jacobian by autodiff, exact inverse, the pytree of weights."""

import functools
import math

from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest

from numpyro_ext.transforms import AffineCoupling

D, SPLIT = 5, 2


def affine_net(weights, a):
    return jnp.tanh(a @ weights["w"]) * 3.0 + weights["b"]


def make(seed=0, clamp=2.0):
    key_w, key_b = random.split(random.key(seed))
    weights = {
        "w": random.normal(key_w, (SPLIT, 2 * (D - SPLIT))),
        "b": random.normal(key_b, (2 * (D - SPLIT),)),
    }
    return AffineCoupling(functools.partial(affine_net, weights), SPLIT, clamp=clamp)


def points(*batch):
    return 0.7 + jnp.array([1.0, 2.0, 0.5, 3.0, 1.0]) * random.normal(random.key(1), (*batch, D))


@pytest.mark.x64
def test_matches_the_formula_by_hand(tol):
    # a = .5: s_raw = 1, t = -.25; s = 2 tanh(1/2) = .9242343145; y_b = -1.5 e^s - .25.
    coupling = AffineCoupling(lambda a: jnp.concatenate([2 * a, -0.5 * a], -1), 1)
    x = jnp.array([0.5, -1.5])
    y = coupling(x)
    s = 2 * math.tanh(0.5)
    assert jnp.allclose(y, jnp.array([0.5, -1.5 * math.exp(s) - 0.25]), rtol=tol(1e-6, 1e-12))
    assert jnp.allclose(coupling.log_abs_det_jacobian(x, y), s, rtol=tol(1e-6, 1e-12))


def test_quadratic_net_makes_the_banana_exactly(tol):
    # z1 ~ N(0, 1), z2 | z1 ~ N(b v (z1^2 - 1), 1) with b v = 3: the target of KL 0.
    banana = AffineCoupling(lambda a: jnp.concatenate([0 * a, 3 * (a**2 - 1)], -1), 1)
    q = dist.TransformedDistribution(dist.Normal(jnp.zeros(2), 1).to_event(1), banana)
    z = jnp.array([[0.5, -1.0], [2.0, 9.5], [-1.3, 0.2]])
    expected = dist.Normal(0, 1).log_prob(z[:, 0]) + dist.Normal(
        3 * (z[:, 0] ** 2 - 1), 1
    ).log_prob(z[:, 1])
    assert jnp.allclose(q.log_prob(z), expected, rtol=tol(1e-6, 1e-12))


def test_clamp_bounds_the_log_scale():
    wild = AffineCoupling(lambda a: 1e6 * jnp.concatenate([a, -a, 0 * a, 0 * a], -1), 1, clamp=0.5)
    x = jnp.array([0.3, 2.0, -4.0])
    y = wild(x)
    assert jnp.allclose(y, jnp.array([0.3, 2.0 * jnp.exp(0.5), -4.0 * jnp.exp(-0.5)]))
    gentle = make(clamp=1e6)
    s_raw = gentle.net(points()[:SPLIT])[: D - SPLIT]
    assert jnp.allclose(gentle.call_with_intermediates(points())[1], s_raw.sum(), atol=1e-5)


def test_takes_what_numpyro_module_returns():
    pair = stax.serial(stax.Dense(4), stax.Tanh, stax.Dense(2 * (D - SPLIT)))

    def program(x):
        return AffineCoupling(numpyro.module("net", pair, (SPLIT,)), SPLIT)(x)

    x = points(3)
    trace = handlers.trace(handlers.seed(program, 0)).get_trace(x)
    params = {"net$params": trace["net$params"]["value"]}
    y = handlers.substitute(program, params)(x)
    s_raw = pair[1](params["net$params"], x[:, :SPLIT])[:, : D - SPLIT]
    t = pair[1](params["net$params"], x[:, :SPLIT])[:, D - SPLIT :]
    assert jnp.allclose(
        y[:, SPLIT:], x[:, SPLIT:] * jnp.exp(2 * jnp.tanh(s_raw / 2)) + t, rtol=1e-5
    )


def test_vector_and_net_of_the_wrong_length_are_named():
    with pytest.raises(ValueError, match="split is 2 and the vector has length 2"):
        make()(jnp.ones(2))
    with pytest.raises(ValueError, match=r"it must give \(8,\)"):
        make()(jnp.ones(6))
