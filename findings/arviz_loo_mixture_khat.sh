#!/usr/bin/env bash
# The Pareto k-hat of `arviz.loo(mixture=True)` belongs to the reciprocal of its weights.
#
# Guess: `pareto_k` judges the tail of the importance weights that the estimate uses. Each of these
#   weights, exp(-l_i) / sum_j exp(-l_j), is at most 1, which is what the mixture is for, so that k-hat is
#   at most about 0 (Silva and Zanella 2023, section 3).
# Behaviour: `psislw` of arviz-stats takes a log *likelihood*, although its text says "log weights", and
#   changes the sign itself; `loo` hands it the log weights of the mixture. What comes out is the k-hat
#   of the reciprocal weights. It is above .7, with the warning, where the weights are bounded. Whoever
#   hands log weights to `psislw`, as older ArviZ took them, has the reverse: k-hat -1.9 where it is 3.
# Versions: arviz-stats 1.3.3 (loo/loo.py: `mix_log_weights.azstats.psislw`; base/diagnostics.py: `_psislw`
#   takes `-ary`), xarray 2026.9.0, numpy 2.5.5, scipy 1.18.1.
# Seen (20 rows, weights at most 1): `loo` reports k-hats of 1.75 to 6.1; of its weights k-hat is
#   below 0. Log weights with k = 3 give -1.9.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'arviz-stats[xarray]==1.3.3' arviz-base==1.3.1 xarray==2026.9.0 \
    numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" -W ignore - <<'PY'
import arviz_base
import arviz_stats
from arviz_stats.base import array_stats
import numpy as np
from scipy import special

# Twenty rows, and draws of a normal's mean and sd that are wider than the posterior, as a mixture's are.
rng = np.random.default_rng(0)
y = rng.normal(size=20)
mean, sd = y.mean() + 0.3 * rng.normal(size=(4, 2000)), np.exp(0.4 * rng.normal(size=(4, 2000)))
log_lik = -0.5 * ((y - mean[..., None]) / sd[..., None]) ** 2 - np.log(sd[..., None])
data = arviz_base.from_dict({"posterior": {"mean": mean, "sd": sd}, "log_likelihood": {"y": log_lik}})
result = arviz_stats.loo(data, mixture=True, pointwise=True, reff=1.0)
weights = -log_lik - special.logsumexp(-log_lik, axis=-1, keepdims=True)
reported = np.asarray(result.pareto_k)
right = np.array([array_stats.psislw(-weights[..., i].ravel())[1] for i in range(len(y))])
print("largest weight", np.exp(weights).max())
print("k-hat that loo reports", reported.min(), "to", reported.max())
print("k-hat of the weights", right.min(), "to", right.max())
reverse = np.array([array_stats.psislw(weights[..., i].ravel())[1] for i in range(len(y))])
np.testing.assert_allclose(reported, reverse, rtol=1e-4)
assert np.exp(weights).max() <= 1 and (right < 0).all() and (reported > 0.7).all()

log_weights = 1.5 * rng.normal(size=40_000) ** 2  # the tail of exp(s z^2 / 2) has k = s = 3
print("log weights with k = 3 through psislw", array_stats.psislw(log_weights)[1])
assert array_stats.psislw(log_weights)[1] < 0 < 2 < array_stats.psislw(-log_weights)[1]
PY
