#!/usr/bin/env bash
# The median of a Beta and the quartiles of a Student t in NumPyro are first guesses that nobody improved.
#
# Guess: `icdf` of Beta and StudentT, which is `tfp.math.betaincinv`, is right to about the precision of its
#   numbers at every probability, best in the middle, and better in double than in single precision. A test of
#   `cdf(icdf(q))` at some q says so for all.
# Behaviour: the search for x marks an entry as done at once if the probability equals one of the ends of the
#   bracket of x, which are 0 and 1/2 in double precision. So at exactly 1/2 the starting guess is returned,
#   while 1/2 + 1e-12 is right (to .001 in its probability). For Beta that is the median, for StudentT,
#   which asks for 1 - |1 - 2 q|, both quartiles: its interquartile range is up to 27 % wrong. In single
#   precision, where the bracket ends at 1/2 only if both parameters are below 1, the t with one degree of
#   freedom (Cauchy) has the quartile .785 for 1. TFP computes the quantile of its own StudentT in another way,
#   which is right.
# Versions: numpyro 0.22.0, tfp-nightly 0.26.0.dev20261027 (math/special.py: `tf.equal(y, initial_high)`), jax
#   and jaxlib 0.12.0.1, scipy 1.18.1, numpy 2.5.5.
# Seen (double precision; got, right): median of Beta(2, .7) .8291 .8036, of Beta(1, 5) .1760 .1294, of
#   Beta(.7, .7) .3581 .5; quartile of t(1) 1.2732 1, of t(3) .6646 .7649, of t(30) .5504 .6828.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpyro==0.22.0 jax==0.12.0.1 jaxlib==0.12.0.1 \
  tfp-nightly==0.26.0.dev20261027 scipy==1.18.1 numpy==2.5.5
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import numpy as np
import numpyro.distributions as dist
from scipy import stats

CASES = [
    (f"Beta({a}, {b})", dist.Beta(a, b), stats.beta(a, b), 0.5)
    for a, b in ((2.0, 0.7), (1.0, 5.0), (0.7, 0.7))
]
CASES += [(f"t({df:.0f})", dist.StudentT(df), stats.t(df), 0.75) for df in (1.0, 3.0, 30.0)]
for name, here, right, q in CASES:
    with jax.enable_x64(True):
        got, beside = float(here.icdf(np.float64(q))), float(here.icdf(np.float64(q + 1e-12)))
    print(f"{name:13} {q}: {got:.4f}, right {right.ppf(q):.4f}, at {q} + 1e-12 {beside:.4f}")
    assert abs(right.cdf(got) - q) > 0.02 and abs(right.cdf(beside) - q) < 1e-3
single = float(dist.StudentT(1.0).icdf(np.float32(0.75)))
print(f"t(1), single precision: {single:.4f}")
assert abs(single - 1) > 0.2
PY
