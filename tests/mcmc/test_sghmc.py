"""SGHMC: three integrators, their exact Gaussian laws, and the correction for gradient noise."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.mcmc import SGHMC
from tests.mcmc.models import (
    NoisyGradient,
    gaussian,
    gaussian_mean,
    gaussian_mean_data,
    run,
    within,
)

EPS, H, C, S2 = 0.3, 2.0, 1.5, 4.0


def coth(x):
    return 1 / np.tanh(x)


def one_step(integrator, r, z, zeta, g_of, M, V, T=0.7):
    """The published rules in numpy, noise given."""
    c = np.exp(-C * EPS)
    if integrator == "aboba":
        zm = z + EPS / 2 * r / M
        k = -EPS * g_of(zm)
        rb = c * (r + k / 2) + zeta * np.sqrt(T * M * (1 - c**2) - (1 + c) ** 2 / 4 * EPS**2 * V)
        return rb + k / 2, zm + EPS / 2 * (rb + k / 2) / M
    if integrator == "baoab":
        r1 = r - EPS * g_of(z)
        zm = z + EPS / 2 * r1 / M
        r2 = c * r1 + np.sqrt(T * M * (1 - c**2)) * zeta
        return r2, zm + EPS / 2 * r2 / M
    z2 = z + EPS * r / M
    r2 = r - EPS * g_of(z2) - EPS * C * r + np.sqrt(2 * C * T * M * EPS - EPS**2 * V) * zeta
    return r2, z2


@pytest.mark.x64
@pytest.mark.parametrize("integrator", ["aboba", "baoab", "euler"])
def test_one_transition_is_the_formula(integrator, tol):
    h, loc = np.array([0.5, 2.0, 7.0]), np.array([1.0, -2.0, 0.3])
    M = np.array([0.6, 1.0, 3.0])
    V = np.array([0.5, 0.0, 1.0]) * (integrator != "baoab")
    kernel = SGHMC(
        gaussian,
        EPS,
        friction=C,
        mass={"z": M},
        noise_variance={"z": V},
        integrator=integrator,
        temperature=0.7,
    )
    args = (jnp.asarray(loc), jnp.asarray(h))
    state = kernel.init(random.key(0), 0, None, args, {})
    new = kernel.sample(state, args, {})
    zeta = np.asarray(random.normal(random.split(state.rng_key, 3)[2], (3,)))
    r, z = one_step(
        integrator, *map(np.asarray, (state.r, state.z["z"], zeta)), lambda z: h * (z - loc), M, V
    )
    assert np.allclose(new.r, r, rtol=tol(1e-4, 1e-11), atol=tol(1e-5, 1e-12))
    assert np.allclose(new.z["z"], z, rtol=tol(1e-4, 1e-11), atol=tol(1e-5, 1e-12))
    assert np.isclose(new.kinetic_temperature, np.mean(r**2 / M), rtol=tol(1e-4, 1e-11))


# h, s2, V, M of a block of coordinates, and the variance in the table of reference values.
BLOCKS = [
    (H, S2, 0.0, 1.0, 0.7033637),
    (H, S2, 3.0, 1.0, 0.5508409),
    (H, 0.0, 0.0, 1.0, 0.5),
    (5.0, 2.0, 1.0, 2.5, None),
]


@pytest.mark.slow
def test_gaussian_law():
    """
    Blocks of 2500 coordinates over 60 draws 10 transitions (3 units of time) apart.

    The correlation of z over 3 units at friction 1.5 and curvature 2 is below 0.15: variances have
    a relative error of sqrt(2 * 1.05 / 150 000) = 0.375 %.
    """
    size = 2500
    h, s2, V, M = (np.repeat([block[k] for block in BLOCKS], size) for k in range(4))
    kernel = SGHMC(
        gaussian,
        EPS,
        friction=C,
        mass={"z": M},
        noise_variance={"z": V},
        gradient=NoisyGradient(s2),
        steps_per_sample=10,
    )
    mcmc = run(
        kernel,
        jnp.full(len(h), -2.0),
        jnp.asarray(h, float),
        warmup=20,
        draws=60,
        extra_fields=("r",),
    )
    z, fields = mcmc.get_samples()["z"], mcmc.get_extra_fields()
    kinetic = []
    for k, (curvature, noise, known, mass, table) in enumerate(BLOCKS):
        rows = slice(k * size, (k + 1) * size)
        # The variance of z in units in which the mass is 1.
        hot = EPS**2 / 4 * (noise - known) / mass * coth(C * EPS / 2)
        expected = (1 + hot) / curvature
        assert table is None or expected == pytest.approx(table, rel=1e-6)
        within(jnp.var(z[:, rows]), expected, expected * 0.00375)
        within(jnp.mean(z[:, rows]), -2.0, (expected * 1.35 / 150_000) ** 0.5)
        r = mass * expected * curvature / (1 - EPS**2 * curvature / mass / 4)
        within(jnp.var(fields["r"][:, rows]), r, r * 0.00375)
        kinetic.append(r / mass)
    within(jnp.mean(fields["kinetic_temperature"]), np.mean(kinetic), np.mean(kinetic) * 0.002)


@pytest.mark.nightly
def test_noise_variance_from_warmup():
    """
    Gaussian mean with batches: the estimate is N^2/B popvar = 499.6, and z has the exact posterior
    variance.

    12 000 pairs: error of the estimate about 1.2 %; 20 000 nearly independent draws: error of the
    variance 1.05 %.
    """
    eps = 0.04
    kernel = SGHMC(gaussian_mean, eps, friction=12.0, noise_variance="warmup", steps_per_sample=40)
    mcmc = run(kernel, gaussian_mean_data(), warmup=300, draws=20_000)
    (estimate,) = mcmc.last_state.noise_variance
    within(estimate, 499.6082696, 499.6 * 0.013)
    draws = mcmc.get_samples()["loc"]
    left = eps**2 / 4 * (499.6082696 - float(estimate)) * coth(12 * eps / 2)
    within(jnp.var(draws), (1 + left) / 100.1, 0.0105 / 100.1)
    hot = (1 + eps**2 / 4 * 499.6 * coth(12 * eps / 2)) / 100.1
    assert abs(float(jnp.var(draws)) - hot) > 20 * 0.0105 / 100.1


@pytest.mark.slow
def test_noise_variance_is_frozen_after_warmup():
    kernel = SGHMC(gaussian_mean, 0.02, noise_variance="warmup", steps_per_sample=2)
    args = (gaussian_mean_data(),)
    state = kernel.init(random.key(0), 3, None, args, {})
    step = jax.jit(lambda state: kernel.sample(state, args, {}))
    seen = [state := step(state) for _ in range(5)]
    values = [float(s.noise_variance[0]) for s in seen]
    assert len(set(values[:3])) == 3
    assert values[2] == values[3] == values[4]


@pytest.mark.slow
def test_momentum_is_resampled_at_the_right_transitions():
    """With friction near 0 and no force, the momentum changes only there."""
    kernel = SGHMC(gaussian, 0.1, friction=1e-8, resample_every=3, temperature=4.0, mass=9.0)
    args = (0.0, jnp.full(5000, 1e-12))
    state = kernel.init(random.key(0), 0, None, args, {})
    step = jax.jit(lambda state: kernel.sample(state, args, {}))
    for i in range(7):
        new = step(state)
        assert bool(jnp.allclose(new.r, state.r, atol=0.1)) == (i % 3 != 0), i
        state = new
    # Standard error of a variance from 5000 draws: 2 %.
    within(jnp.var(state.r), 36.0, 36 * 0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"friction": 0.0}, r"friction is 0.0; it must be a positive"),
        ({"mass": {"z": np.array([1.0, 0.0])}}, r"mass is .*0.0"),
        ({"noise_variance": -0.1}, r"noise_variance is .*-0.1"),
        ({"noise_variance": 0.1, "integrator": "baoab"}, r"use 'aboba' or 'euler'"),
    ],
)
def test_wrong_input(options, message):
    with pytest.raises(ValueError, match=message):
        SGHMC(gaussian, 0.1, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_variance": 1000.0}, r"noise_variance is 1000, more than .* 19.98;"),
        ({"noise_variance": 21.0, "integrator": "euler"}, r"injected, 20; take a smaller step"),
        ({"noise_variance": "warmup"}, r"noise_variance is 'warmup' but num_warmup is 0"),
        ({"mass": {"y": 1.0}}, r"mass has \['y'\]; it must be a dict with the sites \['z'\]"),
    ],
)
def test_wrong_input_seen_with_the_model(options, message):
    kernel = SGHMC(gaussian, 0.1, **options)
    with pytest.raises(ValueError, match=message):
        kernel.init(random.key(0), 0, None, (0.0, jnp.ones(2)), {})
