#!/usr/bin/env bash
# The predictive sd of scikit-learn's BayesianRidge takes the intercept for known.
#
# Guess: with `fit_intercept=True` the sd of `predict(return_std=True)` has the noise and the error of
#   the fitted line, which at the mean of x is noise / sqrt(n), as in every text book.
# Behaviour: columns and y are centred and the posterior is of the slopes alone. At the mean of x the sd
#   is the noise and nothing else, and near it the error of the line is all but zero: eight rows give
#   a mean that errs by .35 and says 0. Without an error bar on the intercept, intervals for the mean
#   do not cover it there. ARDRegression does the same.
# Versions: scikit-learn 1.9.1, numpy 2.4.6.
# Seen (4,000 data sets of 8 rows, y ~ N(5 + x, 1), at the mean of x): the line errs by .347 in root
#   mean square, as 1 / sqrt(8) = .354 says; sqrt(sd^2 - noise^2) is below 1e-7 in all of them.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check scikit-learn==1.9.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import numpy as np
from sklearn.linear_model import ARDRegression, BayesianRidge

rng = np.random.default_rng(0)
for cls, repeats in ((BayesianRidge, 4000), (ARDRegression, 400)):
    errors, claimed = [], []
    for _ in range(repeats):
        x = rng.normal(size=8)
        x -= x.mean()
        fit = cls().fit(x[:, None], 5 + x + rng.normal(size=8))
        mean, sd = fit.predict([[0.0]], return_std=True)
        errors.append(mean[0] - 5)
        claimed.append(np.sqrt(max(sd[0] ** 2 - 1 / fit.alpha_, 0)))
    rms = np.sqrt(np.mean(np.square(errors)))
    print(f"{cls.__name__}: errs by {rms:.3f}, says at most {max(claimed):.1e}")
    assert abs(rms - 8**-0.5) < 0.05 and max(claimed) < 1e-6
PY
