"""Solutions, and derivatives by the implicit function against those through the iterations."""

from functools import cache

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import fixed_point

# A nonlinear contraction of two leaves of unequal scales.
ARGS = {"M": np.array([[0.4, -0.3], [0.2, 0.5]]), "b": np.array([1.5, -0.4])}
INIT = {"x": np.zeros(2), "y": np.ones(())}
WEIGHT = np.array([0.3, -1.1])


def f(args, x):
    inner = args["M"] @ jnp.tanh(x["x"]) + args["b"] + 0.01 * x["y"]
    return {"x": inner, "y": 0.5 * x["y"] + 20 * jnp.sin(x["x"][0])}


def measure(x):
    return WEIGHT @ x["x"] ** 2 + 0.1 * x["y"]


@cache
def both_gradients():
    """The value, and the gradients in args and init: implicit, and through 150 iterations."""

    def implicit(args, init):
        result = fixed_point(f, args, init)
        return measure(result.value) + result.residual, result

    def unrolled(args, init):
        return measure(lax.scan(lambda x, _: (f(args, x), None), init, length=150)[0])

    args, init = jax.tree.map(lambda x: jnp.asarray(x, float), (ARGS, INIT))
    compute = jax.jit(
        lambda a, i: (
            jax.value_and_grad(implicit, (0, 1), has_aux=True)(a, i),
            jax.value_and_grad(unrolled)(a, i),
        )
    )
    return compute(args, init)


@pytest.mark.x64
def test_derivative_is_that_through_the_iterations(tol):
    ((value, _), (outcome, in_init)), (expected_value, expected) = both_gradients()
    np.testing.assert_allclose(value, expected_value, rtol=tol(1e-4, 1e-8))
    for name in expected:
        np.testing.assert_allclose(outcome[name], expected[name], rtol=tol(1e-3, 1e-7))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(in_init))


def test_stops_where_a_loop_stops():
    """The rule is max |f(x) - x| <= tol (1 + max |x|), and the result is f(x)."""
    ((_, result), _), _ = both_gradients()
    x = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), INIT)
    tol = 1e-10 if jax.config.jax_enable_x64 else 1e-5
    count, residual = 0, np.inf
    while residual > tol * (1 + max(np.abs(leaf).max() for leaf in x.values())):
        old, count = x, count + 1
        x = {
            "x": ARGS["M"] @ np.tanh(old["x"]) + ARGS["b"] + 0.01 * old["y"],
            "y": 0.5 * old["y"] + 20 * np.sin(old["x"][0]),
        }
        residual = max(np.abs(x[name] - old[name]).max() for name in x)
    assert result.converged and abs(int(result.num_iter) - count) <= 1  # one for rounding
    np.testing.assert_allclose(result.value["x"], x["x"], rtol=1e-5)


@cache
def scalars():
    """x = a x + 1, for any slope a and start: value, diagnostics and gradient in a."""

    def solve(a, start):
        result = fixed_point(lambda a, x: a * x + 1, a, start, max_iter=60)
        return result.value, result

    return jax.value_and_grad(solve, has_aux=True)


def test_elements_of_a_batch_stop_on_their_own():
    slopes, starts = jnp.array([0.1, 0.7, 1.0, 3.0, -0.4]), jnp.array([0.0, 2.0, 1.0, 1e30, 5.0])
    together = jax.jit(jax.vmap(scalars()))(slopes, starts)
    alone = jax.jit(scalars())
    for i, (a, start) in enumerate(zip(slopes, starts, strict=True)):
        for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone(a, start)), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-6, atol=1e-6)
    (value, result), _ = together
    assert result.converged.tolist() == [True, True, False, False, True]
    np.testing.assert_allclose(
        value[jnp.array([0, 1, 4])], 1 / (1 - slopes[jnp.array([0, 1, 4])]), rtol=1e-4
    )
    assert result.num_iter[2] == 60 and value[2] == 61.0 and result.residual[2] == 1.0


def test_an_iterate_that_is_not_finite_ends_at_the_last_finite_one():
    (value, result), _ = jax.jit(scalars())(1e10, 1e20)
    assert 2 <= result.num_iter < 60 and np.isfinite(value) and value > 1e29
    assert result.residual == np.inf and not result.converged


def test_a_point_that_repels_has_the_derivative_of_one_step():
    """x = a + tanh(3 x) starts at its fixed point 0, where the slope is 3; df/da = 1."""

    def solve(a):
        return fixed_point(lambda a, x: a + jnp.tanh(3 * x), a, 0.0).value

    assert jax.grad(solve)(0.0) == 1.0


def test_a_small_cotangent_is_solved_as_well_as_a_large_one():
    solve = jax.jit(jax.grad(lambda a, c: c * fixed_point(lambda a, x: a * x + 1, a, 0.0).value))
    large, small = solve(0.9, 1.0), solve(0.9, 1e-12)
    np.testing.assert_allclose(large, 100.0, rtol=2e-3)  # 1 / (1 - a)^2
    np.testing.assert_allclose(small * 1e12, large, rtol=1e-5)


def test_memory_does_not_depend_on_the_number_of_iterations():
    def temporary(max_iter):
        def loss(a):
            x = fixed_point(lambda a, x: 0.5 * jnp.sin(x) + a, a, a, tol=0.0, max_iter=max_iter)
            return jnp.sum(x.value)

        compiled = jax.jit(jax.grad(loss)).lower(jnp.zeros(1000)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(10) == temporary(1000) > 0


def test_what_f_closes_over_has_its_gradient_too():
    def solve(a):
        return jax.jit(lambda a: fixed_point(lambda _, x: 0.5 * x + a, 0.0, 0.0).value)(a**2)

    np.testing.assert_allclose(jax.grad(solve)(3.0), 12.0, rtol=1e-4)
