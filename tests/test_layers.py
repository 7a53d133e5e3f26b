"""The design's layering, held by the syntax of the files themselves.

Each test looks at every file, collects what it finds and reports it together.
"""

import ast
from collections.abc import Iterator
import functools
import importlib
import inspect
from pathlib import Path
import re
import subprocess
import sys

import numpyro
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "numpyro_ext"
FILES = sorted(PACKAGE.rglob("*.py"))
MARKDOWN = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)

MATHEMATICS = {"_typing", "_checks", "_networks"}
GROUND = MATHEMATICS | {"_numpyro", "_model"}
MAY_IMPORT = {
    "_typing": set(),
    "_checks": {"_typing"},
    "_networks": set(),
    "_numpyro": MATHEMATICS,
    "_model": MATHEMATICS | {"_numpyro", "data"},
    "data": {"_typing", "_checks"},
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
    "saving": GROUND,
    "diagnostics": GROUND | {"scores"},
}
OUTSIDE = {"targets", "tests", "examples", "benchmarks"}
# What NumPyro's ``Transform`` asks a subclass to define; mathematics do not know ``_numpyro``.
HOOKS = {"_inverse"}
# NumPyro's own functions that run a model and add up what its sites say.
READERS = {
    "compute_log_probs",
    "initialize_model",
    "log_density",
    "log_likelihood",
    "potential_energy",
}


def report(found: list[str]) -> None:
    assert not found, "\n".join(["", *found])


def place(path: Path, node: ast.AST | None = None) -> str:
    line = "" if node is None else f":{node.lineno}"
    return f"{path.relative_to(ROOT)}{line}"


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[tuple[ast.AST, str, list[str]]]:
    """``(statement, module, names)``, those in functions and under ``TYPE_CHECKING`` too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, node.module or "", [alias.name for alias in node.names]


def test_imports_point_downwards():
    found = []
    for path in FILES:
        part = part_of(path)
        if part in {"__init__", "targets"}:
            continue
        allowed = MAY_IMPORT[part] | {part}
        for node, module, names in imports_of(path):
            if module == "numpyro_ext":
                targets = set(names)
            elif module.startswith("numpyro_ext."):
                targets = {module.split(".")[1]}
            else:
                targets = {module.split(".")[0]} & OUTSIDE
            found += [f"{place(path, node)} imports {name}" for name in targets - allowed]
    report(found)


def test_imports_are_absolute():
    nodes = ((path, node) for path in FILES for node in ast.walk(tree_of(path)))
    report([place(*n) for n in nodes if isinstance(n[1], ast.ImportFrom) and n[1].level])


def test_no_file_imports_itself_in_a_circle():
    """Files, not packages; imports in functions and under ``TYPE_CHECKING`` count."""
    modules = {module_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for _, target, names in imports_of(path):
            below = {f"{target}.{name}" for name in names} & set(modules)
            if target in modules and (not names or len(below) < len(names)):
                below.add(target)
            graph[module] |= below

    found, done = [], set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    report(found)


def test_only_a_program_runs_a_model():
    """One file has ``handlers.trace``, one unconstrained values and NumPyro's reading functions."""
    programs = {PACKAGE / "_model" / name for name in ("read.py", "potential.py")}
    # Where NumPyro's kernels and guides start.
    allowed = {PACKAGE / "_model" / "start.py": {"initialize_model"}}
    found = []
    for path in set(FILES) - programs:
        readers = READERS - allowed.get(path, set())
        for node, module, names in imports_of(path):
            taken = set(names) & {"at_unconstrained"}
            if module.split(".")[0] == "numpyro":
                taken |= set(names) & (readers | ({"trace"} if "handlers" in module else set()))
            found += [f"{place(path, node)} imports {name}" for name in sorted(taken)]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                numpyros = text.startswith(("numpyro.", "infer.", "util."))
                if (
                    node.attr == "get_trace"
                    or text.endswith("handlers.trace")
                    or (node.attr in readers and numpyros)
                ):
                    found.append(f"{place(path, node)} uses {text}")
            elif isinstance(node, ast.Constant) and node.value == "get_trace":
                found.append(f"{place(path, node)} uses {node.value!r}")
    report(sorted(found))


def test_only_the_reader_looks_under_a_distribution():
    """No ``base_dist`` outside ``_model``."""
    found = []
    for path in FILES:
        for node in ast.walk(tree_of(path)) if part_of(path) != "_model" else ():
            name = getattr(node, "attr", getattr(node, "value", None))
            if isinstance(node, ast.Attribute | ast.Constant) and name == "base_dist":
                found.append(f"{place(path, node)} uses {ast.unparse(node)}")
    report(found)


