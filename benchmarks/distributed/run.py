"""Parts of the data in files that two workers of Dask open: seconds, bytes and a killed worker.

python benchmarks/distributed/run.py [--rows 50000] [--parts 20]

A logistic regression with 4 coefficients, in double precision. The files are written by a process
of their own, and so is the fit of one process with all rows. This process opens none.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
import os
from pathlib import Path
import pickle
import signal
import subprocess
import sys
import tempfile
from threading import Timer
import time
from typing import Any
import warnings

import cloudpickle
import dask
from distributed import Client, LocalCluster
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.ep import DistributedEP, ImportanceSampling

D, SWEEPS, KEY = 4, 4, 0
LINK = 1e9 / 8
"""Bytes that a link of one gigabit sends in a second."""


def model(x: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    with numpyro.plate("rows", len(x)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def opened(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with path.with_suffix(".opened").open("a") as log:
        print(os.getpid(), file=log)
    with np.load(path) as rows:
        return rows["x"], rows["y"]


def engine(partition: Any, **options: Any) -> DistributedEP:
    projection = ImportanceSampling(num_samples=32)
    return DistributedEP(model, partition, projection=projection, max_rank=0, **options)


def write(folder: Path, parts: int, rows: int) -> None:
    """The files, and the answer of one process that has all of them."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(D)
    data = []
    for j in range(parts):
        x = rng.standard_normal((rows, D))
        y = (rng.random(rows) < 1 / (1 + np.exp(-x @ w))).astype(np.int32)
        np.savez(folder / f"part{j}.npz", x=x, y=y)
        data.append((x, y))
    x, y = (jax.numpy.asarray(np.concatenate(a)) for a in zip(*data, strict=True))
    ep = engine(np.repeat(np.arange(parts), rows))
    state, seconds = sweeps(ep, x, y)
    np.savez(folder / "alone.npz", seconds=seconds, **ep.get_params(state))


def sweeps(ep: DistributedEP, *args: Any) -> tuple[Any, float]:
    """The state after some sweeps, and the seconds of one, without the first, which compiles."""
    plan, state, arrays = ep.begin(jax.random.key(KEY), None, args, {})
    state, _ = jax.block_until_ready(ep.sweep(plan, state, arrays))
    start = time.perf_counter()
    for _ in range(SWEEPS - 1):
        state, _ = jax.block_until_ready(ep.sweep(plan, state, arrays))
    return state, (time.perf_counter() - start) / (SWEEPS - 1)


def timed(task: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    answer = task(*args)
    return time.perf_counter() - start, answer


class Counting(Executor):
    """An executor that counts the bytes of tasks and answers, and the seconds of tasks."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.sent: list[int] = []
        self.received: list[int] = []
        self.seconds: list[float] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        self.sent.append(len(cloudpickle.dumps((fn, args))))
        whole: Future = Future()

        def pass_on(future: Future) -> None:
            try:
                seconds, answer = future.result()
            except Exception as error:
                whole.set_exception(error)
                return
            self.seconds.append(seconds)
            self.received.append(len(pickle.dumps(answer)))
            whole.set_result(answer)

        self.executor.submit(timed, fn, *args, **kwargs).add_done_callback(pass_on)
        return whole


def cluster() -> LocalCluster:
    ports = {"dashboard_address": None, "worker_dashboard_address": None}
    return LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", **ports
    )


def executors(client: Client) -> list[Counting]:
    """One for each worker, whose parts another one takes if it dies."""
    options = {"pure": False, "allow_other_workers": True}
    addresses = client.run(os.getpid)
    return [Counting(client.get_executor(workers=[a], **options)) for a in addresses]


def largest(params: Any, expected: Any) -> float:
    """The largest difference of the mean and of the factor of the covariance."""
    return max(float(np.max(np.abs(params[k] - expected[k]))) for k in params)


def with_a_killed_worker(sources: list[Any], **options: Any) -> tuple[Any, list[str]]:
    """The parameters after all sweeps, in the second of which a worker was killed; what is said."""
    with cluster() as workers, Client(workers) as client:
        ep = engine(sources, executor=executors(client), **options)
        first = state = ep.init(jax.random.key(KEY))
        for sweep in range(SWEEPS):
            if sweep == 1:
                pid = list(client.run(os.getpid).values())[1]
                Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
            state, _ = ep.update(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ep.warn(first, state, SWEEPS)
        told = [str(w.message) for w in caught if "failed" in str(w.message)]
        return ep.get_params(state), told


def main(parts: int, rows: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--write", name]
        sizes = ["--parts", str(parts), "--rows", str(rows)]
        subprocess.run([*command, *sizes], check=True)
        paths = [folder / f"part{j}.npz" for j in range(parts)]
        size = sum(path.stat().st_size for path in paths)
        sources = [partial(opened, path) for path in paths]
        with np.load(folder / "alone.npz") as alone:
            expected = {k: alone[k] for k in alone if k != "seconds"}
            print(f"one process: {float(alone['seconds']):.2f} s a sweep of {parts} parts")
        with cluster() as workers, Client(workers) as client:
            pools = executors(client)
            ep = engine(sources, executor=pools)
            state, seconds = sweeps(ep)
            # Without the tasks that open the parts, and the sweep that compiles.
            tasks = np.concatenate([pool.seconds[parts:] for pool in pools])
            pids = set(map(str, client.run(os.getpid).values()))
        sent, received = (
            np.mean([x for pool in pools for x in getattr(pool, name)[parts:]])
            for name in ("sent", "received")
        )
        by = {pid for path in paths for pid in path.with_suffix(".opened").read_text().split()}
        print(f"two workers: {seconds:.2f} s a sweep; a part {tasks.mean():.2f} s")
        print(f"files opened by the workers alone: {by == pids and str(os.getpid()) not in by}")
        print(f"largest difference: {largest(ep.get_params(state), expected):.1e}")
        print(f"bytes of a part and sweep: {sent:.0f} sent, {received:.0f} answered")
        print(f"bytes of the files: {size / parts:.0f} a part")

        params, told = with_a_killed_worker(sources)
        print(f"a worker killed: largest difference {largest(params, expected):.1e}; {told}")
        with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
            params, told = with_a_killed_worker(sources, lost="keep")
            print(f"its parts lost for a sweep: {largest(params, expected):.1e}; {told}")

        rng = np.random.default_rng(0)
        slowest = rng.choice(tasks, (1000, 1000)).max(1).mean()
        link = 1000 * (sent + received) / LINK
        print(
            f"on paper, 1,000 parts on 1,000 workers: {slowest:.2f} s of the slowest part,"
            f" {link:.2f} s of {1000 * (sent + received) / 1e6:.1f} MB on a link of 1 Gbit/s"
        )


if __name__ == "__main__":
    os.environ["JAX_ENABLE_X64"] = "1"  # of the workers
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=20)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.write is None:
        main(options.parts, options.rows)
    else:
        write(options.write, options.parts, options.rows)
