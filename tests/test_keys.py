"""``--shift-keys`` moves the keys of tests and leaves those of the package alone."""

import jax
from jax import random
import numpy as np
from numpyro import handlers
import numpyro.distributions as dist
import pytest

import numpyro_ext
from tests.conftest import shifted

pytestmark = pytest.mark.golden  # with --shift-keys they would be shifted twice


@pytest.fixture
def moved(monkeypatch):
    for module, name in ((jax.random, "key"), (np.random, "default_rng")):
        monkeypatch.setattr(module, name, shifted(getattr(module, name), 1000))


def test_integers_of_tests_are_shifted(moved):
    plain = shifted(lambda seed, **kwargs: (seed, kwargs), 1000)
    assert plain(3, impl="rbg") == (1003, {"impl": "rbg"})
    assert plain("no integer") == ("no integer", {})
    assert np.array_equal(random.key_data(random.key(3)), random.key_data(shift_by_hand(3)))


def shift_by_hand(seed):
    return random.wrap_key_data(np.array([0, seed + 1000], np.uint32))


def test_the_seed_handler_of_a_test_is_shifted(moved):
    drawn = handlers.seed(lambda: dist.Normal().sample(random.key(0)), 0)
    assert np.array_equal(random.key_data(drawn.rng_key), random.key_data(shift_by_hand(0)))


def test_keys_that_the_package_makes_are_not(moved):
    """Code of the package is that whose file lies outside the tests."""
    namespace = {"random": random}
    code = compile("made = random.key(3)", numpyro_ext.__file__, "exec")
    exec(code, namespace)
    expected = random.wrap_key_data(np.array([0, 3], np.uint32))
    assert np.array_equal(random.key_data(namespace["made"]), random.key_data(expected))
