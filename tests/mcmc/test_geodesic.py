"""`SphereReparam`, and `GeodesicSGHMC` and `GeodesicSGNHT` on spheres, by closed forms.

A von Mises-Fisher direction of concentration k in three dimensions has the mean resultant length
coth k - 1/k, and 1 - 2 / k times that as the second moment along its mean.
"""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy
import pytest

from numpyro_ext.diagnostics import InferenceWarning, diagnose, to_arviz
from numpyro_ext.mcmc import SGHMC, GeodesicSGHMC, GeodesicSGNHT, SphereReparam, Whitening
from numpyro_ext.optim import find_modes
from tests.mcmc.models import linear, linear_data

KERNELS = {"SGHMC": GeodesicSGHMC, "SGNHT": GeodesicSGNHT}
A = jnp.array([6.0, 0.0, 8.0]), jnp.array([-1.0, 2.0, 0.5])
ALPHA = jnp.array([2.0, 1.0, 5.0, 3.0])


def uniform(d):
    return dist.ImproperUniform(dist.constraints.sphere, (), (d,))


def model():
    """Two directions in a plate, one in two dimensions, probabilities, and two ordinary sites."""
    numpyro.sample("scale", dist.Gamma(4.0, 2.0))
    with numpyro.plate("two", 2):
        u = numpyro.sample("u", uniform(3))
        numpyro.factor("of u", jnp.sum(u * jnp.stack(A), -1))
    numpyro.sample("p", dist.Dirichlet(ALPHA))
    v = numpyro.sample("v", dist.ProjectedNormal(jnp.array([0.0, 0.0])))
    numpyro.factor("of v", 2.0 * v[1])
    numpyro.sample("x", dist.Normal(3.0, 0.5))


MODEL = reparam(model, config={name: SphereReparam() for name in ("u", "v", "p")})


def resultant(k):
    return 1 / np.tanh(k) - 1 / k


def run(kernel, chains, draws, *args, warmup=100, key=0, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(key), *args, **kwargs)
    return mcmc


