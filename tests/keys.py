"""Which tests make no random key or generator, so that they are the same at any of them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# What makes one: of JAX, of NumPy, and NumPyro's handler.
MAKES_ONE = {"key", "PRNGKey", "default_rng", "seed"}


@cache
def without_keys(path: Path) -> frozenset[str]:
    """The test functions of a file that reach no key by name.

    It follows functions, fixtures, tables and what is cached, since a test may read what another
    has drawn. Whatever comes from another file of the tests counts as a key.
    """
    reads: dict[str, set[str]] = {}
    for statement in ast.parse(path.read_text()).body:
        for name in _defined(statement):
            reads.setdefault(name, set()).update(_read(statement))
    reached = set(MAKES_ONE)
    while more := {name for name, read in reads.items() if read & reached} - reached:
        reached |= more
    return frozenset(name for name in reads if name.startswith("test_")) - reached


def _defined(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a file binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _read(statement: ast.stmt) -> Iterator[str]:
    """The names in a statement; a string may name a fixture."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.Constant(value=str(name)):
                yield name
            case ast.ImportFrom(module=str(module)) if module.startswith("tests"):
                yield "key"
            case ast.ImportFrom(module="jax.random") | ast.ImportFrom(module="numpy.random"):
                yield from ("key" for alias in node.names if alias.name in MAKES_ONE)
