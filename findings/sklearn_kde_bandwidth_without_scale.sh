#!/usr/bin/env bash
# scikit-learn's KernelDensity(bandwidth="scott") does not look at how wide the data are.
#
# Guess: Scott's and Silverman's rules are a factor of the number of rows times the standard deviation
#   of the data, as in SciPy and in ArviZ, so that a density follows the unit in which data are given.
# Behaviour: the bandwidth is the factor alone, in the unit of the data. Draws of a coefficient with an
#   sd of .01 get a bandwidth of .22, and a density that is 22 times too low and 22 times too wide;
#   for an sd of 1000 the same number is a spike at each draw.
# Versions: scikit-learn 1.9.1, scipy 1.17.1, numpy 2.4.6.
# Seen (2,000 draws from N(0, s)), the mean log density of 2,000 other draws less the exact one at
#   s = .01, 1 and 1000: by scikit-learn -2.59, -.002 and -351, by SciPy's gaussian_kde -.002 at all.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check scikit-learn==1.9.1 scipy==1.17.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import numpy as np
from scipy.stats import gaussian_kde, norm
from sklearn.neighbors import KernelDensity

x, other = np.random.default_rng(0).normal(size=(2, 2000))
lost = {}
for sd in (0.01, 1.0, 1000.0):
    exact = norm(0, sd).logpdf(sd * other).mean()
    kde = KernelDensity(bandwidth="scott").fit(sd * x[:, None])
    by_sklearn = float(kde.score_samples(sd * other[:, None]).mean() - exact)
    by_scipy = float(gaussian_kde(sd * x, "scott").logpdf(sd * other).mean() - exact)
    print(f"sd {sd}: bandwidth {kde.bandwidth_:.3f}, {by_sklearn:.3f}, SciPy {by_scipy:.3f}")
    lost[sd] = by_sklearn, by_scipy
assert all(abs(r[1]) < 0.05 for r in lost.values())
assert abs(lost[1.0][0]) < 0.05
assert lost[0.01][0] < -2 and lost[1000.0][0] < -20
PY
