"""The tests that are slow by measurement are tests that there are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_costly_test_exists():
    unknown = []
    for name in (ROOT / "tests" / "costly.txt").read_text().splitlines():
        path, _, test = name.partition("::")
        # Of a documented name the last part; of a test its function, without class and case.
        function = test.split("[")[0].split("::")[-1].split(".")[-1]
        file = ROOT / path
        if not file.is_file() or (file.suffix == ".py" and function not in file.read_text()):
            unknown.append(name)
    assert not unknown, f"make costly measures again; tests/costly.txt has no such tests: {unknown}"
