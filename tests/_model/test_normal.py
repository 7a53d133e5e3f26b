"""One normal, whatever the kind of its factor: its maps, sizes and log volume against a matrix."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
import pytest

from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.normal import Normal, mean_and_sd
from numpyro_ext._numpyro import normal_of_guide
from numpyro_ext.guides.base import FixedMap
from numpyro_ext.particles._whitening import CovarianceWhitening

N = 6
RNG = np.random.default_rng(0)
CENTER = jnp.asarray(RNG.normal(size=N) * 30)
SCALES = np.geomspace(0.3, 20, N)
ROOT = np.tril(RNG.normal(size=(N, N))) * SCALES[:, None]
ROOT[np.diag_indices(N)] = SCALES


def arrow() -> Arrow:
    root, block = np.tril(RNG.normal(size=(2, 2))), np.tril(RNG.normal(size=(2, 2, 2)))
    root[np.diag_indices(2)], block[:, [0, 1], [0, 1]] = 1.5, 0.7
    places = jnp.array([4, 0]), jnp.array([[1, 3], [5, 2]]), jnp.array([1]), jnp.array([[0], [0]])
    return Arrow(*places, *(jnp.asarray(x) for x in (root, RNG.normal(size=(2, 2, 2)), block)))


def of_points(m: int) -> Normal:
    """With a dense root of correlations for m >= d, and of low rank for fewer."""
    made = jax.jit(CovarianceWhitening.from_particles)
    return made(jnp.asarray(SCALES * RNG.normal(size=(m, N))))


NORMALS = {
    "dense": Normal(CENTER, jnp.asarray(ROOT)),
    "diagonal": Normal(CENTER, jnp.asarray(SCALES)),
    "arrow": Normal(CENTER, arrow()),
    "points": of_points(40),
    "few points": of_points(4),
}
KINDS = pytest.mark.parametrize("kind", NORMALS)
OF_MODES = pytest.mark.parametrize("kind", ["dense", "diagonal", "arrow"])


def whole(kind: str) -> np.ndarray:
    """A as a matrix, by pushing units."""
    return np.asarray(jax.jit(jax.vmap(NORMALS[kind].push))(jnp.eye(N)).T, float)


@KINDS
def test_the_maps_are_those_of_one_matrix(kind):
    normal, A = NORMALS[kind], whole(kind)
    xi, g = np.asarray(random.normal(random.key(0), (2, N)))

    @jax.jit
    def maps(xi, g):
        z = normal.to_z(xi)
        return z, normal.to_xi(z), normal.pull(g)

    for ours, expected in zip(maps(xi, g), (normal.center + A @ xi, xi, A.T @ g), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@OF_MODES
def test_sds_volume_distance_and_matrix_are_those_of_the_covariance(kind):
    normal, A = NORMALS[kind], whole(kind)
    covariance, log_det = A @ A.T, np.linalg.slogdet(A)[1]
    np.testing.assert_allclose(normal.sds, np.sqrt(np.diag(covariance)), rtol=1e-5)
    precision = np.linalg.inv(covariance)
    np.testing.assert_allclose(normal.conditional_sds, np.diag(precision) ** -0.5, rtol=1e-3)
    assert float(normal.log_volume) == pytest.approx(log_det, abs=1e-5)
    laplace = N / 2 * np.log(2 * np.pi) + log_det - 3.0
    assert normal.laplace(3.0) == pytest.approx(laplace, abs=1e-5)
    away = normal.center + A @ np.full(N, 2.0)
    assert normal.distance(away) == pytest.approx(2 * N**0.5, rel=1e-3)
    matrix = np.asarray(normal.matrix, float)
    assert not np.any(np.triu(matrix, 1))
    error = (matrix @ matrix.T - covariance) / np.outer(normal.sds, normal.sds)
    np.testing.assert_allclose(error, 0, atol=1e-5)


@OF_MODES
def test_the_fixed_map_of_a_guide_is_that_of_the_normal(kind):
    normal, x = NORMALS[kind], random.normal(random.key(0), (3, N))
    change = FixedMap(normal)

    @jax.jit
    def both(x):
        y, slopes = change(x), jax.vmap(jax.jacobian(change))(x)
        ours = y, change.inv(y), change.log_abs_det_jacobian(x, y)
        return ours, (jax.vmap(normal.to_z)(x), x, jnp.linalg.slogdet(slopes)[1])

    for ours, expected, rtol, atol in zip(*both(x), (1e-6, 0, 0), (0, 1e-4, 1e-4), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=rtol, atol=atol)


def model():
    """Its sites are not in the order of the alphabet."""
    numpyro.sample("z", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
    numpyro.sample("a", dist.Normal(jnp.zeros(2), 1.0).to_event(1))


@OF_MODES
@pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoDiagonalNormal, AutoNormal])
def test_a_guide_begins_at_the_normal_and_tells_it(kind, guide):
    normal, guide = NORMALS[kind], guide(model)
    told = Normal(*normal_of_guide(guide, normal.init_params(guide)))
    np.testing.assert_allclose(told.center, normal.center, rtol=1e-6)
    dense = isinstance(guide, AutoMultivariateNormal)
    expected = normal.sds if dense else normal.conditional_sds
    np.testing.assert_allclose(told.sds, expected, rtol=1e-3)


def test_the_mean_of_equal_numbers_is_this_number_also_of_some_rows():
    x = np.full((1000, 2), 0.1, np.float32)
    x[:10, 0] = 7.0
    here = jnp.arange(1000) >= 10
    mean, sd = mean_and_sd(jnp.asarray(x), here)
    assert (mean[0], sd[0]) == (np.float32(0.1), 0.0)
    mean, sd = mean_and_sd(jnp.asarray(x))
    np.testing.assert_allclose([mean[0], sd[0]], [x[:, 0].mean(), x[:, 0].std()], rtol=1e-4)
