"""The table that ``diagnose`` returns, and its lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
import math
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple
import warnings

import numpy as np

from numpyro_ext._checks import InferenceWarning

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Diagnosis", "Row", "equally_spaced", "in_columns", "shown", "warn_of"]

_WIDTH = 100
_MARKS = {True: "ok", False: "!!", None: ""}


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
    """The limit that the value is compared with; empty if there is none."""
    ok: bool | None
    """None for a number that is shown for information or, where there is a limit, not judged."""
    verdict: str
    """One sentence: the meaning of the value, and what to do."""
    of_draws: bool = False
    """True if the line says whether the draws are those of the posterior."""

    @property
    def not_judged(self) -> bool:
        """True if there is a limit and no verdict."""
        return self.ok is None and bool(self.limit)

    @property
    def shown(self) -> str:
        """The value with its error."""
        if self.error is None or not math.isfinite(self.error):
            return shown(self.value)
        digits = 4
        if (
            self.error and self.value and math.isfinite(self.value)
        ):  # down to the place of the error
            digits = 1 + math.floor(math.log10(abs(self.value)))
            digits = max(4, digits - math.floor(math.log10(abs(self.error))))
        return f"{shown(self.value, digits)} +- {shown(self.error, 2)}"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of :func:`diagnose`; it prints as a table."""

    title: str
    """The kernel, or the guide and its loss, and the number of draws."""
    rows: tuple[Row, ...]
    """The lines of the table: ``quantity, value, error, limit, ok, verdict, of_draws``."""
    seen: Any = field(default=None, compare=False)
    """What :func:`plot_diagnosis` draws: arrays that the lines were made of. Not compared."""

    @property
    def ok(self) -> bool:
        """True if no line says that something is wrong, and the draws have been judged.

        A line that should judge the draws and could not counts as wrong, unless another has.
        """
        if any(row.ok is False for row in self.rows):
            return False
        draws = [row for row in self.rows if row.of_draws]
        should = any(row.not_judged for row in draws)
        return any(row.ok for row in (draws if should else self.rows))

    def to_frame(self) -> "pd.DataFrame":
        """The table as a pandas frame, one line per quantity."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(Row._fields)).set_index("quantity")

    def __str__(self) -> str:
        wrong = sum(row.ok is False for row in self.rows)
        left = sum(row.not_judged for row in self.rows)
        of_draws = any(row.of_draws for row in self.rows)
        are = "is" if wrong == 1 else "are"
        found = "no problems found"
        if wrong:
            found = f"{wrong} of {len(self.rows)} {are} wrong"
        elif not self.ok:
            found = "the draws could not be judged" if of_draws else "nothing could be judged"
        found += f", {left} not judged" if left and (of_draws or self.ok or wrong) else ""
        cells = [("quantity", "value", "limit", "")]
        for row in self.rows:
            mark = "?" if row.not_judged else _MARKS[row.ok]
            cells.append((row.quantity, row.shown, row.limit, mark))
        texts = ["verdict", *(row.verdict for row in self.rows)]
        lines = [f"{self.title}: {found}"]
        for left, text in zip(in_columns(cells), texts, strict=True):
            indent = len(left) + 4
            wrapped = textwrap.wrap(text, max(20, _WIDTH - indent))
            lines += [f"  {left}  {wrapped[0]}", *(" " * indent + line for line in wrapped[1:])]
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return str(self)


def in_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, with its cells as wide as the widest of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)) for row in rows]


def warn_of(rows: list[Row], stacklevel: int) -> None:
    """An :class:`InferenceWarning` of one sentence for every line that is wrong."""
    for row in rows:
        if row.ok is False:
            warnings.warn(
                f"the {row.quantity} is {row.shown} (limit {row.limit}): {row.verdict}",
                InferenceWarning,
                stacklevel=stacklevel + 1,
            )


def equally_spaced(size: int, most: int) -> np.ndarray:
    """At most ``most`` of the numbers ``0 .. size - 1``, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(most, size)).astype(int))
