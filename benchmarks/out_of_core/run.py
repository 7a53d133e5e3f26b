"""Fits and chains on rows in a file that is larger than memory.

The file has ten correlated columns of unequal scale and a Bernoulli response, and is written in
pieces. The exact answer is the mode, by Newton in double precision in passes over the file, with
the inverse curvature there: with so many rows the posterior is normal to the digits shown.

Each method is a process of its own, with compilation and the search for a mode in its seconds.
*Ready* are the seconds until its first step can be taken, after a search for the mode or a proxy.
Memory is the largest of the process without pages of the file (`RssAnon`).

    python benchmarks/out_of_core/run.py --rows 1e6
    python benchmarks/out_of_core/run.py --rows 1e8 --dir /some/disk
    python benchmarks/out_of_core/run.py --beside-arrays    # the rows in memory, at 10^6 rows
    python benchmarks/out_of_core/run.py --reads            # rows and blocks, from memory and disk
    python benchmarks/out_of_core/picture.py --dir /some/disk
"""

import argparse
from contextlib import contextmanager
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import numpy as np

COLUMNS, BATCH, PIECE = 10, 256, 100_000
SCALES = np.geomspace(0.1, 10.0, COLUMNS)


def make_file(folder, rows):
    """`x.npy` and `y.npy`, unless they are there, written in pieces."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    root = np.linalg.cholesky(0.9 * np.ones((COLUMNS, COLUMNS)) + 0.1 * np.eye(COLUMNS))
    w = np.random.default_rng(0).standard_normal(COLUMNS) / SCALES / 2
    shapes = {"x.npy": (rows, COLUMNS), "y.npy": (rows,)}
    types = {"x.npy": np.float32, "y.npy": np.uint8}
    for name, shape in shapes.items():
        np.lib.format.open_memmap(folder / name, "w+", types[name], shape).flush()
    with open(folder / "x.npy", "r+b") as x_file, open(folder / "y.npy", "r+b") as y_file:
        for file, name in ((x_file, "x.npy"), (y_file, "y.npy")):
            mapped = np.load(folder / name, mmap_mode="r")
            file.seek(mapped.offset)
        for begin in range(0, rows, PIECE):
            rng = np.random.default_rng([1, begin])
            num = min(PIECE, rows - begin)
            x = (rng.standard_normal((num, COLUMNS)) @ root.T * SCALES).astype(np.float32)
            x.tofile(x_file)
            (rng.random(num) < 1 / (1 + np.exp(-x @ w))).astype(np.uint8).tofile(y_file)
    (folder / "done").touch()


def exact(folder):
    """The mode and the standard deviations there, by Newton steps of passes over the file."""
    kept = folder / "exact.npy"
    if kept.exists():
        return np.load(kept)
    x, y = read_columns(folder)
    w = np.zeros(COLUMNS)
    for last in (min(len(x), 100_000), len(x)):
        for _ in range(20):
            g, H = w / 100, np.eye(COLUMNS) / 100  # of the prior N(0, 10)
            for begin in range(0, last, PIECE):
                a = np.asarray(x[begin : begin + PIECE], np.float64)
                p = 1 / (1 + np.exp(-a @ w))
                g = g + a.T @ (p - y[begin : begin + PIECE])
                H = H + (a.T * (p * (1 - p))) @ a
            step = np.linalg.solve(H, g)
            w = w - step
            if step @ H @ step < 1e-8:
                break
    answer = np.stack([w, np.sqrt(np.diag(np.linalg.inv(H)))])
    np.save(kept, answer)
    return answer


@contextmanager
def peak_memory():
    """A list that gets the largest anonymous memory, in MB, of the block."""
    largest, stop = [0.0], threading.Event()

    def watch():
        while not stop.wait(0.02):
            lines = Path("/proc/self/status").read_text().splitlines()
            kB = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            largest[0] = max(largest[0], kB / 1e3)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield largest
    stop.set()
    thread.join()


def model(x, y, batch=BATCH):
    import numpyro
    import numpyro.distributions as dist

    w = numpyro.sample("w", dist.Normal(0, 10).expand([COLUMNS]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def by_sghmc(x, y, ready):
    from jax import random
    from numpyro.infer import MCMC

    from numpyro_ext.mcmc import SGHMC

    kernel = SGHMC(model, steps_per_sample=20)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=2000, progress_bar=False)
    mcmc.warmup(random.key(0), x, y)
    ready(2000 * 20)
    mcmc.run(random.key(1), x, y)
    draws = np.asarray(mcmc.get_samples()["w"], np.float64)
    return draws.mean(0), draws.std(0)


def by_flow(x, y, ready):
    import jax
    from jax import random
    from numpyro.infer import SVI
    import optax

    from numpyro_ext.guides import AutoRealNVPNormal
    from numpyro_ext.objectives import VRELBO, taylor_proxy

    proxy = taylor_proxy(model, x, y)
    guide = AutoRealNVPNormal(model, init_from=proxy)
    adam = optax.adam(optax.cosine_decay_schedule(2e-3, 1000))
    svi = SVI(model, guide, adam, VRELBO(1.0, 4, proxy=proxy))
    svi.init(random.key(0), x, y)
    ready(1000)
    fit = svi.run(random.key(0), 1000, x, y, progress_bar=False)
    sample = jax.jit(lambda key, p: guide.sample_posterior(key, p, sample_shape=(20_000,)))
    draws = np.asarray(sample(random.key(1), fit.params)["w"], np.float64)
    return draws.mean(0), draws.std(0)


def by_particles(x, y, ready):
    from jax import random
    from numpyro.infer import SVI

    from numpyro_ext.objectives import taylor_proxy
    from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step

    proxy = taylor_proxy(model, x, y)
    guide = AutoParticles(model, 200, init_from=proxy)
    svi = SVI(model, guide, particle_step(500), RegularizedSVGD(proxy=proxy))
    svi.init(random.key(0), x, y)
    ready(500)
    fit = svi.run(random.key(0), 500, x, y, progress_bar=False)
    draws = np.asarray(guide.particles(fit.params)["w"], np.float64)
    return draws.mean(0), draws.std(0)


def by_ep(x, y, ready):
    from jax import random

    from numpyro_ext.ep import StochasticEP
    from numpyro_ext.objectives import taylor_proxy

    proxy = taylor_proxy(model, x, y)
    engine = StochasticEP(model, batch_size=BATCH, proxy=proxy)
    engine.init(random.key(0), x, y)
    ready(500)
    fit = engine.run(random.key(0), 500, x, y, progress_bar=False)
    normal = engine.guide.get_posterior(fit.params)
    return np.asarray(normal.mean), np.asarray(normal.variance) ** 0.5


def by_numpyro(x, y, ready, seconds):
    """NumPyro alone: a loader of random rows gives the model B of them, the plate scales them."""
    import jax
    from jax import random
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoMultivariateNormal
    import optax

    rows = len(x)

    def of_batch(x, y):
        w = numpyro.sample("w", dist.Normal(0, 10).expand([COLUMNS]).to_event(1))
        with numpyro.plate("rows", rows, subsample_size=len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def loader():
        rng = np.random.default_rng(0)
        while True:
            i = np.sort(rng.integers(0, rows, BATCH))
            yield x[i], y[i]

    guide, batches = AutoMultivariateNormal(of_batch), loader()

    def svi_at(rate):
        return SVI(of_batch, guide, optax.adam(rate), Trace_ELBO())

    began, svi, steps = time.perf_counter(), svi_at(0.01), 0
    state = svi.init(random.key(0), *next(batches))

    @jax.jit
    def update(state, rate, batch):
        now = svi_at(rate)
        now.constrain_fn = svi.constrain_fn
        return now.update(state, *batch)

    ready(0)
    while (share := 1 - (time.perf_counter() - began) / seconds) > 0:
        state, loss = update(state, 0.01 * share, next(batches))
        steps += 1
        if steps % 100 == 0:
            loss.block_until_ready()
    normal = guide.get_posterior(svi.get_params(state))
    return np.asarray(normal.mean), np.asarray(normal.variance) ** 0.5, steps


METHODS = {
    "SGHMC": by_sghmc,
    "AutoRealNVPNormal, proxy": by_flow,
    "RegularizedSVGD, proxy": by_particles,
    "StochasticEP, proxy": by_ep,
}


def read_columns(folder):
    """The two columns, mapped."""
    return [np.load(Path(folder) / name, mmap_mode="r") for name in ("x.npy", "y.npy")]


def run_method(name, folder, seconds):
    """One method in this process, whose line is printed as JSON."""
    began = time.perf_counter()
    with peak_memory() as largest, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x, y = read_columns(folder)
        marks = []

        def ready(steps):
            marks.extend([time.perf_counter() - began, steps])

        if name == "NumPyro":
            mean, sd, marks_steps = by_numpyro(x, y, ready, seconds)
            marks[1] = marks_steps
        else:
            from numpyro_ext.data import HostArray

            mean, sd = METHODS[name](HostArray(x), HostArray(y), ready)
    total = time.perf_counter() - began
    right, right_sd = exact(folder)
    ratio = sd / right_sd
    line = {
        "mean": float(np.max(np.abs(mean - right) / right_sd)),
        "low": float(ratio.min()),
        "high": float(ratio.max()),
        "ready": marks[0],
        "step": 1e3 * (total - marks[0]) / max(marks[1], 1),
        "total": total,
        "MB": largest[0],
        "said": sorted({str(w.message) for w in said if "numpyro_ext" in str(w.category)}),
    }
    print(json.dumps(line))


def beside_arrays(folder):
    """Milliseconds with rows in the file and in memory, in turns, the best of five."""
    import jax
    from jax import lax, random
    import jax.numpy as jnp
    from numpyro.infer import SVI
    import optax

    from numpyro_ext.data import HostArray
    from numpyro_ext.guides import AutoRealNVPNormal
    from numpyro_ext.mcmc import SGHMC, SGLD, ControlVariate
    from numpyro_ext.objectives import VRELBO, taylor_proxy

    files = read_columns(folder)
    kinds = {"file": tuple(map(HostArray, files)), "array": tuple(map(jnp.asarray, files))}
    proxy = taylor_proxy(model, *kinds["array"])
    guide = AutoRealNVPNormal(model, init_from=proxy)

    def chain_on(data, **options):
        kernel = SGHMC(model, 1e-5, gradient=ControlVariate(proxy.center), **options)
        state = kernel.init(random.key(0), 0, proxy.unravel(proxy.normal.center), data)
        draws = jax.jit(lambda s: lax.fori_loop(0, 50, lambda _, s: kernel.sample(s, data), s))
        return draws, state, 50 * kernel.steps_per_sample

    def fit_on(data):
        svi = SVI(model, guide, optax.adam(1e-3), VRELBO(1.0, 4, proxy=proxy))
        state = svi.init(random.key(0), *data)
        many = jax.jit(lambda s: lax.fori_loop(0, 100, lambda _, s: svi.update(s, *data)[0], s))
        return many, state, 100

    def pass_on(data):
        kernel = SGLD(model, 1e-5)
        kernel.init(random.key(0), 0, proxy.unravel(proxy.normal.center), data)
        potential = kernel.potential(data, {})
        z = proxy.unravel(proxy.normal.center)
        return jax.jit(potential.full_value_and_grad), z, 1

    print("| milliseconds | file | array | ratio |\n|---|---|---|---|")
    for name, make in {
        "a transition of SGHMC(steps_per_sample=20)": lambda d: chain_on(d, steps_per_sample=20),
        "a transition of SGHMC": chain_on,
        "a step of AutoRealNVPNormal, VRELBO(1., 4), proxy": fit_on,
        "a gradient of all rows": pass_on,
    }.items():
        runs = {kind: make(data) for kind, data in kinds.items()}
        best = dict.fromkeys(kinds, np.inf)
        for _ in range(6):  # the first one compiles
            for kind, (fn, state, num) in runs.items():
                began = time.perf_counter()
                jax.block_until_ready(fn(state))
                best[kind] = min(best[kind], 1e3 * (time.perf_counter() - began) / num)
        file, array = best["file"], best["array"]
        print(f"| {name} | {file:.3f} | {array:.3f} | {file / array:.2f} |", flush=True)


def times_of_reads(folder):
    """Milliseconds of a read of 256 rows, one by one and in blocks of neighbours: from pages in
    memory, and from a disk, after the system has dropped the file. The first read of five, by which
    it is known that rows come from the disk, is left out."""
    from numpyro_ext.data import HostArray

    rng = np.random.default_rng(0)

    def mapped(width, cold):
        columns = {}
        for name in ("x", "y"):
            file = folder / f"{name}.npy"
            if cold:
                with open(file) as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            column = np.load(file, mmap_mode="r")
            column = column[: len(column) // width * width]
            columns[name] = column.reshape(-1, width, *column.shape[1:])
            if not cold:
                columns[name].view(np.ndarray).max()
        return HostArray(columns)

    for name, width in (("256 single rows", 1), ("4 blocks of 64", 64), ("a block of 256", 256)):
        means = []
        for cold in (False, True):
            times = []
            for _ in range(5):
                rows = mapped(width, cold)
                for k, index in enumerate(rng.integers(0, len(rows), (5, BATCH // width))):
                    began = time.perf_counter()
                    rows.read(index)
                    if k > 0:
                        times.append(1e3 * (time.perf_counter() - began))
                del rows
            means.append(np.mean(times))
        yield name, *means


def in_a_process(script, *options):
    """The JSON that a script prints with these options."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--dir", type=Path, help="where the file is made, and kept")
    parser.add_argument("--only", nargs="*", default=[*METHODS, "NumPyro"])
    parser.add_argument("--beside-arrays", action="store_true")
    parser.add_argument("--reads", action="store_true")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = int(options.rows)
        folder = (options.dir or Path(temporary)) / f"rows_{rows}"
        make_file(folder, rows)
        if options.method:
            run_method(options.method, folder, options.seconds)
            return
        if options.beside_arrays:
            beside_arrays(folder)
            return
        if options.reads:
            print("| 256 rows, milliseconds | in memory | on a disk |\n|---|---|---|")
            for name, warm, cold in times_of_reads(folder):
                print(f"| {name} | {warm:.3f} | {cold:.2f} |", flush=True)
            return
        exact(folder)
        print(f"{rows:,} rows, {os.cpu_count()} cores")
        print("| method | mean off (sd) | sd ratio | ready (s) | a step (ms) | in all (s) | MB |")
        print("|---|---|---|---|---|---|---|")
        longest = options.seconds
        for name in options.only:
            line = in_a_process(
                *("run.py", "--rows", str(rows), "--dir", str(folder.parent)),
                *("--method", name, "--seconds", str(longest)),
            )
            if "failed" in line:
                print(f"| {name} | {line['failed']} |", flush=True)
                continue
            if name == "AutoRealNVPNormal, proxy":
                longest = line["total"]
            print(
                f"| {name} | {line['mean']:.2f} | {line['low']:.2f} to {line['high']:.2f}"
                f" | {line['ready']:.0f} | {line['step']:.2f} | {line['total']:.0f}"
                f" | {line['MB']:.0f} |",
                *(f"\n  ! {sentence}" for sentence in line["said"]),
                flush=True,
            )


if __name__ == "__main__":
    main()
