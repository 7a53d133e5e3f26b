#!/usr/bin/env bash
# Draws of `jax.random.binomial` are too widely spread where there are tens of millions of trials.
#
# Guess: counts of 1e8 trials at .3 have the mean 3e7 and the variance 2.1e7. They are returned in
#   single precision, in which numbers near 3e7 are 2 apart: that adds 1/3 to a variance of 2.1e7.
# Behaviour: the variance is more than a third too large, and the mean is off by three standard errors of
#   100,000 draws, a hundredth of a standard deviation. With 64 bits both are right.
# Versions: jax and jaxlib 0.12.0.1, numpy 2.5.5.
# Seen, variance over n p (1 - p) for 1e4, 1e6 and 1e8 trials: .998 1.002 1.385; with 64 bits 1.004 1.002
#   1.003.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
cat > "$folder/run.py" <<'PY'
import sys

import jax
import numpy as np

jax.config.update("jax_enable_x64", sys.argv[1] == "64")
p, m = 0.3, 100_000
for n in (1e4, 1e6, 1e8):
    x = np.asarray(jax.random.binomial(jax.random.key(0), n, p, shape=(m,)), np.float64)
    shift = (x.mean() - n * p) / (n * p * (1 - p) / m) ** 0.5
    ratio = x.var() / (n * p * (1 - p))
    print(f"{sys.argv[1]} bits, {n:.0e} trials: variance ratio {ratio:.3f}, mean off {shift:.1f} errors")
    wrong = sys.argv[1] == "32" and n == 1e8
    # Six standard errors of a variance of 100,000 draws are .027.
    assert ratio > 1.15 if wrong else abs(ratio - 1) < 0.03
PY
for bits in 32 64; do JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/run.py" $bits; done
