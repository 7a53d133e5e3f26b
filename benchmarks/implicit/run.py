"""A guide without a density as a newcomer meets it, nothing tuned, compared with NUTS.

`AutoImplicit(model)` with each loss that needs draws alone, at its defaults, and `AutoNormal` with
`Trace_ELBO(10)` for comparison: 5,000 steps of `optax.adam` at a rate of 1e-2 that falls to zero by
a cosine. The truth is NUTS: 4 chains of 1,000 + 2,000 draws, kept under `out/`. `worst mean` is the
largest distance between the means of 10,000 draws of the guide and of NUTS, in standard deviations
of NUTS; `sd ratio` is the mean, and [least, largest], of the standard deviation of the guide's
draws over that of NUTS, over all numbers of the compared sites. `seconds` are those of everything,
compilation included.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
import sys
import time
from typing import Any

import jax
from jax import random
import numpy as np
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax

from numpyro_ext.guides import AutoImplicit
from numpyro_ext.objectives import AmortizedMCMC, ImplicitELBO, SteinDiscrepancy
from numpyro_ext.particles import SVGD, RegularizedSVGD

sys.path.append(str(Path(__file__).parents[1]))
from _shared.numpyro_examples import EXAMPLES, Example

STEPS = 5000
PROBLEMS = ("logistic", "eight schools")
WAYS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "ImplicitELBO()": (AutoImplicit, ImplicitELBO),
    "ImplicitELBO(200)": (AutoImplicit, lambda: ImplicitELBO(200)),
    "SteinDiscrepancy()": (AutoImplicit, SteinDiscrepancy),
    "AmortizedMCMC()": (AutoImplicit, AmortizedMCMC),
    "SVGD()": (AutoImplicit, SVGD),
    "RegularizedSVGD()": (AutoImplicit, RegularizedSVGD),
    "AutoNormal": (AutoNormal, lambda: Trace_ELBO(10)),
}
Samples = dict[str, np.ndarray]


def reference(name: str, problem: Example, folder: Path) -> Samples:
    """Draws of NUTS of the compared sites, made once."""
    path = folder / f"nuts_{name.replace(' ', '_')}.npz"
    if path.is_file():
        return dict(np.load(path))
    kernel = NUTS(problem.model, target_accept_prob=0.95)
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=2000,
        num_chains=4,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *problem.data)
    samples = {site: np.asarray(mcmc.get_samples()[site]) for site in problem.compared}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **samples)
    return samples


def row(name: str, way: str, problem: Example, truth: Samples) -> str:
    began = time.perf_counter()
    make_guide, make_loss = WAYS[way]
    guide = make_guide(problem.model)
    optim = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
    svi = SVI(problem.model, guide, optim, make_loss())
    params = svi.run(random.key(1), STEPS, *problem.data, progress_bar=False).params
    draws = guide.sample_posterior(random.key(2), params, *problem.data, sample_shape=(10_000,))
    samples = jax.device_get(draws)
    seconds = time.perf_counter() - began
    errors, ratios = [], []
    for site, values in truth.items():
        mean, sd = values.mean(0), values.std(0)
        errors.append(np.ravel(np.abs(samples[site].mean(0) - mean) / sd))
        ratios.append(np.ravel(samples[site].std(0) / sd))
    error, ratio = np.concatenate(errors).max(), np.concatenate(ratios)
    shown = f"{ratio.mean():.2f} [{ratio.min():.2f}, {ratio.max():.2f}]"
    return "| " + " | ".join([name, way, f"{error:.2f}", shown, f"{seconds:.0f}"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problem", nargs="*", default=PROBLEMS, choices=PROBLEMS)
    parser.add_argument("--way", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("out/implicit"))
    args = parser.parse_args()
    print("| model | loss | worst mean | sd ratio | seconds |")
    print("|---|---|---|---|---|")
    for name in args.problem:
        problem = EXAMPLES[name]()
        truth = reference(name, problem, args.out)
        for way in args.way:
            print(row(name, way, problem, truth), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
