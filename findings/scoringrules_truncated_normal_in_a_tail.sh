#!/usr/bin/env bash
# The CRPS of a truncated normal forecast is the observation itself where the bounds lie in a tail.
#
# Guess: `crps_tnormal(y, 0, 1, 8, 10)` is the integral of (F(x) - [x >= y])^2 with the cdf F of a
#   normal between 8 and 10, and for a y in there at most 2, the distance of the bounds.
# Behaviour: from bounds of 5 and 7 on the digits go, and at 7 and 9 the score is the observation itself,
#   ten times the integral and more than the distance of the bounds. No warning, no NaN. The mirrored
#   forecast, where the normal cdf is near 0 and has all of its digits, is as wrong, against a second guess.
# Versions: scoringrules 0.11.0, numpy 2.5.5, scipy 1.18.1.
# Seen (bounds, observation, score, mirrored, integral): 1 to 3, 2: .3493 .3493 .3493; 5 to 7, 6: .722923
#   .722923 .722845; 7 to 9, 8: 7.9996 8.0003 .7944; 8 to 10, 9: 9.0031 9.0034 .8184.
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
