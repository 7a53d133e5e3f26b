#!/usr/bin/env bash
# By ArviZ's `bayes_factor` an effect that is four times as likely as none is thirty times less likely, under a Cauchy prior.
#
# Guess: `bayes_factor` divides the density of the prior draws at 0 by the one of the posterior draws, each by a density estimate.
#   It errs by some percent, by less with more draws, and the prior is the easy part, as its draws cost nothing.
# Behaviour: the estimate has 512 points, evenly from the least to the largest draw. Draws of a Cauchy prior, the usual
#   one for an effect size, reach as far as they are many, so that the peak at 0 lies between two of the points. The density of the
#   prior comes out too small, the more so the more draws there are, and BF10 with it, towards no effect and to any
#   conclusion. No warning, though there is one for a reference value beyond the draws. Under a normal prior and a t prior with
#   three degrees of freedom it is right to some percent. The prior's own density at 0 in the place of the estimate is the remedy.
# Versions: arviz-stats 1.3.3 (bayes_factor.py: `azstats.kde(grid_len=512)`), arviz-base 1.3.1, xarray 2026.9.0, numpy 2.5.5,
#   scipy 1.18.1.
# Seen (ten rows with the mean .8 and an sd of 1, median BF10 of ten tries, by 2,000, 10,000 and 100,000 draws; right): normal prior
#   4.61 5.08 5.27; 5.53. t(3) 4.00 4.43 4.67; 4.84. Cauchy 1.72 .151 .032; 3.86.
# Known: for `hypothesis` of brms in R it was the other way, a density too large (paul-buerkner/brms, issue 534).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'arviz-stats[xarray]==1.3.3' arviz-base==1.3.1 \
  xarray==2026.9.0 numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" -W error - <<'PY'
import arviz_base
import arviz_stats
import numpy as np
from scipy import integrate, stats

ROWS, MEAN = 10, 0.8  # the mean of ten rows of N(effect, 1)
data = stats.norm(MEAN, ROWS**-0.5)
effect = np.linspace(-4, 4, 400_001)
for name, prior in (("normal", stats.norm()), ("t(3)", stats.t(3)), ("Cauchy", stats.cauchy())):
    weight = prior.pdf(effect) * data.pdf(effect)
    right = np.trapezoid(weight, effect) / data.pdf(0)
    cdf = integrate.cumulative_trapezoid(weight, effect, initial=0)
    line = []
    for draws in (2_000, 10_000, 100_000):
        rng, got = np.random.default_rng(0), []
        for _ in range(10):
            posterior = np.interp(rng.uniform(0, cdf[-1], (4, draws // 4)), cdf, effect)
            groups = {"posterior": {"effect": posterior}, "prior": {"effect": prior.rvs((4, draws // 4), random_state=rng)}}
            factor = arviz_stats.bayes_factor(arviz_base.from_dict(groups), "effect")["effect"]
            got.append(float(factor.sel(bf_type="BF10")))
        line.append(np.median(got))
    print(f"{name} prior: BF10 of 2,000, 10,000, 100,000 draws {np.round(line, 3)}, right {right:.2f}")
    if name == "normal":
        np.testing.assert_allclose(line, right, rtol=0.25)
    if name == "Cauchy":
        assert line[2] < line[1] < line[0] < right and line[2] < 0.1 < 3 < right
PY
