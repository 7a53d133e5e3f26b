"""The linear kernel: its derivatives, and the velocity of SVGD made of it."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import Linear, as_kernel

X = np.array([[0.0, 0.0], [1.0, 0.5], [-0.5, 2.0], [3.0, -1.0]])
PRECISION = np.array([[2.0, 0.3], [0.3, 0.5]])
LOC = np.array([1.0, -1.0])


def velocity(kernel, x, g):
    """SVGD of a kernel that may be matrix-valued."""
    return kernel.to_velocity(kernel(x, x) @ g + kernel.repulsion(x, x)) / len(x)


def test_derivatives_are_those_of_autodiff():
    x, y = jnp.array(X) + 3.0, jnp.array(X[:2]) - 1.0
    kernel = Linear(0.7)
    by_autodiff = as_kernel(lambda x, y: x @ y.T + 0.7)
    np.testing.assert_allclose(kernel(x, y), by_autodiff(x, y), rtol=1e-6)
    for name in ("grad_x", "grad_y", "cross_trace", "repulsion"):
        ours, theirs = getattr(kernel, name)(x, y), getattr(by_autodiff, name)(x, y)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.x64
def test_particles_with_the_right_two_moments_stand_still(tol):
    """Mean and 1/m covariance of N(mu, P^-1): theorem 3.3 of Liu and Wang (2018)."""
    centred = X - X.mean(0)
    root = np.linalg.cholesky(centred.T @ centred / len(X))
    x = centred @ np.linalg.inv(root).T @ np.linalg.cholesky(np.linalg.inv(PRECISION)).T + LOC
    g = -(jnp.array(x) - LOC) @ PRECISION
    assert jnp.abs(velocity(Linear(), jnp.array(x), g)).max() < tol(2e-6, 1e-13)
    assert jnp.abs(velocity(Linear(), 1.1 * jnp.array(x), g)).max() > 0.05
