"""Which public classes and functions a run has called: ``--touch-all`` fails if one was left out.

A class counts if it, an instance or a subclass has run a method of the package.
"""

from importlib.util import find_spec
import inspect
from pathlib import Path
import sys

# Not imported before the hook is there that checks shapes.
PACKAGE = str(Path(find_spec("numpyro_ext").origin).parent)
TOOL = 4  # a number that sys.monitoring leaves free
ENTRY = sys.monitoring.events.PY_START


class Touched:
    """Counts in the workers; adds up and judges where the run began."""

    def __init__(self):
        self.names = set()

    def pytest_sessionstart(self, session):
        sys.monitoring.use_tool_id(TOOL, "touched")
        sys.monitoring.register_callback(TOOL, ENTRY, self.enter)
        sys.monitoring.set_events(TOOL, ENTRY)

    def enter(self, code, offset):
        is_body = not code.co_flags & inspect.CO_OPTIMIZED  # of a module or class
        if is_body or not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE
        first = code.co_varnames[0] if code.co_varnames else ""
        if first not in ("self", "cls"):
            self.names.add(f"{module_of(code)}.{code.co_qualname}")
            return sys.monitoring.DISABLE
        # It stays on: other classes enter here too.
        x = sys._getframe(1).f_locals[first]
        self.names.update(map(name_of, (x if isinstance(x, type) else type(x)).__mro__))

    def pytest_testnodedown(self, node, error):
        # A worker that died has left nothing.
        self.names.update(getattr(node, "workeroutput", {}).get("touched", ()))

    def pytest_sessionfinish(self, session):
        sys.monitoring.set_events(TOOL, 0)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["touched"] = sorted(self.names)
        elif left := self.left_out():
            print("\nno test has called", *left, sep="\n  ")
            session.exitstatus = 1

    def left_out(self) -> list[str]:
        from tests.test_catalogue import ALGORITHMS

        # A protocol has no code.
        there = {k: x for k, x in ALGORITHMS.items() if not getattr(x, "_is_protocol", False)}
        names = {where: name_of(inspect.unwrap(x)) for where, x in there.items()}
        return [".".join(where) for where, name in names.items() if name not in self.names]


def name_of(x) -> str:
    return f"{x.__module__}.{x.__qualname__}"


def module_of(code) -> str:
    path = Path(code.co_filename).relative_to(Path(PACKAGE).parent).with_suffix("")
    return ".".join(path.parts).removesuffix(".__init__")
