"""The recipe keeps its law for any D and Q, and only with its correction."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov

from numpyro_ext.mcmc import RecipeKernel
from numpyro_ext.mcmc.geometry import recipe_correction
from tests.mcmc.laws import average, mean_and_error, normal, second_moment, start, step_at
from tests.mcmc.models import NoisyGradient
from tests.mcmc.test_geometry import curl, dense


def momentum_pair(C, n=1):
    zero, eye = jnp.zeros((n, n)), jnp.eye(n)
    D = jnp.block([[zero, zero], [zero, C * eye]])
    Q = jnp.block([[zero, -eye], [eye, zero]])
    return (lambda x: D), (lambda x: Q)


@pytest.mark.slow
def test_unsplit_sghmc_has_the_covariance_of_explicit_euler():
    eps, h, C, T, s2 = 0.2, 2, 1.5, 0.5, 3
    M = np.array([[1, eps], [-eps * h, 1 - eps * C]])
    law = solve_discrete_lyapunov(M, np.diag([0, 2 * eps * C * T + eps**2 * s2]))
    D, Q = momentum_pair(C)
    options = {"num_auxiliary": 1, "temperature": T, "gradient": NoisyGradient(s2)}
    kernel = RecipeKernel(normal([h], loc=2.0), eps, diffusion=D, curl=Q, **options)
    fns = {"zz": second_moment(2.0), "rr": lambda s: s.r**2}
    out, state = average(kernel, fns, 600, 100, chains=500)
    assert state.r.shape == (500, 1)
    for value, expected in ((out["zz"], law[0, 0]), (out["rr"], law[1, 1])):
        mean, error = mean_and_error(value)
        assert error < 0.02 * expected
        assert abs(mean - expected) < 4 * error


@pytest.mark.x64
def test_step_is_the_formula(tol):
    z, eps = jnp.array([0.7, -1.1]), 0.01
    grad = np.array([1.0, 3.0]) * (np.asarray(z) - 2)
    full = np.asarray(dense(z) + curl(z)) @ grad
    make = partial(RecipeKernel, normal([1.0, 3.0], loc=2.0), eps, diffusion=dense, curl=curl)
    at, key = step_at(make, z)
    moved = [at(T) for T in (0.0, 1.0, 4.0)]
    np.testing.assert_allclose(moved[0], -eps * full, rtol=0, atol=tol(1e-6, 1e-13))
    Gam = np.asarray(jax.jit(partial(recipe_correction, dense, curl))(z))
    noise_free = 2 * (moved[1] - moved[0]) - (moved[2] - moved[0])
    np.testing.assert_allclose(noise_free, -2 * eps * Gam, rtol=0, atol=tol(2e-6, 1e-13))
    zeta = random.normal(key, (2,))
    noise = moved[1] - moved[0] - eps * Gam
    squared = noise @ np.linalg.solve(np.asarray(dense(z)), noise)
    assert squared == pytest.approx(2 * eps * float(zeta @ zeta), rel=tol(1e-4, 1e-10))


def skew(x):
    return jnp.array([[0.0, 1.0], [-1.0, 0.0]])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"diffusion": lambda x: jnp.eye(2) + skew(x)}, "diffusion is not positive semidefinite"),
        ({"diffusion": jnp.ones_like, "curl": lambda x: jnp.eye(2)}, "curl is not skew-symmetric"),
        ({"diffusion": lambda x: jnp.ones(1)}, r"diffusion returns shape \(1,\)"),
        ({"diffusion": jnp.ones_like, "correction": jnp.sum}, r"correction returns shape \(\)"),
    ],
)
def test_bad_fields_at_the_initial_point(arguments, match):
    kernel = RecipeKernel(normal([1.0, 1.0]), 0.1, **arguments)
    with pytest.raises(ValueError, match=match):
        kernel.init(random.key(0), 0, None, (), {})


def test_singular_diffusion_is_allowed():
    def D(x):
        direction = jnp.array([3.0, 4.0]) / 5
        return jnp.outer(direction, direction)

    state, step = start(RecipeKernel(normal([1.0, 1.0]), 0.1, diffusion=D), z=[0.0, 0.0])
    new = step(state)
    assert not new.diverging
    np.testing.assert_allclose(4 * new.z["z"][0], 3 * new.z["z"][1], atol=1e-5)
    assert jax.device_get(jnp.abs(new.z["z"]).max()) > 0
