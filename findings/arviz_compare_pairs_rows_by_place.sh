#!/usr/bin/env bash
# `arviz.compare` pairs the rows of two models by their place, although the rows have labels.
#
# Guess: the differences of the pointwise elpd are those of rows with the same label, as in all arithmetic of
#   xarray, so that the order in which a model has its rows changes nothing; or rows in another order are
#   an error.
# Behaviour: the labels are dropped (`.values`), and row i of one model is paired with row i of the other. The
#   sum of the differences stays; its standard error, the probability that one model is worse, and the
#   stacking weights are those of pairs that do not exist. Nothing is said. It happens where a table was
#   sorted, shuffled or grouped for one of the models.
# Versions: arviz-stats 1.3.3 (loo/compare.py), arviz-base 1.3.1, xarray 2026.9.0, numpy 2.5.5, scipy 1.18.1.
# Seen (40 rows, two means .8 apart): dse 2.7 and 5.4, probability .98 and .86, weight of the better
#   model 1.00 and .78, for the same two models with the same labelled rows.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'arviz-stats[xarray]==1.3.3' arviz-base==1.3.1 xarray==2026.9.0 \
    numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" -W ignore - <<'PY'
import arviz_base
import arviz_stats
import numpy as np
from scipy import stats

rng = np.random.default_rng(0)
y = 0.3 + 1.5 * rng.normal(size=40)
mean = y.mean() + 1.5 / 40**0.5 * rng.normal(size=(4, 4000))


def fitted(order, shift):
    log_lik = stats.norm(mean[..., None] + shift, 1.5).logpdf(y[order])
    groups = {"posterior": {"mean": mean}, "log_likelihood": {"y": log_lik}}
    return arviz_base.from_dict(groups, coords={"row": order}, dims={"y": ["row"]})


in_order, shuffled = np.arange(40), rng.permutation(40)
better = fitted(in_order, 0.0)
tables = {}
for name, order in {"same order": in_order, "another order": shuffled}.items():
    worse = fitted(order, 0.8)
    table = arviz_stats.compare({"better": better, "worse": worse}, round_to="none")
    a, b = (arviz_stats.loo(tree, pointwise=True).elpd_i for tree in (better, worse))
    by_label = np.asarray(a - b.sel(row=a.row))
    right = np.sqrt(40 * np.var(by_label))
    tables[name] = table
    row, weight = table.loc["worse"], table.loc["better", "weight"]
    print(f"{name}: difference {row.elpd_diff:.2f} dse {row.dse:.2f} (by label {right:.2f})",
          f"p_worse {row.p_worse:.3f} weight {weight:.2f}")
    if order is in_order:
        assert abs(row.dse / right - 1) < 0.01 and weight > 0.95
    else:
        assert row.dse > 1.5 * right and weight < 0.9
differences = [float(table.loc["worse", "elpd_diff"]) for table in tables.values()]
assert abs(differences[0] - differences[1]) < 0.01
PY
