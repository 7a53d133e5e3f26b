"""The power mean against high precision, and the corners of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.objectives.power_mean import power_mean, surrogate

LW = np.array([-3.0, 0.25, 1.5, -0.75])


def reference(lw, a):
    lw = np.asarray(lw, np.longdouble)
    if a == 0:
        return float(lw.mean())
    c = lw.max() if a > 0 else lw.min()
    a = np.longdouble(a)
    # expm1 and log1p: at a = 1e-12 the plain form would lose all digits of the reference itself.
    return float(c + np.log1p(np.mean(np.expm1(a * (lw - c)))) / a)


@pytest.mark.x64
@pytest.mark.parametrize("a", [-40.0, -1.0, -1e-3, -1e-9, 0.0, 1e-12, 1e-6, 1e-2, 0.3, 1.0, 1e3])
def test_matches_extended_precision(a, tol):
    for static in (a, jnp.asarray(a)):
        value, weights = power_mean(jnp.asarray(LW, float), static)
        np.testing.assert_allclose(value, reference(LW, a), rtol=tol(1e-6, 1e-13))
        expected = np.exp(a * LW - np.max(a * LW))
        np.testing.assert_allclose(
            weights, expected / expected.sum(), rtol=tol(2e-5, 1e-12), atol=1e-30
        )


@pytest.mark.slow
@pytest.mark.x64
def test_smooth_through_zero_far_from_the_origin(tol):
    lw = jnp.asarray(LW - 1e3, float)
    a = jnp.concatenate([-jnp.logspace(-9, -3, 20), jnp.zeros(1), jnp.logspace(-9, -3, 20)])
    values = jax.vmap(lambda a: power_mean(lw, a)[0])(jnp.sort(a))
    exact = [reference(LW, float(x)) - 1e3 for x in jnp.sort(a)]
    np.testing.assert_allclose(values, exact, rtol=tol(2e-7, 1e-14))


def test_infinite_orders_pick_the_first_extreme():
    lw = jnp.array([[1.0, 4.0], [3.0, -2.0], [3.0, -2.0]])
    for a, value, best in ((jnp.inf, [3.0, 4.0], [1, 0]), (-jnp.inf, [1.0, -2.0], [0, 1])):
        mean, weights = power_mean(lw, float(a))
        assert mean.tolist() == value
        assert jnp.argmax(weights, 0).tolist() == best
        assert weights.sum(0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("a", [-1.0, 0.0, 0.5, jnp.inf, -jnp.inf])
def test_weights_of_minus_infinity(a, traced):
    if traced and np.isinf(a):
        return
    order = jnp.asarray(a) if traced else float(a)
    some = jnp.array([-jnp.inf, 0.5, -1.0])
    value, grad = jax.value_and_grad(lambda lw: surrogate(lw, order))(some)
    if a > 0:
        assert np.isfinite(value)
        assert grad[0] == 0
        np.testing.assert_allclose(grad.sum(), 1, rtol=1e-6)
    else:
        assert value == -jnp.inf
        assert grad.tolist() == [0, 0, 0]
    value, grad = jax.value_and_grad(lambda lw: surrogate(lw, order))(jnp.full(3, -jnp.inf))
    assert value == -jnp.inf
    assert grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("a", [-1.0, 0.0, 0.5, jnp.inf, -jnp.inf])
def test_nan_is_passed_on(a):
    assert jnp.isnan(surrogate(jnp.array([0.0, jnp.nan, 1.0]), float(a)))


def test_surrogate_has_the_gradient_of_its_value():
    lw = jnp.asarray(LW, float)
    for a in (-2.0, 0.3, 1.0):
        grad = jax.grad(lambda lw, a=a: surrogate(lw, a))(lw)
        exact = jax.grad(lambda lw, a=a: jnp.log(jnp.mean(jnp.exp(a * lw))) / a)(lw)
        np.testing.assert_allclose(grad, exact, rtol=1e-5)
