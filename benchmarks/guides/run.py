"""Every guide on six posteriors, compared with NumPyro's: one learning rate, nothing tuned.

All are trained by Adam, 5e-3 falling along a cosine, for 5,000 steps of 4 particles, from three
seeds, and start around `init_to_median`. The row is that of the seed with the median ELBO.

- `ELBO`: mean and its Monte Carlo error over 20,000 draws, and the least of the seeds. The log
  evidence is its upper bound: 0 for banana and funnel, 1.878 for the two moons, -529.17 for German
  credit. `k-hat` is of the same draws.
- `KSD`: squared, unbiased, 1,000 draws, unconstrained; exact draws scatter around 0.
- `sd ratio`: standard deviation of 20,000 draws over the right one, mean [least, largest], from the
  closed form (of the funnel for v alone), or from NUTS in unconstrained space.
- `steps/s`: of the fastest block of 500 steps, in one compiled loop.

Rows without a bracket are trained by `Trace_ELBO()`; `path` is `VRELBO(1., gradient="stl")`,
`order 0.5` is `VRELBO(0.5, gradient="dreg")`, and `init_from` starts from an
`AutoMultivariateNormal` that is fitted before in the same way.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import time
from typing import Any, NamedTuple, cast
import warnings

from constructors import ROWS, Row
import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import ELBO, SVI
from numpyro.infer.initialization import init_to_median
from numpyro.infer.util import unconstrain_fn
import optax
from targets import NAMES, SHOOT_OUT, Target, exact_draws, make

from numpyro_ext.diagnostics import kernel_stein_discrepancy, pareto_khat
from numpyro_ext.guides import IntractableDensityError
from numpyro_ext.objectives import log_weights

STEPS, BLOCK, DRAWS = 5000, 500, 20_000
Sites = dict[str, Any]


class Fit(NamedTuple):
    """What one seed gave."""

    params: dict[str, Array]
    log_weights: np.ndarray | None
    """Or 500 values of a bound."""
    steps_per_second: float

    @property
    def elbo(self) -> float:
        return -np.inf if self.log_weights is None else float(np.mean(self.log_weights))


def train(
    guide: Any, objective: ELBO, target: Target, rate: float, seeds: int
) -> list[tuple[dict[str, Array], float]]:
    """Parameters and steps per second of each seed."""
    optim = optax.adam(optax.cosine_decay_schedule(rate, STEPS))
    svi = SVI(target.model, guide, optim, objective)
    states = [svi.init(random.key(seed), *target.data) for seed in range(seeds)]

    @jax.jit
    def block(state: Any, data: tuple) -> Any:
        return lax.scan(lambda s, _: (svi.update(s, *data)[0], None), state, length=BLOCK)[0]

    block(states[0], target.data)  # compiles
    found = []
    for state in states:
        seconds = []
        for _ in range(STEPS // BLOCK):
            began = time.perf_counter()
            state = jax.block_until_ready(block(state, target.data))
            seconds.append(time.perf_counter() - began)
        found.append((svi.get_params(state), BLOCK / min(seconds)))
    return found


def fits(row: Row, target: Target, rate: float, particles: int, seeds: int) -> tuple[Any, list]:
    """The guide and its fits, best first."""
    objective = row.objective(row.num_particles or particles)
    options: dict[str, Any] = {"init_loc_fn": init_to_median}
    if row.start is not None:
        normal = row.start(target.model, **options)
        options = {"init_from": (normal, train(normal, objective, target, rate, 1)[0][0])}
    guide = row.guide(target.model, **options)

    @jax.jit
    def weights(key: Array, params: Any, data: tuple) -> Array:
        options: Any = {"num_samples": DRAWS, "batch_size": 2000}
        return log_weights(key, params, target.model, guide, *data, **options)

    @jax.jit
    def bounds(params: Any, data: tuple) -> Array:
        def one(key: Array) -> Array:
            return -cast(Array, objective.loss(key, params, target.model, guide, *data))

        return lax.map(one, random.split(random.key(100), 500))

    found = []
    for params, speed in train(guide, objective, target, rate, seeds):
        try:
            lw = np.asarray(weights(random.key(100), params, target.data), float)
        except IntractableDensityError:
            lw = np.asarray(bounds(params, target.data), float) if row.is_bound else None
        found.append(Fit(params, lw, speed))
    return guide, sorted(found, key=lambda fit: np.nan_to_num(fit.elbo, nan=-np.inf), reverse=True)


def unconstrained(target: Target) -> Callable[[Sites], Sites]:
    """The latent sites among draws, in unconstrained space."""
    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        target.model(*target.data)
    latent = {n for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
    view = jax.jit(jax.vmap(partial(unconstrain_fn, target.model, target.data, {})))
    return lambda draws: view({n: x for n, x in draws.items() if n in latent})


def sd_ratios(draws: Sites, exact: Sites, target: Target) -> np.ndarray:
    known = target.sds
    if known is None:
        view = unconstrained(target)
        draws, known = view(draws), {n: np.std(x, 0) for n, x in view(exact).items()}
    ratios = [np.ravel(np.std(np.asarray(draws[n], float), 0) / sd) for n, sd in known.items()]
    return np.concatenate(ratios)


def discrepancy(draws: Sites, target: Target) -> float:
    options: Any = {"model": target.model, "model_args": target.data, "num_samples": 1000}
    return float(kernel_stein_discrepancy(draws, **options))


def cells(row: Row, target: Target, exact: Sites, args: argparse.Namespace) -> list[str]:
    guide, found = fits(row, target, args.rate, args.particles, args.seeds)
    fit = found[len(found) // 2]
    lw, elbo, khat = fit.log_weights, "-", "-"
    if lw is not None:
        value, least = fit.elbo, found[-1].elbo
        if args.shootout and target.log_evidence is not None:
            value, least = target.log_evidence - value, target.log_evidence - least
        elbo = f"{value:.3f} ± {lw.std() / lw.size**0.5:.3f} ({least:.3f})"
        if lw.size == DRAWS:
            khat = f"{float(pareto_khat(lw).khat):.2f}" if np.isfinite(lw).all() else "nan"
    sample = jax.jit(lambda key, p, x: guide.sample_posterior(key, p, *x, sample_shape=(DRAWS,)))
    draws = {n: np.asarray(x) for n, x in sample(random.key(200), fit.params, target.data).items()}
    ratio = sd_ratios(draws, exact, target)
    spread = f"{ratio.mean():.2f} [{ratio.min():.2f}, {ratio.max():.2f}]"
    more = [f"{name} {moment(draws):.2f}" for name, moment in target.moments.items()]
    line = [elbo, khat, f"{discrepancy(draws, target):.2g}", spread]
    return [*line, *(["; ".join(more)] if args.shootout else []), f"{fit.steps_per_second:,.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", nargs="*", choices=[*NAMES, "correlated"])
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names, default all")
    parser.add_argument("--shootout", action="store_true", help="3e-3, 16 particles, KL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("out/guides"))
    args = parser.parse_args()
    args.rate, args.particles = (3e-3, 16) if args.shootout else (5e-3, 4)
    heads = ["guide", "KL" if args.shootout else "ELBO", "k-hat", "KSD", "sd ratio"]
    heads += ["moments", "steps/s"] if args.shootout else ["steps/s"]
    for name in args.target or (SHOOT_OUT if args.shootout else NAMES):
        target = make(name, args.data_dir)
        exact = exact_draws(name, target, args.out)
        print(f"\n## {name}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
        for label, row in ROWS.items():
            if not any(part in label for part in args.only):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a guide is bad is what the table says
                line = cells(row, target, exact, args)
            print(f"| {label} | {' | '.join(line)} |", flush=True)
        latents = {site: jnp.asarray(x) for site, x in exact.items()}
        print(f"| exact draws | | | {discrepancy(latents, target):.2g} |" + " |" * (len(heads) - 4))


if __name__ == "__main__":
    main()
