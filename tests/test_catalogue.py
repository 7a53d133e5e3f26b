"""The catalogue and the code say the same: nothing public without its row, doctest and test file."""

import doctest
import importlib
import inspect
from pathlib import Path
import re

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [
    "diagnostics",
    "guides",
    "mcmc",
    "objectives",
    "particles",
    "scores",
    "targets",
    "transforms",
]
CATALOGUE = (ROOT / "docs" / "algorithms.md").read_text()
CHOICES = (ROOT / "docs" / "how_to_choose.md").read_text()


def every_public_object():
    for room in ROOMS:
        module = importlib.import_module(f"numpyro_ext.{room}")
        for name in module.__all__:
            yield pytest.param(room, name, getattr(module, name), id=f"{room}.{name}")


PUBLIC = list(every_public_object())


def is_algorithm(value) -> bool:
    """States and results are described where their algorithm is; errors need no example."""
    if inspect.isclass(value):
        return not issubclass(value, (tuple, Exception)) and not inspect.isabstract(value)
    return inspect.isfunction(value)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_names_what_is_public(room):
    module = importlib.import_module(f"numpyro_ext.{room}")
    assert module.__doc__
    assert module.__all__ == sorted(module.__all__)


@pytest.mark.parametrize(("room", "name", "value"), PUBLIC)
def test_has_docstring(room, name, value):
    assert inspect.getdoc(value), f"{room}.{name} has no docstring"


@pytest.mark.parametrize(("room", "name", "value"), PUBLIC)
def test_has_row_in_catalogue(room, name, value):
    if is_algorithm(value):
        assert re.search(rf"^\|.*`{name}`", CATALOGUE, re.M), f"docs/algorithms.md lacks `{name}`"


@pytest.mark.parametrize(("room", "name", "value"), PUBLIC)
def test_has_line_in_how_to_choose(room, name, value):
    if inspect.isclass(value) and is_algorithm(value):
        assert f"`{name}`" in CHOICES, f"docs/how_to_choose.md lacks `{name}`"


@pytest.mark.parametrize(("room", "name", "value"), PUBLIC)
def test_has_doctest(room, name, value):
    if is_algorithm(value):
        found = doctest.DocTestFinder(recurse=False).find(value, name)
        assert found and found[0].examples, f"{room}.{name} has no example"


@pytest.mark.parametrize(("room", "name", "value"), PUBLIC)
def test_has_test_file(room, name, value):
    if is_algorithm(value):
        text = "".join(p.read_text() for p in sorted((ROOT / "tests" / room).glob("test_*.py")))
        assert re.search(rf"\b{name}\b", text), f"no test of {room} names {name}"


def test_catalogue_rows_exist_in_code():
    names = {
        name for room in ROOMS for name in importlib.import_module(f"numpyro_ext.{room}").__all__
    }
    rows = re.findall(r"^\| `(\w+)`", CATALOGUE, re.M)
    assert rows, "the catalogue is empty"
    assert set(rows) <= names, f"rows without code: {set(rows) - names}"
