"""Guides that start at the mode, on the models of `run.py`: how many of them are right then?

The normal at the mode is that of `find_modes(model, *args).whitening`, or on minibatches that of
`taylor_proxy`. `AutoMultivariateNormal` starts from it, and the flows by `init_from`. The loss is
`VRELBO(1., 4, gradient="stl")`, on minibatches with the proxy. Adam runs at 2e-3 in pieces of 1,000
steps until the loss has stopped falling: until its mean over a piece is no longer below that of the
piece before by two of their standard errors, but 20 pieces at most. Then 2,000 steps follow whose
rate falls to zero along a cosine.

The truth, the columns and the folder `--out` are those of `run.py`; `steps` are the steps taken.
"""

import argparse
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any
import warnings

import jax
from jax import random
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.guides import AutoRealNVPNormal, AutoSplineNormal
from numpyro_ext.objectives import VRELBO, taylor_proxy
from numpyro_ext.optim import find_modes

sys.path.append(str(Path(__file__).parents[1]))
from _shared.unseen_models import MODELS, Unseen
from _shared.verdicts import HEADS, Errors, Line, Truth, Verdict, counted, errors, kept

FLOWS = {flow.__name__: flow for flow in (AutoRealNVPNormal, AutoSplineNormal)}
METHODS = ["AutoMultivariateNormal", *FLOWS]
RATE, PIECE, MOST, LAST, DRAWS = 2e-3, 1000, 20, 2000, 4000
COLUMNS = ("model", "guide", "steps", "worst mean", "sd ratio", *HEADS, "seconds")


def settled(losses: list[np.ndarray]) -> bool:
    """Whether the last piece is not clearly below the one before."""
    if len(losses) < 2:
        return False
    means, errors = zip(*((x.mean(), x.std() / len(x) ** 0.5) for x in losses[-2:]), strict=True)
    return bool(means[0] - means[1] < 2 * np.hypot(*errors))


def fit(problem: Unseen, method: str, truth: Truth) -> tuple[int, Errors, Verdict]:
    model, data = problem.batched, problem.rows
    normal: Any = AutoMultivariateNormal(model)
    proxy = None if problem.batch is None else taylor_proxy(model, *data)
    if proxy is None:
        start = find_modes(model, *data).whitening.init_params(normal, *data)
    else:
        start = proxy.init_params(normal)
    guide, params = normal, start
    if method in FLOWS:
        guide, params = FLOWS[method](model, init_from=(normal, start)), None
    loss = VRELBO(1.0, 4, gradient="stl", proxy=proxy)
    svi, losses, state = SVI(model, guide, optax.adam(RATE), loss), [], None
    while len(losses) < MOST and not settled(losses):
        how = {"init_state": state, "init_params": None if losses else params}
        result = svi.run(random.key(1), PIECE, *data, progress_bar=False, **how)
        state, params = result.state, result.params
        losses.append(np.asarray(result.losses, np.float64))
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(RATE, LAST)), loss)
    result = svi.run(random.key(2), LAST, *data, init_params=params, progress_bar=False)
    draw = jax.jit(lambda k, p, x: guide.sample_posterior(k, p, *x, sample_shape=(DRAWS,)))
    error = errors(jax.device_get(draw(random.key(3), result.params, data)), truth)
    found = diagnose(svi, result=result, model_args=data)
    return len(losses) * PIECE + LAST, error, Verdict(error.right(), found)


def line(name: str, method: str, problem: Unseen, truth: Truth) -> tuple[str, Verdict]:
    began, sizes = time.perf_counter(), ["-", "-", "-"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            steps, error, verdict = fit(problem, method, truth)
            sizes = [f"{steps:,}", f"{error.mean:.2f}", error.spread]
        except (ValueError, RuntimeError) as refusal:
            verdict = Verdict(False, told=f"refused: {' '.join(str(refusal).split())}")
    cells = [name, method, *sizes, *verdict.cells, f"{time.perf_counter() - began:.1f}"]
    return f"| {' | '.join(cells)} |", verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", default=METHODS, choices=METHODS, help="guides")
    parser.add_argument("--out", type=Path, default=Path("out/newcomers"))
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    lines: list[Line] = []
    for name in args.model:
        problem = MODELS[name]()
        truth = problem.truth(args.out, name)
        for method in args.only:
            row = partial(line, name, method, problem, truth)
            lines.append(kept(args.out, f"mode {name} {method}", row))
    right = sum(x.right for x in lines)
    print(counted(lines), f"Right: {right}.")


if __name__ == "__main__":
    main()
