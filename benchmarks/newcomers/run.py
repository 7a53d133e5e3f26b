"""Guides, particles and kernels as a newcomer meets them, nothing tuned, on models that are in none
of the other tables.

Guides run for 5,000 steps of `Trace_ELBO(4)` with Adam at 5e-3 falling along a cosine, and give
4,000 draws; particles are 100, for 500 steps; kernels are built as `Kernel(model,
steps_per_sample=20)` and run for 2 chains of 200 + 2,500 draws. The two models of many rows have
minibatches of 200 and 300 rows for all methods. The truth is exact by quadrature, or NUTS in double
precision (4 chains of 2,000 + 5,000 draws), kept under `--out`; `--truth` makes it and fits
nothing.

`worst mean` is the largest error of a mean in standard deviations, `sd ratio` the mean, and
[least, largest], of the standard deviations over the right ones, over all numbers of the compared
sites. `right`: each mean is within .2 sd and each sd within 20 %; of kernels within .1 and 10 %,
or three Monte Carlo errors more. `says` is what `diagnose` finds wrong or could not judge, and
warnings; `judged by` has the quantities with a verdict about the draws; a `false alarm` is a right
row that `diagnose` finds wrong. `seconds` are those of everything, compilation included. Rows are
kept under `--out` too, so that a table which was stopped goes on; without the folder `rows` there
they are run again.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any
import warnings

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_ext.guides import AutoMixtureNormal, AutoRealNVPNormal, AutoSplineNormal
from numpyro_ext.mcmc import SGHMC, SGLD, SGNHT
from numpyro_ext.particles import Blob, RegularizedSVGD

sys.path.append(str(Path(__file__).parents[1]))
from _shared.methods import by_guide, by_kernel, by_particles, by_parvi, merged, smallest_ess
from _shared.unseen_models import MODELS, NUTS_DRAWS, Unseen
from _shared.verdicts import HEADS, Errors, Line, Truth, Verdict, counted, errors, kept

GUIDES = {
    guide.__name__: guide
    for guide in (
        *(AutoNormal, AutoMultivariateNormal),
        *(AutoRealNVPNormal, AutoSplineNormal, AutoMixtureNormal),
    )
}
FIELDS = {field.__name__: field for field in (RegularizedSVGD, Blob)}
KERNELS: dict[str, Callable[..., Any]] = {"SGHMC": SGHMC, "SGNHT": SGNHT, "SGLD": SGLD}
METHODS = [*GUIDES, *FIELDS, "ParVI", *KERNELS]
COLUMNS = ("model", "method", "worst mean", "sd ratio", *HEADS, "seconds")
KERNEL_BAND = 0.1, 0.1


def fit(problem: Unseen, method: str, truth: Truth) -> tuple[Errors, Verdict]:
    model, data = problem.batched, problem.rows
    if method in KERNELS:
        chains = by_kernel(KERNELS[method](model, steps_per_sample=20), data)
        compared = {site: chains.samples[site] for site in truth}
        error, ess = errors(merged(compared), truth), smallest_ess(compared)
        right = error.right(*KERNEL_BAND) or error.nearly(*KERNEL_BAND, ess)
        return error, Verdict(right, chains.found, chains.told)
    if method in GUIDES:
        draws, found = by_guide(model, data, GUIDES[method](model), Trace_ELBO(4))
    elif method in FIELDS:
        draws, found = by_particles(model, data, FIELDS[method])
    else:
        draws, found = by_parvi(model, data)
    error = errors(draws, truth)
    return error, Verdict(error.right(), found)


def line(name: str, method: str, problem: Unseen, truth: Truth) -> tuple[str, Verdict]:
    began = time.perf_counter()
    sizes = ["-", "-"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            error, verdict = fit(problem, method, truth)
            sizes = [f"{error.mean:.2f}", error.spread]
        except (ValueError, RuntimeError) as refusal:
            verdict = Verdict(False, told=f"refused: {' '.join(str(refusal).split())}")
    cells = [name, method, *sizes, *verdict.cells, f"{time.perf_counter() - began:.1f}"]
    return f"| {' | '.join(cells)} |", verdict


def report_truth(folder: Path, name: str, truth: Truth) -> None:
    """Moments, and of NUTS the largest R-hat and the least effective sample size."""
    path = folder / f"nuts_{name.replace(' ', '_').replace(',', '')}.npz"
    how = "exact"
    if path.is_file():
        chains = [x.reshape(4, NUTS_DRAWS["draws"], -1) for x in np.load(path).values()]
        r_hat = max(float(np.max(split_gelman_rubin(x))) for x in chains)
        ess = min(float(np.min(effective_sample_size(x))) for x in chains)
        how = f"NUTS, R-hat {r_hat:.4f}, ESS {ess:,.0f}"
    print(f"{name}: {how}")
    for site, (mean, sd) in truth.items():
        print(f"  {site}: mean {np.ravel(mean)[:6].round(4)}, sd {np.ravel(sd)[:6].round(4)}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", default=METHODS, choices=METHODS, help="methods")
    parser.add_argument("--out", type=Path, default=Path("out/newcomers"))
    parser.add_argument("--truth", action="store_true", help="make and show the truths alone")
    args = parser.parse_args()
    if not args.truth:
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    lines: list[Line] = []
    for name in args.model:
        problem = MODELS[name]()
        truth = problem.truth(args.out, name)
        if args.truth:
            report_truth(args.out, name, truth)
            continue
        for method in args.only:
            row = partial(line, name, method, problem, truth)
            lines.append(kept(args.out, f"{name} {method}", row))
    if lines:
        print(counted(lines))


if __name__ == "__main__":
    main()
