#!/usr/bin/env bash
# The effective sample size of many short chains is a number that does not depend on the draws.
#
# Guess: 350 particles at five times, all independent, are 1,750 draws, and ArviZ's bulk, mean and tail
#   ESS are near 1,750; of a slow process, correlation .9 from one time to the next, they are some
#   hundreds (exactly 411), and never above the number of draws by much.
# Behaviour: chains are split in halves, in which Geyer's sum finds no pair of lags, so that the result is
#   the cap of n log10(n), 4,404.6 for any draws at all, whether independent or stuck (R-hat 3.2). The Monte Carlo
#   error of a mean, `mcse`, is .6 of the right one. With eight draws a chain it is still the cap, of a
#   smaller n; with twenty, 1.2 times too large. `rhat` sees the slow process.
# Versions: arviz-stats 1.3.3, numpy 2.5.5, scipy 1.18.1, xarray 2026.9.0.
# Seen: independent 4404.6, slow 4404.6 (exact 411), mcse .0150 for .0239.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check arviz-stats==1.3.3 arviz-base==1.3.1 xarray==2026.9.0 \
    numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" - <<'PY'
from arviz_stats.base import array_stats
import numpy as np

rng = np.random.default_rng(0)
chains, draws = 350, 5
independent = rng.normal(size=(chains, draws))
slow = np.zeros((chains, draws))
slow[:, 0] = rng.normal(size=chains)
for i in range(1, draws):
    slow[:, i] = 0.9 * slow[:, i - 1] + np.sqrt(1 - 0.81) * rng.normal(size=chains)
lags = np.arange(1, draws)
exact = chains * draws / (1 + 2 * np.sum((1 - lags / draws) * 0.9**lags))
values = {}
for name, x in (("independent", independent), ("slow", slow)):
    values[name] = [float(array_stats.ess(x, method=m)) for m in ("bulk", "mean")]
    print(name, "ESS", values[name], "R-hat", float(array_stats.rhat(x)))
print("exact", chains * draws, exact)
error = float(array_stats.mcse(independent, method="mean"))
print("mcse", error, "right", (chains * draws) ** -0.5)
n = chains * 4  # halves of two draws; the one in the middle is left out
np.testing.assert_allclose(values["independent"] + values["slow"], n * np.log10(n), rtol=1e-3)
assert error < 0.7 * (chains * draws) ** -0.5
PY
