"""Default settings on posteriors that are known: no number is given by hand, NUTS in the same run.

Every kernel is built as `Kernel(model, steps_per_sample=20)` and run for 2 chains of 200 + 2,500 draws, 100,000
transitions in all. `worst mean` is the largest distance between the means of the draws and of the truth in standard
deviations of the truth, `sd ratio` the least and the largest standard deviation of the draws over that of the truth,
over all latent numbers; `variance` is the predicted variance over the right one beside the measured one, in the mean
over them. The truth is published (German credit, posteriordb), the Laplace approximation in double precision (logistic
regression with 100,000 and more rows), or 4 chains of 2,000 draws of NUTS on all rows. `found` is the seconds of
`kernel.init`, where the settings are found, compilation included; `seconds` are those of everything. A warning is
printed by its first words.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any
import warnings

import arviz_stats
import jax
from jax import random
from models import PROBLEMS, Problem
import numpy as np
from numpyro.infer import MCMC, NUTS

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.mcmc import SGHMC, SGLD, SGNHT

KERNELS: dict[str, Callable[..., Any]] = {"SGHMC": SGHMC, "SGNHT": SGNHT, "SGLD": SGLD}
DRAWS, WARMUP, STEPS = 2500, 200, 20


def smallest_ess(samples: dict[str, Any]) -> float:
    """The least effective sample size of a number, from ``(chain, draw, ...)`` arrays."""
    sizes = []
    for value in samples.values():
        columns = np.asarray(value, float).reshape(*np.shape(value)[:2], -1)
        sizes += [
            arviz_stats.base.array_stats.ess(columns[..., k]) for k in range(columns.shape[-1])
        ]
    return float(np.min(sizes))


def nuts(problem: Problem, num_samples: int) -> tuple[dict[str, Any], float]:
    model = partial(problem.model, batch=None)
    kernel = NUTS(model, dense_mass=True)
    options = {"num_chains": 4, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=500, num_samples=num_samples, **options)
    began = time.perf_counter()
    mcmc.run(random.key(0), *problem.data)
    samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
    return samples, time.perf_counter() - began


def moments(samples: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    flat = {site: np.reshape(x, (-1, *np.shape(x)[2:])) for site, x in samples.items()}
    return {site: (x.mean(0), x.std(0)) for site, x in flat.items()}


def row(name: str, label: str, problem: Problem, truth: dict[str, Any]) -> str:
    kernel = KERNELS[label](partial(problem.model, batch=problem.batch), steps_per_sample=STEPS)
    mcmc = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", InferenceWarning)
        state = kernel.init(random.split(random.key(1), 2), WARMUP * STEPS, None, problem.data, {})
        jax.block_until_ready(state.i)
        found = time.perf_counter() - began
        mcmc.run(random.key(1), *problem.data)
    samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - began
    ours = moments({site: samples[site] for site in truth})
    error = max(float(np.max(np.abs(ours[s][0] - m) / sd)) for s, (m, sd) in truth.items())
    ratios = np.concatenate([np.ravel(ours[s][1] / sd) for s, (_, sd) in truth.items()])
    ess = smallest_ess({site: samples[site] for site in truth})
    said = [str(w.message).split(",")[0] for w in seen if issubclass(w.category, InferenceWarning)]
    settings = kernel.settings
    friction = "-" if settings.friction is None else f"{settings.friction:.2g}"
    cells = [
        name,
        label,
        f"{settings.step_size:.2g}, {friction}",
        f"{error:.3f}",
        f"{ratios.min():.2f} to {ratios.max():.2f}",
        f"{settings.variance_ratio:.2f} / {np.mean(ratios**2):.2f}",
        f"{ess:,.0f}",
        f"{found:.1f}",
        f"{seconds:.1f}",
        f"{ess / seconds:,.0f}",
        said[0] if said else "",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    parser.add_argument("--problem", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--nuts", action="store_true", help="NUTS also where the truth is known")
    args = parser.parse_args()
    if not args.data_dir.is_dir():
        sys.exit(f"There is no folder {args.data_dir}; give it as --data-dir.")
    print(
        "| posterior | kernel | step, friction | worst mean | sd ratio | variance, predicted / measured |"
        " ESS | found, s | seconds | ESS per second | warning |"
    )
    print("|" + "---|" * 11)
    for name in args.problem:
        problem = PROBLEMS[name](args.data_dir)
        truth = problem.truth
        if truth is None or args.nuts:
            samples, seconds = nuts(problem, 2000 if truth is None else 250)
            truth = moments(samples) if truth is None else truth
            ess = smallest_ess({site: samples[site] for site in truth})
            print(
                f"| {name} | NUTS, dense mass |  |  |  |  | {ess:,.0f} |  | {seconds:.1f} |"
                f" {ess / seconds:,.0f} |  |",
                flush=True,
            )
        for label in args.kernel:
            print(row(name, label, problem, truth), flush=True)


if __name__ == "__main__":
    main()
