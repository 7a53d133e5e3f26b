#!/usr/bin/env bash
# Draws of two independent mixtures of PreliZ have a correlation of .93.
#
# Guess: `Mixture([...], weights).rvs(n)` draws a component for each row and then the row, so that rows are independent, as
#   they are of each other distribution of the package. Two priors drawn one after the other are independent, and the shape
#   is the one that was asked for.
# Behaviour: the draws of the first component come first, then the ones of the second, and the array is flat whatever `size` is.
#   Each mixture alone is right, by histogram, moments and a Kolmogorov-Smirnov test, so that a plot of it looks well. What
#   takes two of them row by row, as a prior predictive simulation with two parameters does, has the first component of both
#   together and never one of each. So has a reshape into chains, or a split into first and last rows. No word in
#   the docstring, no warning. `rng.permuted` of each, or `ppf` of uniform numbers, is the remedy; `Truncated` and `Hurdle`
#   in the same package draw that way.
# Versions: preliz 0.28.0 (distributions/mixture.py: `np.concatenate(samples)`), numpy 2.5.5, scipy 1.18.1.
# Seen (10,000 draws each of N(-2, .5) and N(2, .5) with equal weights): correlation .929, after a shuffle .001; sd of the sum 4.04,
#   shuffled 2.91, right 2.92; share of sums within 1 of 0 .006, shuffled .426; `rvs((4, 1000))` has the shape (4000,).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check preliz==0.28.0 'arviz-stats[xarray]==1.3.3' \
  arviz-base==1.3.1 numba==0.68.0 numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" -W ignore - <<'PY'
import numpy as np
import preliz as pz
from scipy import stats

N = 10_000
mixture, normal = pz.Mixture([pz.Normal(-2, 0.5), pz.Normal(2, 0.5)], [0.5, 0.5]), pz.Normal(0, 1)
x, y = mixture.rvs(N, random_state=1), mixture.rvs(N, random_state=2)
shuffled = np.random.default_rng(3).permuted(y)
correlation, after = np.corrcoef(x, y)[0, 1], np.corrcoef(x, shuffled)[0, 1]
together, apart, right = np.std(x + y), np.std(x + shuffled), 2**0.5 * mixture.std()
p_value = stats.kstest(x, mixture.cdf).pvalue
first, last = (x[: N // 3] > 0).mean(), (x[-N // 3 :] > 0).mean()
shapes = mixture.rvs((4, 1_000)).shape, normal.rvs((4, 1_000)).shape
print(f"x alone: sd {x.std():.3f}, right {mixture.std():.3f}, Kolmogorov p {p_value:.2f}")
print(f"share above 0 in the first and last third {first:.3f} {last:.3f}; rvs((4, 1000)) {shapes[0]}, normal {shapes[1]}")
print(f"x and y: correlation {correlation:.3f}, shuffled {after:.3f}; sd of x + y {together:.3f}, shuffled {apart:.3f},", end=" ")
print(f"right {right:.3f}; share of |x + y| < 1 {np.mean(np.abs(x + y) < 1):.3f}, shuffled {np.mean(np.abs(x + shuffled) < 1):.3f}")
assert p_value > 0.01 and abs(after) < 0.05 and abs(apart / right - 1) < 0.03
assert correlation > 0.9 and together > 1.3 * right and first < 0.01 and last > 0.99
assert shapes == ((4_000,), (4, 1_000))
PY
