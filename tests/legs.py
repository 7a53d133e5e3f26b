"""Which tests `make test` runs, and in which order: read off a table of processor seconds.

``tests/seconds.tsv`` has a line for each test that took long when it was recorded, with what it
compiled (``make seconds``). A test of at most ``FAST`` seconds is in the fast leg, and so is a test
without a line. Workers take whole files, the dearest first, so that no long file is left for the
end.
"""

import collections
import os
from pathlib import Path
import time

import pytest

TABLE = Path(__file__).with_name("seconds.tsv")
FAST = 0.8  # processor seconds of a test in the fast leg, at most
# What a reader pastes first, and what nothing cheaper calls or shows.
ALWAYS = (
    "README.md",
    "numpyro_ext/targets/latent_cycle.py",
    "tests/_model/test_density.py::test_jacobian_is_that_of_autodiff",
    "tests/ep/test_examples.py::test_evidence_of_pairs[pair0]",
    "tests/targets/test_targets.py::test_pinwheel_is_its_formula",
    "tests/guides/test_auto_implicit.py::test_langevin_steps_have_the_variance_of_the_recursion",
    # Share one table, which the first of them computes.
    "tests/expfam/test_contract.py",
)
RECORDED = 0.5  # processor seconds from which a test has a line in the table


def read(table: Path = TABLE) -> dict[str, float]:
    """Processor seconds by node id."""
    lines = table.read_text().splitlines() if table.exists() else []
    return {node: float(seconds) for seconds, node in (x.split("\t", 1) for x in lines)}


def arrange(config, items: list, leg: str | None) -> None:
    """Leaves the tests of a leg, the files with the most processor seconds first."""
    seconds = read()
    if leg is not None:
        taken, others = [], []
        for item in items:
            is_fast = seconds.get(item.nodeid, 0.0) <= FAST or item.nodeid.startswith(ALWAYS)
            (taken if is_fast == (leg == "fast") else others).append(item)
        items[:] = taken
        config.hook.pytest_deselected(items=others)
    total = collections.Counter()
    for item in items:
        total[item.path] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: -total[item.path])


class Deadline:
    """Skips the tests that have not begun by then: what a slow machine leaves out is the end of the
    last leg, and is said, where a run that is cut off would say nothing."""

    def __init__(self, end: float):
        self.end = end

    def pytest_runtest_setup(self):
        if time.time() > self.end:
            pytest.skip("not begun before the time of TESTS_END")


def processor_seconds() -> float:
    """What this process has used, and the processes that it waited for."""
    return sum(os.times()[:4])


class Recorder:
    """Writes the table, from the processor seconds of the tests of all workers.

    A shared fixture and a cached fit count for the test that happens to make them.
    """

    def __init__(self):
        self.last, self.seconds = processor_seconds(), collections.defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = processor_seconds()
        report.processor_seconds, self.last = now - self.last, now
        return report

    def pytest_collection_finish(self, session):
        self.last = processor_seconds()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.processor_seconds

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            return
        kept = {**read(), **self.seconds}
        lines = [f"{x:.1f}\t{node}" for node, x in sorted(kept.items()) if x >= RECORDED]
        TABLE.write_text("\n".join(lines) + "\n")
