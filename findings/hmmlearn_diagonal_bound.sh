#!/usr/bin/env bash
# hmmlearn's lower bound for a hidden Markov model with diagonal covariances is one for full covariances.
#
# Guess: `VariationalGaussianHMM(covariance_type="diag")` is the model in which each state has a diagonal covariance. With one
#   state the posterior is in the variational family, and the bound is the log evidence, the sum of the columns' own (less the
#   constant n d / 2 log(2 pi), which the source says it leaves out). Of independent columns it is far above the bound of "full".
# Behaviour: the bound is the one of a full Wishart of which the scale matrix has only its diagonal: gamma and digamma functions
#   of (dof - j) / 2, and the price of all d (d + 1) / 2 entries of a covariance for each state. So it bounds the evidence of the
#   full model, and with one state it is never above the bound of "full", whatever the data. It grows with the square of the
#   number of columns, so that a choice of the number of states by `monitor_.history[-1]`, as the example of the package makes it,
#   ends at too few states. With one column, and with "full", all digits are right. No warning.
# Versions: hmmlearn 0.3.3 (vhmm.py: `fill_covars`, then `kl_wishart_distribution`), scikit-learn 1.9.1, numpy 2.5.5, scipy 1.18.1.
# Seen (100 rows; bound with the constant, right): one state, 1 column: full -142.2 -142.2, diagonal -142.2 -142.2; 5 columns:
#   full -732.4 -732.4, diagonal -735.7 -719.8; 20 columns: full -3003.5 -3003.5, diagonal -3089.0 -2886.4. 20 columns with rows
#   of two kinds: one state -3182.6 -2980.1, two states -3215.9, right at least -2919.4.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check hmmlearn==0.3.3 scikit-learn==1.9.1 numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" - <<'PY'
import numpy as np
from hmmlearn.vhmm import VariationalGaussianHMM
from scipy.special import gammaln, multigammaln


def evidence(rows, freedom):
    """Log evidence of rows of one normal: mean | Q ~ N(0, Q^-1), precision Q ~ Wishart(freedom, I / freedom)."""
    n, d = rows.shape
    mean, scale = rows.mean(0), np.eye(d) * freedom
    after = scale + (rows - mean).T @ (rows - mean) + n / (n + 1) * np.outer(mean, mean)
    value = multigammaln((freedom + n) / 2, d) - multigammaln(freedom / 2, d) - n * d / 2 * np.log(np.pi)
    value += (freedom * np.linalg.slogdet(scale)[1] - (freedom + n) * np.linalg.slogdet(after)[1]) / 2
    return value - d / 2 * np.log(n + 1)


def evidence_diagonal(rows, freedom):
    return sum(evidence(column[:, None], freedom) for column in rows.T)


def switches(state, states):
    """Log probability of a path of states under Dirichlet(1 / states) priors of the start and of each row."""
    counts = np.zeros((states, states))
    np.add.at(counts, (state[:-1], state[1:]), 1)
    a = np.full(states, 1 / states)
    rows = sum((gammaln(a + c) - gammaln(a)).sum() - gammaln(1 + c.sum()) for c in counts)
    return rows - np.log(states)


def bound(rows, states, kind):
    """The largest bound of five starts, with the constant that the source says it leaves out."""
    d = rows.shape[1]
    scale = np.eye(d) if kind == "full" else np.ones(d)
    fits = [
        VariationalGaussianHMM(
            states,
            kind,
            n_iter=500,
            tol=1e-8,
            random_state=seed,
            means_prior=np.zeros((states, d)),
            beta_prior=np.ones(states),
            dof_prior=np.full(states, d + 2.0),
            scale_prior=np.stack([scale * (d + 2)] * states),
        ).fit(rows)
        for seed in range(5)
    ]
    return max(fit.monitor_.history[-1] for fit in fits) - rows.size / 2 * np.log(2 * np.pi)


rng = np.random.default_rng(0)
for d in (1, 5, 20):
    rows = rng.normal(size=(100, d))
    full, diagonal = bound(rows, 1, "full"), bound(rows, 1, "diag")
    full_right, diagonal_right = evidence(rows, d + 2), evidence_diagonal(rows, d + 2)
    print(f"one state, {d} columns: full {full:.1f}, right {full_right:.1f};", end=" ")
    print(f"diagonal {diagonal:.1f}, right {diagonal_right:.1f}")
    np.testing.assert_allclose(full, full_right, atol=1e-4)
    if d == 1:
        np.testing.assert_allclose(diagonal, diagonal_right, atol=1e-4)
    else:
        assert diagonal < full - 2 < full < diagonal_right - 10

half = np.repeat([0, 1], 50)
rows = rng.normal(size=(100, 20)) + 0.6 * half[:, None]
one, two = bound(rows, 1, "diag"), bound(rows, 2, "diag")
# with two states the evidence is at least the part of the path that made the rows, under either order of labels
one_right = evidence_diagonal(rows, 22)
two_right = evidence_diagonal(rows[:50], 22) + evidence_diagonal(rows[50:], 22) + switches(half, 2) + np.log(2)
print(f"20 columns, two kinds of rows: diagonal, one state {one:.1f}, right {one_right:.1f};", end=" ")
print(f"two states {two:.1f}, right at least {two_right:.1f}")
assert two < one - 10 and two_right > one_right + 30
PY
