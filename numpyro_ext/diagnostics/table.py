"""The table that ``diagnose`` returns, and its lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
import math
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 8
"""The largest number of lines in a table."""
_WIDTH = 100
_MARKS = {True: "ok", False: "!!", None: "?"}


def shown(x: float, digits: int = 4) -> str:
    """A number as the table prints it."""
    whole = float(x).is_integer() and abs(x) < 1e9
    return f"{x:,.0f}" if whole else f"{x:.{digits}g}"


class Row(NamedTuple):
    """One line of a :class:`Diagnosis`."""

    quantity: str
    value: float
    error: float | None
    """Monte Carlo standard error of the value."""
    limit: str
    """The limit that the value is compared with."""
    ok: bool | None
    """True if the value is right, False if it is wrong, None if it could not be judged."""
    verdict: str
    """One sentence: the meaning of the value, and what to do."""
    of_draws: bool = False
    """True if the line compares the draws with the posterior."""

    @property
    def shown(self) -> str:
        """The value with its error."""
        if self.error is None or not math.isfinite(self.error):
            return shown(self.value)
        digits = 4
        if self.error and self.value and math.isfinite(self.value):
            # Down to the place of the error.
            digits = 1 + math.floor(math.log10(abs(self.value)))
            digits = max(4, digits - math.floor(math.log10(abs(self.error))))
        return f"{shown(self.value, digits)} +- {shown(self.error, 2)}"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of :func:`diagnose`; it prints as a table of at most eight lines."""

    title: str
    """The kernel, or the guide and its loss, and the number of draws."""
    rows: tuple[Row, ...]
    """The lines of the table: ``quantity, value, error, limit, ok, verdict, of_draws``."""
    plot_data: Any = field(default=None, compare=False)
    """Arrays that :func:`plot_diagnosis` draws. Not compared."""

    @property
    def ok(self) -> bool:
        """True if no line is wrong and one is right among the lines that compare the draws with the
        posterior, or among all lines where no line does, as for NUTS."""
        of_draws = [row for row in self.rows if row.of_draws]
        right = any(row.ok for row in of_draws or self.rows)
        return right and all(row.ok is not False for row in self.rows)

    def to_frame(self) -> "pd.DataFrame":
        """The table as a pandas frame, one line per quantity."""
        import pandas as pd

        frame = pd.DataFrame(list(self.rows), columns=list(Row._fields)).set_index("quantity")
        return frame.astype({"ok": object})

    def __str__(self) -> str:
        wrong = sum(row.ok is False for row in self.rows)
        summary = "no problems found"
        if wrong:
            summary = f"{wrong} of {len(self.rows)} {'is' if wrong == 1 else 'are'} wrong"
        elif not self.ok:
            summary = "nothing could compare the draws with the posterior"
        cells = [("quantity", "value", "limit", "")]
        cells += [(row.quantity, row.shown, row.limit, _MARKS[row.ok]) for row in self.rows]
        texts = ["verdict", *(row.verdict for row in self.rows)]
        lines = [f"{self.title}: {summary}"]
        for left, text in zip(in_columns(cells), texts, strict=True):
            indent = len(left) + 4
            wrapped = textwrap.wrap(text, max(20, _WIDTH - indent))
            lines += [f"  {left}  {wrapped[0]}", *(" " * indent + line for line in wrapped[1:])]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def merge_rows(
    rows: Sequence[Row], order: Sequence[bool | None] = (False, True, None)
) -> list[Row]:
    """One line for each quantity: wrong if a check finds it wrong, otherwise right if one does."""
    merged: dict[str, list[Row]] = {}
    for row in rows:
        merged.setdefault(row.quantity, []).append(row)
    result = []
    for same in merged.values():
        ok = next(ok for ok in order if any(row.ok is ok for row in same))
        first = next(row for row in same if row.ok is ok)
        result.append(first._replace(of_draws=any(row.of_draws for row in same)))
    return result


def shorten(rows: list[Row], most: int = MOST_ROWS) -> tuple[Row, ...]:
    """At most so many lines: where there are more, the last ones that are right are left out."""
    kept = list(rows)
    for ok in (True, None, False):
        for row in reversed(rows):
            if len(kept) > most and row.ok is ok:
                kept.remove(row)
    return tuple(kept)


def in_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, with its cells as wide as the widest of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)) for row in rows]


def in_table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    """A title, and the rows below it in columns."""
    return "\n".join([title, *(f"  {line}".rstrip() for line in in_columns(rows))])


def equally_spaced(size: int, most: int) -> np.ndarray:
    """At most ``most`` of the numbers ``0 .. size - 1``, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(most, size)).astype(int))
