#!/usr/bin/env bash
# The Laplace approximation of pymc-extras leaves out the Jacobian, also for its covariance and draws.
#
# Guess: `fit_laplace` draws from the normal at the mode of the posterior of the unconstrained variables,
#   with the curvature there, as in Stan's `laplace`, TMB and NumPyro. `find_MAP` is known to maximise the
#   density of the variables as they are written; then the normal is fitted in these, or the Jacobian
#   joins in before the curvature is taken.
# Behaviour: mode and curvature are those of the density of the rate, seen as a function of its logarithm, and
#   the draws are exponentials of that normal. This is the Laplace approximation of another posterior: for
#   Gamma(a, b) it is the one of Gamma(a - 1, b). A positive parameter comes out too small and its logarithm
#   too wide, most where there are few data (sds of groups, rates of rare events). The same rate written by
#   its logarithm has the right one. ADVI (`pm.fit`) and `fit_pathfinder` have the Jacobian.
# Versions: pymc-extras 0.15.1 (inference/laplace_approx: `model.logp(jacobian=False)`, twice), pymc 6.3.2.
# Seen (two events, rate ~ Exponential(1), posterior Gamma(3, 2); median, mean, sd of the log): 1.00, 1.28,
#   .71; by its logarithm 1.50, 1.77, .58, as they should be. The posterior has 1.34, 1.50, .63. (The
#   Hessian is by `trust-ncg`, as BFGS has another fault: pymc_laplace_covariance_of_bfgs.sh.)
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pymc==6.3.2 pymc-extras==0.15.1
PYTENSOR_FLAGS="base_compiledir=$folder/compiled" "$folder/venv/bin/python" - <<'PY'
import logging

import numpy as np
import pymc as pm
import pymc_extras as pmx
from scipy import stats

logging.disable(logging.INFO)


def laplace(model):
    options = {"draws": 20_000, "progressbar": False, "random_seed": 0}
    tree = pmx.fit_laplace("trust-ncg", model=model, **options)
    return np.asarray(tree["posterior"]["rate"]).ravel()


with pm.Model() as direct:
    rate = pm.Exponential("rate", 1.0)
    pm.Poisson("events", rate, observed=2)
with pm.Model() as by_its_logarithm:
    log_rate = pm.Flat("log_rate")
    rate = pm.Deterministic("rate", pm.math.exp(log_rate))
    pm.Potential("prior", log_rate - rate)  # the density of the logarithm of an Exponential(1)
    pm.Poisson("events", rate, observed=2)

posterior = stats.gamma(3, scale=0.5)  # of the rate; its log has the mode log(3 / 2) and curvature 3
print(f"posterior: median {posterior.median():.2f}, mean {posterior.mean():.2f}")
CASES = (("direct", direct, 1.0, 2**-0.5), ("by its logarithm", by_its_logarithm, 1.5, 3**-0.5))
for name, model, median, sd in CASES:
    x = laplace(model)
    print(f"{name}: median {np.median(x):.3f}, mean {x.mean():.2f}, sd of the log {np.log(x).std():.3f}")
    assert abs(np.log(np.median(x) / median)) < 0.03 and abs(np.log(x).std() / sd - 1) < 0.03
PY
