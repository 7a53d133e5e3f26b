#!/usr/bin/env bash
# The density of a Gaussian copula in the package copulas is the same in millimetres as in metres.
#
# Guess: `GaussianMultivariate.probability_density(X)`, "for points in X", is the density of the rows: of normal margins
#   it is that of a bivariate normal, its mean logarithm compares margins and models, and other units move it by
#   the logarithm of the unit for each column.
# Behaviour: it is the normal density of the rows after each has gone through its margin to a standard normal, without
#   the derivative of that map, so that the margins are not in it. Whatever the spread, the mean log density of two
#   independent columns is near -2.84, the one of two standard normals. It says of gamma data that normal
#   margins fit better than gamma ones. Nothing is said.
# Versions: copulas 0.14.1 (multivariate/gaussian.py), scipy 1.18.1, numpy 2.5.5, pandas 2.3.3.
# Seen (mean log density; got, right): two independent columns with an sd of .01: -2.84 6.38, of 1: -2.84 -2.85,
#   of 100: -2.84 -12.0. Gamma data: gamma margins -2.838 -3.163, normal margins -2.821 -3.535.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check copulas==0.14.1 scipy==1.18.1 numpy==2.5.5 pandas==2.3.3
"$folder/venv/bin/python" -W ignore - <<'PY'
import numpy as np
import pandas as pd
from copulas.multivariate import GaussianMultivariate
from copulas.univariate import GammaUnivariate, GaussianUnivariate
from scipy import stats

rng = np.random.default_rng(0)
for sd in (0.01, 1.0, 100.0):
    X = pd.DataFrame(sd * rng.normal(size=(2000, 2)), columns=["a", "b"])
    model = GaussianMultivariate(distribution=GaussianUnivariate)
    model.fit(X)
    got = np.log(model.probability_density(X)).mean()
    right = stats.multivariate_normal.logpdf(X, X.mean(), np.cov(X.T)).mean()
    print(f"sd {sd}: mean log density {got:.3f}, right {right:.3f}")
    assert abs(got + np.log(2 * np.pi) + 1) < 0.05 and (sd == 1.0 or abs(got - right) > 5)

X = pd.DataFrame(rng.gamma(2.0, 1.0, (3000, 2)), columns=["a", "b"])
seen = {}
for margin in (GammaUnivariate, GaussianUnivariate):
    model = GaussianMultivariate(distribution=margin)
    model.fit(X)
    rho = model.correlation.iloc[0, 1]
    z = model._transform_to_normal(X)
    of_margins = sum(
        np.log(m.probability_density(X[c].to_numpy())) for m, c in zip(model.univariates, X, strict=True)
    )
    copula = stats.multivariate_normal.logpdf(z, cov=[[1, rho], [rho, 1]]) - stats.norm.logpdf(z).sum(1)
    seen[margin] = np.log(model.probability_density(X)).mean(), (of_margins + copula).mean()
    print(f"{margin.__name__}: mean log density {seen[margin][0]:.3f}, right {seen[margin][1]:.3f}")
assert seen[GaussianUnivariate][0] > seen[GammaUnivariate][0]
assert seen[GaussianUnivariate][1] < seen[GammaUnivariate][1] - 0.2
PY
