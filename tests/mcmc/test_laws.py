"""The laws by which settings are chosen, against the linear algebra of a step on N(0, 1)."""

import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov

from numpyro_ext.mcmc.laws import choose_sghmc, choose_sgld, choose_sgnht

NOISE = np.array([0.0, 3.0, 12.0])


def covariance(law, eps, C, s2):
    """That of z and r at the end of a step, from the maps of its parts; noise enters r."""
    c = np.exp(-C * eps)
    drift, kick = np.array([[1.0, eps / 2], [0.0, 1.0]]), np.array([[1.0, 0.0], [-eps, 1.0]])
    half_kick, damp = np.array([[1.0, 0.0], [-eps / 2, 1.0]]), np.diag([1.0, c])
    if law == "euler":
        step = np.array([[1.0, eps], [-eps, 1.0 - eps * C - eps**2]])
        parts = [(np.eye(2), 2 * C * eps + eps**2 * s2)]
    elif law == "aboba":
        step = drift @ half_kick @ damp @ half_kick @ drift
        # One gradient is both kicks, so its noise enters once before and once after the friction.
        parts = [(drift, 1 - c**2 + (1 + c) ** 2 / 4 * eps**2 * s2)]
    else:
        after = drift @ damp @ drift
        step, parts = after @ kick, [(after, eps**2 * s2), (drift, 1 - c**2)]
    added = sum(A @ np.diag([0.0, v]) @ A.T for A, v in parts)
    return solve_discrete_lyapunov(step, added)


@pytest.mark.parametrize("law", ["aboba", "baoab", "euler"])
@pytest.mark.parametrize("friction", [None, 1.0, 4.0])
def test_variance_and_temperature_of_sghmc_are_those_of_its_linear_map(law, friction):
    found = choose_sghmc(NOISE, 0.1, friction=friction, law=law)
    cold, hot = (covariance(law, found.step_size, found.friction, s2) for s2 in (0.0, 12.0))
    assert found.variance_ratio == pytest.approx(hot[0, 0], rel=1e-6)
    assert found.kinetic_temperature == pytest.approx((cold[1, 1], hot[1, 1]), rel=1e-6)


@pytest.mark.parametrize("stiffness", [1.0, 400.0])
def test_steps_are_short_where_the_posterior_is_stiff(stiffness):
    """At curvature h, SGLD takes a step of h eps and SGHMC one of h eps^2 in units in which both
    are 1; 2 and 4 are unstable, and 1/2 and 1/4 are the largest that are chosen."""
    quiet, scale = np.zeros(3), np.array([1.0, 3.0, 0.2])
    for G in (1.0, scale):
        step = choose_sgld(quiet, 1.9, G, stiffness=stiffness).step_size * np.max(G)
        assert step * stiffness == pytest.approx(0.5)
    for choose in (choose_sghmc, choose_sgnht):
        step = choose(quiet, 1.9, stiffness=stiffness).step_size
        assert step**2 * stiffness == pytest.approx(0.25)
