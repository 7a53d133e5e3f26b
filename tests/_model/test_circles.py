"""Circles that are cut where the posterior has least mass: a turned model is the same model."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.handlers import reparam
from numpyro.infer.reparam import CircularReparam
import pytest

from numpyro_ext._model.circles import (
    CutCircle,
    circles_of,
    middle_of,
    on_circles,
    recut,
    reflected,
    unrolled,
    with_circles,
    wrapped,
)
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import read_model
from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.optim import find_modes
from tests.turned import ANGLES, pair, turned


@pytest.mark.parametrize("middle", [0.0, 2.5, -np.pi])
def test_the_map_to_a_cut_circle_is_a_bijection_with_its_jacobian(middle):
    T, z = biject_to(CutCircle(jnp.array(middle))), jnp.array([-3.0, -0.2, 0.0, 1.7])
    angles = T(z)
    assert jnp.all(constraints.circular(angles))
    np.testing.assert_allclose(T.inv(angles), z, atol=1e-4)
    slopes = jax.vmap(jax.grad(T))(z)
    np.testing.assert_allclose(T.log_abs_det_jacobian(z, angles), jnp.log(slopes), atol=1e-5)
    assert float(jnp.abs(wrapped(T(jnp.zeros(())) - middle))) < 1e-6


def test_a_density_on_a_cut_circle_has_the_same_mass():
    """The integral of exp(-U) by the trapezoidal rule is the evidence, wherever the cut is."""
    info = read_model(turned, (1.0, ANGLES))
    z = jnp.linspace(-30.0, 30.0, 20_001)
    evidence = []
    for middle in (None, 0.5, 3.0):
        here = info if middle is None else with_circles(info, jnp.array([middle]))
        potential = Potential(turned, here, {}, (1.0, ANGLES), {})
        values = jax.jit(jax.vmap(lambda x, U=potential: U({"mu": x}, {})))(z)
        evidence.append(float(jnp.trapezoid(jnp.exp(-values), z)))
    np.testing.assert_allclose(evidence, evidence[0], rtol=1e-3)


@pytest.mark.nightly
def test_modes_turn_with_the_model():
    """Turned by pi, a posterior has the same evidence and scales, and its modes are turned."""
    here, there = (find_modes(pair, turn, ANGLES) for turn in (0.0, np.pi))
    assert there.log_evidence == pytest.approx(here.log_evidence, abs=0.02)
    moved = values_at_mode(there) - values_at_mode(here)
    np.testing.assert_allclose(wrapped(moved - np.array([np.pi, np.pi, 0.0])), 0, atol=0.01)
    for modes in (here, there):  # not near a cut: in the middle third of the interval
        assert np.all(np.abs(modes.heaviest.center[:2]) < 0.7)
    again = pickle.loads(pickle.dumps(there))
    np.testing.assert_array_equal(again.circles, there.circles)


def values_at_mode(modes):
    """The values at the heaviest mode, whose first two coordinates are angles."""
    z = modes.unravel(modes.heaviest.center)  # as NumPyro cuts
    angles = biject_to(constraints.circular)(z["angles"])
    return np.append(np.asarray(angles), float(z["zero"]))


@pytest.mark.slow
def test_an_angle_that_is_used_as_a_number_stays_cut_at_pi():
    """Its density ends at pi, which a cut elsewhere would put inside the interval."""

    def model():
        mu = numpyro.sample("mu", dist.VonMises(0.0, 0.1))
        numpyro.sample("y", dist.Normal(mu, 0.3), obs=3.0)

    assert float(find_modes(model).circles[0]) == 0.0


def test_the_cut_lies_between_modes_of_unequal_mass():
    """A twentieth of the mass at 0 and the rest at pi: the cut is near neither."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.vonmises(np.pi, 20.0, 1900), rng.vonmises(0.0, 20.0, 100)])
    cut = middle_of(x) + np.pi
    assert min(abs(wrapped(cut - a)) for a in (0.0, np.pi)) > 0.8


