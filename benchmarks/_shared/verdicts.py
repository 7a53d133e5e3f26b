"""Whether a result is right, what is said of it, and the two counts under a newcomers' table: rows
that are wrong and do not say so, and false alarms, which are right rows that `diagnose` finds
wrong."""

from collections.abc import Callable
import json
from pathlib import Path
import re
from typing import Any, NamedTuple

import numpy as np

from numpyro_ext.diagnostics import Diagnosis
from numpyro_ext.diagnostics.table import Row

Truth = dict[str, tuple[Any, Any]]
"""Mean and standard deviation of what is compared."""
HEADS = ("right", "false alarm", "says", "judged by")
LEAST_ESS = 300
NOT_OF_THE_DRAWS = (
    *("change of the loss", "k-hat", "number of particles", "local inference", "problems"),
    *("smallest ESS", "states in use", "residual", "factors skipped"),
)
"""Beginnings of the quantities that judge a run or its weights, and not whether its draws have the
mean and the spread of the posterior."""


def moments(draws: dict[str, Any]) -> Truth:
    """Of arrays ``(draw, ...)``."""
    return {site: (x.mean(0), x.std(0)) for site, x in draws.items()}


class Errors(NamedTuple):
    mean: float
    """The largest error of a mean in standard deviations."""
    ratios: np.ndarray
    """Standard deviations over the right ones."""

    @property
    def spread(self) -> str:
        return spread(self.ratios)

    def largest(self, of_mean: float, of_sd: float) -> float:
        """In units of what is called right."""
        return max(self.mean / of_mean, float(np.max(np.abs(self.ratios - 1))) / of_sd)

    def right(self, of_mean: float = 0.2, of_sd: float = 0.2) -> bool:
        return self.largest(of_mean, of_sd) <= 1

    def nearly(self, of_mean: float, of_sd: float, ess: float) -> bool:
        """Within three standard errors of the number that is known least."""
        worst = 3 / np.sqrt(ess)
        return bool(ess >= LEAST_ESS) and self.right(of_mean + worst, of_sd + worst / np.sqrt(2))


def errors(draws: dict[str, Any], truth: Truth) -> Errors:
    """Those of arrays ``(draw, ...)``, over all numbers of the compared sites."""
    means, ratios = [], []
    for site, (mean, sd) in truth.items():
        draw = np.reshape(draws[site], (len(draws[site]), -1))
        means.append(np.abs(draw.mean(0) - np.ravel(mean)) / np.ravel(sd))
        ratios.append(draw.std(0) / np.ravel(sd))
    return Errors(float(np.concatenate(means).max()), np.concatenate(ratios))


def spread(ratio: np.ndarray) -> str:
    return f"{ratio.mean():.2f} [{ratio.min():.2f}, {ratio.max():.2f}]"


def shown(found: Diagnosis, quantity: str) -> str:
    """The value of a line, or a dash without one."""
    rows = [row for row in found.rows if row.quantity == quantity and not np.isnan(row.value)]
    return rows[0].shown if rows else "-"


def elbo(found: Diagnosis) -> str:
    """The ELBO of a guide with a density, from the log weights of its draws."""
    weights = found.plot_data.weights
    if weights is None:
        return "-"
    log_w = weights.log_w.reshape(len(weights.log_w), -1).astype(np.float64)
    return f"{log_w.sum(1).mean():.2f} +- {log_w.sum(1).std() / len(log_w) ** 0.5:.2g}"


class Verdict(NamedTuple):
    """One row of a table."""

    right: bool
    found: Diagnosis | None = None
    told: str = ""
    """A warning of the run, or the sentence with which it was refused."""

    @property
    def lines(self) -> tuple[Row, ...]:
        return () if self.found is None else self.found.rows

    @property
    def false_alarm(self) -> bool:
        return self.right and any(line.ok is False for line in self.lines)

    @property
    def fine(self) -> bool:
        """Whether nothing was said: no warning, and the `ok` of `diagnose`, which is false too if
        nothing could judge the draws."""
        return not self.told and self.found is not None and self.found.ok

    @property
    def silent(self) -> bool:
        return not self.right and self.fine

    @property
    def says(self) -> str:
        """What is wrong or could not be judged."""
        said = ["ok"] if self.fine else [self.told] if self.told else []
        said += [f"{line.quantity} {line.shown}" for line in self.lines if line.ok is False]
        left = [line.quantity for line in self.lines if line.ok is None]
        return "; ".join([*said, *(f"{quantity} not judged" for quantity in left)])

    @property
    def judged_by(self) -> str:
        """The quantities with a verdict about the draws."""
        judged = [line.quantity for line in self.lines if line.ok is not None]
        return "; ".join(q for q in judged if not q.startswith(NOT_OF_THE_DRAWS)) or "nothing"

    @property
    def cells(self) -> list[str]:
        """Those below ``HEADS``."""
        words = "yes" if self.right else "no", "yes" if self.false_alarm else ""
        return [*words, self.says, self.judged_by]


class Line(NamedTuple):
    """A row of a table as it is kept."""

    text: str
    right: bool
    false_alarm: bool
    silent: bool

    @classmethod
    def of(cls, text: str, verdict: Verdict) -> "Line":
        flags = verdict.right, verdict.false_alarm, verdict.silent
        return cls(text, *map(bool, flags))


def kept(folder: Path, label: str, row: Callable[[], tuple[str, Verdict] | Line]) -> Line:
    """Prints a row of a table: that in ``folder / "rows"`` if an earlier run has made it, so that a
    table which was stopped goes on. Without the file the row is run again."""
    path = folder / "rows" / f"{re.sub('[^a-z0-9]+', '-', label.lower()).strip('-')}.json"
    if path.is_file():
        line = Line(**json.loads(path.read_text()))
    else:
        made = row()
        line = made if isinstance(made, Line) else Line.of(*made)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(line._asdict()))
    print(line.text, flush=True)
    return line


def counted(lines: list[Line]) -> str:
    """The sentence below a table."""
    silent, right = sum(x.silent for x in lines), sum(x.right for x in lines)
    alarms = sum(x.false_alarm for x in lines)
    return (
        f"\nWrong and silent: {silent} of {len(lines)} rows; false alarms: {alarms} of {right}"
        " right rows."
    )
