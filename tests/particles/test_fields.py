"""The velocities themselves: reference values, slow loops, functionals, limits, known targets."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext.particles import (
    GFSD,
    GFSF,
    SVGD,
    AutoParticles,
    Blob,
    RegularizedSVGD,
    particle_step,
)
from numpyro_ext.scores import (
    IMQ,
    RBF,
    Linear,
    MatrixRBF,
)
from tests.particles.fixture import G, X, slow_velocity, slow_whitening

# At l = 0.9, from a second implementation.
REFERENCE = [
    (
        SVGD(Linear()),
        [[-0.1625, -0.65], [-1.540625, -0.890625], [5.0125, 0.665625], [-9.28125, -2.7]],
    ),
    (
        SVGD(MatrixRBF(np.array([[2.0, 0.3], [0.3, 0.5]]), 1.2)),
        [
            [0.4108572488057019, -1.0156971925047644],
            [0.2599324046845054, -0.6538474840916372],
            [0.3999307059362855, -0.725509610022867],
            [-0.4700009290781949, -0.0517068169488741],
        ],
    ),
]
FIELDS = [
    pytest.param(SVGD, None, id="SVGD"),
    pytest.param(Blob, None, id="Blob"),
    pytest.param(GFSD, None, id="GFSD"),
    pytest.param(partial(GFSF, eta=0.05), 0.05, id="GFSF"),
    pytest.param(partial(RegularizedSVGD, eta=0.7, precondition=None), 0.7, id="RegularizedSVGD"),
]


def name_of(make):
    return getattr(make, "func", make).__name__


@pytest.mark.x64
@pytest.mark.parametrize(("field", "expected"), REFERENCE, ids=lambda a: type(a).__name__)
def test_matches_reference_values(field, expected, tol):
    v = jax.jit(field.velocity)(jnp.array(X), jnp.array(G))
    np.testing.assert_allclose(v, expected, atol=tol(5e-6, 1e-12))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [RBF("median"), IMQ(1.3, beta=-0.3)], ids=["RBF", "IMQ"])
@pytest.mark.parametrize(("make", "eta"), FIELDS)
def test_equals_the_slow_loop_with_and_without_preconditioning(make, eta, kernel, tol):
    x, g = jnp.array(X) * jnp.array([2.0, 0.1]) + 5.0, jnp.array(G)
    expected = slow_velocity(name_of(make), kernel.resolve(x), x, g, eta)
    v = jax.jit(make(kernel).velocity)(x, g)
    np.testing.assert_allclose(v, expected, atol=tol(1e-4, 1e-10))
    root = slow_whitening(x)
    y = np.linalg.solve(root, np.asarray(x - x.mean(0)).T).T
    resolved = kernel.resolve(jnp.array(y))
    expected = slow_velocity(name_of(make), resolved, y, np.asarray(g) @ root, eta) @ root.T
    v = jax.jit(make(kernel, precondition="covariance").velocity)(x, g)
    np.testing.assert_allclose(v, expected, atol=tol(2e-5, 1e-10))


def test_blob_is_downhill_and_gfsd_is_so_with_frozen_centres(tol):
    """Minus the gradient of F = -sum log p + sum log rho; grad log p - grad log KDE."""
    x = random.normal(random.key(1), (12, 2)) * jnp.array([0.5, 2.0]) - 3.0
    log_p = lambda x: jnp.sum(-0.5 * (x + 2.0) ** 2 - 0.1 * x**4)  # noqa: E731
    g, kernel = jax.jit(jax.grad(log_p))(x), RBF(0.8)
    energy = lambda x: jnp.sum(jnp.log(kernel(x, x).sum(1))) - log_p(x)  # noqa: E731
    v = jax.jit(Blob(kernel).velocity)(x, g)
    np.testing.assert_allclose(v, -jax.jit(jax.grad(energy))(x), rtol=tol(1e-4, 1e-10), atol=1e-4)
    frozen = lambda y: log_p(y) - jnp.sum(jnp.log(kernel(y, x).sum(1)))  # noqa: E731
    v = jax.jit(GFSD(kernel).velocity)(x, g)
    np.testing.assert_allclose(v, jax.jit(jax.grad(frozen))(x), rtol=tol(1e-4, 1e-10), atol=1e-4)


@pytest.mark.parametrize(("make", "eta"), FIELDS)
def test_limits_of_the_bandwidth(make, eta):
    """Without neighbours in reach nothing repels: g, and g / m for SVGD."""
    share = {"SVGD": 1 / len(X), "RegularizedSVGD": 1 / 1.7}.get(name_of(make), 1.0)
    v = make(RBF(0.01)).velocity(jnp.array(X), jnp.array(G))
    np.testing.assert_allclose(v, G * share, rtol=1e-5, atol=1e-5)


def test_limits_of_the_ridge():
    x, g = jnp.array(X), jnp.array(G)
    np.testing.assert_allclose(GFSF(eta=1e6).velocity(x, g), g, atol=1e-5)
    regularized = partial(RegularizedSVGD, precondition=None)
    large = regularized(eta=1e5).velocity(x, g) * 1e5 / 4
    np.testing.assert_allclose(large, SVGD().velocity(x, g), rtol=1e-3, atol=1e-4)
    small = regularized(RBF(0.9), eta=1e-4).velocity(x, g)
    np.testing.assert_allclose(small, GFSF(RBF(0.9), eta=1e-4).velocity(x, g), rtol=2e-3, atol=2e-3)


def test_regularized_field_rests_where_the_plain_one_does():
    x = random.normal(random.key(2), (15, 2))
    k = RBF(0.7)
    plain = jax.jit(SVGD(k).velocity)
    g = jnp.linalg.solve(k(x, x), -15 * plain(x, jnp.zeros_like(x)))
    assert jnp.abs(plain(x, g)).max() < 1e-3
    for eta in (0.1, 10.0):
        v = jax.jit(RegularizedSVGD(k, eta=eta, precondition=None).velocity)(x, g)
        assert jnp.abs(v).max() < 1e-2 < jnp.abs(g).max()


@pytest.mark.nightly
def test_regularized_field_keeps_the_spread_of_many_skew_coordinates():
    """Particles of 25 shares without data: each is Beta(1, 24). With a ridge of 1 their standard
    deviations are a little over half of the right ones."""
    guide = AutoParticles(lambda: numpyro.sample("p", dist.Dirichlet(jnp.ones(25))), 150)
    svi = SVI(guide.model, guide, particle_step(500), RegularizedSVGD())
    params = svi.run(random.key(0), 500, progress_bar=False).params
    sd = np.std(guide.particles(params)["p"], 0)
    assert 0.75 < np.mean(sd) / np.sqrt(24 / 25**2 / 26) < 1.1


def test_preconditioning_in_more_dimensions_than_particles(tol):
    """The root of low rank gives the velocity of the definition; two columns are proportional."""
    x = random.normal(random.key(7), (4, 6)) * jnp.array([1.0, 50.0, 0.1, 3.0, 1.0, 1.0]) + 2.0
    x = x.at[:, 5].set(1.5 * x[:, 4])
    g = jnp.sin(x)
    root = slow_whitening(x)
    y = np.linalg.solve(root, np.asarray(x - x.mean(0)).T).T
    kernel = RBF("median").resolve(jnp.array(y))
    expected = slow_velocity("SVGD", kernel, y, np.asarray(g) @ root) @ root.T
    velocity = jax.jit(SVGD(RBF("median"), precondition="covariance").velocity)
    np.testing.assert_allclose(velocity(x, g), expected, rtol=tol(1e-3, 1e-9), atol=tol(1e-4, 1e-9))
    v = velocity(x.at[:, 5].set(7.0), g)
    assert jnp.all(jnp.isfinite(v)) and jnp.abs(v[:, 5]).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("make", "sd"), [(Blob, 1.985), (GFSD, 1.87), (GFSF, 1.96)])
def test_spread_on_a_normal(make, sd):
    """N(1, 2) from 100 particles by Adagrad: the sd of a second implementation, to 0.06."""
    field, optim = make(RBF("median")), optax.adagrad(0.5)

    def run(x):
        def step(carry, _):
            x, state = carry
            updates, state = optim.update(-field.velocity(x, (1.0 - x) / 4.0), state)
            return (x + updates, state), None

        return jax.lax.scan(step, (x, optim.init(x)), None, 1500)[0][0]

    x = jax.jit(run)(random.normal(random.key(5), (100, 1)))
    assert abs(x.mean() - 1.0) < 0.05 and abs(x.std() - sd) < 0.06


def test_bad_input_is_one_clear_sentence():
    for kernel in (Linear(), MatrixRBF(np.eye(2))):
        with pytest.raises(TypeError, match=r"which SVGD alone takes; use RBF"):
            GFSD(kernel)
    x = jnp.ones((1, 2))
    with pytest.raises(ValueError, match=r"num_particles is 1.*use precondition=None"):
        RegularizedSVGD().velocity(x, x)
    with pytest.raises(ValueError, match=r"eta is 0\.0; it must be a positive"):
        GFSF(eta=0.0)
