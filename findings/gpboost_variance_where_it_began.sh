#!/usr/bin/env bash
# GPBoost ends at the variance with which it began where each of few groups has many rows.
#
# Guess: more rows in each group only sharpen the likelihood of the variance between groups, so the
#   fit of 30,000 rows in 20 groups is nearer to the truth than that of 1,000 rows, and every
#   optimiser of the package ends at the same value.
# Behaviour: with the default optimiser the fit of 30,000 rows stops after four iterations at .9987,
#   next to the 1 where it began, and the log likelihood that the package itself reports there is 16.8
#   below what its `optimizer_cov="nelder_mead"` reaches (.0736). A start at .05 ends at .05. No
#   warning is given, and coefficients and shape look well. With 10,000 rows all is right.
# Versions: gpboost 1.8.0, numpy 2.4.6.
# Seen (gamma likelihood, one grouping factor, an intercept and two columns): variance and negative log
#   likelihood .0753 and 8676.4 (10,000 rows), .9987 and 26973.3 (30,000 rows), .0500 and 26957.4
#   (from .05), .0736 and 26956.5 (Nelder and Mead).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check gpboost==1.8.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import gpboost
import numpy as np


def fit(rows, **params):
    rng = np.random.default_rng(1)
    group, effect = rng.integers(0, 20, rows), 0.25 * rng.normal(size=20)
    x = rng.normal(size=(rows, 2))
    y = rng.gamma(1.7, np.exp(effect[group] + x @ [0.1, -0.2]) / 1.7)
    model = gpboost.GPModel(group_data=group, likelihood="gamma")
    model.fit(y=y, X=np.column_stack([np.ones(rows), x]), params=params)
    variance = float(np.ravel(model.get_cov_pars(format_pandas=False))[0])
    print(f"{rows} rows, {params}: {variance:.4f}, {model.get_current_neg_log_likelihood():.1f}")
    return variance, model.get_current_neg_log_likelihood()


assert 0.06 < fit(10_000)[0] < 0.09
stopped, began_low = fit(30_000), fit(30_000, init_cov_pars=np.array([0.05]))
found = fit(30_000, optimizer_cov="nelder_mead")
assert 0.06 < found[0] < 0.09
assert stopped[0] > 0.9 and stopped[1] > found[1] + 10
assert abs(began_low[0] - 0.05) < 0.002
PY
