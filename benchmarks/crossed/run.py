"""One thing that is rare in each model, crossed with engines, kernels, guides and particles.

Nothing is tuned. Engines run for at most 50 steps (`StochasticEP` and `DSEP` for 200) and give
4,000 draws; kernels run for 2 chains of 200 + 2,500 draws, 20 transitions apart, on minibatches of
20 rows; guides train for 3,000 steps of Adam at 5e-3, falling along a cosine, the normal from the
mode of the proxy of such a minibatch and the flow (couplings, or splines of one latent number) by
its own default; there are 200 particles, for
500 steps. Where rows have latent sites of their own, all but the engines take the same posterior
without them. The truth is NUTS in double precision (4 chains of 2,000 + 10,000 draws), kept under
`--out`.

The columns are those of `benchmarks/newcomers/run.py`. `right`: each mean is within 0.2 sd and each
sd within 20 %. A row that was refused with a sentence is not right and not silent. `--x64` fits in
double precision.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

from numpyro_ext.diagnostics import InferenceWarning, diagnose
from numpyro_ext.ep import DSEP, EP, StochasticEP
from numpyro_ext.guides import AutoRealNVPNormal, AutoSplineNormal
from numpyro_ext.mcmc import SGHMC, SGLD, SGNHT, SVRG
from numpyro_ext.objectives import VRELBO, taylor_proxy
from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step

sys.path.append(str(Path(__file__).parents[1]))
from _shared.methods import by_engine, by_kernel, merged
from _shared.nuts import nuts
from _shared.verdicts import HEADS, Truth, Verdict, counted, errors, kept, moments
from crossed.models import MODELS, Crossed

DRAWS, STEPS = 4000, 3000
COLUMNS = ("model", "method", "worst mean", "sd ratio", *HEADS, "seconds")


def by_engine_of(engine: Callable[..., Any], steps: int, problem: Crossed) -> Any:
    fit = by_engine(engine(problem.model), problem.data, steps=steps)
    return fit.draws, fit.found


def by_kernel_of(kernel: Callable[..., Any], problem: Crossed) -> Any:
    model, data = common(problem)
    chains = by_kernel(kernel(model, steps_per_sample=20), data)
    return merged(chains.samples), chains.found


def by_guide(kind: str, problem: Crossed) -> Any:
    model, data = common(problem)
    proxy = None if problem.batch is None else taylor_proxy(model, *data)
    if kind == "normal":
        guide = AutoMultivariateNormal(model)
        start = {} if proxy is None else {"init_params": proxy.init_params(guide, *data)}
        loss = VRELBO(0.5, 10, proxy=proxy)
    else:
        trace = handlers.trace(handlers.seed(model, 0)).get_trace(*data)
        latents = (x for x in trace.values() if x["type"] == "sample" and not x["is_observed"])
        one = sum(np.size(x["value"]) for x in latents) == 1
        guide, start = (AutoSplineNormal if one else AutoRealNVPNormal)(model), {}
        loss = VRELBO(1.0, 4, proxy=proxy)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(5e-3, STEPS)), loss)
    result = svi.run(random.key(1), STEPS, *data, progress_bar=False, **start)
    draws = guide.sample_posterior(random.key(2), result.params, *data, sample_shape=(DRAWS,))
    return draws, diagnose(svi, result=result, model_args=data)


def by_particles(problem: Crossed) -> Any:
    model, data = common(problem._replace(batch=None))
    guide = AutoParticles(model, 200)
    svi = SVI(model, guide, particle_step(500), loss=RegularizedSVGD())
    result = svi.run(random.key(1), 500, *data, progress_bar=False)
    return guide.particles(result.params), diagnose(svi, result=result, model_args=data)


def common(problem: Crossed) -> tuple[Any, tuple]:
    """The model without latent sites in its rows, and the data."""
    model, data = problem.same or (problem.model, problem.data)
    return partial(model, batch=problem.batch), jax.tree.map(jnp.asarray, data)


METHODS: dict[str, Callable[[Crossed], Any]] = {
    "EP": partial(by_engine_of, EP, 50),
    "EP parallel": partial(by_engine_of, partial(EP, schedule="parallel"), 50),
    "StochasticEP": partial(by_engine_of, StochasticEP, 200),
    "DSEP": partial(by_engine_of, partial(DSEP, partition=4), 200),
    "SGHMC": partial(by_kernel_of, SGHMC),
    "SGLD": partial(by_kernel_of, SGLD),
    "SGNHT, SVRG": partial(by_kernel_of, partial(SGNHT, gradient=SVRG(100))),
    "VRELBO(0.5), normal": partial(by_guide, "normal"),
    "VRELBO(1), flow": partial(by_guide, "flow"),
    "particles": by_particles,
}


def line(name: str, method: str, problem: Crossed, truth: Truth) -> tuple[str, Verdict]:
    began, sizes = time.perf_counter(), ["-", "-"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", InferenceWarning)
        try:
            draws, found = METHODS[method](problem)
            error = errors(draws, truth)
            told = [str(w.message) for w in seen if issubclass(w.category, InferenceWarning)]
            first = [f"warning: {text.split(':')[0].split(', so ')[0]}" for text in told[:1]]
            verdict = Verdict(error.right(), found, "".join(first))
            sizes = [f"{error.mean:.2f}", error.spread]
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as refusal:
            told = f"refused: {' '.join(str(refusal).split())[:300]}"
            verdict = Verdict(False, told=told)
    cells = [name, method, *sizes, *verdict.cells, f"{time.perf_counter() - began:.1f}"]
    return f"| {' | '.join(cells)} |", verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("out/crossed"))
    parser.add_argument("--x64", action="store_true", help="fit in double precision")
    args = parser.parse_args()
    if args.x64:
        jax.config.update("jax_enable_x64", True)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    lines = []
    for name in args.model:
        problem = MODELS[name]()
        model, data = problem.truth or problem.same or (problem.model, problem.data)
        options = {"warmup": 2000, "draws": 10000, "x64": True}
        truth = moments(nuts(args.out, name, model, data, problem.compared, **options))
        for method in args.only:
            row = partial(line, name, method, problem, truth)
            lines.append(kept(args.out / ("x64" if args.x64 else "x32"), f"{name} {method}", row))
        jax.clear_caches()  # the programs of all models would be more than a process may hold
    print(counted(lines))


if __name__ == "__main__":
    main()
