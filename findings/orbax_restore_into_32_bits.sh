#!/usr/bin/env bash
# Orbax restores a checkpoint into JAX's default precision by wrapping integers and overflowing floats.
#
# Guess: a checkpoint with counts in int64 and numbers in float64 that is restored into a target of JAX's
#   default types is refused, as a target of another shape is, or warned about, as `jnp.asarray` warns of
#   such a type.
# Behaviour: the file has the right bits, and they are cast on the way without a word: a step or row count
#   of 2^40 becomes 0, 2^33 as an unsigned seed 0, a log likelihood or scale of 1e300 inf. Restored without
#   a target the numbers are right.
# Versions: orbax-checkpoint 0.12.8, jax 0.12.0.1, numpy 2.5.5.
# Seen: [1099511627776, 5] -> [0, 5]; 8589934592 -> 0; 1e300 -> inf. No warning.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check orbax-checkpoint==0.12.8 jax==0.12.0.1 \
	numpy==2.5.5
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - "$folder/checkpoint" <<'PY'
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

state = {"rows": np.array([2**40, 5]), "seed": np.array(2**33, np.uint64), "scale": np.array(1e300)}
checkpointer = ocp.StandardCheckpointer()
checkpointer.save(sys.argv[1], state)
checkpointer.wait_until_finished()
target = {
    "rows": jnp.zeros(2, int),
    "seed": jnp.zeros((), jnp.uint32),
    "scale": jnp.zeros(()),
}
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    again = checkpointer.restore(sys.argv[1], target)
about_types = [x for x in warned if "dtype" in str(x.message) or "trunc" in str(x.message)]
print(f"saved {state}\nrestored {again}\nwarnings about types: {len(about_types)}")
assert again["rows"].tolist() == [0, 5] and int(again["seed"]) == 0 and np.isinf(again["scale"])
assert not about_types
whole = checkpointer.restore(sys.argv[1])
assert whole["rows"].tolist() == [2**40, 5] and float(whole["scale"]) == 1e300
PY
