"""Test set-up: two CPU devices, what makes compiling cheap, the tolerances of both precisions, the
suite at other random keys (``--shift-keys``), and no more programs than a process can hold.
"""

import collections
import gc
import os
from pathlib import Path
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is the compiler's.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Two workers on two cores leave no core to a second thread of a small matrix, which then waits for
# it a hundred times as long as it computes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
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
import numpy as np
import pytest

from tests.keys import without_keys

# Tests that are slow by measurement, beside those with the mark: `make costly` writes it.
COSTLY = Path(__file__).with_name("costly.txt")
TESTS = str(Path(__file__).resolve().parent) + os.sep
MAPPINGS = Path("/proc/self/maps")
# Of Linux's 65,530. Each compiled program takes some, and without another the compiler dies.
MOST_MAPPINGS = 25_000


def pytest_addoption(parser):
    help = "add 1000 times this to every integer that a test makes a random key or generator of"
    parser.addoption("--shift-keys", type=int, default=0, metavar="N", help=help)
    help = "write the names of tests that take longer to tests/costly.txt (make costly)"
    parser.addoption("--costly", type=float, metavar="SECONDS", help=help)


def pytest_configure(config):
    config.pluginmanager.register(FewPrograms())
    # The reports of all workers come together in the process that started them.
    if (seconds := config.getoption("--costly")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costly(seconds))
    if shift := 1000 * config.getoption("--shift-keys"):
        for module, names in ((jax.random, ("key", "PRNGKey")), (np.random, ("default_rng",))):
            for name in names:
                setattr(module, name, shifted(getattr(module, name), shift))


class Costly:
    """Writes down which tests take more than these seconds, all their phases together."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.took = collections.defaultdict(float)

    def pytest_runtest_logreport(self, report):
        self.took[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        names = sorted(name for name, took in self.took.items() if took > self.seconds)
        COSTLY.write_text("\n".join(names) + "\n")


class FewPrograms:
    """Forgets what is compiled between two tests, once it is much."""

    def __init__(self):
        self.last = time.monotonic()

    def pytest_runtest_teardown(self):
        # Counting takes some hundredths of a second.
        if not MAPPINGS.exists() or time.monotonic() < self.last + 10:
            return
        self.last = time.monotonic()
        with MAPPINGS.open("rb") as lines:
            mappings = sum(1 for _ in lines)
        if mappings > MOST_MAPPINGS:
            jax.clear_caches()
            gc.collect()


def shifted(make_key, shift):
    """``make_key`` with another integer where a test calls it, itself or by NumPyro's ``seed``.

    The keys of the package, such as those of a model that is only looked at, are left alone.
    """

    def make(*args, **kwargs):
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename.endswith(os.path.join("numpyro", "handlers.py")):
            frame = frame.f_back
        from_a_test = frame and frame.f_code.co_filename.startswith(TESTS)
        if from_a_test and args and isinstance(args[0], int):
            args = (args[0] + shift, *args[1:])
        return make_key(*args, **kwargs)

    return make


def pytest_itemcollected(item):
    if "needs_x64" in getattr(item, "fixturenames", ()):
        item.add_marker("needs_x64")


@pytest.hookimpl(tryfirst=True)  # so that -m sees the marks
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--costly"):
        costly = frozenset(COSTLY.read_text().splitlines())
        for item in items:
            if item.nodeid in costly:
                item.add_marker("slow")
    if config.getoption("--shift-keys"):
        left_out = pytest.mark.skip(reason="golden values belong to their keys")
        for item in items:
            if item.get_closest_marker("golden"):
                item.add_marker(left_out)
        functions = [item for item in items if isinstance(item, pytest.Function)]
        same = {item for item in functions if item.originalname in without_keys(item.path)}
        config.hook.pytest_deselected(items=list(same))
        items[:] = [item for item in items if item not in same]


@pytest.fixture
def tol():
    """``tol(f32, f64)``: the tolerance of the precision that is running."""

    def choose(f32: float, f64: float) -> float:
        return f64 if jax.config.jax_enable_x64 else f32

    return choose


@pytest.fixture
def needs_x64():
    """For reference values that float32 cannot resolve."""
    if not jax.config.jax_enable_x64:
        pytest.skip("reference values in double precision: checked in double precision")
