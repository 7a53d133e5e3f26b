"""Kernels equal their formulas, their derivatives those of autodiff, their bandwidths the rules."""

import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import (
    IMQ,
    RBF,
    BaseKernel,
    Cauchy,
    Epanechnikov,
    RadialKernel,
    as_kernel,
    median_bandwidth,
)

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
Y = np.array([[0.5, 0.5], [-0.2, 0.1]])
KERNELS = [
    RBF("median", factor=2.0),
    IMQ(0.7, beta=-0.8, factor=0.5),
    Cauchy("median_distance", factor=0.7),
    Epanechnikov(1.7),
]


@pytest.mark.x64
@pytest.mark.parametrize(
    ("kernel", "value", "grad_y", "cross"),
    [
        (RBF(1.5), 0.6383370211, (-0.2553348084, -0.3120758770), 0.3127063333),
        (IMQ(1.5), 0.7259008777, (-0.1530001850, -0.1870002261), 0.0987354825),
        (Cauchy(1.5), 0.6901840491, (-0.1905416086, -0.2328841883), 0.1610576651),
        (Epanechnikov(), -0.01, (-0.9, -1.1), 2.0),
    ],
)
def test_matches_reference_values(kernel, value, grad_y, cross, tol):
    x, y = jnp.array(X[:1]), jnp.array(X[1:2])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=tol(1e-5, 5e-9))  # noqa: E731
    np.testing.assert_allclose(kernel(x, y)[0, 0], value, atol=tol(1e-6, 1e-9))
    close(kernel.grad_y(x, y)[0, 0], grad_y)
    close(kernel.grad_x(x, y)[0, 0], -np.array(grad_y))
    close(kernel.cross_trace(x, y)[0, 0], cross)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_stein_kernel_is_that_of_autodiff(kernel):
    x, y = jnp.array(X) + 3.0, jnp.array(Y) + 3.0
    kernel = kernel.resolve(x)
    by_autodiff = as_kernel(lambda x, y: kernel(x, y))
    a, b = jnp.cos(x), jnp.sin(y)
    ours, theirs = kernel.stein(x, y, a, b), by_autodiff.stein(x, y, a, b)
    np.testing.assert_allclose(ours, theirs, atol=5e-6)
    ours, theirs = kernel.repulsion(x, y), by_autodiff.repulsion(x, y)
    np.testing.assert_allclose(ours, theirs, atol=5e-6)


@pytest.mark.x64
def test_median_bandwidth_matches_reference(tol):
    rtol = tol(1e-5, 1e-9)
    for points, small, wide in (
        (X, 0.9647017518, 1.8261982368),
        (np.array([[0.0], [1.0], [3.0]]), 1.2011224088, 2.0),
    ):
        np.testing.assert_allclose(median_bandwidth(jnp.array(points)), small, rtol=rtol)
        ours = median_bandwidth(jnp.array(points), rule="median_distance")
        np.testing.assert_allclose(ours, wide, rtol=rtol)


def test_median_of_many_points_uses_evenly_spaced_rows_and_the_full_count():
    x = jnp.exp(random.normal(random.key(0), (1001, 2)))
    rows = np.rint(np.arange(256) * 1001 / 256).astype(int)
    wide = median_bandwidth(x, rule="median_distance")
    assert wide == median_bandwidth(x[rows], rule="median_distance")
    np.testing.assert_allclose(median_bandwidth(x), wide * np.sqrt(0.5 / np.log(1002)), rtol=1e-6)


def test_median_falls_back_to_the_mean_and_then_to_one():
    mostly_equal = jnp.zeros((5, 1)).at[0].set(3.0)
    mean = np.sqrt(0.4 * 9.0)
    ours = median_bandwidth(mostly_equal, rule="median_distance")
    np.testing.assert_allclose(ours, mean, rtol=1e-6)
    assert median_bandwidth(jnp.ones((4, 2))) == 1.0
    assert median_bandwidth(jnp.ones((1, 2))) == 1.0


def test_no_gradient_flows_through_a_rule_but_through_a_number():
    x = jnp.array(X)
    by_rule = jax.grad(lambda x: RBF("median")(x, x).sum())(x)
    by_number = jax.grad(lambda x: RBF(median_bandwidth(X))(x, x).sum())(x)
    np.testing.assert_allclose(by_rule, by_number, rtol=1e-6)
    assert jnp.all(jax.grad(lambda x: median_bandwidth(x))(x) == 0.0)
    assert jax.grad(lambda h: RBF(h)(x, x).sum())(1.5) > 0.1


def test_factor_multiplies_numbers_rules_and_callables():
    x = jnp.array(X)
    h = median_bandwidth(x)
    expected = RBF(2.0 * h)(x, x)
    for kernel in (
        RBF(h, factor=2.0),
        RBF("median", factor=2.0),
        RBF(median_bandwidth, factor=2.0),
    ):
        np.testing.assert_allclose(kernel(x, x), expected, rtol=1e-6)
        np.testing.assert_allclose(kernel.resolve(x)(x, x), expected, rtol=1e-6)


def test_kernels_are_frozen_pytrees_that_cross_jit_vmap_and_pickle():
    x = jnp.array(X)
    kernel = IMQ("median", beta=-0.3)
    assert isinstance(kernel, BaseKernel)
    assert jax.tree.leaves(kernel) == [1.0, -0.3]
    crossed = jax.jit(lambda k: jax.tree.map(lambda leaf: leaf, k))(kernel)
    assert crossed.bandwidth == "median"
    expected = kernel(x, x)
    np.testing.assert_allclose(jax.jit(lambda k, x: k(x, x))(kernel, x), expected, rtol=1e-6)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(kernel))(x, x), expected)
    several = jax.vmap(lambda h: RBF(h)(x, x))(jnp.array([0.5, 1.5]))
    np.testing.assert_allclose(several[1], RBF(1.5)(x, x), rtol=1e-6)
    with pytest.raises(AttributeError):
        kernel.beta = -0.4


def test_a_kernel_of_ones_own_needs_only_its_formula():
    class Quadratic(BaseKernel):
        def __call__(self, x, y):
            return (1.0 + x @ y.T) ** 2

    class Cubic(RadialKernel):
        def phi(self, s):
            return (1.0 + s / self.length**2) ** -3

    x, y = jnp.array(X), jnp.array(Y)
    gradient = 2.0 * (1.0 + x @ y.T)[..., None] * y[None]
    np.testing.assert_allclose(Quadratic().grad_x(x, y), gradient, rtol=1e-5)
    kernel = Cubic(1.3)
    by_autodiff = as_kernel(lambda x, y: kernel(x, y))
    np.testing.assert_allclose(
        kernel.cross_trace(x, y), by_autodiff.cross_trace(x, y), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RBF(0.0), "bandwidth is 0.0"),
        (lambda: RBF("meadian"), "'median', 'median_distance'"),
        (lambda: RBF(factor=0.0), "factor is 0.0"),
        (lambda: IMQ(beta=-1.0), r"beta is -1.0; it must be in \(-1, 0\)"),
        (lambda: Cauchy("he"), r"Cauchy is no Gaussian.*use RBF\('he'\)"),
        (lambda: median_bandwidth(jnp.ones(3)), r"pass x\[:, None\]"),
        (lambda: RBF(1.0)(jnp.ones((3, 1)), jnp.ones((3, 2))), "dimension 1 and y"),
    ],
)
def test_bad_input_is_one_clear_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()