def test_only_the_reader_takes_log_probabilities_of_sites():
    """No ``site["fn"].log_prob(...)`` outside ``_model``, under another name neither."""
    found = []
    for path in FILES:
        if part_of(path) == "_model":
            continue
        aliases = {
            ast.unparse(target)
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Assign) and "['fn']" in ast.unparse(node.value)
            for whole in node.targets
            for target in (whole.elts if isinstance(whole, ast.Tuple) else [whole])
        }
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr == "log_prob":
                fn = ast.unparse(node.value)
                if "['fn']" in fn or fn in aliases:
                    found.append(f"{place(path, node)} uses {ast.unparse(node)}")
    report(found)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a class or module defines: functions, classes, variables, ``self._x``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


@functools.cache
def names_of_class(cls: type) -> frozenset[str]:
    """Private names that the body of a class defines, those of its bases left out."""
    path = Path(inspect.getfile(cls))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return frozenset(own_names(node))
    return frozenset()


@functools.cache
def numpyro_private_names() -> frozenset[str]:
    files = sorted(Path(inspect.getfile(numpyro)).parent.rglob("*.py"))
    return frozenset().union(*(own_names(ast.parse(path.read_text())) for path in files)) - HOOKS


def ours_and_theirs(cls: type) -> tuple[set[str], set[str]]:
    """Private names that the class has from this package, and from NumPyro."""
    ours, theirs = set(), set()
    for base in cls.__mro__:
        top = base.__module__.split(".")[0]
        if top in ("numpyro", "numpyro_ext"):
            (theirs if top == "numpyro" else ours).update(names_of_class(base))
    return ours - theirs, theirs - HOOKS


def parts_of_fstrings(tree: ast.AST) -> set[int]:
    fstrings = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    return {id(value) for node in fstrings for value in node.values}


def private_uses(tree: ast.AST) -> Iterator[tuple[ast.AST, str, bool]]:
    """``(node, name, whether it is an attribute of self)``; strings and methods count."""
    pieces = parts_of_fstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield node, node.attr, of_self
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if is_private(node.value) and id(node) not in pieces:
                yield node, node.value, False


@pytest.mark.slow
def test_private_numpyro_names_only_in_one_file():
    """A private name is NumPyro's if NumPyro defines it anywhere and the file's classes do not.

    What a class of the package inherits from NumPyro is NumPyro's, also where it overrides it.
    """
    found = []
    for path in FILES:
        if part_of(path) == "_numpyro":
            continue
        for node, module, names in imports_of(path):
            if module.split(".")[0] == "numpyro":
                private = [name for name in [*module.split("."), *names] if is_private(name)]
                found += [f"{place(path, node)} imports {name}" for name in private]
        module = importlib.import_module(module_of(path))
        tree = tree_of(path)
        ours: set[str] = set()
        inherited: set[int] = set()
        for body in ast.walk(tree):
            cls = getattr(module, body.name, None) if isinstance(body, ast.ClassDef) else None
            if cls is None:
                continue
            mine, theirs = ours_and_theirs(cls)
            ours |= mine
            inherited |= {id(n) for n, x, self in private_uses(body) if self and x in theirs}
            for node in body.body:
                if isinstance(node, ast.FunctionDef) and node.name in theirs:
                    found.append(f"{place(path, node)} overrides {node.name}")
        taken = numpyro_private_names() - ours
        for node, name, _ in private_uses(tree):
            if name in taken or id(node) in inherited:
                found.append(f"{place(path, node)} uses {name}")
    report(found)


def test_heavy_libraries_are_imported_inside_functions():
    heavy = {"arviz", "arviz_base", "arviz_stats", "matplotlib", "sklearn"}
    found = []
    for path in FILES:
        top = set(map(id, tree_of(path).body))
        for node, module, _ in imports_of(path):
            if module.split(".")[0] in heavy and id(node) in top:
                found.append(f"{place(path, node)} imports {module} at import time")
    report(found)


def test_prose_of_markdown_fits_100_columns():
    """Rows of tables, and lines of a single word such as an address, may be longer."""
    found = []
    for path in MARKDOWN:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > 100 and not line.startswith("|") and re.search(r"\s", line.strip()):
                found.append(f"{place(path)}:{number} has {len(line)} columns")
    report(found)


# Each takes longer to import than this package, or nearly.
HEAVY = {"IPython", "arviz", "arviz_base", "arviz_stats", "equinox", "flax", "matplotlib", "pandas"}
HEAVY |= {"scipy.optimize", "scipy.stats", "sklearn", "statsmodels", "xarray"}


@pytest.mark.slow
def test_nothing_happens_at_import():
    """No array is alive and no configuration, warning filter or heavy module has come with it."""
    script = (
        "import sys, warnings, jax, numpyro, optax\n"
        "before = (dict(jax.config.values), list(warnings.filters), len(jax.live_arrays()))\n"
        "import numpyro_ext\n"
        "after = (dict(jax.config.values), list(warnings.filters), len(jax.live_arrays()))\n"
        "assert before == after, (before, after)\n"
        f"heavy = {HEAVY} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
