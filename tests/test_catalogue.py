"""The catalogue and the code say the same: nothing public without its row, doctest and test file.

Each test looks at every public name, collects what it finds and reports it together.
"""

from collections import defaultdict
import doctest
import importlib
import inspect
from pathlib import Path
import re

import pytest

from docs.tables import catalogue

ROOT = Path(__file__).resolve().parents[1]
MODULES = [
    "data",
    "diagnostics",
    "ep",
    "expfam",
    "guides",
    "mcmc",
    "objectives",
    "optim",
    "particles",
    "saving",
    "scores",
    "svae",
    "targets",
    "transforms",
]
CATALOGUE = (ROOT / "docs" / "algorithms.md").read_text()
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text()


def public(module: str) -> list[str]:
    return importlib.import_module(f"numpyro_ext.{module}").__all__


PUBLIC = {
    (module, name): getattr(importlib.import_module(f"numpyro_ext.{module}"), name)
    for module in MODULES
    for name in public(module)
}


MADE_BY_OTHERS = {"Modes", "Potential", "Settings"}
"""Classes that nobody constructs; their examples show what returns them."""


def is_algorithm(module: str, name: str, value) -> bool:
    """States and results are described where their algorithm is; errors need no example."""
    entry = catalogue()[module].get(name)
    if entry is not None and entry.group.startswith(("States", "Results")):
        return False
    if inspect.isclass(value):
        return not issubclass(value, (tuple, Exception)) and not inspect.isabstract(value)
    return inspect.isfunction(value)


ALGORITHMS = {where: value for where, value in PUBLIC.items() if is_algorithm(*where, value)}


def report(found: list[str]) -> None:
    assert not found, "\n".join(["", *found])


def test_every_module_names_what_is_public():
    found = []
    for module in MODULES:
        loaded = importlib.import_module(f"numpyro_ext.{module}")
        found += [] if loaded.__doc__ else [f"{module} has no docstring"]
        found += [] if public(module) == sorted(public(module)) else [f"{module}: sort __all__"]
    report(found)


def test_everything_public_has_a_line_in_the_catalogue():
    report([f"{m}.{n}: add it to docs/catalogue.tsv" for m, n in PUBLIC if n not in catalogue()[m]])


def test_everything_public_has_a_docstring():
    report([".".join(where) for where, value in PUBLIC.items() if not inspect.getdoc(value)])


def test_no_public_name_means_two_things():
    meanings = defaultdict(dict)
    for (module, name), value in PUBLIC.items():
        meanings[name].setdefault(id(value), module)
    report([f"{name} in {sorted(m.values())}" for name, m in meanings.items() if len(m) > 1])


def test_every_algorithm_has_a_row_in_the_catalogue():
    """Of the modules that have a table there; the page of each of the others is its catalogue."""
    tables = set(re.findall(r"^## (\w+)$", CATALOGUE, re.M))
    rows = set(re.findall(r"^\|.*?`(\w+)`", CATALOGUE, re.M))
    assert {"objectives", "guides", "mcmc", "particles", "ep", "optim", "svae"} <= tables
    report([f"{m}.{name}" for m, name in ALGORITHMS if m in tables and name not in rows])


def test_every_row_of_the_catalogue_exists_in_the_code():
    rows = set(re.findall(r"^\| `(\w+)`", CATALOGUE, re.M))
    assert rows, "the catalogue is empty"
    report(sorted(rows - {name for _, name in PUBLIC}))


def test_every_class_says_when_to_use_it():
    """On the page of its module, by its line in the catalogue."""
    classes = [where for where, value in ALGORITHMS.items() if inspect.isclass(value)]
    report([f"{m}.{name}" for m, name in classes if not catalogue()[m][name].choice])


def test_every_public_name_is_in_the_table_of_its_page_of_the_api():
    """The page documents all of them by itself, but a reader looks for them in its tables."""
    found = []
    for module in MODULES:
        page = (ROOT / "docs" / "api" / f"{module}.md").read_text()
        rows = set(re.findall(r"^   (\w+)$|^\.\. autoclass:: (\w+)$", page, re.M))
        named = {name for row in rows for name in row}
        found += [f"{module}.{name}" for name in public(module) if name not in named]
    report(found)


def test_every_algorithm_has_an_example_that_uses_it():
    """No marker leaves an example out, so that `make test` calls all that is public."""
    found = []
    for where, value in ALGORITHMS.items():
        tests = doctest.DocTestFinder(recurse=False).find(value, where[1])
        code = "".join(example.source for test in tests for example in test.examples)
        is_named = re.search(rf"\b{where[1]}\b", code) or (code and where[1] in MADE_BY_OTHERS)
        found += [] if is_named else [".".join(where)]
    report(found)


def test_every_algorithm_is_named_in_a_test_of_its_module():
    words = {
        module: set(
            re.findall(
                r"\w+",
                " ".join(path.read_text() for path in (ROOT / "tests" / module).rglob("test_*.py")),
            )
        )
        for module in MODULES
    }
    report([".".join(where) for where in ALGORITHMS if where[1] not in words[where[0]]])


def test_each_row_of_the_evidence_names_the_examples_or_benchmarks_that_made_it():
    found = []
    for name, entry in ((n, entry) for names in catalogue().values() for n, entry in names.items()):
        ran = re.findall(r"`([\w/.]+)", entry.measured_by)
        found += [] if bool(ran) == bool(entry.found) else [f"{name}: found and measured_by"]
        compared = filter(None, entry.compared.split(" | "))
        found += [f"{name}: {x}" for x in compared if x.count("; ") != 3 or not ran]
        found += [f"{name}: there is no {x}" for x in ran if not (ROOT / x).is_file()]
        found += [f"{name}: {x}" for x in ran if x.split("/")[0] not in ("benchmarks", "examples")]
    report(found)


@pytest.mark.parametrize("page", [CATALOGUE, EVIDENCE], ids=["catalogue", "evidence"])
def test_the_tables_are_sorted(page):
    tables = re.findall(r"(?:^\|.*\n)+", page, re.M)
    names = [re.findall(r"^\| `(\w+)", table, re.M) for table in tables]
    assert [x for x in names if x != sorted(x, key=str.lower)] == []
