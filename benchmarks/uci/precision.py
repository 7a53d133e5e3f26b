"""Does probabilistic backpropagation in single precision end where it does in double precision?

The weights and all else that is random at the start are the same in both, as is the order of the
rows. After each of ``--epochs`` it prints the mean precision of the noise, and the predictive log
density of the rows left out, on the first split of a set.

    python benchmarks/uci/precision.py --data-dir data --set kin8nm
"""

import argparse
from pathlib import Path
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

from numpyro_ext.ep import PBP


def split(folder: Path) -> tuple[np.ndarray, ...]:
    """Rows of the fit and rows left out: columns and target of each."""
    data = np.loadtxt(folder / "data.txt")
    columns = np.loadtxt(folder / "index_features.txt", dtype=int)
    target = int(np.loadtxt(folder / "index_target.txt"))
    parts = [np.loadtxt(folder / f"index_{part}_0.txt", dtype=int) for part in ("train", "test")]
    return tuple(data[rows][:, c] for rows in parts for c in (columns, target))


def as_double(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--set", default="kin8nm")
    parser.add_argument("--epochs", type=int, nargs="*", default=[5, 20])
    args = parser.parse_args()
    X, y, X_test, y_test = split(args.data_dir / "uci" / args.set)
    start = PBP([X.shape[1], 50, 1]).init(random.key(0), X, y)

    print("| epochs | precision | noise precision | log density |\n|---|---|---|---|")
    for epochs in args.epochs:
        for x64 in (False, True):
            with jax.enable_x64(x64):
                pbp = PBP([X.shape[1], 50, 1])
                state = jax.tree.map(as_double, start) if x64 else start
                fit = pbp.run(random.key(1), epochs, X, y, progress_bar=False, init_state=state)
                mean, variance = pbp.predict(fit.params, X_test)
                square = (y_test - mean) ** 2 / variance
                density = np.mean(-0.5 * (np.log(2 * np.pi * variance) + square))
                noise = fit.state.q.noise
                precision = float(noise.shape / noise.rate)
            name = "double" if x64 else "single"
            print(f"| {epochs} | {name} | {precision:.4f} | {density:.4f} |", flush=True)


if __name__ == "__main__":
    main()
