"""The design's layering, held by the import statements themselves."""

import ast
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "numpyro_ext"
FILES = sorted(PACKAGE.rglob("*.py"))

MATHEMATICS = {"_typing", "_checks"}
GROUND = MATHEMATICS | {"_numpyro", "_model"}
MAY_IMPORT = {
    "_typing": set(),
    "_checks": {"_typing"},
    "_numpyro": MATHEMATICS,
    "_model": MATHEMATICS | {"_numpyro"},
    "expfam": MATHEMATICS,
    "scores": MATHEMATICS,
    "transforms": MATHEMATICS,
    "objectives": GROUND | {"scores"},
    "guides": GROUND | {"transforms"},
    "svae": GROUND | {"expfam"},
    "mcmc": GROUND | {"scores"},
    "particles": GROUND | {"scores"},
    "optim": GROUND | {"expfam"},
    "ep": GROUND | {"expfam"},
    "diagnostics": GROUND | {"scores"},
}
OUTSIDE = {"targets", "tests", "examples", "benchmarks"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[str, list[str], bool]]:
    """``(module, names, at module level)`` of every import statement."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, [], id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found.append((node.module or "", [a.name for a in node.names], id(node) in top))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path):
    room = room_of(path)
    if room in {"__init__", "targets"}:
        return
    allowed = MAY_IMPORT[room] | {room}
    for module, names, _ in imports_of(path):
        if module == "numpyro_ext":
            targets = set(names)
        elif module.startswith("numpyro_ext."):
            targets = {module.split(".")[1]}
        else:
            targets = {module.split(".")[0]} & OUTSIDE
        assert targets <= allowed, f"{room} must not import {targets - allowed}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_numpyro_names_only_in_one_file(path):
    if room_of(path) == "_numpyro":
        return
    tree = ast.parse(path.read_text())
    for module, names, _ in imports_of(path):
        if module.split(".")[0] == "numpyro":
            private = [n for n in [*module.split("."), *names] if n.startswith("_")]
            assert not private, f"{private} belongs in _numpyro.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            assert not (isinstance(base, ast.Name) and base.id == "numpyro"), node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arviz_and_matplotlib_are_imported_inside_functions(path):
    for module, _, at_top in imports_of(path):
        if module.split(".")[0] in {"arviz", "arviz_base", "arviz_stats", "matplotlib", "sklearn"}:
            assert not at_top, f"{path.name} imports {module} at import time"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_over_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


def test_nothing_happens_at_import():
    """No array is alive and no configuration, warning filter or heavy module has come with it."""
    script = (
        "import sys, warnings, jax, numpyro, optax\n"
        "before = (dict(jax.config.values), list(warnings.filters), len(jax.live_arrays()))\n"
        "import numpyro_ext\n"
        "after = (dict(jax.config.values), list(warnings.filters), len(jax.live_arrays()))\n"
        "assert before == after, (before, after)\n"
        "heavy = {'arviz', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
