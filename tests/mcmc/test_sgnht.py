"""SGNHT finds the friction that noise of unknown size needs, as its laws say."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.mcmc import SGNHT
from tests.mcmc.laws import average, mean_and_error, normal, second_moment, start
from tests.mcmc.models import NoisyGradient


def law_of_xi(eps, h, C, T, s2):
    return 2 / eps * np.arctanh(eps * (C + eps * s2 / (2 * T)) / (2 - eps**2 * h / 2))


@pytest.mark.slow
def test_restores_the_temperature_under_unknown_noise():
    eps, h, C, T, s2 = 0.3, 2.0, 1.5, 0.5, 4.0
    # 1000 coordinates: the standard error of h Var z is 0.3 %, that of xi 0.2 %; xi's own
    # fluctuations bias it by O(1/n).
    model = normal(np.full(1000, h), loc=3.0)
    kernel = SGNHT(model, eps, friction=C, temperature=T, gradient=NoisyGradient(s2))
    out, _ = average(
        kernel,
        {
            "z": lambda s: s.z["z"],
            "zz": second_moment(3.0),
            "K": lambda s: s.kinetic_temperature,
            "xi": lambda s: s.thermostat,
        },
        1500,
        300,
    )
    variance, error = mean_and_error(h * out["zz"])
    assert error < 0.01 * T
    assert abs(variance - T) < 4 * error
    mean, error = mean_and_error(out["z"])
    assert abs(mean - 3.0) < 4 * error
    assert out["K"] == pytest.approx(T, rel=2e-3)
    assert out["xi"].shape == ()
    assert out["xi"] == pytest.approx(law_of_xi(eps, h, C, T, s2), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("thermostat", "thermal_mass"), [("scalar", None), ("per_site", 3.0), ("per_parameter", None)]
)
def test_thermostat_adds_up_the_excess_temperature(thermostat, thermal_mass, tol):
    """``xi_n - xi_m`` is the sum of ``eps n_g / mass (K - T)``, for any model."""

    def model():
        a = numpyro.sample("a", dist.Gamma(3.0, 2.0))
        numpyro.sample("b", dist.StudentT(5.0, 1.0, a).expand([14]).to_event(1))

    eps, T = 0.1, 0.7
    kernel = SGNHT(model, eps, thermostat=thermostat, thermal_mass=thermal_mass, temperature=T)
    state, step = start(kernel, seed=1)
    first, total = state.thermostat, 0.0
    groups = {
        "scalar": [slice(0, 15)],
        "per_site": [slice(0, 1), slice(1, 15)],
        "per_parameter": [slice(k, k + 1) for k in range(15)],
    }[thermostat]
    size = np.array([group.stop - group.start for group in groups])
    mass = np.maximum(size, 10) if thermal_mass is None else thermal_mass
    for _ in range(50):
        state = step(state)
        r2 = np.asarray(state.r, np.float64) ** 2
        assert state.kinetic_temperature == pytest.approx(r2.mean(), rel=tol(1e-5, 1e-12))
        total = total + eps * size / mass * (np.array([r2[group].mean() for group in groups]) - T)
    assert np.shape(state.thermostat) == (() if thermostat == "scalar" else (len(groups),))
    np.testing.assert_allclose(
        np.ravel(state.thermostat - first), total, rtol=0, atol=tol(2e-5, 1e-12)
    )


@pytest.mark.x64
def test_step_is_the_formula(tol):
    kernel = SGNHT(normal([2.0, 0.5], loc=1.0), 0.3, friction=1.5, temperature=0.0)
    state, step = start(kernel, z=[3.0, -2.0])
    assert np.all(state.r == 0)  # drawn from N(0, T)
    state = state._replace(r=jnp.array([0.4, -0.1]))
    new = step(state)
    c = np.exp(-1.5 * 0.3)
    r = c * np.array([0.4, -0.1]) - (1 + c) / 2 * 0.3 * np.array([4.0, -1.5])
    np.testing.assert_allclose(new.r, r, rtol=tol(1e-5, 1e-12))
    np.testing.assert_allclose(new.z["z"], np.array([3.0, -2.0]) + 0.3 * r, rtol=tol(1e-5, 1e-12))
    assert new.thermostat == pytest.approx(1.5 + 0.3 * 2 / 10 * np.mean(r**2), rel=tol(1e-5, 1e-12))


def test_runaway_is_reported():
    """Past ``eps C + eps^2 s2 / (2T) = 2 - eps^2 h/2`` no friction is enough."""
    kernel = SGNHT(normal(np.ones(50)), 0.5, gradient=NoisyGradient(40.0), steps_per_sample=500)
    state, step = start(kernel)
    state = step(state)
    assert state.diverging or state.thermostat > 50
    assert np.all(np.isfinite(state.z["z"]))
