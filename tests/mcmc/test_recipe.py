"""The recipe keeps its law for any D and Q, and only with its correction."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov

from numpyro_ext.mcmc import SGLD, RecipeKernel, RecipeKernelState
from numpyro_ext.mcmc.geometry import recipe_correction
from tests.mcmc.laws import average, mean_and_error, normal, second_moment, start, step_at
from tests.mcmc.models import NoisyGradient, from_potential
from tests.mcmc.test_geometry import curl, dense


def momentum_pair(C, n=1):
    zero, eye = jnp.zeros((n, n)), jnp.eye(n)
    D = jnp.block([[zero, zero], [zero, C * eye]])
    Q = jnp.block([[zero, -eye], [eye, zero]])
    return (lambda x: D), (lambda x: Q)


@pytest.mark.slow
def test_unsplit_sghmc_has_the_covariance_of_explicit_euler():
    """The variance 2.154 for 1 at eps 0.5 and unit friction and curvature, and one with noise and
    T.
    """
    for eps, h, C, T, s2, reference in ((0.5, 1, 1, 1, 0, 2.1538), (0.2, 2, 1.5, 0.5, 3, None)):
        M = np.array([[1, eps], [-eps * h, 1 - eps * C]])
        law = solve_discrete_lyapunov(M, np.diag([0, 2 * eps * C * T + eps**2 * s2]))
        if reference is not None:  # of the law; the chain itself is run with noise and T
            assert law[0, 0] == pytest.approx(reference, abs=1e-4)
            continue
        D, Q = momentum_pair(C)
        kernel = RecipeKernel(
            normal([h], loc=2.0),
            eps,
            diffusion=D,
            curl=Q,
            num_auxiliary=1,
            temperature=T,
            gradient=NoisyGradient(s2),
        )
        fns = {"zz": second_moment(2.0), "rr": lambda s: s.r**2}
        out, state = average(kernel, fns, 600, 100, chains=500)
        assert state.r.shape == (500, 1)
        for value, expected in ((out["zz"], law[0, 0]), (out["rr"], law[1, 1])):
            mean, error = mean_and_error(value)
            assert error < 0.02 * expected
            assert abs(mean - expected) < 4 * error


@pytest.mark.slow
def test_changing_diffusion_needs_the_correction():
    """``U = z^2/2``, ``D = 1 + z^2``: without Gam the density is ``exp(-U) / D``."""
    x = np.linspace(-8, 8, 8001)
    density = np.exp(-(x**2) / 2) / (1 + x**2)
    wrong = np.sum(x**2 * density) / np.sum(density)
    assert wrong < 0.6
    for correction, expected in (("autodiff", 1.0), (jnp.zeros_like, wrong)):
        kernel = RecipeKernel(
            normal([1.0]),
            0.005,
            diffusion=lambda x: 1 + x**2,
            correction=correction,
            steps_per_sample=10,
        )
        out, _ = average(kernel, {"zz": second_moment(0.0)}, 150, 60, chains=1500)
        mean, error = mean_and_error(out["zz"])
        assert error < 0.015
        assert abs(mean - expected) < 4 * error + 0.02 * expected, (mean, error)


@pytest.mark.slow
def test_changing_diffusion_and_curl_keep_the_law():
    """Both matrices of the reference value, on a Gaussian of unequal curvatures off the origin."""
    h, loc = np.array([3.0, 1.0]), 0.5
    kernel = RecipeKernel(
        normal(h, loc=loc), 0.004, diffusion=dense, curl=curl, steps_per_sample=10
    )
    fns = {"z": lambda s: s.z["z"], "zz": second_moment(loc)}
    out, _ = average(kernel, fns, 100, 40, chains=500)
    for k in range(2):
        mean, error = mean_and_error(out["z"][:, k])
        assert error < 0.03
        assert abs(mean - loc) < 4 * error + 0.005
        mean, error = mean_and_error(out["zz"][:, k])
        assert error < 0.05 / h[k]
        assert abs(mean - 1 / h[k]) < 4 * error + 0.02 / h[k], (k, mean, error)


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


@pytest.mark.slow
def test_unit_diffusion_is_sgld(tol):
    model = from_potential(lambda z: jnp.sum(z**4 - 2 * z**2), 2)
    state, step = start(SGLD(model, 0.1), z=[0.3, -0.4])
    expected = step(state).z["z"]
    for D in (lambda x: 1.0, jnp.ones_like, lambda x: jnp.eye(2)):
        state, step = start(RecipeKernel(model, 0.1, diffusion=D), z=[0.3, -0.4])
        new = step(state)
        np.testing.assert_allclose(new.z["z"], expected, rtol=tol(1e-6, 1e-13))
        assert new.r.shape == (0,)


def test_several_auxiliaries_and_temperature():
    """``num_auxiliary=2``: x has three blocks, and r starts from N(0, T)."""
    seen = []

    def D(x):
        seen.append(x.shape)
        return jnp.ones_like(x)

    kernel = RecipeKernel(normal(np.ones(300)), 0.1, diffusion=D, num_auxiliary=2, temperature=4.0)
    state = kernel.init(random.key(0), 0, None, (), {})
    assert set(seen) == {(900,)}
    assert state.r.shape == (600,)
    assert np.var(state.r) == pytest.approx(4.0, rel=0.25)  # four standard errors
    assert isinstance(state, RecipeKernelState)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"diffusion": 1.0}, TypeError, "diffusion is 1.0"),
        ({"diffusion": None}, TypeError, "diffusion is None"),
        ({"diffusion": jnp.ones_like, "curl": 1.0}, TypeError, "curl is 1.0"),
        ({"diffusion": jnp.ones_like, "num_auxiliary": -1}, ValueError, "num_auxiliary is -1"),
        ({"diffusion": jnp.ones_like, "correction": "none"}, ValueError, "one of 'autodiff'"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        RecipeKernel(normal([1.0, 1.0]), 0.1, **arguments)


def skew(x):
    return jnp.array([[0.0, 1.0], [-1.0, 0.0]])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"diffusion": lambda x: -1.0}, "diffusion is not positive semidefinite"),
        (
            {"diffusion": lambda x: jnp.diag(jnp.array([1.0, -1.0]))},
            "diffusion is not positive semi",
        ),
        ({"diffusion": lambda x: jnp.eye(2) + skew(x)}, "diffusion is not positive semidefinite"),
        ({"diffusion": lambda x: jnp.nan * x}, "diffusion is not positive semidefinite"),
        ({"diffusion": lambda x: jnp.ones(3)}, r"diffusion returns shape \(3,\)"),
        ({"diffusion": jnp.ones_like, "curl": lambda x: jnp.eye(2)}, "curl is not skew-symmetric"),
        ({"diffusion": jnp.ones_like, "curl": jnp.ones_like}, r"curl returns shape \(2,\)"),
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
