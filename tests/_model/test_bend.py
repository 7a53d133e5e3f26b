"""The map that bends coordinates with the scales of a hierarchy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext._model.bend import Bend

RNG = np.random.default_rng(1)
EFFECTS, TURN = np.array([0, 2, 3, 4, 5]), RNG.normal(size=(2, 2))
OF_EFFECTS, OF_PARTS, SLOPES = np.zeros((2, 7)), np.zeros((4, 7, 2)), np.zeros((7, 2))
OF_EFFECTS[:, EFFECTS] = RNG.uniform(0, 1, (2, 5))
OF_PARTS[:, EFFECTS] = RNG.normal(size=(4, 5, 2))
SLOPES[[0, 2, 3, 4]] = 0.3
BEND = Bend(
    of=jnp.array([6, 1]),
    of_effects=jnp.asarray(OF_EFFECTS),
    of_parts=jnp.asarray(OF_PARTS),
    slopes=jnp.asarray(SLOPES),
    rows=jnp.array([3, 4, 4]),  # the numbers 2, 3 and 4 are one effect
    columns=jnp.array([2, 2, 3]),
    shears=jnp.array([[0.5, -0.2], [0.1, 0.4], [-0.7, 0.3]]),
    turned=jnp.array([5, 0]),
    turns=jnp.asarray(np.stack([TURN, np.linalg.inv(TURN)])),
)


def test_inverse_and_determinant_are_those_of_the_map():
    v = jnp.asarray(np.random.default_rng(0).normal(size=7), float)
    bent, log_det = BEND(v)
    np.testing.assert_allclose(BEND.inverse(bent), v, atol=1e-5)
    jacobian = np.asarray(jax.jacfwd(lambda v: BEND(v)[0])(v), float)
    assert float(log_det) == pytest.approx(np.linalg.slogdet(jacobian)[1], abs=1e-5)
    again = Bend.unpacked(*BEND.packed)
    np.testing.assert_array_equal(again(v)[0], bent)


def test_at_the_center_it_is_the_identity_to_first_order():
    jacobian = jax.jacfwd(lambda v: BEND(v)[0])(jnp.zeros(7))
    np.testing.assert_allclose(jacobian, np.eye(7), atol=1e-6)


def test_of_normal_rows_it_is_the_conditional_normal_at_any_distance():
    """Effects u_j ~ N(m, e^{2 t}) with a row y_j ~ N(u_j, r_j e^{2 l}) each: given m, t and l they
    are N(c(m, t, l), v(t, l)), wherever these are from where the bend was made."""
    r, y, g0 = np.array([0.1, 1.0, 30.0]), np.array([2.0, -1.0, 4.0]), np.array([1.0, 0.3, -0.1])

    def moments(m, t, l):
        of_prior, of_rows = np.exp(-2 * t), np.exp(-2 * l) / r
        return (of_prior * m + of_rows * y) / (of_prior + of_rows), 1 / (of_prior + of_rows)

    (center, variance), zero = moments(*g0), np.zeros(3)
    p = variance * np.exp(-2 * g0[1])
    pull = p * (center - g0[0])
    # Of the globals m, t and l, in this order: a is -2 in t, and the mean of the prior moves by m.
    a, of_rows = np.stack([zero, zero - 2, zero], 1), np.stack([zero, zero, zero - 2], 1)
    parts = np.array([a, of_rows, np.stack([p, zero, zero], 1), np.zeros((3, 3))])
    before = np.zeros((4, 3, 3))
    numbers = (
        np.concatenate([np.zeros((2, 3)), [p, pull]], axis=1),
        np.concatenate([before, parts], axis=1),
    )
    nowhere = jnp.zeros(0, int)
    bend = Bend(
        jnp.arange(3),
        *map(jnp.asarray, numbers),
        jnp.zeros((6, 3)),
        nowhere,
        nowhere,
        jnp.zeros((0, 3)),
        nowhere,
        jnp.zeros((2, 0, 0)),
    )
    e = np.array([1.0, -2.0, 0.5])
    for g in ([3.0, -4.0, 0.5], [-2.0, 2.0, -1.0]):
        d = np.array(g) - g0
        linear = (parts[2] + pull[:, None] * (of_rows - a)) @ d  # which a normal has itself
        bent, _ = bend(jnp.asarray(np.r_[d, linear + variance**0.5 * e]))
        mean, spread = moments(*g)
        np.testing.assert_allclose(center + bent[3:], mean + spread**0.5 * e, rtol=1e-4, atol=1e-4)
