"""Potentials against differences of log partitions, integrals on a grid and reference values."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import Gaussian, GaussianNatural, multiply
from numpyro_ext.svae import (
    GaussianPotential,
    MixturePotential,
    decoder_network,
    recognition_network,
)

MIXTURE = {"loc": [[-0.5], [1.5]], "covariance_matrix": [[[0.4]], [[0.8]]]}
ETA = {"loc": [[-1.0], [2.0]], "covariance_matrix": [[[1.0]], [[0.5]]]}


def spread(batch, d):
    """Potentials and normals of unequal scales, off the origin."""
    keys = random.split(random.key(0), 3)
    root = random.normal(keys[0], (*batch, d, d)) + jnp.eye(d)
    h = 2 + random.normal(keys[1], (*batch, d))
    return GaussianPotential(h, -root @ jnp.swapaxes(root, -1, -2))


@pytest.mark.slow
@pytest.mark.x64
def test_gaussian_potential_is_a_product_of_naturals(tol):
    psi, other = spread((4,), 2), spread((3,), 2)
    eta = GaussianNatural(other.h, other.W)
    wide = jax.tree.map(lambda leaf: leaf[:, None], GaussianNatural(psi.h, psi.W))
    product = multiply(wide, eta)
    ratio = Gaussian.log_partition(product) - Gaussian.log_partition(eta)
    np.testing.assert_allclose(psi.log_partition_ratio(eta), ratio, rtol=tol(1e-4, 1e-9))
    for result, expected in zip(psi.tilted_moments(eta), Gaussian.mean(product), strict=True):
        np.testing.assert_allclose(result, expected, rtol=tol(1e-4, 1e-9), atol=tol(1e-5, 1e-9))


@pytest.mark.slow
@pytest.mark.x64
def test_mixture_potential_reference_values(tol):
    r = Gaussian.from_standard(**MIXTURE)
    psi = MixturePotential(jnp.log(jnp.array([0.25, 0.75])), *r)
    eta = Gaussian.from_standard(**ETA)
    log_z = jnp.log(jnp.array([0.3, 0.7])) + psi.log_partition_ratio(eta)
    weights = jax.nn.softmax(log_z)
    np.testing.assert_allclose(weights, [0.17111229, 0.82888771], atol=tol(1e-6, 1e-8))
    moments = psi.tilted_moments(eta)
    mean, second = weights @ moments.x[:, 0], weights @ moments.xx[:, 0, 0]
    np.testing.assert_allclose(mean, 1.4345816281, atol=tol(1e-5, 1e-9))
    np.testing.assert_allclose(second - mean**2, 0.9858879254, atol=tol(1e-5, 1e-9))
    log_z = jax.nn.logsumexp(log_z)
    np.testing.assert_allclose(log_z, -0.6704216085, atol=tol(1e-5, 1e-9))


def test_a_zero_potential_says_nothing():
    eta = Gaussian.from_standard(**ETA)
    psi = GaussianPotential(jnp.zeros(1), jnp.zeros((1, 1)))
    np.testing.assert_allclose(psi.log_partition_ratio(eta), jnp.zeros(2), atol=1e-6)
    np.testing.assert_allclose(psi.tilted_moments(eta).x, ETA["loc"], rtol=1e-6)


def test_float32_far_from_the_origin():
    """At mean 30 and variance 0.01 a difference of log partitions is wrong by 1e-2."""
    eta = Gaussian.from_standard(jnp.array([30.0]), jnp.array([[0.01]]))
    psi = GaussianPotential(jnp.array([60.1]), jnp.array([[-1.0]]))
    exact = 30 * 60.1 - 30**2 + 0.5 * 0.1**2 / 102 - 0.5 * np.log(102 / 100)
    np.testing.assert_allclose(psi.log_partition_ratio(eta), exact, atol=3e-4)
    r = Gaussian.from_standard(jnp.array([[30.05]]), jnp.array([[[0.5]]]))
    mixture = MixturePotential(jnp.zeros(1), *r)
    exact = -0.5 * 0.05**2 / 0.51 - 0.5 * np.log(0.51)
    np.testing.assert_allclose(mixture.log_partition_ratio(eta), exact, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["orthogonal", "identity", None])
def test_networks_start_as_their_linear_part(residual):
    y = jnp.array([[1.0, -2.0, 0.5], [0.3, 4.0, -1.0]])
    init, apply = recognition_network(2, residual=residual, num_components=3)
    shape, params = init(random.key(0), (3,))
    psi = apply(params, y)
    R = params.get("residual", jnp.zeros((3, 2)))
    assert shape == (2,) and psi.h.shape == (2, 3, 2) and psi.log_weights.shape == (2, 3)
    np.testing.assert_allclose(psi.h, jnp.broadcast_to((y @ R)[:, None], (2, 3, 2)), atol=1e-3)
    np.testing.assert_allclose(
        psi.W, jnp.broadcast_to(-np.log(2) * jnp.eye(2), psi.W.shape), atol=1e-3
    )
    if residual == "orthogonal":
        np.testing.assert_allclose(R.T @ R, jnp.eye(2), atol=1e-5)
    init, apply = decoder_network(3, residual=residual)
    params = init(random.key(0), (2,))[1]
    loc, scale = apply(params, y[:, :2])
    R = params.get("residual", jnp.zeros((2, 3)))
    np.testing.assert_allclose(loc, y[:, :2] @ R, atol=1e-3)
    np.testing.assert_allclose(scale**2, np.log(2) * jnp.ones((2, 3)), atol=1e-3)


def test_networks_are_their_formula():
    init, apply = recognition_network(2, hidden=(3,), init_scale=2.0)
    params = jax.tree.map(lambda leaf: leaf + 0.1, init(random.key(1), (2,))[1])
    y = jnp.array([0.4, -1.3])
    (w1, c1), (w2, c2) = params["mlp"]
    out = jnp.tanh(y @ w1 + c1) @ w2 + c2
    psi = apply(params, y)
    h = out[2:] + y @ params["residual"] + params["h"]
    precision = jax.nn.softplus(out[:2]) + jax.nn.softplus(params["precision"])
    np.testing.assert_allclose(psi.h, h, rtol=1e-5)
    np.testing.assert_allclose(psi.W, -jnp.diag(precision) / 2, rtol=1e-5)
