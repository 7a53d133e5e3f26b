"""Test set-up: two CPU devices (for ``chain_method="parallel"``), and the x64 leg."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is the compiler's.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
).strip()
os.environ.setdefault("MPLBACKEND", "Agg")

import jax
import pytest


@pytest.fixture
def tol():
    """``tol(f32, f64)``: the tolerance that belongs to the leg that is running."""

    def choose(f32: float, f64: float) -> float:
        return f64 if jax.config.jax_enable_x64 else f32

    return choose


@pytest.fixture
def needs_x64():
    """For reference values that float32 cannot resolve."""
    if not jax.config.jax_enable_x64:
        pytest.skip("reference values in double precision: checked in the x64 leg")
