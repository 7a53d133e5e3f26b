"""Links between the pages lead somewhere, and the pages name every example."""

import ast
import importlib
from pathlib import Path
import re

import pytest

from docs.tables import PAGES as TABLES
from docs.tables import QUANTITIES
import numpyro_ext

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *DOCS.glob("*.md"),
        *(DOCS / "api").glob("*.md"),
        *(DOCS / "choose").glob("*.md"),
        *(DOCS / "tutorials").glob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_links_and_pictures_are_files_of_the_repository():
    """By relative paths, which also lead there where the repository is read in a browser."""
    found = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", prose):
            if not target.startswith("http") and not (page.parent / target).exists():
                found.append(f"{page.relative_to(ROOT)}: {target}")
    assert not found, "\n".join(["", *found])


def test_pictures_of_the_pages_are_small_and_shown():
    text = "".join(page.read_text() for page in PAGES)
    pictures = {path.name: path.stat().st_size for path in (DOCS / "pictures").iterdir()}
    wrong = [x for x, size in pictures.items() if size > 60_000 or f"pictures/{x})" not in text]
    assert wrong == []


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_are_those_that_a_script_writes(page):
    """`python docs/tables.py` does."""
    text = (DOCS / page).read_text()
    assert TABLES[page](text) == text


def test_the_page_on_diagnose_has_every_line():
    lines = "".join(QUANTITIES.values()).strip().split("\n")
    names = {line.split(" | ")[0] for line in lines if line}
    used = set()
    package = ROOT / "numpyro_ext"
    for path in [*(package / "diagnostics").rglob("*.py"), package / "svae/judgement.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                parts = getattr(node, "values", [node])
                text = [str(x.value) if isinstance(x, ast.Constant) else "..." for x in parts]
                used.add("".join(text).replace("'...'", "..."))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "Row" or node.func.id.startswith("judged"):
                    first = node.args[0]
                    assert not isinstance(first, ast.Constant) or first.value in names
    assert names <= used, names - used


def test_every_example_begins_with_a_title():
    """In reStructuredText, for the gallery of the documentation."""
    heads = {path.name: path.read_text().lstrip('"\n').split("\n")[:2] for path in EXAMPLES}
    wrong = [name for name, (title, line) in heads.items() if line != "=" * len(title)]
    assert wrong == []


def test_the_page_of_the_examples_names_every_script():
    text = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in EXAMPLES if path.name not in text] == []


def test_the_readme_says_how_to_install_and_what_make_runs():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert [x for x in ("pip install .", "make quickstart", "make test") if x not in text] == []
    assert [x for x in re.findall(r"\bmake ([a-z]+)", text) if x not in targets] == []


def test_citation_and_changelog_have_the_version_of_the_package():
    version = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert version
    assert version[1] == numpyro_ext.__version__
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "numpyro_ext" / "py.typed").is_file()


def test_the_code_of_the_pages_can_be_copied():
    """Every block of Python parses, and what it imports from the package is there."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            if ">>>" in block:
                continue  # a doctest, which runs
            try:
                tree = ast.parse(block)
            except SyntaxError as error:
                found.append(f"{page.relative_to(ROOT)}: {error}")
                continue
            froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            for node in froms:
                if str(node.module).startswith("numpyro_ext"):
                    module = importlib.import_module(str(node.module))
                    names = [x.name for x in node.names if not hasattr(module, x.name)]
                    found += [f"{page.relative_to(ROOT)}: {node.module}.{x}" for x in names]
    assert not found, "\n".join(["", *found])
