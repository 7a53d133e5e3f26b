"""Parts of the data that two workers hold: the answer, the seconds, and the bytes that travel.

python benchmarks/ep/workers.py            # two processes of the standard library
python benchmarks/ep/workers.py --dask     # two workers of dask.distributed, then one is killed
python benchmarks/ep/workers.py --paper    # seconds of a step for 1,000 parts, on paper

A logistic regression with two coefficients, of 20 parts with 50,000 rows each, in files that the
workers alone open, in double precision; the serial engine reads all files itself.
"""

import argparse
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
import os
from pathlib import Path
import pickle
import signal
import tempfile
import threading
import time
import warnings

os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.ep import DistributedEP

PARTS, STEPS = 20, 6


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def open_part(folder, number):
    return tuple(np.load(Path(folder) / f"{name}{number}.npy") for name in "xy")


def write_parts(folder: str, rows: int) -> None:
    for number in range(PARTS):
        rng = np.random.default_rng(number)
        x = rng.standard_normal((rows, 2)) + number / PARTS
        y = (rng.random(rows) < 1 / (1 + np.exp(-x @ [1.0, -0.5]))).astype(int)
        np.save(Path(folder) / f"x{number}.npy", x)
        np.save(Path(folder) / f"y{number}.npy", y)


class Counting(Executor):
    """An executor that counts the bytes of its calls and answers."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.sent, self.received, self.calls = inner, 0, 0, 0

    def submit(self, *call):
        self.sent += len(pickle.dumps(call))
        self.calls += 1
        future = self.inner.submit(*call)

        def count(done):
            if done.exception() is None:
                self.received += len(pickle.dumps(done.result()))

        future.add_done_callback(count)
        return future


def timed(run):
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of so few steps
        result = run()
    return result, time.perf_counter() - start


def compare(name: str, executors: list[Counting], folder: str, expected) -> None:
    sources = [partial(open_part, folder, number) for number in range(PARTS)]
    ep = DistributedEP(model, sources, executor=executors, damping=1.0)
    result, seconds = timed(lambda: ep.run(jax.random.key(0), STEPS, progress_bar=False))
    off = max(
        float(jnp.max(jnp.abs(x - expected.params[key]) / jnp.max(jnp.abs(expected.params[key]))))
        for key, x in result.params.items()
    )
    calls = sum(x.calls for x in executors)
    sent, received = (sum(getattr(x, way) for x in executors) for way in ("sent", "received"))
    print(
        f"{name:<34}{seconds:>8.1f} s   {off:.1e}   {sent / calls:,.0f} + {received / calls:,.0f}"
        f" bytes a call, {calls} calls",
        flush=True,
    )


def on_paper() -> None:
    """A step is its slowest part and the parameters of all parts on one line: by simulation, with
    lognormal seconds of a part (median 1) and 1 Gbit/s."""
    rng = np.random.default_rng(0)
    print(f"{'parts':>6}{'workers':>9}{'d':>6}{'seconds of a step':>19}{'of these, lines':>17}")
    for parts, workers, d in ((20, 2, 10), (1000, 1000, 10), (1000, 1000, 300), (1000, 100, 300)):
        seconds = np.exp(0.3 * rng.standard_normal((200, workers, parts // workers))).sum(2).max(1)
        line = 2 * parts * 8 * (d**2 + d) / 125e6
        print(f"{parts:>6}{workers:>9}{d:>6}{seconds.mean() + line:>19.2f}{line:>17.2f}")


def main(use_dask: bool, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_parts(folder, rows)
        parts = [open_part(folder, number) for number in range(PARTS)]
        whole = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        labels = np.arange(PARTS).repeat(rows)
        serial = DistributedEP(model, labels, damping=1.0)
        expected, seconds = timed(
            lambda: serial.run(
                jax.random.key(0), STEPS, *map(jnp.asarray, whole), progress_bar=False
            )
        )
        print(f"{'one process, all rows':<34}{seconds:>8.1f} s", flush=True)
        if not use_dask:
            pools = [ProcessPoolExecutor(1, get_context("spawn")) for _ in range(2)]
            compare("two processes", list(map(Counting, pools)), folder, expected)
            for pool in pools:
                pool.shutdown()
            return
        from dask.distributed import Client, LocalCluster

        with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            with Client(cluster) as client:
                pool = Counting(client.get_executor())
                compare("two Dask workers", [pool], folder, expected)
                pool = Counting(client.get_executor())
                victim = next(iter(client.run(os.getpid).values()))

                def kill():
                    while pool.calls < 3 * PARTS:
                        time.sleep(0.05)
                    os.kill(victim, signal.SIGKILL)

                threading.Thread(target=kill, daemon=True).start()
                compare("two Dask workers, one killed", [pool], folder, expected)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dask", action="store_true")
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--rows", type=int, default=50_000, help="of each part")
    options = parser.parse_args()
    on_paper() if options.paper else main(options.dask, options.rows)
