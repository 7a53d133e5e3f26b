"""Angles at the place where NumPyro cuts the circle: a flow, a kernel and particles as a newcomer
runs them, beside NUTS.

The models are in `models.py`. The reference is NUTS where nothing is cut: with ``turn=0``, or by
`--reference-turn` another angle, four chains of 1,000 + 5,000 draws. The methods have the same
posterior turned by pi (`--turn`), and their draws are turned back. Columns:

- *shift*: the largest error of a mean. Of an angle it is |E exp(i angle) - that of the reference|
  over sqrt(1 - |E exp(i angle)|^2), which is the error of the circular mean in circular standard
  deviations where these are small, and has a meaning where an angle is nearly uniform; of another
  number, in standard deviations.
- *sds*: the smallest and the largest ratio of standard deviations, of angles the circular ones,
  sqrt(-2 log |E exp(i angle)|).
- *right*: a shift of at most 0.25 and ratios from 0.8 to 1.25.
- *ok*: what `diagnose` says.
- *seconds*: of the fit, compilation included, and of `diagnose`.
"""

import argparse
from pathlib import Path
import sys
import time
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
import optax

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step

sys.path.append(str(Path(__file__).parents[1]))
from circular.models import PROBLEMS, Problem

METHODS = ["AutoRealNVPNormal", "SGHMC", "RegularizedSVGD", "NUTS"]
FLOW_STEPS, PARTICLE_STEPS, PARTICLES, DRAWS = 3000, 1000, 200, 20_000
SHIFT, RATIO = 0.25, 1.25


def nuts(problem: Problem, turn: float, chains: int) -> Any:
    mcmc = MCMC(
        NUTS(problem.model),
        num_warmup=1000,
        num_samples=5000,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), turn, jnp.asarray(problem.data))
    return mcmc


def fit(method: str, problem: Problem, turn: float, key: int) -> tuple[dict[str, Any], bool | None]:
    """Draws of the method, and what ``diagnose`` says."""
    args = turn, jnp.asarray(problem.data)
    if method == "NUTS":
        return nuts(problem, turn, 4).get_samples(), None
    if method == "SGHMC":
        mcmc = MCMC(SGHMC(problem.model), num_warmup=1000, num_samples=DRAWS, progress_bar=False)
        mcmc.run(random.key(key), *args)
        return mcmc.get_samples(), diagnose(mcmc).ok
    if method == "AutoRealNVPNormal":
        guide, rate = (
            AutoRealNVPNormal(problem.model),
            optax.cosine_decay_schedule(1e-2, FLOW_STEPS),
        )
        svi = SVI(problem.model, guide, optax.adam(rate), Trace_ELBO(8))
        result = svi.run(random.key(key), FLOW_STEPS, *args, progress_bar=False)
        draws = guide.sample_posterior(random.key(key + 1), result.params, sample_shape=(DRAWS,))
    else:
        guide = AutoParticles(problem.model, PARTICLES)
        optim = particle_step(PARTICLE_STEPS)
        svi = SVI(problem.model, guide, optim, RegularizedSVGD())
        result = svi.run(random.key(key), PARTICLE_STEPS, *args, progress_bar=False)
        draws = guide.particles(result.params)
    return draws, diagnose(svi, result, model_args=args).ok


def moments(x: np.ndarray, *, angle: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean (of an angle exp(i angle)), the standard deviation by which a shift counts, and the
    standard deviation."""
    x = np.asarray(x, np.float64).reshape(len(x), -1)
    if not angle:
        return x.mean(0), x.std(0), x.std(0)
    m = np.exp(1j * x).mean(0)
    return m, np.sqrt(1 - abs(m) ** 2), np.sqrt(-2 * np.log(abs(m)))


def compare(problem: Problem, draws: Any, truth: Any, turn: float) -> tuple[float, float, float]:
    """The largest shift, and the smallest and the largest ratio of standard deviations."""
    shifts, ratios = [], []
    for name, reference in truth.items():
        angle = name in problem.angles
        here = np.asarray(draws[name]) - (turn if angle else 0.0)
        (m, _, sd), (m0, unit, sd0) = (moments(x, angle=angle) for x in (here, reference))
        shifts.append(abs(m - m0) / unit)
        ratios.append(sd / sd0)
    ratio = np.concatenate(ratios)
    return float(np.concatenate(shifts).max()), float(ratio.min()), float(ratio.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--only", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--turn", type=float, default=float(np.pi))
    parser.add_argument("--reference-turn", type=float, default=0.0)
    parser.add_argument("--key", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| model | method | shift | sds | right | ok | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in options.model:
        problem = PROBLEMS[name]
        away = options.reference_turn
        reference = nuts(problem, away, 4).get_samples()
        truth = {
            site: np.asarray(x) - (away if site in problem.angles else 0.0)
            for site, x in reference.items()
        }
        for method in options.only:
            began = time.perf_counter()
            draws, ok = fit(method, problem, options.turn, options.key)
            seconds = time.perf_counter() - began
            shift, low, high = compare(problem, jax.device_get(draws), truth, options.turn)
            right = shift <= SHIFT and low >= 1 / RATIO and high <= RATIO
            said = "-" if ok is None else "yes" if ok else "no"
            print(
                f"| {name} | {method} | {shift:.2f} | {low:.2f} to {high:.2f} |"
                f" {'yes' if right else '**no**'} | {said} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
