#!/usr/bin/env bash
# The CRPS of a truncated normal forecast is the observation itself where the bounds lie in a tail.
#
# Guess: `crps_tnormal(y, 0, 1, 8, 10)` is the integral of (F(x) - [x >= y])^2 with the cdf F of a
#   normal between 8 and 10, and for a y in there at most 2, the distance of the bounds.
# Behaviour: the mass between the bounds is a difference of two values of the normal cdf near 1, which
#   loses its digits from 5 on and is 0 from 8.3 on. The score grows with it, from a part in a million
#   at bounds 5 and 7 to 9.0 for .818 at 8 and 10; with bounds of the other sign, where the cdf is near
#   0, the mirrored forecast has the right score. No warning, no NaN.
# Versions: scoringrules 0.11.0, numpy 2.5.5, scipy 1.18.1.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check scoringrules==0.11.0 numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" -W error - <<'PY'
import numpy as np
import scoringrules
from scipy import integrate, stats


def by_integral(y, low, high):
    cdf = stats.truncnorm(low, high).cdf
    below = integrate.quad(lambda x: cdf(x) ** 2, low, y, epsabs=1e-10)[0]
    return below + integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, high, epsabs=1e-10)[0]


for low in (1.0, 5.0, 7.0, 8.0):
    y, high = low + 1, low + 2
    right = by_integral(y, low, high)
    score = float(scoringrules.crps_tnormal(y, 0.0, 1.0, low, high))
    mirrored = float(scoringrules.crps_tnormal(-y, 0.0, 1.0, -high, -low))
    print(f"{low:.0f} to {high:.0f}, y {y:.0f}: {score:.6f}, mirrored {mirrored:.6f}, integral {right:.6f}")
    if low == 1.0:
        assert abs(score - right) < 1e-6
    if low == 8.0:
        assert score > 5 * right
PY
