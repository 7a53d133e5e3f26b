"""A linear system behind a linear decoder, against a Kalman smoother in numpy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import MNIW, NIW
from numpyro_ext.svae import LDS, GaussianPotential, surrogate_elbo

T = 20
LOC, COVARIANCE = np.array([1.5, -2.0]), np.array([[1.2, 0.4], [0.4, 0.7]])
A = 0.95 * np.array([[np.cos(0.4), -np.sin(0.4)], [np.sin(0.4), np.cos(0.4)]])
Q = np.array([[0.3, 0.1], [0.1, 0.2]])
C, SHIFT = np.array([[1.0, -0.5], [0.3, 2.0], [0.0, 0.4]]), np.array([3.0, -1.0, 0.5])
R = np.diag([0.5, 2.0, 0.1])
SEEN = (np.arange(T) % 7 != 2) & (np.arange(T) < 16)  # gaps, and four steps to forecast


@cache
def data():
    """Two sequences from the system, ``(2, T, 3)``."""
    rng = np.random.default_rng(0)
    x = rng.multivariate_normal(LOC, COVARIANCE, 2)
    rows = []
    for _ in range(T):
        rows.append(x @ C.T + SHIFT + rng.multivariate_normal(np.zeros(3), R, 2))
        x = x @ A.T + rng.multivariate_normal(np.zeros(2), Q, 2)
    return np.stack(rows, 1)


def kalman(y):
    """Smoothed means, covariances, covariances of neighbours and the log likelihood of ``(T, 3)``.

    The filter of Kalman and the smoother of Rauch, Tung and Striebel, in moments, with the lag-one
    covariance ``P_{t+1 | T} G_t^T``.
    """
    m, P, log_lik, filtered, predicted = LOC, COVARIANCE, 0.0, [], []
    for t in range(T):
        predicted.append((m, P))
        if SEEN[t]:
            S = C @ P @ C.T + R
            error = y[t] - C @ m - SHIFT
            gain = P @ C.T @ np.linalg.inv(S)
            log_lik -= error @ np.linalg.solve(S, error) / 2
            log_lik -= np.linalg.slogdet(2 * np.pi * S)[1] / 2
            m, P = m + gain @ error, P - gain @ S @ gain.T
        filtered.append((m, P))
        m, P = A @ m, A @ P @ A.T + Q
    smoothed, lags = [filtered[-1]], []
    for t in reversed(range(T - 1)):
        (m, P), (m_next, P_next), (loc, cov) = filtered[t], predicted[t + 1], smoothed[0]
        G = P @ A.T @ np.linalg.inv(P_next)
        lags.insert(0, cov @ G.T)
        smoothed.insert(0, (m + G @ (loc - m_next), P + G @ (cov - P_next) @ G.T))
    means, covariances = map(np.array, zip(*smoothed, strict=True))
    return means, covariances, np.array(lags), log_lik


@pytest.mark.x64
def test_with_exact_potentials_lds_is_the_kalman_smoother_and_its_bound_the_log_likelihood(tol):
    mean = {
        "initial": NIW.statistics((jnp.asarray(LOC), jnp.asarray(COVARIANCE))),
        "dynamics": MNIW.statistics((jnp.asarray(A), jnp.asarray(Q))),
    }
    y = data()
    precision = np.linalg.inv(R)
    h = (y - SHIFT) @ precision @ C * SEEN[:, None]
    W = -C.T @ precision @ C / 2 * SEEN[:, None, None]
    psi = GaussianPotential(jnp.asarray(h), jnp.broadcast_to(W, (2, *W.shape)))

    @jax.jit
    def infer(psi):
        local = LDS().infer(mean, psi)
        return local.mean["x"], surrogate_elbo(LDS(), mean, psi, local)

    (x, xx, xx_next), bound = jax.tree.map(np.asarray, infer(psi))
    # What the potential leaves out of the log density of the data that were seen.
    errors = np.einsum("nti,ij,ntj->nt", y - SHIFT, precision, y - SHIFT) @ SEEN
    bound = bound - errors / 2 - SEEN.sum() * np.linalg.slogdet(2 * np.pi * R)[1] / 2
    for n in range(2):
        means, covariances, lags, log_lik = kalman(y[n])
        result = xx[n] - x[n, :, :, None] * x[n, :, None]
        lag = xx_next[n] - x[n, 1:, :, None] * x[n, :-1, None]
        assert np.allclose(x[n], means, rtol=0, atol=tol(1e-4, 1e-9))
        assert np.allclose(result, covariances, rtol=0, atol=tol(1e-4, 1e-9))
        assert np.allclose(lag, lags, rtol=0, atol=tol(1e-4, 1e-9))
        assert np.isclose(bound[n], log_lik, rtol=tol(1e-5, 1e-11))
