"""The rows of `run.py` by libraries that do not live beside JAX: Pyro, posteriors and PyMC.

It runs in an environment of their own, and writes `elsewhere.csv`, from which `run.py` makes the
second table of its page:

    python -m venv build/peers && build/peers/bin/pip install pyro-ppl posteriors pymc
    build/peers/bin/python benchmarks/peers/elsewhere.py

Model, batch, particles and single precision are those of `run.py`. Each library has one thread, its
steps are called as its own documentation does, and a time is the shortest of the repeats.
"""

import argparse
from collections.abc import Callable, Iterator
import csv
from datetime import date
from importlib.metadata import version
import os
from pathlib import Path
import time
from typing import Any
import warnings

import numpy as np
import posteriors
import pymc
import pyro
import pyro.distributions as dist
from pyro.infer import SVGD, SVI, RBFSteinKernel, RenyiELBO, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
import pytensor
import torch

Step = Callable[[], Any]
TEN = "a step, logistic regression of 500 rows, d = 20, 10 particles"
ENSEMBLE = "a step, 100 particles, d = 50, 1,000 rows"


def make_data(rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, dim))
    y = rng.random(rows) < 1 / (1 + np.exp(-x @ rng.standard_normal(dim)))
    return x.astype(np.float32), y.astype(np.float32)


def of_kernels() -> Iterator[tuple[str, str, Step]]:
    """Transitions of posteriors; it leaves the minibatch to the user."""
    for rows in (1000, 1_000_000):
        x, y = map(torch.as_tensor, make_data(rows, 10))
        generator = torch.Generator().manual_seed(0)

        def log_posterior(w: Any, batch: Any, rows: int = rows) -> tuple[Any, Any]:
            x, y = batch
            fit = torch.distributions.Bernoulli(logits=x @ w, validate_args=False).log_prob(y)
            return fit.mean() - 0.5 * (w @ w) / rows, torch.tensor(0.0)

        for name in ("sgld", "sghmc"):
            rate = {"lr": 1e-6 * rows, "temperature": 1 / rows}
            kernel = getattr(posteriors.sgmcmc, name).build(log_posterior, **rate)
            box = [kernel.init(torch.zeros(10))]

            def step(kernel=kernel, box=box, x=x, y=y, rows=rows, generator=generator):
                idx = torch.randint(0, rows, (100,), generator=generator)
                box[0], _ = kernel.update(box[0], (x[idx], y[idx]))

            work = f"a transition, batches of 100 of {rows:,} rows, d = 10"
            yield work, f"posteriors, {name}", step


def regression(x: Any, y: Any) -> None:
    w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        logits = (x @ w.unsqueeze(-1)).squeeze(-1)
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def of_pyro() -> Iterator[tuple[str, str, Step]]:
    pyro.enable_validation(False)
    data = tuple(map(torch.as_tensor, make_data(500, 20)))
    bounds = {
        "RenyiELBO(0.5)": RenyiELBO(0.5, num_particles=10, vectorize_particles=True),
        "RenyiELBO(0)": RenyiELBO(0, num_particles=10, vectorize_particles=True),
        "Trace_ELBO": Trace_ELBO(num_particles=10, vectorize_particles=True),
    }
    for name, loss in bounds.items():
        pyro.clear_param_store()
        svi = SVI(regression, AutoNormal(regression), pyro.optim.Adam({"lr": 1e-3}), loss)
        yield TEN, f"Pyro, {name}", lambda svi=svi: svi.step(*data)
    pyro.clear_param_store()
    many = tuple(map(torch.as_tensor, make_data(1000, 50)))
    adam = pyro.optim.Adam({"lr": 0.01})
    field = SVGD(regression, RBFSteinKernel(), adam, 100, 1, mode="multivariate")
    yield ENSEMBLE, "Pyro, SVGD", lambda: field.step(*many)


def of_pymc() -> Iterator[tuple[str, str, Step]]:
    """The compiled step of ADVI and of SVGD, whose particles take all rows too."""
    pytensor.config.floatX = "float32"
    for work, rows, dim in ((TEN, 500, 20), (ENSEMBLE, 1000, 50)):
        x, y = make_data(rows, dim)
        with pymc.Model():
            w = pymc.Normal("w", 0, 1, shape=dim)
            pymc.Bernoulli("y", logit_p=pymc.math.dot(x, w), observed=y.astype(int))
            if work == TEN:
                step = pymc.ADVI().objective.step_function(obj_n_mc=10)
                yield work, "PyMC, ADVI", step
            else:
                step = pymc.SVGD(n_particles=100).objective.step_function()
                yield work, "PyMC, SVGD", step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    used = ("pyro-ppl", "posteriors", "pymc", "torch")
    about = f"{date.today()}, {os.cpu_count()} cores, " + ", ".join(
        f"{name} {version(name)}" for name in used
    )
    rows = [("work", "instead", "microseconds", about)]
    for part in (of_kernels, of_pyro, of_pymc):
        for work, name, step in part():
            step()
            times = []
            for _ in range(args.repeats):
                began = time.perf_counter()
                for _ in range(args.steps):
                    step()
                times.append((time.perf_counter() - began) / args.steps)
            rows.append((work, name, f"{1e6 * min(times):.0f}", ""))
            print(*rows[-1], sep=" | ", flush=True)
    with args.out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
