"""Checks of arguments: NumPy's numbers pass, and a refusal says what is allowed."""

from dataclasses import dataclass, field
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext._checks import (
    OwnArgumentsFirst,
    check_choice,
    check_count,
    check_nonnegative,
    check_positive,
    summary,
)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_counts_may_be_numpy_integers(value):
    count = check_count("num_particles", value)
    assert count == 3
    assert type(count) is int


@pytest.mark.parametrize("value", [0, -1, 2.0, np.float32(2), True, "3", None, jnp.arange(2)])
def test_other_counts_are_refused(value):
    with pytest.raises(ValueError, match=r"num_particles is .* must be an integer of at least 1"):
        check_count("num_particles", value)


def test_a_count_may_have_another_minimum():
    assert check_count("refresh_every", 0, 0) == 0
    with pytest.raises(ValueError, match="at least 2"):
        check_count("num_steps", 1, 2)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), np.int32(4), jnp.float32(0.1)])
def test_positive_numbers_pass(value):
    check_positive("step_size", value)
    check_nonnegative("step_size", value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), np.float32(-2)])
def test_numbers_that_are_not_positive_are_refused(value):
    with pytest.raises(ValueError, match=r"step_size is .* must be a positive, finite number"):
        check_positive("step_size", value)


def test_zero_is_not_negative():
    check_nonnegative("temperature", 0)
    with pytest.raises(ValueError, match="non-negative"):
        check_nonnegative("temperature", -1e-9)


def test_traced_values_pass():
    @jax.jit
    def run(x):
        check_positive("step_size", x)
        check_nonnegative("temperature", x)
        return x

    assert run(-1.0) == -1.0


def test_choices_are_listed():
    check_choice("gradient", "stl", ("stl", "dreg"))
    with pytest.raises(ValueError, match="gradient is 'best'; it must be one of 'stl', 'dreg'"):
        check_choice("gradient", "best", ("stl", "dreg"))


def test_a_summary_names_the_arguments_and_no_numbers_of_an_array():
    class Made:
        def __init__(self, alpha, x, f=None, *, flag=True, other=3, **options):
            self.alpha, self.x, self.f, self.flag = alpha, x, f, flag

    assert summary(Made(0.5, jnp.ones(1000))) == "Made(alpha=0.5, x=<array of shape (1000,)>)"
    named = summary(Made(jnp.array(2), "a", abs, flag=False))
    assert named == "Made(alpha=2, x='a', f=abs, flag=False)"
    seen = []
    jax.eval_shape(lambda alpha: seen.append(summary(Made(alpha, 1))), 1.0)
    assert seen == ["Made(alpha=<traced>, x=1)"]


def test_a_signature_begins_with_the_arguments_of_the_class_itself():
    @dataclass(kw_only=True)
    class Kernel:
        __signature__ = OwnArgumentsFirst()
        model: Any = field(kw_only=False)
        shared: int = 1

    @dataclass(kw_only=True)
    class Own(Kernel):
        own: int = 2

    assert str(inspect.signature(Own)) == "(model: Any, *, own: int = 2, shared: int = 1)"
