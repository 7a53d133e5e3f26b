"""Guides, particles and kernels as a newcomer meets them, nothing tuned, on models that are in none
of the other tables.

The models are eleven of the literature, and by `--model` six more of statsmodels' data, which were
chosen before any of them was run, and five kinds that people ask about, with simulated data.

One name is swapped. Guides run for 5,000 steps of `optax.adam(5e-3)`, NumPyro's with
`Trace_ELBO(4)`, flows with `VRELBO(1., 4)` and `AutoMixtureNormal` with `MixtureELBO()`, and give
4,000 draws. With "falling rate" behind its name a flow takes `VRELBO(1., 16)` and a rate that falls
from 5e-3 to 0 along a cosine; with "4 draws" too, it takes that rate alone. Particles are 200, for
500 steps, or, by `EnsembleLangevin`, for 1,000 and at 50 times of 500 more; kernels are built as
`Kernel(model, steps_per_sample=20)` and run for 2 chains of 200 + 2,500 draws; `EP` makes at most
50 sweeps. The two models of many rows have minibatches of 200 and 300 rows for all methods, flows
and particles with the proxy. The truth is exact by quadrature, or NUTS in double precision (4
chains of 2,000 + 5,000 draws), kept under `--out`; `--truth` makes it and fits nothing.

`worst mean` is the largest error of a mean in standard deviations, `sd ratio` the mean, and
[least, largest], of the standard deviations over the right ones, over all numbers of the compared
sites. `right`: each mean is within 0.2 sd and each sd within 20 %; of kernels within 0.1 and 10 %,
or three Monte Carlo errors more. `says` is what `diagnose` finds wrong or could not judge, and
warnings; `judged by` has the quantities with a verdict about the draws; a `false alarm` is a right
row that `diagnose` finds wrong.

`seconds` are those until the draws are there, with compilation, each row in a process of its own;
`/ NUTS` is their ratio to those of NumPyro's NUTS (one chain, all rows of the data, its defaults)
to 400 effective draws of every compared number, in a process of its own too, and is left out by
`--no-ratio`. Rows are kept under `--out`, so that a table which was stopped goes on; without the
folder `rows` there they are run again. `--seed` shifts the key.
"""

import argparse
from collections.abc import Callable
from functools import partial
import json
import os
from pathlib import Path
import subprocess
import sys
import time
from typing import Any
import warnings

import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoMixtureNormal, AutoRealNVPNormal, AutoSplineNormal
from numpyro_ext.mcmc import SGHMC, SGLD, SGNHT
from numpyro_ext.objectives import VRELBO, MixtureELBO, taylor_proxy
from numpyro_ext.particles import Blob, EnsembleLangevin, RegularizedSVGD

sys.path.append(str(Path(__file__).parents[1]))
from _shared.brought_models import BROUGHT
from _shared.methods import (
    by_engine,
    by_ensemble,
    by_guide,
    by_kernel,
    by_nuts,
    by_particles,
    first_warning,
    merged,
    smallest_ess,
)
from _shared.statsmodels_models import STATSMODELS
from _shared.unseen_models import MODELS as UNSEEN
from _shared.unseen_models import NUTS_DRAWS, Unseen
from _shared.verdicts import HEADS, Errors, Line, Truth, Verdict, counted, errors, kept
from hierarchies.models import HIERARCHIES

MODELS = {**UNSEEN, **STATSMODELS, **BROUGHT, **HIERARCHIES}
STOCK = {guide.__name__: guide for guide in (AutoNormal, AutoMultivariateNormal)}
FLOWS = {guide.__name__: guide for guide in (AutoRealNVPNormal, AutoSplineNormal)}
FALLING, FOUR_FALLING = (f"AutoRealNVPNormal, {how}falling rate" for how in ("", "4 draws, "))
FLOWS |= {FALLING: AutoRealNVPNormal, FOUR_FALLING: AutoRealNVPNormal}
FIELDS = {field.__name__: field for field in (RegularizedSVGD, Blob)}
KERNELS: dict[str, Callable[..., Any]] = {"SGHMC": SGHMC, "SGNHT": SGNHT, "SGLD": SGLD}
LANGEVIN = EnsembleLangevin.__name__
METHODS = [*STOCK, *FLOWS, "AutoMixtureNormal", *FIELDS, LANGEVIN, *KERNELS, "EP"]
COLUMNS = ("model", "method", "worst mean", "sd ratio", *HEADS, "seconds", "/ NUTS")
KERNEL_BAND = 0.1, 0.1
LEAST_ESS = 400


