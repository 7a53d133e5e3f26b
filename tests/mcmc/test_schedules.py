"""Schedules: the numbers of their formulas, traced or not."""

import jax.numpy as jnp
import pytest

from numpyro_ext.mcmc import CyclicalSchedule, PolynomialSchedule


def test_polynomial_numbers(tol):
    assert jnp.isclose(PolynomialSchedule(2, 3, 0.5)(6), 2 / 3, rtol=tol(1e-6, 1e-12))
    # Welling and Teh: from 0.01 to 0.0001 in 10 000 sweeps of 100 rows.
    b = 1e6 / (100 ** (1 / 0.55) - 1)
    schedule = PolynomialSchedule(0.01 * b**0.55, b, 0.55)
    assert jnp.isclose(schedule(0), 0.01, rtol=tol(1e-5, 1e-12))
    assert jnp.isclose(schedule(10**6), 0.0001, rtol=tol(1e-5, 1e-12))


def test_exploration_is_the_first_part_of_a_cycle():
    schedule = CyclicalSchedule(1.0, 8, exploration=0.5)
    assert schedule.sampling(jnp.arange(9)).tolist() == [False] * 4 + [True] * 4 + [False]
    everything = CyclicalSchedule(1.0, 8, exploration=0)
    assert everything.sampling(jnp.arange(8)).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolynomialSchedule(1.0, -2.0), r"b is -2.0"),
        (lambda: CyclicalSchedule(float("inf"), 5), r"peak is inf"),
        (
            lambda: CyclicalSchedule(0.1, 0),
            r"cycle_length is 0; it must be an integer of at least 1",
        ),
        (lambda: CyclicalSchedule(0.1, 5, exploration=1.0), r"exploration is 1.0; it must be in"),
    ],
)
def test_wrong_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
