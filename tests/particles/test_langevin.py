"""EnsembleLangevin: its stationary law, linear maps, modes, and what it refuses."""

from functools import partial
import pickle

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext._model.modes import Mode, Modes
from numpyro_ext.particles import EnsembleLangevin, ParVI, RegularizedSVGD
from numpyro_ext.particles._whitening import CovarianceWhitening
from tests.particles.fixture import STARTS, model


def normal_modes(center, factor, **more):
    return Modes((Mode(center, factor, stiffness=1.0, **more),), (("x", center.shape),))


def history(dynamics, rng_key, x, grad, modes, warmup, num, every, groups=None):
    """``(num, m, d)`` particles at later times."""

    def step(carry, progress):
        x, state = carry
        return dynamics.step(x, state, grad(x), progress, groups), None

    def draw(carry, _):
        carry, _ = lax.scan(step, carry, jnp.ones(every))
        return carry, carry[0]

    carry = x, dynamics.init(rng_key, x, modes, groups)
    carry, _ = lax.scan(step, carry, jnp.arange(warmup) / warmup)
    (_, state), draws = lax.scan(draw, carry, None, num)
    return draws, state


@pytest.mark.slow
@pytest.mark.parametrize(("m", "d"), [(100, 12), (10, 15)], ids=["many", "fewer than numbers"])
def test_draws_have_the_law_of_a_normal_whatever_the_number_of_particles(m, d):
    """Condition number 10^4 in any direction, from a normal two sds off and twice too wide."""
    num_keys, num, every = 4, 30, 20
    rotation = jnp.linalg.qr(random.normal(random.key(7), (d, d)))[0]
    factor = jnp.linalg.cholesky(rotation * jnp.geomspace(1e-4, 1.0, d) @ rotation.T)
    mean = jnp.linspace(-3.0, 5.0, d)

    def grad(x):
        y = jax.scipy.linalg.solve_triangular(factor, (x - mean).T, lower=True)
        return -jax.scipy.linalg.solve_triangular(factor, y, lower=True, trans=1).T

    def moments(rng_key):
        key_start, key_run = random.split(rng_key)
        start = 2.0 + 2.0 * random.normal(key_start, (m, d))
        modes = normal_modes(mean, 2.0 * factor)
        x = mean + start @ factor.T
        draws, _ = history(EnsembleLangevin(0.5), key_run, x, grad, modes, 300, num, every)
        y = jax.scipy.linalg.solve_triangular(factor, (draws.reshape(-1, d) - mean).T, lower=True)
        return jnp.mean(y, axis=1), y @ y.T / y.shape[1]

    means, squares = jax.jit(jax.vmap(moments))(random.split(random.key(0), num_keys))
    # Of independent draws a mean has the error n^-1/2, and a square 2^1/2 as much; ten units of
    # time at a friction of 1 leave a correlation of about a tenth, so that errors are 1.1 of these.
    error = 1.3 * (num_keys * m * num) ** -0.5
    z = jnp.mean(means, axis=0) / error, (jnp.mean(squares, axis=0) - jnp.eye(d)) / error
    assert np.abs(z[0]).max() < 4.5
    assert np.abs(np.diagonal(z[1])).max() < 4.5 * 2**0.5
    assert np.abs(z[1] - np.diag(np.diagonal(z[1]))).max() < 4.5
    # The scatter over all numbers is no larger than it should be either.
    assert np.sqrt(np.mean(np.diagonal(z[1]) ** 2 / 2)) < 1.7


@pytest.mark.slow
def test_lower_triangular_maps_of_the_parameters_map_the_particles(tol):
    d, m = 3, 40
    to = jnp.array([[1e3, 0.0, 0.0], [-20.0, 0.5, 0.0], [3.0, 0.2, 1e-2]])
    x = random.normal(random.key(0), (m, d))
    center, factor = jnp.array([1.0, 0.0, -1.0]), jnp.diag(jnp.array([1.0, 2.0, 0.5]))

    def grad(x):
        return -x - 0.3 * x**3 + 0.2 * jnp.roll(x, 1, axis=1)

    def mapped(z):
        x = jnp.linalg.solve(to, z.T).T
        return jnp.linalg.solve(to.T, grad(x).T).T

    run = partial(history, EnsembleLangevin(), random.key(1), warmup=10, num=1, every=10)
    plain, _ = run(x, grad, normal_modes(center, factor))
    other, _ = run(x @ to.T, mapped, normal_modes(to @ center, to @ factor))
    expected = plain[0] @ to.T
    size = jnp.std(expected, axis=0)
    np.testing.assert_allclose(other[0] / size, expected / size, atol=tol(5e-3, 1e-10))


