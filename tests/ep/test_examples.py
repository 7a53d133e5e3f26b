"""NumPyro's example models on a few rows, by EP as it comes, beside sums over grids."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_ext.ep import EP

X = np.column_stack([np.ones(24), np.sin(5 * np.arange(24.0))])
Y_COUNTS = np.where(np.arange(24) % 3 == 0, 0, np.round(np.exp(0.9 + 0.6 * X[:, 1])))
Y_REAL = 0.3 * X[:, 1] + 0.5 * np.cos(3 * np.arange(24.0)) + 2.5 * (np.arange(24) == 7)


def zero_inflated(X, y):
    """`zero_inflated_poisson.py`."""
    b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    b2 = numpyro.sample("b2", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("obs", len(X)) as i:
        gate, rate = jax.nn.sigmoid(X[i] @ b1), jnp.exp(X[i] @ b2)
        numpyro.sample("y", dist.ZeroInflatedPoisson(gate=gate, rate=rate), obs=y[i])


def log_zero_inflated(b):
    gate, rate = special.expit(b[:, :2] @ X.T), np.exp(b[:, 2:] @ X.T)
    p = (1 - gate) * stats.poisson.pmf(Y_COUNTS, rate) + gate * (Y_COUNTS == 0)
    return normal(b, 0, 1).sum(-1) + np.log(p).sum(-1)


def regression(x, y):
    """The tutorial on divorce rates, with heavy tails."""
    a = numpyro.sample("a", dist.Normal(0.0, 0.2))
    b = numpyro.sample("bM", dist.Normal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("rows", len(x)) as i:
        numpyro.sample("obs", dist.StudentT(3.0, a + b * x[i], sigma), obs=y[i])


def log_regression(z):
    a, b, s = z.T[..., None]
    sigma = np.exp(s)
    log_prior = normal(a, 0, 0.2) + normal(b, 0, 0.5) - sigma + s
    return log_prior[:, 0] + stats.t(3, a + b * X[:, 1], sigma).logpdf(Y_REAL).sum(-1)


def normal(x, mean, sd):
    return stats.norm.logpdf(x, mean, sd)


class Example(NamedTuple):
    model: Callable[..., None]
    data: tuple[Any, ...]
    log_joint: Callable[[np.ndarray], np.ndarray]
    """In NumPy, of vectors in the order of the guide."""


EXAMPLES = {
    "zero-inflated": Example(zero_inflated, (X, Y_COUNTS), log_zero_inflated),
    "robust": Example(regression, (X[:, 1], Y_REAL), log_regression),
}


def exact(name, mean, cov):
    """Mean, standard deviations and log evidence, by a sum over 7 sd around q on every side."""
    D = len(mean)
    axis = np.linspace(-7, 7, {1: 201, 2: 101, 3: 41, 4: 21}[D])
    e = np.stack(np.meshgrid(*[axis] * D, indexing="ij"), -1).reshape(-1, D)
    L = np.linalg.cholesky(cov)
    z = mean + e @ L.T
    log_p = EXAMPLES[name].log_joint(z)
    p = np.exp(log_p - log_p.max())
    assert p[np.any(np.abs(e) == 7, -1)].max() < 1e-4  # the mass is inside
    m = p @ z / p.sum()
    cell = (axis[1] - axis[0]) ** D * np.prod(np.diag(L))
    return m, np.sqrt(p @ (z - m) ** 2 / p.sum()), log_p.max() + np.log(p.sum() * cell)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_moments_and_evidence_of_examples(name):
    """At .01 sd, 4 % and .03 nats where a normal distribution has the shape of the posterior."""
    model, data, _ = EXAMPLES[name]
    data = [jnp.asarray(x, float) for x in data]
    result = EP(model).run(random.key(0), 50, *data, progress_bar=False)
    assert result.state.report.converged
    L = np.asarray(result.params["auto_scale_tril"], float)
    m, V = np.asarray(result.params["auto_loc"], float), L @ L.T
    mean, sd, log_z = exact(name, m, V)
    assert np.all(np.abs(m - mean) < 0.03 * sd)
    assert np.all(np.abs(np.sqrt(np.diag(V)) / sd - 1) < 0.07)
    assert abs(-result.losses[-1] - log_z) < 0.06
