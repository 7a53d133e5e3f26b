#!/usr/bin/env bash
# The CRPS of a Poisson forecast depends on whether the rate is given as 30 or as 30.0.
#
# Guess: `crps_poisson(33, 30)` is `crps_poisson(33., 30.)`, the sum over k of (F(k) - [k >= y])^2.
# Behaviour: with Python integers a power of integers wraps around in 64 bits, and the score is another
#   number, of the right sign and size for a careless eye: .342 for 3.061. Above a rate of some
#   hundreds the floats give NaN.
# Versions: scoringrules 0.11.0, numpy 2.5.5, scipy 1.18.1.
# Seen (rate, observation, integers, floats, by the sum): (30, 35) .342 3.061 3.061; (80, 88) .231 4.846
#   4.846; (150, 162) 1.402, right 7.290.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check scoringrules==0.11.0 numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" -W ignore - <<'PY'
import numpy as np
import scoringrules
from scipy import stats

for rate, y in ((10, 13), (30, 35), (80, 88), (100, 113), (150, 162)):
    k = np.arange(20 * rate)
    right = np.sum((stats.poisson(rate).cdf(k) - (k >= y)) ** 2)
    whole = float(scoringrules.crps_poisson(y, rate))
    floats = float(scoringrules.crps_poisson(float(y), float(rate)))
    print(f"rate {rate} y {y}: integers {whole:.3f} floats {floats:.3f} sum {right:.3f}")
    if rate in (30, 80, 100):
        assert abs(floats - right) < 1e-6 and abs(whole - right) > 0.3 * right
PY