@pytest.mark.slow
def test_too_large_a_step_becomes_smaller_in_the_warmup():
    x = random.normal(random.key(0), (60, 3))
    modes = normal_modes(jnp.zeros(3), jnp.eye(3))
    draws, state = history(
        EnsembleLangevin(6.0), random.key(1), x, jnp.negative, modes, 600, 50, 10
    )
    assert state.largest_step < 2.0  # where a normal becomes unstable
    # 3,000 draws, of which one in two is independent.
    np.testing.assert_allclose(draws.std((0, 1)), 1.0, atol=0.1)
    np.testing.assert_allclose(draws.mean((0, 1)), 0.0, atol=0.12)


@pytest.mark.slow
def test_each_mode_keeps_its_share_and_its_own_width():
    """One ten times as wide as the other; three particles of ten, of which one is alone."""
    which = jnp.arange(60) % 10 < 3
    groups = jnp.stack([~which, which], axis=1).astype(float)
    center = jnp.where(which, 500.0, 0.0)[:, None] * jnp.ones(2)
    width = jnp.where(which, 10.0, 1.0)[:, None]
    x = center + width * random.normal(random.key(0), (60, 2))

    def grad(x):
        near = x[:, :1] > 250.0
        return jnp.where(near, -(x - 500.0) / 100.0, -x)

    modes = normal_modes(jnp.zeros(2), jnp.eye(2))
    options = {"warmup": 200, "num": 100, "every": 10, "groups": groups}
    draws, state = history(EnsembleLangevin(), random.key(1), x, grad, modes, **options)
    np.testing.assert_array_equal(draws[:, :, 0] > 250.0, jnp.tile(which, (100, 1)))
    # Of 1,800 and 4,200 draws that are nearly independent.
    far, near = np.asarray(draws[:, which]), np.asarray(draws[:, ~which])
    np.testing.assert_allclose(far.std((0, 1)), 10.0, rtol=0.1)
    np.testing.assert_allclose(near.std((0, 1)), 1.0, rtol=0.07)
    assert state.num_steps == 1000 and state.shortened.sum() < 10


@pytest.mark.slow
def test_a_kernel_with_these_dynamics_samples_resumes_and_pickles():
    """The means and sds of the model are by quadrature in another coordinate."""
    kernel = ParVI(model, optim=EnsembleLangevin(), steps_per_sample=10)
    mcmc = MCMC(
        pickle.loads(pickle.dumps(kernel)),
        num_warmup=30,
        num_samples=20,
        num_chains=50,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0))
    assert mcmc.get_samples(group_by_chain=True)["loc"].shape == (50, 20)
    state = mcmc.last_state
    assert state.optim_state.num_steps == 200 and jnp.all(jnp.isnan(state.bandwidth))
    # The step that was found has fallen to a quarter.
    largest = float(state.optim_state.largest_step)
    assert state.optim_state.step_size == pytest.approx(0.25 * largest)
    mcmc.post_warmup_state = state
    mcmc.run(random.key(1))
    assert mcmc.last_state.optim_state.num_steps == 400


def alone():
    numpyro.sample("x", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: EnsembleLangevin(0.0), ValueError, r"step_size is 0\.0"),
        (lambda: EnsembleLangevin(friction=0.0), ValueError, r"friction is 0\.0"),
        (
            lambda: ParVI(alone, RegularizedSVGD(), EnsembleLangevin()),
            TypeError,
            "field is RegularizedSVGD.*leave field out",
        ),
        (
            lambda: ParVI(alone, optim=EnsembleLangevin(), init_from=None).init(
                random.split(random.key(0), 3), 1
            ),
            ValueError,
            "num_chains is 3.*give 4 or more",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_kick_of_a_step_is_at_most_three_quarters_of_a_unit():
    dynamics = EnsembleLangevin(0.8)
    state = dynamics.init(random.key(0), STARTS)
    g = jnp.zeros_like(STARTS)
    still, _ = dynamics.step(STARTS, state, g, 1.0)
    pushed, after = dynamics.step(STARTS, state, g + 1e8, 1.0)
    # A kick of 1.5 / 2 for half a step of 0.8 / 4 before and, less the friction, after the noise.
    units = CovarianceWhitening.from_particles(STARTS[1::2])
    speed = units.speed((pushed - still)[::2])
    np.testing.assert_allclose(speed, 0.1 * 0.75 * (1 + np.exp(-0.2)), rtol=1e-4)
    np.testing.assert_array_equal(after.shortened, 1)
