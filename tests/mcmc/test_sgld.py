"""SGLD: its rule, and the laws that its step size, temperature and gradient noise give."""

import jax
from jax import random
import jax.numpy as jnp
import pytest

from numpyro_ext.mcmc import SGLD, CyclicalSchedule
from tests.mcmc.models import NoisyGradient, gaussian, run, within


@pytest.mark.x64
def test_one_transition_is_the_formula(tol):
    h, loc = jnp.array([0.5, 2.0, 7.0]), jnp.array([1.0, -2.0, 0.3])
    kernel = SGLD(gaussian, 0.07, temperature=0.6)
    state = kernel.init(random.key(0), 0, None, (loc, h), {})
    new = kernel.sample(state, (loc, h), {})
    _, _, key_step = random.split(state.rng_key, 3)
    z, zeta = state.z["z"], random.normal(key_step, (3,))
    g = h * (z - loc)
    expected = z - 0.07 * g + (2 * 0.07 * 0.6) ** 0.5 * zeta
    assert jnp.allclose(new.z["z"], expected, rtol=tol(1e-5, 1e-12))
    assert jnp.isclose(new.grad_norm, jnp.linalg.norm(g), rtol=tol(1e-5, 1e-12))
    u = jnp.sum(h * (new.z["z"] - loc) ** 2 / 2 - jnp.log(h / (2 * jnp.pi)) / 2)
    assert jnp.isclose(new.potential_energy, u, rtol=tol(1e-5, 1e-12))
    assert float(new.step_size) == pytest.approx(0.07)
    assert (int(new.i), bool(new.diverging)) == (1, False)


@pytest.mark.slow
def test_gaussian_law():
    """
    Variance and correlation of 3 blocks of 4000 coordinates over 100 draws 3 transitions apart.

    A draw's square correlates by rho^2 with the next, rho = (1 - eps h)^3 <= 0.78, so the variance
    has a relative error of at most sqrt(2 (1 + rho^2) / (1 - rho^2) / 400 000) = 0.46 %, and
    the correlation one of 0.0016.
    """
    eps, size, temperature = 0.1, 4_000, 0.5
    blocks = [(2.0, 3.0, 0.3611111), (0.8, 2.0, None), (4.0, 0.0, None)]
    h, s2 = (jnp.repeat(jnp.array([block[k] for block in blocks]), size) for k in range(2))
    kernel = SGLD(
        gaussian, eps, temperature=temperature, gradient=NoisyGradient(s2), steps_per_sample=3
    )
    z = run(kernel, jnp.full(3 * size, 4.0), h).get_samples()["z"]
    for k, (curvature, noise, table) in enumerate(blocks):
        draws = z[:, k * size : (k + 1) * size]
        expected = (2 * temperature + eps * noise) / (curvature * (2 - eps * curvature))
        assert table is None or expected == pytest.approx(table, rel=1e-6)
        rho = (1 - eps * curvature) ** 3
        error = (2 * (1 + rho**2) / (1 - rho**2) / draws.size) ** 0.5
        within(jnp.var(draws), expected, expected * error)
        within(jnp.mean(draws), 4.0, (expected * (1 + rho) / (1 - rho) / draws.size) ** 0.5)
        centred = draws - 4.0
        within(jnp.mean(centred[1:] * centred[:-1]) / jnp.var(draws), rho, 0.0016)


def test_exploration_shrinks_exactly_and_is_marked(tol):
    """Without noise, z - loc shrinks by 1 - eps_i h; afterwards there is noise."""
    h = jnp.array([1.0, 1.7])
    kernel = SGLD(gaussian, CyclicalSchedule(0.4, 4, exploration=0.5))
    assert kernel.default_fields[-1] == "sampling"
    state = kernel.init(random.key(0), 0, None, (3.0, h), {})
    step = jax.jit(lambda state: kernel.sample(state, (3.0, h), {}))
    for i, eps in enumerate([0.4, 0.341421356237, 0.2, 0.058578643763, 0.4]):
        new = step(state)
        exact = jnp.allclose(
            new.z["z"] - 3, (state.z["z"] - 3) * (1 - eps * h), rtol=tol(1e-4, 1e-9)
        )
        assert bool(exact) == (i % 4 < 2), i
        assert bool(new.sampling) == (i % 4 >= 2)
        assert float(new.step_size) == pytest.approx(eps, rel=tol(1e-5, 1e-10))
        state = new
