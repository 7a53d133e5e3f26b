#!/usr/bin/env bash
# `lower_bound_` of scikit-learn's BayesianGaussianMixture is no bound on the evidence.
#
# Guess: the attribute, documented as "lower bound value on the model evidence (of the training data)",
#   is the ELBO. With one component the posterior is normal-Wishart, the variational family holds it,
#   and the ELBO equals the log evidence, which has a closed form.
# Behaviour: terms that do not change while one fit runs are left out, and those terms depend on the
#   rows, the dimension and the prior. The value lies hundreds of nats above the evidence, by another
#   amount for each prior, so that a comparison of priors by it has the wrong sign.
# Versions: scikit-learn 1.9.1, numpy 2.5.5, scipy 1.18.1.
# Seen (200 rows, 2 columns; degrees of freedom of the prior 5, 20, 60): the value rises, -144.8, -138.8,
#   -118.0, and the log evidence falls, -511.5, -540.1, -663.3.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check scikit-learn==1.9.1 numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" - <<'PY'
import numpy as np
from scipy import stats
from scipy.special import multigammaln
from sklearn.mixture import BayesianGaussianMixture

n, d, kappa = 200, 2, 0.5
x = np.random.default_rng(0).normal(size=(n, d)) @ np.array([[1.0, 0.4], [0.0, 0.7]]) + 3


def evidence(rows, nu):
    """Log marginal density of rows under a normal-Wishart prior at mean 0 and scale matrix 1."""
    m, mean = len(rows), rows.mean(0)
    scatter = (rows - mean).T @ (rows - mean) + np.eye(d)
    scatter += kappa * m / (kappa + m) * np.outer(mean, mean)
    return (
        -m * d / 2 * np.log(np.pi)
        + multigammaln((nu + m) / 2, d)
        - multigammaln(nu / 2, d)
        - (nu + m) / 2 * np.linalg.slogdet(scatter)[1]
        + d / 2 * np.log(kappa / (kappa + m))
    )


# The closed form against the product of the rows' predictive densities, which are Student's t.
nu, total = 5.0, 0.0
mean, scale, k = np.zeros(d), np.eye(d), kappa
for row in x:
    df = nu - d + 1
    total += stats.multivariate_t(mean, scale * (k + 1) / (k * df), df).logpdf(row)
    scale = scale + k / (k + 1) * np.outer(row - mean, row - mean)
    mean, k, nu = (k * mean + row) / (k + 1), k + 1, nu + 1
assert abs(total - evidence(x, 5.0)) < 1e-6

values, truths = [], []
for nu in (5.0, 20.0, 60.0):
    fit = BayesianGaussianMixture(
        n_components=1, mean_precision_prior=kappa, mean_prior=np.zeros(d), reg_covar=0.0,
        degrees_of_freedom_prior=nu, covariance_prior=np.eye(d), tol=1e-12, max_iter=500,
    ).fit(x)
    values.append(fit.lower_bound_)
    truths.append(evidence(x, nu))
    print(f"prior {nu:4.0f}: lower_bound_ {values[-1]:8.1f}  log evidence {truths[-1]:8.1f}")
gaps = np.subtract(values, truths)
print("gaps", gaps.round(1))
assert (gaps > 300).all() and values[2] > values[0] + 20 and truths[2] < truths[0] - 100
PY
