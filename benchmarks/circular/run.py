"""Angles at the place where NumPyro cuts the circle: a flow, a kernel and particles as a newcomer
runs them, beside NUTS.

The models are in `models.py`, with their truth: a sum over a grid, or a closed form on one, or NUTS
where nothing is cut, four chains of 1,000 + 5,000 draws. The methods have the posterior turned by
pi (`--turn`), and their draws are turned back. `NUTS` is NumPyro's on the same. Columns:

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
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.util import log_density
import optax

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.guides import AutoMixtureNormal, AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import MixtureELBO
from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step

sys.path.append(str(Path(__file__).parents[1]))
from circular.models import PROBLEMS, Moments, Problem, of_angle, of_number

METHODS = ["AutoRealNVPNormal", "SGHMC", "RegularizedSVGD", "NUTS"]
EIGHT = "SGHMC, 8 chains"
OF_SEVERAL_MODES = {"migration": ["AutoMixtureNormal", EIGHT]}
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
    if method in ("SGHMC", EIGHT):
        chains = 8 if method == EIGHT else 1
        mcmc = MCMC(
            SGHMC(problem.model),
            num_warmup=1000,
            num_samples=DRAWS // chains,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(key), *args)
        return mcmc.get_samples(), diagnose(mcmc).ok
    if method in ("AutoRealNVPNormal", "AutoMixtureNormal"):
        rate = optax.cosine_decay_schedule(1e-2, FLOW_STEPS)
        guide, loss = AutoRealNVPNormal(problem.model), Trace_ELBO(8)
        if method == "AutoMixtureNormal":
            guide = AutoMixtureNormal(problem.model, num_components=8, covariance="full")
            loss = MixtureELBO()
        svi = SVI(problem.model, guide, optax.adam(rate), loss)
        result = svi.run(random.key(key), FLOW_STEPS, *args, progress_bar=False)
        draws = guide.sample_posterior(random.key(key + 1), result.params, sample_shape=(DRAWS,))
    else:
        guide = AutoParticles(problem.model, PARTICLES)
        optim = particle_step(PARTICLE_STEPS)
        svi = SVI(problem.model, guide, optim, RegularizedSVGD())
        result = svi.run(random.key(key), PARTICLE_STEPS, *args, progress_bar=False)
        draws = guide.particles(result.params)
    return draws, diagnose(svi, result, model_args=args).ok


def moments(x: Any, *, angle: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Those of draws, as in ``Moments``."""
    x = np.asarray(x, np.float64).reshape(len(x), -1)
    return of_angle(np.exp(1j * x).mean(0)) if angle else of_number(x.mean(0), (x**2).mean(0))


def on_grid(problem: Problem) -> Moments:
    """The sum over a grid of all latent sites, in constrained space."""
    data, places, axes = jnp.asarray(problem.data), {}, []
    trace = handlers.trace(handlers.seed(problem.model, 0)).get_trace(0.0, data)
    sites = [site for site in trace.values() if site["type"] == "sample"]
    for site in (site for site in sites if not site["is_observed"]):
        for k in range(jnp.size(site["value"])):
            places[site["name"], k] = len(axes)
            if site["name"] in problem.angles:
                axes.append((np.linspace(-np.pi, np.pi, 96, endpoint=False), 0.0))
            else:
                low, high = problem.ranges[site["name"]]
                log = np.linspace(np.log(low), np.log(high), 200) if low > 0 else None
                x = np.linspace(low, high, 200) if log is None else np.exp(log)
                axes.append((x, 0.0 if log is None else log))
    grid = np.stack(np.meshgrid(*(x for x, _ in axes), indexing="ij"), -1)
    weights = sum(np.meshgrid(*(np.zeros_like(x) + w for x, w in axes), indexing="ij"))
    shapes = {site["name"]: jnp.shape(site["value"]) for site in sites if not site["is_observed"]}

    def log_joint(x: Any) -> Any:
        values = {
            name: jnp.stack([x[places[name, k]] for k in range(int(np.prod(shape)))]).reshape(shape)
            for name, shape in shapes.items()
        }
        return log_density(problem.model, (0.0, data), {}, values)[0]

    points = grid.reshape(-1, len(axes))
    log_p = lax.map(jax.jit(log_joint), jnp.asarray(points), batch_size=4096)
    log_p = np.asarray(log_p, np.float64) + weights.ravel()
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    truth = {}
    for name, shape in shapes.items():
        x = points[:, [places[name, k] for k in range(int(np.prod(shape)))]]
        if name in problem.angles:
            truth[name] = of_angle(p @ np.exp(1j * x))
        else:
            truth[name] = of_number(p @ x, p @ x**2)
    return truth


def truth_of(problem: Problem) -> Moments:
    if problem.exact is not None:
        return problem.exact(problem.data)
    if problem.ranges is not None:
        return on_grid(problem)
    draws = nuts(problem, problem.away, 4).get_samples()
    turned = {n: x - (problem.away if n in problem.angles else 0) for n, x in draws.items()}
    return {name: moments(x, angle=name in problem.angles) for name, x in turned.items()}


def compare(
    problem: Problem, draws: Any, truth: Moments, turn: float
) -> tuple[float, float, float]:
    """The largest shift, and the smallest and the largest ratio of standard deviations."""
    shifts, ratios = [], []
    for name, (m0, unit, sd0) in truth.items():
        angle = name in problem.angles
        m, _, sd = moments(np.asarray(draws[name]) - (turn if angle else 0), angle=angle)
        shifts.append(abs(m - m0) / unit)
        ratios.append(sd / sd0)
    ratio = np.concatenate(ratios)
    return float(np.concatenate(shifts).max()), float(ratio.min()), float(ratio.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--only", nargs="*", choices=[*METHODS, "AutoMixtureNormal", EIGHT])
    parser.add_argument("--turn", type=float, default=float(np.pi))
    parser.add_argument("--key", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| model | method | shift | sds | right | ok | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in options.model:
        problem = PROBLEMS[name]
        truth = truth_of(problem)
        more = OF_SEVERAL_MODES.get(name, [])
        for method in options.only or [*METHODS, *more]:
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
