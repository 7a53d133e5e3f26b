"""Guides of angles: a turned posterior is fitted as well as one that no cut is near."""

from functools import cache
import pickle

from jax import random
import numpy as np
from numpyro.infer import SVI, Predictive, Trace_ELBO
import optax
import pytest

from numpyro_ext.guides import AutoRealNVPNormal, AutoSemiImplicit
from tests.turned import ANGLES, posterior, turned, wrapped

DRAWS = 2000
pytestmark = pytest.mark.slow


@cache
def started(turn):
    """A flow at its start, which is near the posterior, and its loss there."""
    guide = AutoRealNVPNormal(turned)
    svi = SVI(turned, guide, optax.sgd(0.0), Trace_ELBO(64))
    state = svi.init(random.key(0), turn, ANGLES)
    return guide, svi.get_params(state), float(svi.evaluate(state, turn, ANGLES))


def angles_of(guide, params, *args):
    draws = guide.sample_posterior(random.key(1), params, *args, sample_shape=(DRAWS,))
    np.testing.assert_allclose(draws["east"], np.cos(draws["mu"]), atol=1e-5)
    return np.asarray(draws["mu"])


def test_a_turned_model_has_the_same_loss_and_turned_draws():
    (guide, params, loss), (there, turned_params, turned_loss) = started(0.0), started(np.pi)
    assert turned_loss == pytest.approx(loss, abs=0.02)
    x, y = angles_of(guide, params), angles_of(there, turned_params)
    np.testing.assert_allclose(wrapped(y - x - np.pi), 0, atol=0.02)


def test_the_start_is_at_the_posterior():
    """The circular mean within a quarter of the posterior's standard deviation."""
    guide, params, _ = started(np.pi)
    m = np.exp(1j * angles_of(guide, params)).mean()
    loc, concentration = posterior(np.pi, ANGLES)
    assert abs(wrapped(np.angle(m) - loc)) < 0.25 * concentration**-0.5
    assert np.sqrt(-2 * np.log(abs(m))) == pytest.approx(concentration**-0.5, rel=0.15)


def test_parameters_are_whole_without_the_guide_that_was_fitted():
    """In another guide, set up on data elsewhere, and in one that was pickled, they mean the same
    draws; so they do in NumPyro's Predictive."""
    guide, params, _ = started(np.pi)
    other, _, _ = started(0.0)
    x = angles_of(guide, params)
    np.testing.assert_allclose(angles_of(other, params, np.pi, ANGLES), x, atol=1e-4)
    np.testing.assert_allclose(angles_of(pickle.loads(pickle.dumps(guide)), params), x, atol=1e-4)
    draw = Predictive(other, params=params, num_samples=DRAWS)
    m = np.exp(1j * np.asarray(draw(random.key(2), np.pi, ANGLES)["mu"])).mean()
    sd = np.sqrt(1 - abs(m) ** 2)  # the draws of both have errors
    assert abs(m - np.exp(1j * x).mean()) < 6 * sd / DRAWS**0.5


def test_a_guide_without_a_density_is_cut_too():
    guide = AutoSemiImplicit(turned)
    svi = SVI(turned, guide, optax.sgd(0.0), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), np.pi, ANGLES))
    x = angles_of(guide, params)
    loc, concentration = posterior(np.pi, ANGLES)
    assert abs(wrapped(np.angle(np.exp(1j * x).mean()) - loc)) < concentration**-0.5
