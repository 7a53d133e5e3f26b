"""The step in units of the particles' spread: its formula, its other parameters, its errors."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_ext.particles import particle_step
from tests.particles.fixture import slow_whitening

X = random.normal(random.key(0), (9, 2)) * jnp.array([3.0, 0.1]) + 2.0
V = random.normal(random.key(1), (9, 2)) * jnp.array([9.0, 0.05])


def test_step_is_a_clipped_cosine_in_whitened_units(tol):
    optim = particle_step(10, step_size=0.4)
    state = optim.init(X)
    update = jax.jit(optim.update)
    speed = np.sqrt(np.mean(np.linalg.solve(slow_whitening(X), np.asarray(V).T) ** 2, axis=0))
    assert speed.min() < 1 < speed.max()
    for k in range(12):
        move, state = update(-V, state, X)
        epsilon = 0.2 * (1 + np.cos(np.pi * min(k, 10) / 10))
        expected = epsilon * V / np.maximum(1, speed)[:, None]
        np.testing.assert_allclose(move, expected, atol=tol(1e-5, 1e-12))
    assert state.count == 12 and jnp.all(move == 0)


def test_from_modes_no_coordinate_moves_by_more_than_a_part_of_its_spread_there(tol):
    optim = particle_step(10)
    params = {"auto_particles": X, "auto_modes": jnp.ones((9, 1))}
    state = optim.init(params)
    x = 3.0 * X  # whose spread is no longer that of the start
    grads = {"auto_particles": -V, "auto_modes": jnp.zeros((9, 1))}
    move = optim.update(grads, state, {**params, "auto_particles": x})[0]["auto_particles"]
    speed = np.sqrt(np.mean(np.linalg.solve(slow_whitening(x), np.asarray(V).T) ** 2, axis=0))
    farthest = np.max(np.abs(V) / np.std(X, axis=0), axis=1)
    assert np.any(farthest > np.maximum(1, speed))
    expected = 0.3 * V / np.maximum(1, np.maximum(speed, farthest))[:, None]
    np.testing.assert_allclose(move, expected, atol=tol(1e-5, 1e-12))


def test_other_parameters_have_their_own_optimiser():
    params = {"auto_particles": X, "bias": jnp.array(1.0)}
    grads = {"auto_particles": -V, "bias": jnp.array(2.0)}
    alone = particle_step(10)
    expected, _ = alone.update(-V, alone.init(X), X)
    for others, step in ((optax.sgd(0.5), -1.0), (None, -0.05)):
        optim = particle_step(10, others=others)
        moves, _ = optim.update(grads, optim.init(params), params)
        np.testing.assert_allclose(moves["bias"], step, rtol=1e-5)
        np.testing.assert_allclose(moves["auto_particles"], expected, rtol=1e-5)


def test_wrong_calls_are_one_clear_sentence():
    with pytest.raises(ValueError, match="num_steps is 0"):
        particle_step(0)
    with pytest.raises(ValueError, match=r"step_size is -0\.1"):
        particle_step(10, step_size=-0.1)
    optim = particle_step(10)
    with pytest.raises(ValueError, match=r"'auto_particles'.*parameters are loc; give the guide's"):
        optim.init({"loc": X})
