"""Chains of normal vectors against dense linear algebra."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import GaussianChain, GaussianChainNatural
from tests.expfam.families import quick_jit

T, D = 6, 2


def chain(num_steps, d=D, seed=0):
    """Two chains off the origin whose transitions are not those of a normalised system."""
    rng = np.random.default_rng(seed)
    V = rng.normal(size=(2, num_steps - 1, d, d)) * np.array([1.0, 0.3])[:d, None]
    root = rng.normal(size=(2, num_steps, d, d)) * 0.5
    J = root @ np.swapaxes(root, -1, -2) + np.eye(d)
    # Diagonally dominant, so that the whole precision is positive definite.
    J[:, :-1] += np.eye(d) * np.abs(V).sum(axis=-2).max(axis=-1)[..., None, None]
    J[:, 1:] += np.eye(d) * np.abs(V).sum(axis=-1).max(axis=-1)[..., None, None]
    h = rng.normal(size=(2, num_steps, d)) * 5 + 3
    return GaussianChainNatural(h, -J / 2, V)


def dense(natural, which):
    """Precision and linear term of the whole sequence."""
    h, W, V = (np.asarray(leaf[which], np.float64) for leaf in natural)
    num_steps, d = h.shape
    J = np.zeros((num_steps, d, num_steps, d))
    for t in range(num_steps):
        J[t, :, t] = -2 * W[t]
    for t in range(num_steps - 1):
        J[t + 1, :, t] = -V[t]
        J[t, :, t + 1] = -V[t].T
    return J.reshape(num_steps * d, num_steps * d), h.ravel()


@functools.cache
def computed():
    @quick_jit
    def compute(natural, x):
        return {
            "log_partition": GaussianChain.log_partition(natural),
            "mean": GaussianChain.mean(natural),
            "entropy": GaussianChain.entropy(natural),
            "log_prob": GaussianChain.log_prob(natural, x),
        }

    natural = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), chain(T))
    return natural, compute(natural, point())


def point():
    return jnp.asarray(np.linspace(-2, 3, T * D).reshape(T, D), float)


@pytest.mark.slow
@pytest.mark.x64
def test_log_partition_and_densities_are_those_of_the_dense_normal(tol):
    natural, result = computed()
    x = np.asarray(point(), np.float64).ravel()
    for which in range(2):
        J, h = dense(natural, which)
        mean, logdet = np.linalg.solve(J, h), np.linalg.slogdet(J)[1]
        rtol = tol(2e-5, 1e-9)
        A = h @ mean / 2 - logdet / 2
        np.testing.assert_allclose(result["log_partition"][which], A, rtol=rtol)
        entropy = (J.shape[0] * (1 + np.log(2 * np.pi)) - logdet) / 2
        np.testing.assert_allclose(result["entropy"][which], entropy, rtol=rtol)
        log_prob = J.shape[0] / 2 - entropy - (x - mean) @ J @ (x - mean) / 2
        np.testing.assert_allclose(result["log_prob"][which], log_prob, rtol=rtol)


@pytest.mark.x64
def test_moments_are_those_of_the_dense_normal(tol):
    natural, result = computed()
    for which in range(2):
        J, h = dense(natural, which)
        x = np.linalg.solve(J, h).reshape(T, D)
        second = np.linalg.inv(J).reshape(T, D, T, D) + np.einsum("ti,sj->tisj", x, x)
        steps = np.arange(T)
        mean = result["mean"]
        close = functools.partial(
            np.testing.assert_allclose, rtol=tol(1e-4, 1e-9), atol=tol(1e-4, 1e-9)
        )
        close(mean.x[which], x)
        close(mean.xx[which], second[steps, :, steps])
        close(mean.xx_next[which], second[steps[1:], :, steps[:-1]])


def test_float32_far_from_the_origin():
    """Variance .01 at 30: densities and divergences to 1e-3, which differences of A lose."""
    std = {"initial_covariance": [[0.01]], "weight": [[1.0]], "covariance": [[0.01]]}

    @jax.jit
    def compute(loc, other):
        q, p = (
            GaussianChain.from_standard(initial_loc=m, num_steps=5, **std) for m in (loc, other)
        )
        return GaussianChain.kl(q, p), GaussianChain.log_prob(q, jnp.full((5, 1), 30.0))

    kl, log_prob = compute(jnp.array([30.0]), jnp.array([30.1]))
    # They differ in the first mean only: (.1)^2 / .01 / 2.
    np.testing.assert_allclose(kl, 0.5, rtol=2e-3)
    np.testing.assert_allclose(log_prob, -5 / 2 * np.log(2 * np.pi * 0.01), rtol=1e-3)