def test_unrolled_draws_have_the_mean_and_the_spread_of_the_circle():
    rng = np.random.default_rng(1)
    x = rng.vonmises(0.0, 30.0, 4000) + np.array([[3.1], [-2.0]])
    y = wrapped(x.T, middle_of(wrapped(x.T)))
    np.testing.assert_allclose(y.std(0), x.T.std(0), rtol=1e-4)
    np.testing.assert_allclose(wrapped(y.mean(0) - x.mean(1)), 0, atol=1e-4)


def test_coordinates_go_to_another_cut_and_back():
    x, before = jnp.array([0.4, 5.0]), jnp.array([2.0, jnp.inf])
    there = recut(x, before, None)
    assert float(there[1]) == 5.0
    np.testing.assert_allclose(recut(there, None, before), x, atol=1e-5)
    same = biject_to(CutCircle(2.0))(x[0]), biject_to(constraints.circular)(there[0])
    np.testing.assert_allclose(*same, atol=1e-5)


@pytest.mark.parametrize("turn", [1.0, 3.0])
def test_an_angle_on_a_line_has_one_mode_and_not_one_for_each_turn(turn):
    """With NumPyro's ``CircularReparam`` the posterior comes back every 2 pi."""
    on_line = reparam(turned, {"mu": CircularReparam()})
    modes, on_circle = (find_modes(model, turn, ANGLES) for model in (on_line, turned))
    assert len(modes.modes) == 1
    assert abs(modes.heaviest.center[0]) < np.pi
    assert modes.log_evidence == pytest.approx(on_circle.log_evidence, abs=0.1)


def test_an_angle_on_a_line_goes_on_beyond_pi():
    """The angle of ``CircularReparam`` is a deterministic site, and jumps at pi."""
    on_line = reparam(turned, {"mu": CircularReparam()})
    info, x = read_model(on_line, (3.0, ANGLES)), np.array([3.0, 3.3])
    values = {"mu_unwrapped": x, "mu": wrapped(x), "east": np.cos(x)}
    np.testing.assert_array_equal(unrolled(values, info)["mu"], x)


def test_a_model_without_circles_is_left_alone():
    def line():
        numpyro.sample("x", dist.Uniform(-np.pi, np.pi))

    info = read_model(line)
    assert with_circles(info, jnp.ones(1)) is info and circles_of(info) is None
    assert on_circles(line, info) is line


def test_reflected_directions_have_changed_places():
    """However they are cut, and a number beside them stays."""
    angles, middles = jnp.array([3.0, 0.0, -1.6]), jnp.array([2.0, jnp.inf, -1.0])
    T = biject_to(CutCircle(jnp.where(jnp.isfinite(middles), middles, 0.0)))
    x = jnp.where(jnp.isfinite(middles), T.inv(angles), 0.7)
    y = reflected(x, middles)
    np.testing.assert_allclose(wrapped(T(y)[::2] - angles[::-2]), 0, atol=1e-4)
    assert float(y[1]) == pytest.approx(0.7)
    assert reflected(x, middles.at[0].set(jnp.inf)) is None


def directions_of_a_mixture(y):
    """Two directions a right angle apart, which can change places, with the priors of each."""
    first = numpyro.sample("first", dist.VonMises(np.pi, 1.0))
    second = numpyro.sample("second", dist.VonMises(np.pi + 1.6, 1.0))
    kappa = numpyro.sample("kappa", dist.LogNormal(1.0, 0.5))
    each = dist.VonMises(jnp.stack([first, second]), kappa)
    numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), each), obs=y)


@pytest.mark.nightly
def test_both_modes_of_directions_that_can_change_places_are_found():
    """The second one has exp(2 cos(1.6) - 2) / (1 + ...) = 0.11 of the mass by the priors."""
    rng = np.random.default_rng(4)
    y = wrapped(np.where(rng.random(30) < 0.5, 0.0, 1.6) + rng.vonmises(0.0, 4.0, 30) + np.pi)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceWarning)  # that there are several
        modes = find_modes(directions_of_a_mixture, jnp.asarray(y, float))
    assert [mode.share for mode in modes.modes] == pytest.approx([0.89, 0.11], abs=0.06)
