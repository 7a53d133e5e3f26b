#!/usr/bin/env bash
# The codes of a Polars categorical do not begin at 0, and JAX takes each beyond the end for the last level.
#
# Guess: as `cat.codes` of pandas, `to_physical()` of a Categorical counts the levels of its own column:
#   0, 1, ..., K - 1.
# Behaviour: since Categories became shared between columns and frames, the codes go on from one column
#   to the next and depend on all that the process has cast before. `effect[codes]` with an effect of K
#   levels is then outside, which NumPy refuses and JAX, which clamps, reads as the last level: a
#   regression with all rows in one level, without a word. `Enum` counts from 0.
# Versions: polars 2.1.0, jax and jaxlib 0.12.0.1.
# Seen: brand [0, 1, 0], region [2, 3, 2]; effect[codes] of the region is [20, 20, 20] for [10, 20, 10].
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check polars==2.1.0 jax==0.12.0.1 jaxlib==0.12.0.1
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import polars as pl

frame = pl.DataFrame({"brand": ["x", "y", "x"], "region": ["n", "s", "n"]})
frame = frame.with_columns(pl.all().cast(pl.Categorical))
brand, region = (frame[name].to_physical().to_numpy() for name in ("brand", "region"))
effect = jnp.array([10.0, 20.0])
print("brand", brand, "region", region, "effects of the regions", effect[region])
assert brand.tolist() == [0, 1, 0] and region.min() > 1
assert effect[region].tolist() == [20.0, 20.0, 20.0]
counted = pl.Series(["n", "s", "n"]).cast(pl.Enum(["n", "s"])).to_physical().to_numpy()
assert effect[counted].tolist() == [10.0, 20.0, 10.0]
PY
