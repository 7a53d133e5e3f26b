"""Published figures, re-runs and our own stand apart: no number is called what it is not.

`benchmarks/figures.tsv` has every figure of others, with its source. What the tables of the pages
call *published* or *re-run* is compared with it.
"""

import csv
from pathlib import Path
import re

import pytest

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("published", "re-run")
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").glob("*.md"),
    *(ROOT / "benchmarks").rglob("*.md"),
]
with (ROOT / "benchmarks" / "figures.tsv").open(encoding="utf-8") as lines:
    FIGURES = list(csv.DictReader(lines, delimiter="\t"))


def cells(line: str) -> list[str]:
    return [cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def names(words: str, row: list[str]) -> bool:
    """Whether each word of a quantity is a cell of the row, or one with settings behind it."""
    pattern = "(BlackJAX )?{}(,.*| at .*| \\(.* warned\\))?"
    return all(
        any(re.fullmatch(pattern.format(re.escape(word)), cell) for cell in row)
        for word in words.split(" / ")
    )


def test_every_figure_of_others_has_a_kind_and_a_source():
    fields = ["kind", "paper", "table", "edition", "quantity", "value"]
    wrong = [row for row in FIGURES if list(row) != fields or not all(row.values())]
    wrong += [row for row in FIGURES if row["kind"] not in KINDS]
    # What no paper has is in no edition.
    wrong += [x for x in FIGURES if (x["kind"] == "re-run") != (x["edition"] == "not published")]
    assert wrong == []
    keys = [(row["kind"], row["quantity"]) for row in FIGURES]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_that_kind_has_figures_of_that_kind_alone(kind):
    found, seen = [], 0
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.M):
            head, _, *body = map(cells, table.splitlines())
            columns = [j for j, title in enumerate(head) if title.split(" ")[0] == kind]
            for row in body if columns else []:
                for j in columns:
                    seen += bool(row[j])
                    within = [*row, head[j].removeprefix(kind).strip()]
                    known = [
                        x["value"]
                        for x in FIGURES
                        if x["kind"] == kind and names(x["quantity"], within)
                    ]
                    if row[j] and row[j] not in known:
                        found.append(f"{page.relative_to(ROOT)}: {row[:2]}: {row[j]}")
    assert seen > 10
    assert not found, "\n".join(["", *found])
