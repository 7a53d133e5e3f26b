#!/usr/bin/env bash
# The sds of the Laplace approximation of pymc-extras are what its search happened to learn.
#
# Guess: `fit_laplace` finds the mode and takes the Hessian there, by automatic differentiation. Of means of
#   groups with known noise, with a posterior that is normal, it gives the exact sds, wherever the search
#   began. The better conditioned a model is, the easier.
# Behaviour: the search is by BFGS, and the covariance is SciPy's `hess_inv`: the identity with one update of
#   rank two a step. A good condition means few steps, and they leave most directions at the sd of 1 of the
#   identity. A start at the mode, as from an earlier fit, gives an sd of 1 for every parameter. No word about
#   it: centres, draws and ArviZ's summary look well. `optimize_method="trust-ncg"` has the Hessian.
# Versions: pymc-extras 0.15.1 (inference/laplace_approx/find_map.py: `_compute_inverse_hessian`), pymc 6.3.2.
# Seen (thirty means, some 100 rows each; sd over the exact one, least, median, largest): .99, 1.43, 10.1;
#   started at the mode 8.9, 10.2, 10.8; by `trust-ncg` .99, 1.00, 1.01 from either start.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pymc==6.3.2 pymc-extras==0.15.1
PYTENSOR_FLAGS="base_compiledir=$folder/compiled" "$folder/venv/bin/python" - <<'PY'
import logging

import numpy as np
import pymc as pm
import pymc_extras as pmx

logging.disable(logging.INFO)
rng = np.random.default_rng(0)
rows = rng.integers(80, 121, size=30)  # of each of thirty groups
group = np.repeat(np.arange(30), rows)
y = rng.normal(size=30)[group] + rng.normal(size=len(group))
exact = (rows + 0.01) ** -0.5
mode = np.bincount(group, y) * exact**2
with pm.Model() as model:
    mean = pm.Normal("mean", 0.0, 10.0, shape=30)
    pm.Normal("y", mean[group], 1.0, observed=y)

AT_THE_MODE = {"initvals": {"mean": mode}}
for name, bounds, options in (
    ("as it is", None, {}),
    ("started at the mode", None, AT_THE_MODE),
    ("trust-ncg", (0.97, 1.03), {"optimize_method": "trust-ncg"}),
    ("trust-ncg, started at the mode", (0.97, 1.03), {"optimize_method": "trust-ncg"} | AT_THE_MODE),
):
    options |= {"model": model, "draws": 20_000, "progressbar": False, "random_seed": 0}
    tree = pmx.fit_laplace(**options)
    draws = np.asarray(tree["posterior"]["mean"]).reshape(-1, 30)
    ratio = draws.std(0) / exact
    error = np.abs(draws.mean(0) - mode).max()
    print(f"{name}: sd over exact {np.quantile(ratio, (0, 0.5, 1)).round(2)}, of centre {error:.3f}")
    if bounds is not None:
        assert bounds[0] < ratio.min() and ratio.max() < bounds[1]
    elif "mode" in name:
        assert np.abs(draws.std(0) - 1).max() < 0.03
    else:
        assert ratio.max() > 3
PY
