#!/usr/bin/env bash
# The sd that pandas gives of a column in single precision is 14 for 1 where bottleneck is installed too.
#
# Guess: `std` and `describe` of a float32 column are right to some digits, as `mean` is, whatever else is
#   installed. Bottleneck makes things faster.
# Behaviour: pandas takes `std` and `var` from bottleneck if it can import it. Bottleneck adds float32 one
#   after the other in float32 and takes squares about the mean that this gives. Draws of NumPyro and JAX are
#   in float32, and `describe` of a frame of them shows, in one table, a mean that is right
#   (pandas makes it itself), quantiles that are right and an sd that is not. `sem` and
#   `groupby(...).std()` are right. `pip install bottleneck` changes the numbers of a script without a word.
# Versions: pandas 3.1.1, bottleneck 1.6.0, numpy 2.5.5, xarray 2026.9.0.
# Seen (draws of N(10,000, 1)): sd 1.00 of 40,000 draws, 13.90 of 400,000 and 111.1 of 4,000,000, with
#   bottleneck; 1.00 for each without it, in float64, and by `sem` times the root of the number. xarray has
#   the same sds, and the mean 9,888 of 4,000,000, but only with `set_options(use_bottleneck=True)`.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  pandas==3.1.1 bottleneck==1.6.0 numpy==2.5.5 xarray==2026.9.0
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import pandas as pd
import xarray as xr

rng = np.random.default_rng(0)
for n in (40_000, 400_000, 4_000_000):
    draws = pd.DataFrame({"level": (1e4 + rng.normal(size=n)).astype(np.float32)})
    table = draws.describe()["level"]
    exact = draws["level"].to_numpy().std(ddof=1, dtype=float)
    with pd.option_context("compute.use_bottleneck", False):
        without = draws["level"].std()
    sem = draws["level"].sem() * n**0.5
    print(f"{n:9,} draws: mean {table['mean']:.2f}, sd {table['std']:.2f}, right {exact:.4f}; ", end="")
    print(f"without bottleneck {without:.4f}, by sem {sem:.4f}")
    assert abs(table["mean"] - 1e4) < 0.05 and abs(without - exact) < 0.02 and abs(sem - exact) < 0.02
    assert abs(table["std"] - exact) < 0.01 if n == 40_000 else table["std"] > 5
    x = xr.DataArray(draws["level"].to_numpy(), dims="sample")
    with xr.set_options(use_bottleneck=True, use_numbagg=False):
        print(f"{'':9} xarray with it: mean {float(x.mean()):.2f}, sd {float(x.std()):.2f}")
PY
