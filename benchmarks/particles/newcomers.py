"""Particles as a newcomer meets them, nothing tuned, on models of NumPyro's own examples.

Each field runs as `SVI(model, AutoParticles(model), particle_step(500), field())` for 500 steps,
and `EnsembleLangevin` by `MCMC(ParVI(model, steps_per_sample=10), num_warmup=100, num_samples=50,
num_chains=100)`, of which all 5,000 draws are compared. The truth is NUTS: 4 chains of 1,000 +
2,000 draws, kept under `out/`. `worst mean` is the largest distance between the means of particles
and NUTS in standard deviations of NUTS, `sd ratio` the mean, and [least, largest], of the standard
deviation of the particles over that of NUTS, over all numbers of the compared sites. `right` is
whether every mean is within 0.2 and every ratio within 20 % of 1. `says` is what `diagnose` finds
wrong or could not judge, `judged by` has the quantities with a verdict about the draws, and a
`false alarm` is a right row that it finds wrong. `seconds` are those of everything, compilation
included. Rows are kept under `--out` too, so that a table which was stopped goes on; without the
folder `rows` there they are run again.
"""

import argparse
from functools import partial
from pathlib import Path
import sys
import time
import warnings

from numpyro_ext.particles import GFSD, GFSF, SVGD, Blob, EnsembleLangevin, RegularizedSVGD

sys.path.append(str(Path(__file__).parents[1]))
from _shared.methods import by_ensemble, by_particles
from _shared.numpyro_examples import EXAMPLES, Example
from _shared.nuts import nuts
from _shared.verdicts import HEADS, Line, Truth, Verdict, counted, errors, kept, moments

PROBLEMS = (
    "logistic",
    "eight schools",
    "eight schools, centred",
    "baseball",
    "correlations",
    "zero-inflated Poisson",
    "network",
)
FIELDS = {f.__name__: f for f in (RegularizedSVGD, SVGD, GFSF, GFSD, Blob)}

LANGEVIN = EnsembleLangevin.__name__


def row(name: str, label: str, problem: Example, truth: Truth, seed: int) -> tuple[str, Verdict]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if label == LANGEVIN:
            dynamics = EnsembleLangevin()
            samples, found, _ = by_ensemble(problem.model, problem.data, dynamics, seed)
        else:
            samples, found, _ = by_particles(problem.model, problem.data, FIELDS[label], seed)
    seconds = time.perf_counter() - began
    error = errors(samples, truth)
    verdict = Verdict(error.right(), found)
    cells = [name, label, f"{error.mean:.2f}", error.spread, *verdict.cells, f"{seconds:.1f}"]
    return f"| {' | '.join(cells)} |", verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    labels = [*FIELDS, LANGEVIN]
    parser.add_argument("--problem", nargs="*", default=PROBLEMS, choices=PROBLEMS)
    parser.add_argument("--field", nargs="*", default=labels, choices=labels)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/particles"))
    args = parser.parse_args()
    heads = ("model", "field", "worst mean", "sd ratio", *HEADS, "seconds")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    lines: list[Line] = []
    for name in args.problem:
        problem = EXAMPLES[name]()
        truth = moments(nuts(args.out, name, problem.model, problem.data, problem.compared))
        for label in args.field:
            make = partial(row, name, label, problem, truth, args.seed)
            lines.append(kept(args.out, f"{name} {label} {args.seed}", make))
    print(counted(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
