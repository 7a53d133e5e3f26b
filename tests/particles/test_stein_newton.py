"""SteinNewton: Newton's step, the slow loop, affine equivariance, as a loss."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext.particles import AutoParticles, SteinNewton

M, D = 6, 3


@jax.jit
def points():
    """Places, and a gradient and a Hessian at each."""
    x, roots = random.normal(random.key(0), (M, D)) + 1.0, random.normal(random.key(1), (M, D, D))
    return x, jnp.sin(x) - x, -(roots @ roots.transpose(0, 2, 1) + 0.5 * jnp.eye(D))


X, G, H = points()
velocity = jax.jit(SteinNewton().velocity)


@pytest.mark.x64
def test_equals_the_slow_loop(tol):
    x, g, n = np.asarray(X), np.asarray(G), -np.asarray(H)
    a = n.mean(0)
    expected = np.zeros_like(x)
    for i in range(M):
        v, h = np.zeros(D), np.zeros((D, D))
        for j in range(M):
            r = x[i] - x[j]
            k = np.exp(-r @ a @ r / (2 * D))
            slope = k * a @ r / D
            v += (k * g[j] + slope) / M
            h += (k**2 * n[j] + np.outer(slope, slope)) / M
        expected[i] = np.linalg.solve(h, v)
    np.testing.assert_allclose(velocity(X, G, H), expected, atol=tol(1e-4, 1e-10))


def test_one_particle_takes_newtons_step_and_damping_bounds_it(tol):
    step = jnp.linalg.solve(-H[0], G[0])
    np.testing.assert_allclose(velocity(X[:1], G[:1], H[:1])[0], step, rtol=tol(1e-3, 1e-9))
    flat = jnp.zeros((1, D, D))
    v = SteinNewton(damping=0.5).velocity(X[:1], G[:1], flat)
    np.testing.assert_allclose(v, 2.0 * G[:1], rtol=1e-5)


def test_is_equivariant_to_affine_maps(tol):
    b = jnp.array([[2.0, 0.5, 0.0], [0.0, 0.1, 0.3], [1.0, 0.0, -1.0]])
    back = jnp.linalg.inv(b)
    v = velocity(X @ b + 7.0, G @ back.T, back @ H @ back.T)
    np.testing.assert_allclose(v, velocity(X, G, H) @ b, rtol=tol(2e-2, 1e-8), atol=tol(2e-3, 1e-9))


@pytest.mark.slow
def test_is_a_loss_that_computes_its_hessians():
    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, 10.0))
        s = numpyro.sample("s", dist.LogNormal(0.0, 0.3))
        numpyro.sample("y", dist.Normal(w, s), obs=y)

    def log_joint(z, y):
        prior = dist.Normal(0.0, 10.0).log_prob(z[0]) + dist.Normal(0.0, 0.3).log_prob(z[1])
        return prior + dist.Normal(z[0], jnp.exp(z[1])).log_prob(y).sum()

    y = jnp.array([2.9, 3.3, 3.1])
    guide = AutoParticles(model, 5, init_from=None)
    svi = SVI(model, guide, optax.sgd(1.0), SteinNewton(temperature=2.0))
    x = jnp.array([[2.0, 0.1], [3.0, -0.2], [3.5, 0.4], [2.5, 0.0], [4.0, 0.3]])
    state = svi.init(random.key(0), y, init_params={"auto_particles": x})
    moved = svi.get_params(jax.jit(svi.update)(state, y)[0])["auto_particles"]
    g, h = jax.vmap(jax.grad(log_joint), (0, None)), jax.vmap(jax.hessian(log_joint), (0, None))
    expected = x + jax.jit(SteinNewton().velocity)(x, jax.jit(g)(x, y) / 2, jax.jit(h)(x, y) / 2)
    np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-4)


def test_bad_input_is_one_clear_sentence():
    with pytest.raises(ValueError, match=r"damping is 0\.0"):
        SteinNewton(damping=0.0)
    with pytest.raises(ValueError, match=r"needs the \(6, 3, 3\) Hessians"):
        SteinNewton().velocity(X, G)
