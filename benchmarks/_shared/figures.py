"""Figures of others, to be shown beside those found here: `benchmarks/figures.tsv`.

A *published* figure is what a table of a paper says, in the edition that is named. A *re-run* is
the algorithm of others, run for this package; its row says with which code and settings, and no
paper has the number. `quantity` names the cells of the row in which the figure stands.
"""

import csv
from pathlib import Path

TABLE = Path(__file__).parents[1] / "figures.tsv"


def figures(kind: str) -> dict[str, str]:
    """By quantity, the figures that are ``"published"`` or a ``"re-run"``."""
    with TABLE.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t"))
    found = {row["quantity"]: row["value"] for row in rows if row["kind"] == kind}
    if not found:
        raise ValueError(f"kind is {kind!r}; it must be 'published' or 're-run'")
    return found
