"""Test set-up: two CPU devices, what makes compiling cheap, and the tolerances of the two legs."""

import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is the compiler's.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The workers share what they compile, and the next run finds it: `make clean` throws it away.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".jax_cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Tracing makes many small objects; looking for circles among them costs a tenth of a run.
gc.set_threshold(100_000, 50, 100)
# For `chain_method="parallel"`.
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