def fit(problem: Unseen, method: str, truth: Truth, seed: int) -> tuple[Errors, Verdict, float]:
    model, data = problem.batched, problem.rows
    if method in KERNELS:
        chains = by_kernel(KERNELS[method](model, steps_per_sample=20), data, seed)
        compared = {site: chains.samples[site] for site in truth}
        error, ess = errors(merged(compared), truth), smallest_ess(compared)
        right = error.right(*KERNEL_BAND) or error.nearly(*KERNEL_BAND, ess)
        return error, Verdict(right, chains.found, chains.told), chains.seconds
    adam, before = optax.adam(5e-3), 0.0
    if method in STOCK:
        found = by_guide(model, data, STOCK[method](model), Trace_ELBO(4), adam, seed)
    elif method in FLOWS or method in FIELDS or method == LANGEVIN:
        began = time.perf_counter()
        proxy = None if problem.batch is None else taylor_proxy(model, *data)
        before = time.perf_counter() - began
        if method == LANGEVIN:
            dynamics = EnsembleLangevin(proxy=proxy)
            found = by_ensemble(model, data, dynamics, seed, problem.particles)
        elif method in FLOWS:
            loss = VRELBO(1.0, 16 if method == FALLING else 4, proxy=proxy)
            rate = None if method in (FALLING, FOUR_FALLING) else adam  # None is one that falls
            found = by_guide(model, data, FLOWS[method](model), loss, rate, seed)
        else:
            field = partial(FIELDS[method], proxy=proxy)
            found = by_particles(model, data, field, seed, problem.particles)
    elif method == "EP":
        found = by_engine(EP(model), data, seed)
    else:
        found = by_guide(model, data, AutoMixtureNormal(model), MixtureELBO(), adam, seed)
    error = errors(found.draws, truth)
    return error, Verdict(error.right(), found.found), before + found.seconds


def line(name: str, method: str, out: Path, seed: int) -> tuple[Line, float]:
    """A row without its last cell, and its seconds."""
    problem = MODELS[name]()
    truth, sizes = problem.truth(out, name), ["-", "-"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", InferenceWarning)
        try:
            error, verdict, seconds = fit(problem, method, truth, seed)
            verdict = verdict._replace(told=verdict.told or first_warning(seen))
            sizes = [f"{error.mean:.2f}", error.spread]
        except (ValueError, RuntimeError) as refusal:
            verdict = Verdict(False, told=f"refused: {' '.join(str(refusal).split())}")
            seconds = np.nan
    cells = [name, method, *sizes, *verdict.cells, f"{seconds:.1f}"]
    return Line.of(f"| {' | '.join(cells)}", verdict), seconds


def in_a_process(name: str, method: str, out: Path, seed: int) -> Any:
    """What :func:`main` does with ``--one``, where nothing is compiled yet."""
    options = ["--model", name, "--only", method, "--out", str(out), "--seed", str(seed), "--one"]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, __file__, *options]
    return json.loads(subprocess.check_output(command, env=environment, text=True).splitlines()[-1])


def nuts_seconds(name: str, out: Path) -> float:
    """Kept beside the truth."""
    path = out / f"seconds_of_nuts_{name.replace(' ', '_').replace(',', '')}.json"
    if not path.is_file():
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(in_a_process(name, "NUTS", out, 1)))
    return json.loads(path.read_text())


def with_ratio(name: str, method: str, out: Path, seed: int, of_nuts: float) -> Line:
    made, seconds = in_a_process(name, method, out, seed)
    line = Line(*made)
    cell = "" if np.isnan(of_nuts) else f"{seconds / of_nuts:.2f}"
    return line._replace(text=f"{line.text} | {cell} |")


def one(name: str, method: str, out: Path, seed: int) -> Any:
    """What :func:`line` gives, or the seconds of NUTS."""
    if method == "NUTS":
        problem = MODELS[name]()
        return by_nuts(problem.model, problem.rows, problem.compared, LEAST_ESS)
    return line(name, method, out, seed)


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


def table(models: list[str], methods: list[str], out: Path, seed: int, ratio: bool = True) -> None:
    """Print it; without ``ratio`` the last column is empty, and NUTS is not timed."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    lines = []
    for name in models:
        MODELS[name]().truth(out, name)
        of_nuts = nuts_seconds(name, out) if ratio else np.nan
        for method in methods:
            label = f"{name} {method}" + (f" {seed}" if seed > 1 else "")
            row = partial(with_ratio, name, method, out, seed, of_nuts)
            lines.append(kept(out, label, row))
    print(counted(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", nargs="*", default=list(UNSEEN), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", default=METHODS, choices=[*METHODS, "NUTS"])
    parser.add_argument("--out", type=Path, default=Path("out/newcomers"))
    parser.add_argument("--truth", action="store_true", help="make and show the truths alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ratio", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.model[0], args.only[0], args.out, args.seed)))
    elif args.truth:
        for name in args.model:
            report_truth(args.out, name, MODELS[name]().truth(args.out, name))
    else:
        table(args.model, args.only, args.out, args.seed, args.ratio)


if __name__ == "__main__":
    main()
