#!/usr/bin/env bash
# Draws of `jax.random.wald` are negative where the mean is large.
#
# Guess: an inverse Gaussian is positive, and so is each draw, in single precision with some wrong last
#   digits. At a shape of 1 and a large mean the law is nearly 1 / chi-squared(1) up to its far tail, so
#   that the quantiles hardly depend on the mean.
# Behaviour: the smaller root of Michael, Schucany and Haas is taken as m + m^2 y / 2 - (m / 2) sqrt(4 m y +
#   m^2 y^2), a difference of numbers near m^2. At a mean of 1,000 little is left of it, at 10,000 nothing, and
#   the accepted draw is rounding of either sign. Times of first passage at a threshold of 1 with a drift of
#   .001 or .0001 are such draws. Their mean looks right, as it is made by the other root. Neither NaN nor
#   a warning. The same root as 2 m / (2 + m y + sqrt(4 m y + m^2 y^2)) is no difference.
# Versions: jax and jaxlib 0.12.0.1 (jax/_src/random/core.py: `_wald`), numpy 2.5.5, scipy 1.18.1.
# Seen (400,000 draws; mean, share not above 0, 1 % quantile, right): 100 0 .150 .150; 1,000 .4 % .09 .151;
#   10,000 17 % -13 .151; 100,000 36 % -1,073 .151. NumPy's `wald` is right at each.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
  jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5 scipy==1.18.1
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import numpy as np
from scipy import stats

n = 400_000
for mean in (1.0, 100.0, 1e3, 1e4, 1e5):
    exact = stats.invgauss(mean).ppf(0.01)
    draws = {
        "jax": np.asarray(jax.random.wald(jax.random.key(0), mean, (n,)), float),
        "numpy": np.random.default_rng(0).wald(mean, 1.0, n),
    }
    for name, x in draws.items():
        below, low = (x <= 0).mean(), np.quantile(x, 0.01)
        print(f"{mean:8.0f} {name:5}: not above 0 {below:.4f}, 1 % quantile {low:9.3f}, right {exact:.3f}")
        if name == "numpy" or mean <= 100:
            assert below == 0 and abs(low / exact - 1) < 0.02
        else:
            assert below > {1e3: 0.001, 1e4: 0.1, 1e5: 0.2}[mean] and abs(low / exact - 1) > 0.2
PY
