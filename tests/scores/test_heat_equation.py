"""The heat-equation bandwidth: reference values, the equation itself, its laws and its limits."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.scores import RBF, he_bandwidth, heat_equation, median_bandwidth
from numpyro_ext.scores._points import squared_distances
from numpyro_ext.scores.heat_equation import _mismatch, _step

X = np.array([[0.0, 0.0], [1.0, 0.5], [-0.5, 2.0], [3.0, -1.0]])


@jax.jit
def objective(x, l):
    """J at the bandwidth l: the objective of the search."""
    u = (x - x.mean(0)) / l
    return _mismatch(u, squared_distances(u, u), jnp.ones((), x.dtype))


@jax.jit
def step(x, l):
    """The bandwidth after one step of the search."""
    return _step(x, jnp.asarray(l, x.dtype))


@pytest.mark.x64
def test_matches_reference_values(tol):
    x, rtol = jnp.array(X), tol(1e-5, 1e-8)
    reference = {
        0.25: 0.868521784207522,
        0.5: 0.7712908100485203,
        1.0: 0.6747126245509026,
        2.0: 0.8738048927391127,
        4.0: 1.8823969834375034,
    }
    for h, value in reference.items():
        np.testing.assert_allclose(objective(x, h**0.5), value, rtol=rtol)
    np.testing.assert_allclose(step(x, 1.5**0.5) ** 2, 1.2173772896, rtol=rtol)
    np.testing.assert_allclose(step(x, 0.5**0.5) ** 2, 0.55, rtol=rtol)
    np.testing.assert_allclose(he_bandwidth(x) ** 2, 1.07373658, rtol=tol(1e-3, 1e-8))


@pytest.mark.x64
@pytest.mark.parametrize("d", [1, 3])
def test_objective_is_the_mismatch_of_the_heat_equation(d, needs_x64):
    """(2 pi)^d h^(d+2) sum_i (laplace q(x_i) + sum_j grad_{x_j} q(x_i) . grad log q(x_j))^2."""
    x = random.normal(random.key(d), (6, d)) * jnp.array([1.0, 3.0, 0.5])[:d] + 5.0
    h = 0.7

    def q(y, x):
        s = jnp.sum((y - x) ** 2, -1)
        return jnp.mean(jnp.exp(-s / (2 * h))) / (2 * jnp.pi * h) ** (d / 2)

    @jax.jit
    def mismatch(y):
        laplace = jnp.trace(jax.hessian(q)(y, x))
        velocity = -jax.vmap(jax.grad(lambda p: jnp.log(q(p, x))))(x)
        return laplace - jnp.sum(jax.grad(q, argnums=1)(y, x) * velocity)

    total = sum(float(mismatch(y)) ** 2 for y in x)
    expected = (2 * np.pi) ** d * h ** (d + 2) * total
    np.testing.assert_allclose(objective(x, h**0.5), expected, rtol=1e-10)


def test_bandwidth_is_a_sequence_of_clipped_steps_from_the_median(monkeypatch):
    monkeypatch.setattr(heat_equation, "CLIP", 1.15)
    x = random.normal(random.key(1), (31, 3))  # of which no other program is kept
    median = l = median_bandwidth(x)
    for _ in range(3):
        l = jnp.clip(step(x, l), median / 1.15, median * 1.15)
    ours = he_bandwidth(x, num_steps=3)
    np.testing.assert_allclose(ours, l, rtol=1e-5)
    np.testing.assert_allclose(ours * 1.15, median, rtol=1e-5)  # here the clip decides
    monkeypatch.undo()
    again = he_bandwidth(x, start=median, num_steps=1)
    np.testing.assert_allclose(again, step(x, median), rtol=1e-5)


def test_kernel_takes_the_rule_and_one_step_from_its_last_length():
    x = jnp.array(X)
    first = RBF("he", factor=2.0).resolve(x)
    np.testing.assert_allclose(first.length, 2.0 * he_bandwidth(x), rtol=1e-6)
    second = jax.jit(lambda x, l: RBF("he", factor=2.0).resolve(x, l))(x + 1.0, first.length)
    np.testing.assert_allclose(second.length, 2.0 * step(x, first.length / 2.0), rtol=1e-6)
    # The other rules and numbers do not depend on the state.
    assert RBF("median").resolve(x, 7.0).length == RBF("median").resolve(x).length
    assert RBF(3.0).resolve(x, 7.0).length == 3.0


def test_no_gradient_flows_through_the_bandwidth():
    assert jnp.all(jax.grad(he_bandwidth)(jnp.array(X)) == 0.0)
    assert jnp.all(jax.grad(step)(jnp.array(X), 0.7) == 0.0)


@pytest.mark.parametrize("d", [1, 5])
def test_warns_where_there_is_no_minimum(d):
    x = random.normal(random.key(3), (20, d))
    for call in (he_bandwidth, lambda x: RBF("he")(x, x), lambda x: RBF("he").resolve(x, 0.3)):
        with pytest.warns(InferenceWarning, match=f"for d = {d}: .*; use 'median_distance'"):
            jax.eval_shape(call, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(he_bandwidth, jnp.ones((20, 3)))
