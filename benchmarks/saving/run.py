"""Rows of every day, each day in a process of its own: seconds, and programs that are compiled.

python benchmarks/saving/run.py

A day loads the fit of the day before, takes 500 new rows of a logistic regression with four
coefficients, and saves its own fit. It does so without a folder of compiled programs, and with one
that is empty on the first day.
"""

import argparse
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.ep import StochasticEP
from numpyro_ext.saving import load, save

DAYS = 4


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
    with numpyro.plate("rows", len(x)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def run_day(folder: Path, number: int) -> None:
    counts = {"hits": 0, "misses": 0}

    def count(event: str, **options: object) -> None:
        for name in counts:
            counts[name] += event == f"/jax/compilation_cache/cache_{name}"

    jax.monitoring.register_event_listener(count)
    rng = np.random.default_rng(number)
    x = rng.standard_normal((500, 4))
    y = rng.random(500) < 1 / (1 + np.exp(-x @ [1.0, -0.5, 0.2, 0.0]))
    rows = jnp.asarray(x), jnp.asarray(y, int)
    prior = None
    if number > 0:
        yesterday = StochasticEP(model, batch_size=500)
        prior = yesterday, load(folder / "day.npz", yesterday, *rows)
    engine = StochasticEP(model, batch_size=500, prior=prior)
    result = engine.run(jax.random.key(number), 12, *rows, progress_bar=False)
    save(folder / "day.npz", engine, result)
    print(counts["hits"], counts["misses"])


def main() -> None:
    print(f"{'day':>4}{'seconds':>10}{'of a processor':>16}{'loaded':>8}{'compiled':>10}")
    for cached in (True, False):
        print("with a folder of compiled programs" if cached else "without")
        with tempfile.TemporaryDirectory() as folder:
            environment = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
            if cached:
                environment["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
                environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            for day in range(DAYS):
                command = [sys.executable, __file__, "--day", str(day), "--folder", folder]
                start, before = time.perf_counter(), os.times()
                out = subprocess.run(command, env=environment, check=True, capture_output=True)
                seconds, after = time.perf_counter() - start, os.times()
                spent = after[2] + after[3] - before[2] - before[3]
                hits, misses = map(int, out.stdout.split())
                loaded, compiled = (hits, misses) if cached else ("", "all")
                print(f"{day + 1:>4}{seconds:>10.1f}{spent:>16.1f}{loaded:>8}{compiled:>10}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--day", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.day is None:
        main()
    else:
        run_day(options.folder, options.day)
