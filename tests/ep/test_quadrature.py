"""Moments of a factor times its cavity by quadrature, against brute force in double precision."""

import functools

import jax
import jax.numpy as jnp
from jax.scipy.special import log_ndtr
import numpy as np
import pytest
from scipy import special

from numpyro_ext.ep import Quadrature


def log_sigmoid(u):
    return -np.logaddexp(0, -u)


def student(u, xp):
    return -1.5 * xp.log1p((u - 1) ** 2 / 2)


def normal(centre, sd):
    return lambda u: -0.5 * ((u - centre) / sd) ** 2


# name: (factor, the same in NumPy, mean and variance of the cavity, centre and scale of the sharp
# part, errors of the variance in double and in single precision)
LINES = {
    "probit": (log_ndtr, special.log_ndtr, 0.3, 1.0, 0, 1, 1e-9, 1e-6),
    "probit, separable": (log_ndtr, special.log_ndtr, 60.0, 1e4, 0, 1, 4e-9, 3e-4),
    "probit, far from its cavity": (log_ndtr, special.log_ndtr, 150.0, 1e4, 0, 1, 4e-9, 3e-4),
    "logistic": (jax.nn.log_sigmoid, log_sigmoid, 5.0, 1e4, 0, 1, 4e-9, 1e-5),
    "weak logistic": (jax.nn.log_sigmoid, log_sigmoid, 1.0, 1e-4, 0, 1, 1e-14, 1e-7),
    "narrow normal": (normal(1.3, 0.01), normal(1.3, 0.01), 0.0, 4.0, 1.3, 0.01, 3e-7, 1e-5),
    "Poisson": (
        lambda u: 3 * u - jnp.exp(u),
        lambda u: 3 * u - np.exp(np.minimum(u, 700)),
        *(0.0, 900.0, 1, 1, 1e-8, 1e-5),
    ),
    "heavy tails": (
        lambda u: student(u, jnp),
        lambda u: student(u, np),
        *(0.2, 4.0, 1, 1, 1e-9, 1e-5),
    ),
    "kink": (
        lambda u: -jnp.abs(u - 0.4) / 30,
        lambda u: -np.abs(u - 0.4) / 30,
        *(0.1, 1.0, 0.4, 0.01, 1e-5, 1e-5),
    ),
}


def brute_force(f, mean, var, centre, scale, power=1.0):
    """log Z, and of the tilted distribution the mean minus the cavity's, and the variance."""
    t = np.linspace(-1, 1, 60001) * np.arcsinh((abs(mean - centre) + 15 * np.sqrt(var)) / scale)
    u = centre + scale * np.sinh(t)
    log_p = power * f(u) - (u - mean) ** 2 / (2 * var) - np.log(2 * np.pi * var) / 2
    p = np.exp(log_p - log_p.max()) * scale * np.cosh(t) * (t[1] - t[0])
    Z = p.sum()
    m = p @ (u - mean) / Z
    return np.log(Z) + log_p.max(), m, p @ (u - mean - m) ** 2 / Z


@functools.cache
def of_line(name):
    f, _, mean, var, *_ = LINES[name]
    arrays = jnp.array([mean]), jnp.array([[var]])
    return jax.device_get(jax.jit(lambda: Quadrature().project(lambda u: f(u[0]), *arrays, 1.0))())


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("name", LINES)
def test_matches_brute_force_on_a_line(name, tol):
    _, f, mean, var, centre, scale, tol64, tol32 = LINES[name]
    computed, limit = of_line(name), tol(tol32, tol64)
    log_z, m, V = brute_force(f, mean, var, centre, scale)
    T, v = float(computed.site_precision[0, 0]), float(computed.site_shift[0])
    V_found = 1 / (1 / var + T)
    assert abs(V_found / V - 1) < limit
    # The shift of a narrow site is a large number, of which the mean is what rounding leaves.
    assert abs(V_found * (v - T * mean) - m) / np.sqrt(V) < tol(10, 1) * limit
    assert abs(computed.log_normaliser - log_z) < max(limit, tol(2e-6, 1e-13))
    assert computed.ok and not computed.inaccurate


@pytest.mark.x64
def test_weak_site_is_right_to_rounding(tol):
    """As a difference of precisions, 1e4, it would have three digits in single precision."""
    _, f, mean, var, centre, scale, *_ = LINES["weak logistic"]
    _, _, V = brute_force(f, mean, var, centre, scale)
    computed = of_line("weak logistic").site_precision[0, 0]
    assert abs(computed / (1 / V - 1 / var) - 1) < tol(1e-5, 1e-8)


def test_sites_of_weak_kinks_have_the_right_sign():
    """Second derivatives are 0 almost everywhere, so that the form by scores has T below 0."""
    computed = of_line("kink").site_precision[0, 0]
    _, f, mean, var, centre, scale, *_ = LINES["kink"]
    _, _, V = brute_force(f, mean, var, centre, scale)
    assert abs(computed / (1 / V - 1 / var) - 1) < 2e-3


