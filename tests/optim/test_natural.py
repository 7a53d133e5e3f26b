"""Steps of natural gradients: the step, the guard of the domain, and use in SVI."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_ext.optim import natural_gradient

PARAMS = {"a": np.array([4.0, -30.0]), "b": np.array(0.5)}
GRADIENT = {"a": np.array([8.0, 1.0]), "b": np.array(-0.25)}


def step(optim, params=PARAMS, gradient=GRADIENT, state=None):
    state = optim.init(params) if state is None else state
    updates, state = jax.jit(optim.update)(gradient, state, params)
    return optax.apply_updates(params, updates), state


def test_a_step_is_rho_times_the_gradient():
    new, state = step(natural_gradient(0.25))
    np.testing.assert_allclose(new["a"], [2.0, -30.25])
    np.testing.assert_allclose(new["b"], 0.5625)
    assert tuple(state) == (1, 0, 0)
    with pytest.raises(ValueError, match=r"step_size is 1.5; it must be in \(0, 1\]"):
        natural_gradient(1.5)


def test_a_schedule_is_given_the_number_of_steps():
    optim = natural_gradient(lambda i: 1 / (i + 2))
    _, state = step(optim)
    new, state = step(optim, state=state)
    np.testing.assert_allclose(new["b"], 0.5 + 0.25 / 3, rtol=1e-6)
    assert state.count == 2


def test_a_step_is_halved_until_it_is_inside():
    """a[0] is 4 - 8 s > 3.2 for s < 0.1: from 0.8 that takes four halvings, to 0.05."""
    optim = natural_gradient(0.8, lambda p: {"a": p["a"] > jnp.array([3.2, -50]), "b": True})
    new, state = step(optim)
    np.testing.assert_allclose(new["a"], [3.6, -30.05], rtol=1e-6)
    assert tuple(state) == (1, 4, 0)


def test_a_step_that_stays_outside_is_left_out():
    new, state = step(natural_gradient(0.8, lambda p: p["a"][0] > 4.0))
    np.testing.assert_array_equal(new["a"], PARAMS["a"])
    assert tuple(state) == (1, 20, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("domain", [None, lambda p: p["b"] > 0])
def test_a_gradient_that_is_not_finite_moves_nothing(bad, domain):
    new, state = step(natural_gradient(0.8, domain), gradient={**GRADIENT, "b": np.array(bad)})
    for name in PARAMS:
        np.testing.assert_array_equal(new[name], PARAMS[name])
    assert tuple(state) == (1, 0, 1)
