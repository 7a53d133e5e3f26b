"""The tutorial on divorce rates, with heavy tails, by EP beside a sum over a grid."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_ext.ep import EP

X = np.sin(5 * np.arange(24.0))
Y = 0.3 * X + 0.5 * np.cos(3 * np.arange(24.0)) + 2.5 * (np.arange(24) == 7)


def regression(x, y):
    a = numpyro.sample("a", dist.Normal(0.0, 0.2))
    b = numpyro.sample("bM", dist.Normal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("rows", len(x)) as i:
        numpyro.sample("obs", dist.StudentT(3.0, a + b * x[i], sigma), obs=y[i])


def log_joint(z):
    """In NumPy, of vectors in the order of the guide."""
    a, b, s = z.T[..., None]
    sigma = np.exp(s)
    log_prior = stats.norm.logpdf(a, 0, 0.2) + stats.norm.logpdf(b, 0, 0.5) - sigma + s
    return log_prior[:, 0] + stats.t(3, a + b * X, sigma).logpdf(Y).sum(-1)


def exact(mean, cov):
    """Mean, standard deviations and log evidence, by a sum over 7 sd around q on every side."""
    axis = np.linspace(-7, 7, 41)
    e = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    L = np.linalg.cholesky(cov)
    z = mean + e @ L.T
    log_p = log_joint(z)
    p = np.exp(log_p - log_p.max())
    assert p[np.any(np.abs(e) == 7, -1)].max() < 1e-4  # the mass is inside
    m = p @ z / p.sum()
    cell = (axis[1] - axis[0]) ** 3 * np.prod(np.diag(L))
    return m, np.sqrt(p @ (z - m) ** 2 / p.sum()), log_p.max() + np.log(p.sum() * cell)


@pytest.mark.slow
def test_moments_and_evidence_of_a_robust_regression():
    data = jnp.asarray(X), jnp.asarray(Y)
    result = EP(regression).run(random.key(0), 50, *data, progress_bar=False)
    assert result.state.report.converged
    L = np.asarray(result.params["auto_scale_tril"], float)
    m, V = np.asarray(result.params["auto_loc"], float), L @ L.T
    mean, sd, log_z = exact(m, V)
    assert np.all(np.abs(m - mean) < 0.03 * sd)
    assert np.all(np.abs(np.sqrt(np.diag(V)) / sd - 1) < 0.07)
    assert abs(-result.losses[-1] - log_z) < 0.06
