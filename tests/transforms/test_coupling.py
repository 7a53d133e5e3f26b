"""`AffineCoupling`: values by hand, Jacobian by autodiff, exact inverse, the pytree of weights."""

import functools
import inspect
import math
import pickle

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions.transforms import ComposeTransform, PermuteTransform
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


@pytest.mark.x64
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_log_det_is_that_of_autodiff_and_the_inverse_is_exact_for_every_batch(batch, tol):
    coupling, x = make(), points(*batch)

    @jax.jit
    def everything(coupling, x):
        y, cached = coupling.call_with_intermediates(x)
        jacobians = jax.vmap(jax.jacobian(coupling))(x.reshape(-1, D))
        return {
            "y": y,
            "inverse": coupling.inv(y),
            "expected": jnp.linalg.slogdet(jacobians)[1].reshape(batch),
            "fresh": coupling.log_abs_det_jacobian(x, y),
            "cached": coupling.log_abs_det_jacobian(x, y, cached),
            "of_inverse": -coupling.inv.log_abs_det_jacobian(y, x),
        }

    got = everything(coupling, x)
    y = got["y"]
    assert y.shape == x.shape
    for name in ("fresh", "cached", "of_inverse"):
        assert jnp.allclose(got[name], got["expected"], atol=tol(1e-5, 1e-12))
    assert jnp.allclose(got["inverse"], x, atol=tol(1e-5, 1e-9))
    assert jnp.array_equal(y[..., :SPLIT], x[..., :SPLIT])
    assert jnp.abs(y[..., SPLIT:] - x[..., SPLIT:]).min() > 1e-3


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


def test_weights_are_leaves_so_that_it_crosses_jit_vmap_and_grad():
    coupling, x = make(), points()
    call = jax.jit(lambda c, x: c(x))
    assert jnp.allclose(call(coupling, x), coupling(x), rtol=1e-6)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), make(0), make(1))
    both = jax.jit(jax.vmap(lambda c: c(x)))(stacked)
    assert jnp.allclose(both, jnp.stack([call(make(0), x), call(make(1), x)]), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda c: c(x).sum()))(coupling)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient.net))


def test_equality_and_round_trips():
    coupling = make()
    assert coupling == coupling
    assert coupling == jax.tree.unflatten(*jax.tree.flatten(coupling)[::-1])
    weights = coupling.net.args[0]
    net = functools.partial(affine_net, weights)
    assert coupling == AffineCoupling(net, SPLIT)
    assert coupling != AffineCoupling(net, SPLIT, clamp=1.0)
    assert coupling != AffineCoupling(net, SPLIT + 1)
    assert coupling != PermuteTransform(jnp.arange(D))
    assert coupling != AffineCoupling(jnp.sin, SPLIT)
    assert bool(coupling.eq(make(), static=False))
    assert not bool(coupling.eq(make(seed=1), static=False))
    again = pickle.loads(pickle.dumps(coupling))
    assert jnp.array_equal(again(points()), coupling(points()))


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


def test_own_draws_are_never_inverted(monkeypatch):
    def refuse(self, y):
        raise AssertionError("inverted")

    monkeypatch.setattr(AffineCoupling, "_inverse", refuse)
    flip = PermuteTransform(jnp.arange(D)[::-1])
    chain = ComposeTransform([make(0), flip, make(1)])
    q = dist.TransformedDistribution(dist.Normal(jnp.zeros(D), 1).to_event(1), chain)

    def density(cached):
        z, used = q.sample_with_intermediates(random.key(2), (4,))
        return q.log_prob(z, used if cached else None)

    # Tracing is enough to meet an inverse.
    assert jax.eval_shape(lambda: density(True)).shape == (4,)
    with pytest.raises(AssertionError, match="inverted"):
        jax.eval_shape(lambda: density(False))


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"split": 0}, ValueError, "split is 0"),
        ({"clamp": 0.0}, ValueError, "clamp is 0.0"),
        ({"clamp": "soft"}, TypeError, "clamp is 'soft'"),
    ],
)
def test_bad_arguments_are_named(kwargs, error, match):
    arguments = {"net": jnp.sin, "split": SPLIT, "clamp": 2.0} | kwargs
    # The tests' own type checker would answer first.
    init = inspect.unwrap(AffineCoupling.__init__)
    with pytest.raises(error, match=match):
        init(object.__new__(AffineCoupling), **arguments)


def test_vector_and_net_of_the_wrong_length_are_named():
    with pytest.raises(ValueError, match="split is 2 and the vector has length 2"):
        make()(jnp.ones(2))
    with pytest.raises(ValueError, match=r"it must give \(8,\)"):
        make()(jnp.ones(6))
