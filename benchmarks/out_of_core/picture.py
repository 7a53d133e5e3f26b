"""Draws what an array, rows on a disk and a loader cost, and reads from memory and a disk.

For each number of rows and each way a process of its own runs `SGHMC(steps_per_sample=20)` on the
plain gradient of 256 rows. Milliseconds are the best of five for a transition, warm; memory is the
largest of the process without pages of the file (`RssAnon`). On the right, 256 rows as one by one
and as blocks of neighbours, from pages in memory and from the disk. Writes
`out/larger_than_memory.png`.

    python benchmarks/out_of_core/picture.py --dir /some/disk
"""

import argparse
import json
from pathlib import Path
import time

import numpy as np
from run import (
    BATCH,
    COLUMNS,
    in_a_process,
    make_file,
    model,
    peak_memory,
    read_columns,
    times_of_reads,
)

ROWS = 10_000, 100_000, 1_000_000, 10_000_000
WAYS = {"array": "an array", "disk": "HostArray", "loader": "Batches of a loader"}


def of_batches(batches):
    import numpyro
    import numpyro.distributions as dist

    w = numpyro.sample("w", dist.Normal(0, 10).expand([COLUMNS]).to_event(1))
    with numpyro.plate("rows", len(batches), subsample_size=batches.batch_size) as i:
        x, y = batches[i]
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def measure(way, folder, rows):
    """Milliseconds of a transition and megabytes, as JSON."""
    import jax
    from jax import lax, random
    import jax.numpy as jnp

    from numpyro_ext.data import Batches, HostArray
    from numpyro_ext.mcmc import SGHMC

    x, y = (column[:rows] for column in read_columns(folder))

    def loader():
        rng = np.random.default_rng(0)
        while True:
            i = rng.integers(0, rows, BATCH)
            yield x[i], y[i]

    with peak_memory() as largest:
        data = {
            "array": lambda: (jnp.asarray(x), jnp.asarray(y)),
            "disk": lambda: (HostArray(x), HostArray(y)),
            "loader": lambda: (Batches(loader, rows),),
        }[way]()
        kernel = SGHMC(of_batches if way == "loader" else model, 1e-6, steps_per_sample=20)
        state = kernel.init(random.key(0), 0, {"w": jnp.zeros(COLUMNS)}, data)

        @jax.jit
        def draws(state, data):  # as arguments, since a program would hold copies
            return lax.fori_loop(0, 50, lambda _, s: kernel.sample(s, data), state)

        best = np.inf
        for _ in range(6):  # the first one compiles
            began = time.perf_counter()
            jax.block_until_ready(draws(state, data))
            best = min(best, time.perf_counter() - began)
    print(json.dumps({"ms": 1e3 * best / (50 * 20), "MB": largest[0]}))


def draw(points, reads, path):
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    for k, (way, label) in enumerate(WAYS.items()):
        for axes, what in ((left, "ms"), (middle, "MB")):
            axes.plot(ROWS, [points[way, rows][what] for rows in ROWS], f"o-C{k}", label=label)
    for axes, title in ((left, "a transition, milliseconds"), (middle, "memory, megabytes")):
        axes.set(xscale="log", yscale="log", xlabel="rows", title=title)
        axes.grid(alpha=0.3)
    left.set_ylim(1e-3, 1)
    middle.set_ylim(100, 3_000)
    left.legend()
    place = np.arange(len(reads))
    for k, label in ((1, "in memory"), (2, "on a disk")):
        bars = right.barh(place + 0.2 - 0.4 * (k == 1), [x[k] for x in reads], 0.38, label=label)
        right.bar_label(bars, fmt="%.2g", padding=3)
    right.set(yticks=place, yticklabels=[x[0] for x in reads], xscale="log")
    right.set(title="a read of 256 rows, milliseconds", xlim=(0.01, 300))
    right.invert_yaxis()
    right.legend(loc="center right")
    path.parent.mkdir(exist_ok=True)
    fig.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="where the file is made, and kept")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.dir / f"rows_{ROWS[-1]}"
    make_file(folder, ROWS[-1])
    if options.way:
        measure(options.way, folder, options.rows)
        return
    points = {}
    print("| rows | way | a transition (ms) | MB |\n|---|---|---|---|")
    for rows in ROWS:
        for way, label in WAYS.items():
            asked = "--dir", str(options.dir), "--way", way, "--rows", str(rows)
            point = points[way, rows] = in_a_process("picture.py", *asked)
            print(f"| {rows:,} | {label} | {point['ms']:.3f} | {point['MB']:.0f} |", flush=True)
    reads = list(times_of_reads(folder))
    for name, warm, cold in reads:
        print(f"{name}: {warm:.3f} ms in memory, {cold:.2f} on a disk")
    draw(points, reads, Path("out/larger_than_memory.png"))


if __name__ == "__main__":
    main()
