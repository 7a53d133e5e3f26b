"""Guides as a newcomer meets them, nothing tuned, on models of NumPyro's own examples.

Each runs as `SVI(model, guide(model), optim, objective())` for 5,000 steps of 4 particles, with
Adam at 5e-3 falling along a cosine for all, and starts where it starts by default. The truth is
NUTS: 4 chains of 1,000 + 2,000 draws, kept under `out/`. `sd ratio` is the mean, and
[least, largest], of the standard deviation of 4,000 draws over that of NUTS, over all numbers of
the compared sites; `worst mean` the largest distance of the means in standard deviations of NUTS.
`right` is whether every mean is within 0.2 and every ratio within 20 % of 1. `ELBO` (± Monte Carlo
error, 1,000 draws) and `k-hat` are those of `diagnose`; `says` is what it finds wrong or could not
judge, `judged by` has the quantities with a verdict about the draws, and a `false alarm` is a right
row that it finds wrong. `seconds` are those of everything, compilation included. Rows are kept
under `--out` too, so that a table which was stopped goes on; without the folder `rows` there they
are run again.
"""

import argparse
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any
import warnings

from constructors import ROWS

sys.path.append(str(Path(__file__).parents[1]))
from _shared.methods import by_guide
from _shared.numpyro_examples import EXAMPLES, Example
from _shared.nuts import nuts
from _shared.verdicts import (
    HEADS,
    Line,
    Truth,
    Verdict,
    counted,
    elbo,
    errors,
    kept,
    moments,
    shown,
)

PROBLEMS = (
    "logistic",
    "eight schools",
    "correlations",
    "autoregression",
    "zero-inflated Poisson",
)
GUIDES = [label for label in ROWS if "(" not in label]
"""Those with their default arguments and their first objective."""


def line(name: str, label: str, problem: Example, truth: Truth) -> tuple[str, Verdict]:
    began = time.perf_counter()
    row, model = ROWS[label], problem.model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loss = row.objective(row.num_particles or 4)
            samples, found, _ = by_guide(model, problem.data, row.guide(model), loss)
        except ValueError as error:  # by `diagnose`, of a fit that diverged
            verdict = Verdict(False, told=f"refused: {' '.join(str(error).split())}")
            seconds = f"{time.perf_counter() - began:.1f}"
            cells = [name, label, *4 * "-", *verdict.cells, seconds]
            return f"| {' | '.join(cells)} |", verdict
    seconds = time.perf_counter() - began
    error = errors(samples, truth)
    verdict = Verdict(error.right(), found)
    cells: list[Any] = [
        name,
        label,
        elbo(found),
        shown(found, "k-hat"),
        error.spread,
        f"{error.mean:.2f}",
        *verdict.cells,
        f"{seconds:.1f}",
    ]
    return f"| {' | '.join(cells)} |", verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problem", nargs="*", default=PROBLEMS, choices=list(EXAMPLES))
    parser.add_argument("--only", nargs="*", default=[""], help="parts of guides, default all")
    parser.add_argument("--out", type=Path, default=Path("out/guides"))
    args = parser.parse_args()
    heads = ("model", "guide", "ELBO", "k-hat", "sd ratio", "worst mean", *HEADS, "seconds")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    lines: list[Line] = []
    for name in args.problem:
        problem = EXAMPLES[name]()
        truth = moments(nuts(args.out, name, problem.model, problem.data, problem.compared))
        for label in GUIDES:
            if any(part in label for part in args.only):
                make = partial(line, name, label, problem, truth)
                lines.append(kept(args.out, f"{name} {label}", make))
    print(counted(lines))


if __name__ == "__main__":
    main()
