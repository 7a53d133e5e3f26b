#!/usr/bin/env bash
# With SciPy's entropy of an inverse Wishart a lower bound on the evidence lies above the evidence.
#
# Guess: `invwishart.entropy` is the mean of `-logpdf`. Where q is the exact posterior of a covariance, mean log joint density
#   plus entropy is the log evidence, in any dimension, as it is with `wishart.entropy` and the precision. The pull
#   request that added it cites a paper with the formula and has tests.
# Behaviour: the log determinant of half the scale is taken as `log_det_scale - log(2)`, where p by p matrices need `p log(2)`.
#   The entropy is too large by (p^2 - 1) / 2 log 2: exact for p = 1, which is where one checks against `invgamma`, 1.04
#   nats for p = 2, 8.3 for 5, 34 for 10. The excess depends neither on scale nor on degrees of freedom,
#   so that two laws of one size compare well, and a bound that only has to rise does rise; what is wrong is each
#   comparison with another number: an evidence, a model of another dimension, a mean field with other factors, a Monte
#   Carlo estimate. SciPy's own `wishart` contradicts it. No warning.
# Versions: scipy 1.18.1 (stats/_multivariate.py, `invwishart_gen._entropy`; since pull request 17700), numpy 2.5.5.
# Seen (entropy, right one by the Wishart of the inverse, mean of -logpdf of 20,000 draws): p = 1 -.107 -.107 -.111; 2 -.101
#   -1.141 -1.128; 5 -4.988 -13.306 -13.323; 10 -43.13 -77.44 -77.56. Of 50 rows, log evidence and "lower" bound: p = 2
#   -152.3 -151.3; 5 -390.4 -382.1; 10 -847.6 -813.3.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check scipy==1.18.1 numpy==2.5.5
"$folder/venv/bin/python" -W error - <<'PY'
import numpy as np
from scipy import stats
from scipy.special import multigammaln, psi


def mean_log_det(df, scale):
    """Mean of the log determinant of an inverse Wishart matrix."""
    p = len(scale)
    return np.linalg.slogdet(scale / 2)[1] - psi((df - np.arange(p)) / 2).sum()


rng = np.random.default_rng(0)
rows = 50
for p in (1, 2, 3, 5, 10):
    df, scale = p + 4, np.eye(p) + 0.3
    prior = stats.invwishart(df, scale)
    draws = prior.rvs(20_000, random_state=rng).reshape(-1, p, p)
    minus = -prior.logpdf(np.moveaxis(draws, 0, -1))
    # A matrix and its inverse: the Jacobian is the determinant to the power of p + 1.
    by_wishart = stats.wishart(df, np.linalg.inv(scale)).entropy() + (p + 1) * mean_log_det(df, scale)
    excess, error = float(prior.entropy() - by_wishart), minus.std() / len(minus) ** 0.5
    print(f"p {p}: entropy {float(prior.entropy()):.3f}, by wishart {float(by_wishart):.3f}, ", end="")
    print(f"by draws {minus.mean():.3f} +- {error:.3f}, excess {excess:.4f}")
    assert abs(minus.mean() - by_wishart) < 5 * error
    assert abs(excess - (p**2 - 1) / 2 * np.log(2)) < 1e-6

    # Rows from N(0, covariance), with the exact posterior as q: the bound is the evidence.
    y = rng.multivariate_normal(np.zeros(p), np.eye(p), rows)
    after, q = df + rows, scale + y.T @ y
    posterior = stats.invwishart(after, q)
    evidence = (
        -rows * p / 2 * np.log(np.pi)
        + multigammaln(after / 2, p)
        - multigammaln(df / 2, p)
        + df / 2 * np.linalg.slogdet(scale)[1]
        - after / 2 * np.linalg.slogdet(q)[1]
    )
    normaliser = df / 2 * np.linalg.slogdet(scale / 2)[1] - multigammaln(df / 2, p)
    joint = (
        normaliser
        - rows * p / 2 * np.log(2 * np.pi)
        - (after + p + 1) / 2 * mean_log_det(after, q)
        - after * p / 2  # half the trace of q times the mean precision, after q^-1
    )
    bound = joint + float(posterior.entropy())
    print(f"     log evidence {evidence:.3f}, lower bound {bound:.3f}")
    assert abs(bound - evidence - excess) < 1e-6 and (p == 1 or bound > evidence + 1)
PY
