"""Particles as a newcomer meets them, nothing tuned, on models of NumPyro's own examples.

Each field runs as `SVI(model, AutoParticles(model), particle_step(500), field())` for 500 steps,
and `ParVI` as `MCMC(ParVI(model), num_warmup=500, num_samples=1, num_chains=100)`. The truth is
NUTS: 4 chains of 1,000 + 2,000 draws, kept under `out/`. `worst mean` is the largest distance
between the means of particles and NUTS in standard deviations of NUTS, `sd ratio` the mean, and
[least, largest], of the standard deviation of the particles over that of NUTS, over all numbers of
the compared sites. `right` is whether every ratio is within 20 % of 1. `says` is what `diagnose`
says: `ok`, or the quantities that it finds wrong. `seconds` are those of everything, compilation
included.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
import sys
import time
from typing import Any
import warnings

import jax
from jax import random
import numpy as np
from numpyro.infer import MCMC, SVI

from numpyro_ext.diagnostics import Diagnosis, diagnose
from numpyro_ext.particles import (
    GFSD,
    GFSF,
    SVGD,
    AutoParticles,
    Blob,
    ParVI,
    RegularizedSVGD,
    particle_step,
)

sys.path.append(str(Path(__file__).parents[1]))
from _shared.numpyro_examples import EXAMPLES, Example
from _shared.nuts import Samples, nuts

STEPS = 500
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


def by_svi(problem: Example, field: Callable[[], Any], seed: int) -> tuple[Samples, Diagnosis]:
    guide = AutoParticles(problem.model)
    svi = SVI(problem.model, guide, particle_step(STEPS), loss=field())
    result = svi.run(random.key(seed), STEPS, *problem.data, progress_bar=False)
    return (
        jax.device_get(guide.particles(result.params)),
        diagnose(svi, result=result, model_args=problem.data),
    )


def by_parvi(problem: Example, seed: int) -> tuple[Samples, Diagnosis]:
    mcmc = MCMC(
        ParVI(problem.model),
        num_warmup=STEPS,
        num_samples=1,
        num_chains=100,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), *problem.data)
    return jax.device_get(mcmc.get_samples()), diagnose(mcmc)


def what_it_says(found: Diagnosis) -> str:
    wrong = [row for row in found.rows if row.ok is False]
    return "; ".join(f"{row.quantity} {row.shown}" for row in wrong) or "ok"


def row(name: str, label: str, problem: Example, truth: Samples, seed: int) -> tuple[str, bool]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if label == "ParVI":
            samples, found = by_parvi(problem, seed)
        else:
            samples, found = by_svi(problem, FIELDS[label], seed)
    seconds = time.perf_counter() - began
    errors, ratios = [], []
    for site, draws in truth.items():
        mean, sd = draws.mean(0), draws.std(0)
        errors.append(np.ravel(np.abs(samples[site].mean(0) - mean) / sd))
        ratios.append(np.ravel(samples[site].std(0) / sd))
    error, ratio = np.concatenate(errors).max(), np.concatenate(ratios)
    right = bool(np.all(np.abs(ratio - 1) <= 0.2))
    cells = [
        name,
        label,
        f"{error:.2f}",
        f"{ratio.mean():.2f} [{ratio.min():.2f}, {ratio.max():.2f}]",
        "yes" if right else "no",
        what_it_says(found),
        f"{seconds:.1f}",
    ]
    return "| " + " | ".join(cells) + " |", right or not found.ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    labels = [*FIELDS, "ParVI"]
    parser.add_argument("--problem", nargs="*", default=PROBLEMS, choices=PROBLEMS)
    parser.add_argument("--field", nargs="*", default=labels, choices=labels)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/particles"))
    args = parser.parse_args()
    print("| model | field | worst mean | sd ratio | right | says | seconds |")
    print("|---|---|---|---|---|---|---|")
    honest = []
    for name in args.problem:
        problem = EXAMPLES[name]()
        truth = nuts(args.out, name, problem.model, problem.data, problem.compared)
        for label in args.field:
            line, fair = row(name, label, problem, truth, args.seed)
            honest.append(fair)
            print(line, flush=True)
    wrong = len(honest) - sum(honest)
    print(f"\nRows that are wrong and do not say so: {wrong} of {len(honest)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
