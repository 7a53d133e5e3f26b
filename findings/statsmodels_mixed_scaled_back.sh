#!/usr/bin/env bash
# `scale_fe=True` of the mixed models of statsmodels leaves the intercept, and some sds, on the other scale.
#
# Guess: `fit_vb(scale_fe=True)` and `fit_map(scale_fe=True)` standardise the columns, fit, and give means and sds of
#   the coefficients of the columns as they were ("on the original scale", says the text), so that they agree
#   to all digits with what a user has who standardises by hand and goes back.
# Behaviour: slopes do. The intercept is that of the centred columns, as the means of the columns are computed and
#   never used again, so that `predict` of the very rows of the fit is far off: with an age around 40 it
#   says 88 % where 49 % have the outcome. In `fit_map` the covariance is divided in a copy: the sd of a slope is
#   the one of the standardised column, ten times too large for an sd of 10 (a slope of .053, sd .0050, is
#   reported as .053, sd .0505: no effect at all), and too small for a column of small numbers. No warning. Without
#   `scale_fe` all is on one scale.
# Versions: statsmodels 0.15.0 (genmod/bayes_mixed_glm.py: `cov[ixs, :][:, ixs] /= ...`, `mn`), numpy 2.5.5,
#   pandas 3.1.1, scipy 1.18.1.
# Seen (2,000 rows in 40 groups, binary; got, right): intercept -.055 -2.23 (fit_vb), -.055 -2.18 (fit_map); sd of
#   the slope .00508 .00508, .0505 .00505; mean of `predict` .882 .487, of the outcome .487. Counts: mean of
#   `predict` 7.4 1.1.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check statsmodels==0.15.0 numpy==2.5.5 pandas==3.1.1 scipy==1.18.1
"$folder/venv/bin/python" -W error - <<'PY'
import numpy as np
from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM, PoissonBayesMixedGLM

rng = np.random.default_rng(0)
group = np.repeat(np.arange(40), 50)
age = rng.normal(40.0, 10.0, group.size)
eta = 0.05 * (age - 40) + rng.normal(0.0, 0.5, 40)[group]
yes = rng.binomial(1, 1 / (1 + np.exp(-eta))).astype(float)
counts = rng.poisson(np.exp(eta)).astype(float)
center, scale = age.mean(), age.std()
raw, by_hand = (np.c_[np.ones(age.size), x] for x in (age, (age - center) / scale))
for model, y in ((BinomialBayesMixedGLM, yes), (PoissonBayesMixedGLM, counts)):
    for how in ("fit_vb", "fit_map"):
        got = getattr(model(y, raw, np.eye(40)[group], np.zeros(40, int)), how)(scale_fe=True, rng=0)
        hand = getattr(model(y, by_hand, np.eye(40)[group], np.zeros(40, int)), how)(rng=0)
        slope, sd = hand.fe_mean[1] / scale, hand.fe_sd[1] / scale
        intercept = hand.fe_mean[0] - slope * center
        print(f"{model.__name__}.{how} (got, right): intercept {got.fe_mean[0]:.3f} {intercept:.3f}", end=", ")
        print(f"slope {got.fe_mean[1]:.4f} {slope:.4f}, its sd {got.fe_sd[1]:.5f} {sd:.5f}", end=", ")
        print(f"mean of predict {got.predict().mean():.3f} {hand.predict().mean():.3f}, of y {y.mean():.3f}")
        np.testing.assert_allclose(got.fe_mean[1], slope, rtol=1e-3)
        np.testing.assert_allclose(got.fe_mean[0], hand.fe_mean[0], atol=1e-3)
        np.testing.assert_allclose(got.fe_sd[1] / sd, scale if how == "fit_map" else 1.0, rtol=0.02)
        assert got.predict().mean() > 1.5 * hand.predict().mean()
PY
