"""The two legs share the tests out, and a test without a record is in the fast one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import legs


@pytest.fixture
def arranged(monkeypatch):
    """Names of the tests of a leg, of five tests with seconds of three."""
    nodes = ["a::new", "a::cheap", "b::dear", "b::new", "c::dearer"]
    seconds = {"a::cheap": legs.FAST, "b::dear": legs.FAST + 1, "c::dearer": legs.FAST + 2}
    monkeypatch.setattr(legs, "read", lambda: seconds)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)

    def take(leg):
        items = [SimpleNamespace(nodeid=x, path=Path(x.split("::")[0])) for x in nodes]
        legs.arrange(SimpleNamespace(hook=hook), items, leg)
        return [item.nodeid for item in items]

    return take


def test_a_test_without_a_record_is_in_the_fast_leg(arranged):
    assert set(arranged("fast")) == {"a::new", "a::cheap", "b::new"}


def test_what_is_not_fast_is_slow(arranged):
    assert set(arranged("slow")) == {"b::dear", "c::dearer"}


def test_the_dearest_file_comes_first_and_files_stay_whole(arranged):
    assert arranged(None) == ["c::dearer", "b::dear", "b::new", "a::new", "a::cheap"]


def test_what_has_not_begun_by_the_end_is_skipped_and_said():
    legs.Deadline(float("inf")).pytest_runtest_setup()
    with pytest.raises(pytest.skip.Exception, match="before the time of TESTS_END"):
        legs.Deadline(0.0).pytest_runtest_setup()
