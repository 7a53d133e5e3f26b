"""Guides as a newcomer meets them, nothing tuned, on models of NumPyro's own examples.

Each runs as `SVI(model, guide(model), optim, objective())` for 5,000 steps of 4 particles, with
Adam at 5e-3 falling along a cosine for all, and starts where it starts by default. The truth is
NUTS: 4 chains of 1,000 + 2,000 draws, kept under `out/`. `sd ratio` is the mean, and
[least, largest], of the standard deviation of 4,000 draws over that of NUTS, over all numbers of
the compared sites; `worst mean` the largest distance of the means in standard deviations of NUTS.
`right` is whether every ratio is within 20 % of 1. `ELBO` (± Monte Carlo error, 1,000 draws) and
`k-hat` are those of `diagnose`, and `says` is what it finds wrong. `seconds` are those of
everything, compilation included.
"""

import argparse
import math
from pathlib import Path
import sys
import time
from typing import Any
import warnings

from constructors import ROWS, Row
import jax
from jax import random
import numpy as np
from numpyro.infer import SVI
import optax

from numpyro_ext.diagnostics import Diagnosis, diagnose

sys.path.append(str(Path(__file__).parents[1]))
from _shared.numpyro_examples import EXAMPLES, Example
from _shared.nuts import Samples, nuts

STEPS, DRAWS = 5000, 4000
PROBLEMS = (
    "logistic",
    "eight schools",
    "correlations",
    "autoregression",
    "zero-inflated Poisson",
)
GUIDES = [label for label in ROWS if "(" not in label]
"""Those with their default arguments and their first objective."""


def fit(problem: Example, row: Row) -> tuple[Samples, Diagnosis]:
    guide = row.guide(problem.model)
    optim = optax.adam(optax.cosine_decay_schedule(5e-3, STEPS))
    svi = SVI(problem.model, guide, optim, row.objective(row.num_particles or 4))
    result = svi.run(random.key(1), STEPS, *problem.data, progress_bar=False)
    sample = jax.jit(lambda key, p, x: guide.sample_posterior(key, p, *x, sample_shape=(DRAWS,)))
    return (
        jax.device_get(sample(random.key(2), result.params, problem.data)),
        diagnose(svi, result=result, model_args=problem.data),
    )


def shown(found: Diagnosis, quantity: str) -> str:
    values = {row.quantity: row.shown for row in found.rows if not math.isnan(row.value)}
    return values.get(quantity, "-")


def line(name: str, label: str, problem: Example, truth: Samples) -> tuple[str, bool]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples, found = fit(problem, ROWS[label])
        except ValueError as error:  # by `diagnose`, of a fit that diverged
            return f"| {name} | {label} | {error} |", False
    seconds = time.perf_counter() - began
    errors, ratios = [], []
    for site, draws in truth.items():
        mean, sd = draws.mean(0), draws.std(0)
        errors.append(np.ravel(np.abs(samples[site].mean(0) - mean) / sd))
        ratios.append(np.ravel(samples[site].std(0) / sd))
    error, ratio = np.concatenate(errors).max(), np.concatenate(ratios)
    right = bool(np.all(np.abs(ratio - 1) <= 0.2))
    says = [row.quantity for row in found.rows if row.ok is False]
    cells: list[Any] = [
        name,
        label,
        shown(found, "ELBO (order 1)"),
        shown(found, "k-hat"),
        f"{ratio.mean():.2f} [{ratio.min():.2f}, {ratio.max():.2f}]",
        f"{error:.2f}",
        "yes" if right else "no",
        "; ".join(says) or "ok",
        f"{seconds:.1f}",
    ]
    return f"| {' | '.join(cells)} |", right or not found.ok


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problem", nargs="*", default=PROBLEMS, choices=list(EXAMPLES))
    parser.add_argument("--only", nargs="*", default=[""], help="parts of guides, default all")
    parser.add_argument("--out", type=Path, default=Path("out/guides"))
    args = parser.parse_args()
    heads = "model,guide,ELBO,k-hat,sd ratio,worst mean,right,says,seconds".split(",")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    honest = []
    for name in args.problem:
        problem = EXAMPLES[name]()
        truth = nuts(args.out, name, problem.model, problem.data, problem.compared)
        for label in GUIDES:
            if any(part in label for part in args.only):
                text, fair = line(name, label, problem, truth)
                honest.append(fair)
                print(text, flush=True)
    print(f"\nRows that are wrong and do not say so: {honest.count(False)} of {len(honest)}.")


if __name__ == "__main__":
    main()