@pytest.mark.nightly
@pytest.mark.parametrize("r", [pytest.param(1, marks=pytest.mark.x64), 2, 3])
def test_normal_factor_is_its_own_site(r, tol):
    """At any power, and in any rank."""
    v, T = jnp.array([0.7, -2.0, 0.4])[:r], jnp.diag(jnp.array([3.0, 0.2, 1.0])[:r]) + 0.1
    mean = jnp.array([0.4, -1.0, 2.0])[:r]
    cov = jnp.diag(jnp.array([0.5, 2.0, 1.0])[:r]) + 0.2

    def project(power):
        return Quadrature().project(lambda u: v @ u - u @ T @ u / 2, mean, cov, power)

    for computed in map(jax.jit(project, static_argnums=0), (0.5, 1.0) if r < 3 else (0.5,)):
        limit = 1e-3 if r > 1 else tol(2e-5, 1e-9)
        np.testing.assert_allclose(computed.site_precision, T, atol=limit)
        np.testing.assert_allclose(computed.site_shift, v, atol=limit)
        assert computed.ok


def funnel(mean, cov):
    """Moments of N(0; x, exp(2 s)) N((x, s); mean, cov), x in closed form and s by brute force."""
    sd = np.sqrt(cov[1, 1])
    s = mean[1] + sd * np.linspace(-12, 12, 40001)
    slope = cov[0, 1] / cov[1, 1]
    m, var = mean[0] + slope * (s - mean[1]), cov[0, 0] - slope * cov[0, 1]
    total = var + np.exp(2 * s)
    log_p = -0.5 * (m**2 / total + np.log(2 * np.pi * total) + ((s - mean[1]) / sd) ** 2)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    x, var_x = m * np.exp(2 * s) / total, var * np.exp(2 * s) / total
    means = np.array([p @ x, p @ s])
    dx, ds = x - means[0], s - means[1]
    return means, np.array([[p @ (var_x + dx**2), p @ (dx * ds)], [p @ (dx * ds), p @ ds**2]])


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("width", [1.0, 30.0])
def test_matches_brute_force_on_a_funnel(width, tol):
    """The prior of an effect, given its distance from the mean and the log scale."""
    mean, cov = np.array([3.0, 1.3]), np.array([[2 * width, 0.5], [0.5, 0.8]])

    def log_factor(u):
        return -u[1] - 0.5 * (u[0] * jnp.exp(-u[1])) ** 2

    computed = jax.jit(lambda m, S: Quadrature().project(log_factor, m, S, 1.0))(mean, cov)
    m, V = funnel(mean, cov)
    V_found = np.linalg.inv(np.linalg.inv(cov) + computed.site_precision)
    m_found = V_found @ (np.linalg.solve(cov, mean) + computed.site_shift)
    sd = np.sqrt(np.diag(V))
    np.testing.assert_allclose((V_found - V) / np.outer(sd, sd), 0, atol=1e-3)
    np.testing.assert_allclose((m_found - m) / sd, 0, atol=1e-3)
    assert computed.ok and not computed.inaccurate


@pytest.mark.x64
def test_exclusive_site_has_means_under_q(tol):
    mean, var = 0.7, 2.5
    u = mean + np.sqrt(var) * np.linspace(-12, 12, 40001)
    w = np.exp(-((u - mean) ** 2) / (2 * var))
    w /= w.sum()
    p = special.expit(u)
    computed = jax.jit(
        lambda: Quadrature().project(
            lambda u: jax.nn.log_sigmoid(u[0]), jnp.array([mean]), jnp.array([[var]]), 0.0
        )
    )()
    limit = tol(1e-6, 1e-9)
    T = w @ (p * (1 - p))
    np.testing.assert_allclose(computed.site_precision[0, 0], T, rtol=limit)
    np.testing.assert_allclose(computed.site_shift[0], w @ (1 - p) + T * mean, rtol=limit)
    np.testing.assert_allclose(computed.log_normaliser, w @ log_sigmoid(u), rtol=10 * limit)
    assert computed.ok


@jax.jit
def trouble():
    def two_modes(u):
        return jnp.logaddexp(normal(4, 0.1)(u), normal(-3, 0.05)(u))

    factors = {
        "beyond the nodes": normal(50, 0.1),
        "two sharp modes": lambda u: two_modes(3 * u),
        "no finite value": lambda u: jnp.nan * u,
        "impossible": lambda u: jnp.where(u > 1e3, 0.0, -jnp.inf),
    }
    return {
        name: Quadrature().project(lambda u, f=f: f(u[0]), jnp.zeros(1), jnp.eye(1), 1.0)
        for name, f in factors.items()
    }


def test_the_report_names_what_the_nodes_do_not_see():
    computed = trouble()
    assert computed["two sharp modes"].inaccurate
    for name in ("beyond the nodes", "no finite value", "impossible"):
        assert not computed[name].ok, name