def assert_means(draws, expected, limit, bias=0.0):
    """By the scatter of the means of independent chains, ``(chains, draws, ...)``."""
    means = np.asarray(draws, float).mean(1)
    error = means.std(0) / (len(means) - 1) ** 0.5
    assert np.all(error < limit), error  # so that it can fail
    assert np.all(np.abs(means.mean(0) - expected) < 5 * error + bias), (means.mean(0), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_law_of_several_spheres_a_simplex_and_ordinary_sites(name):
    """With a probability whose density does not vanish at 0."""
    kernel = KERNELS[name](MODEL, 0.03, friction=3.0, steps_per_sample=15)
    mcmc = run(kernel, 60, 300)
    draws = mcmc.get_samples(group_by_chain=True)
    for k, a in enumerate(A):
        u, length = draws["u"][:, :, k], float(jnp.linalg.norm(a))
        np.testing.assert_allclose(jnp.linalg.norm(u, axis=-1), 1, atol=1e-5)
        assert_means(u, resultant(length) * a / length, 0.02, 0.003)
        along = (u @ a / length) ** 2
        assert_means(along, 1 - 2 / length * resultant(length), 0.02, 0.003)
    total = float(ALPHA.sum())
    mean = ALPHA / total
    np.testing.assert_allclose(draws["p"].sum(-1), 1, atol=1e-5)
    assert_means(draws["p"], mean, 0.02, 0.003)
    assert_means((draws["p"] - mean) ** 2, mean * (1 - mean) / (total + 1), 0.01, 0.002)
    # I_1(2) / I_0(2) on the circle.
    assert_means(draws["v"], np.array([0.0, 0.69777]), 0.02, 0.003)
    assert_means(draws["x"], 3.0, 0.05, 0.003)
    assert_means((draws["x"] - 3.0) ** 2, 0.25, 0.02, 0.003)
    assert_means(draws["scale"], 2.0, 0.1, 0.01)
    temperature = mcmc.get_extra_fields(group_by_chain=True)["kinetic_temperature"]
    assert_means(temperature, 1.0, 0.02, 0.01)


def directions(x, batch=None):
    u = numpyro.sample("u", uniform(3))
    with numpyro.plate("rows", len(x), subsample_size=batch):
        rows = numpyro.subsample(x, event_dim=1)
        numpyro.factor("likelihood", rows @ u)


@pytest.mark.slow
def test_thermostat_takes_up_the_noise_of_minibatches_and_friction_does_not():
    """200 rows, 20 at a time: the posterior is von Mises-Fisher of the length k of their sum."""
    x = 0.1 * random.normal(random.key(5), (200, 3)) + jnp.array([0.06, 0.0, 0.08])
    total = np.asarray(x.sum(0), float)
    k = np.linalg.norm(total)
    the_model, found = reparam(directions, config={"u": SphereReparam()}), {}
    for name, kernel in KERNELS.items():
        mcmc = run(kernel(the_model, 0.05, steps_per_sample=5), 100, 200, x, batch=20, warmup=300)
        u = mcmc.get_samples(group_by_chain=True)["u"]
        found[name] = u @ (total / k)
    assert_means(found["SGNHT"], resultant(k), 0.005, 0.004)
    assert resultant(k) - found["SGHMC"].mean() > 0.01


@pytest.mark.slow
@pytest.mark.x64
def test_flow_is_the_great_circle_and_reversible():
    kernel = GeodesicSGHMC(MODEL, 0.1)
    state = kernel.init(random.key(0), 10, None, (), {})
    z = kernel.on_manifold(kernel.flatten(state.z))
    r = kernel.draw_momentum(random.key(1), z, jnp.ones(()))
    t = jnp.array(0.7)
    new, turned = kernel.flow(z, r, t)
    for where, shape in kernel._spheres:
        x, y, v = (np.asarray(a[where], float).reshape(shape) for a in (z, new, r))
        speed = np.linalg.norm(v, axis=-1)
        np.testing.assert_allclose(np.arccos(np.sum(x * y, -1)), _folded(0.7 * speed), atol=1e-3)
        assert np.abs(np.sum(y * np.asarray(turned[where]).reshape(shape), -1)).max() < 1e-5
    np.testing.assert_allclose(jnp.linalg.norm(turned), jnp.linalg.norm(r), rtol=1e-5)
    back, reverse = kernel.flow(new, -turned, t)
    np.testing.assert_allclose(back, z, atol=1e-5)
    np.testing.assert_allclose(-reverse, r, atol=1e-5)
    still, _ = kernel.flow(z, 0 * r, t)
    np.testing.assert_allclose(still, z, atol=1e-6)


def _folded(angle):
    return np.abs((angle + np.pi) % (2 * np.pi) - np.pi)


@pytest.mark.x64
def test_density_in_all_of_space_integrates_to_the_evidence():
    """By quadrature over the plane, of a projected normal and of the roots of probabilities."""
    grid = jnp.linspace(-7.0, 7.0, 701)
    points = jnp.stack(jnp.meshgrid(grid, grid + 1e-3), -1).reshape(-1, 2)

    def projected():
        v = numpyro.sample("z", dist.ProjectedNormal(jnp.array([1.0, -0.5])))
        numpyro.factor("of v", jnp.log(2 + v[0]))

    def probabilities():
        p = numpyro.sample("z", dist.Dirichlet(jnp.array([2.0, 1.5])))
        numpyro.factor("of p", jnp.log(p[0]))

    mean = random.normal(random.key(0), (400_000, 2)) + jnp.array([1.0, -0.5])
    mean = float(jnp.mean(mean[:, 0] / jnp.linalg.norm(mean, axis=1)))
    for the_model, site, expected in (
        (projected, "z", 2 + mean),  # Monte Carlo error .001
        (probabilities, "z_sphere", 2 / 3.5),
    ):
        fn = reparam(the_model, config={"z": SphereReparam()})
        minus_log = jax.vmap(lambda x: potential_energy(fn, (), {}, {site: x}))  # noqa: B023
        integral = jnp.exp(-jax.jit(minus_log)(points)).sum() * (grid[1] - grid[0]) ** 2
        assert integral == pytest.approx(expected, rel=5e-3)


@pytest.mark.slow
def test_chains_at_mirror_images_agree():
    """Three probabilities of 100 rows, of which no chain goes from one sign to another."""

    def counts():
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
        numpyro.factor("rows", jnp.array([30.0, 50.0, 20.0]) @ jnp.log(p))

    fn = reparam(counts, config={"p": SphereReparam()})
    mcmc = run(GeodesicSGHMC(fn, 0.015, friction=3.0), 4, 2000)
    means = mcmc.get_samples(group_by_chain=True)["p_sphere"].mean(1)
    assert means.min() < -0.3  # so that it can fail
    rhat = diagnose(mcmc, num_moves=0).to_frame().loc["largest R-hat", "value"]
    assert rhat < 1.05
    roots = to_arviz(mcmc, log_likelihood=False).posterior.p_sphere
    np.testing.assert_array_equal(roots, abs(mcmc.get_samples(group_by_chain=True)["p_sphere"]))


@pytest.mark.slow
def test_where_roots_have_no_mode_the_advice_is_on_spheres():
    def counts():
        p = numpyro.sample("p", dist.Dirichlet(0.2 * jnp.ones(3)))
        numpyro.factor("rows", jnp.array([2.0, 8.0]) @ jnp.log(p[1:]))

    with pytest.warns(InferenceWarning, match="leave out the SphereReparam of 'p'") as caught:
        find_modes(reparam(counts, config={"p": SphereReparam()}), starts=1)
    assert not any("LocScale" in str(x.message) or "heavy" in str(x.message) for x in caught)


@pytest.mark.slow
def test_without_a_sphere_it_is_sghmc():
    draws = []
    for kernel in (GeodesicSGHMC, SGHMC):
        mcmc = run(kernel(linear, 0.01, friction=2.0), 1, 20, *linear_data(), warmup=4)
        draws.append(mcmc.get_samples())
    for name, one in draws[0].items():
        np.testing.assert_allclose(one, draws[1][name], rtol=1e-4)


def test_what_does_not_fit_is_named():
    def normal():
        numpyro.sample("x", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="site 'x' is a Normal; SphereReparam is for latent sites"):
        numpyro.handlers.seed(reparam(normal, config={"x": SphereReparam()}), 0)()
    with pytest.raises(ValueError, match="step_size is None, but GeodesicSGHMC has no law"):
        GeodesicSGHMC(MODEL)
    with pytest.raises(ValueError, match="whitening is given, but GeodesicSGNHT moves on spheres"):
        GeodesicSGNHT(MODEL, 0.1, whitening=Whitening(jnp.zeros(2), jnp.ones(2)))
    with pytest.raises(ValueError, match="cannot handle spherical sample site 'u'"):
        GeodesicSGHMC(model, 0.1).init(random.key(0), 1, None, (), {})
