"""Which tests are left out at other keys."""

from tests.keys import without_keys

FILE = """
from functools import cache
import pytest
from jax import random
from tests.models import model

KEYS = random.split(random.PRNGKey(1))
TABLE = {"drawn": lambda: drawn(), "plain": lambda: 3}

@cache
def drawn():
    return random.normal(random.key(0))

@pytest.fixture(scope="module")
def fitted():
    return drawn()

def by_another():
    from tests.models import other
    return other

def closed_form(x):
    return x**2

def test_key(): random.key(0)
def test_cached(): assert drawn() < 5
def test_of_a_fixture(fitted): pass
def test_at_import(): assert KEYS.shape
def test_of_a_table(): TABLE["plain"]()
def test_imported(): model()
def test_imported_in_a_function(): by_another()
@pytest.mark.usefixtures("fitted")
def test_named_in_a_string(): pass
@pytest.mark.parametrize("draw", [drawn])
def test_of_a_parameter(draw): draw()

def test_refusal(): assert closed_form(2) == 4
"""


def test_a_test_without_keys_is_one_that_reaches_none(tmp_path):
    file = tmp_path / "test_file.py"
    file.write_text(FILE)
    assert without_keys(file) == {"test_refusal"}
