"""NumPyro's example models on a few rows, by EP as it comes, beside sums over grids."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_ext.diagnostics import evidence_bounds
from numpyro_ext.ep import EP
from tests.ep.models import SCHOOLS, exact_schools

pytestmark = pytest.mark.slow

X = np.column_stack([np.ones(24), np.sin(5 * np.arange(24.0))])
WITHOUT = X * [1, 0]
Y_BINARY = (np.cos(3 * np.arange(24.0)) + X[:, 1] > 0.3).astype(float)
Y_COUNTS = np.where(np.arange(24) % 3 == 0, 0, np.round(np.exp(0.9 + 0.6 * X[:, 1])))
Y_REAL = 0.3 * X[:, 1] + 0.5 * np.cos(3 * np.arange(24.0)) + 2.5 * (np.arange(24) == 7)
HITS, TIMES = np.array([30, 8, 22, 5, 15, 27, 11, 3]), 45


def logistic(X, y):
    """`covtype.py`."""
    coefs = numpyro.sample("coefs", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", len(X)) as i:
        numpyro.sample("obs", dist.Bernoulli(logits=X[i] @ coefs), obs=y[i])


def log_logistic(b, X=X):
    s = np.where(Y_BINARY == 1, 1, -1)
    return normal(b, 0, 1).sum(-1) + special.log_expit((b @ X.T) * s).sum(-1)


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


def poisson(X, y):
    """The same without zeros of another kind."""
    b2 = numpyro.sample("b2", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("obs", len(X)) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ b2)), obs=y[i])


def log_poisson(b):
    rows = stats.poisson.logpmf(Y_COUNTS, np.exp(b @ X.T))
    return normal(b, 0, 1).sum(-1) + rows.sum(-1)


def regression(x, y, robust=False):
    """The tutorial on divorce rates, and with heavy tails."""
    a = numpyro.sample("a", dist.Normal(0.0, 0.2))
    b = numpyro.sample("bM", dist.Normal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("rows", len(x)) as i:
        mu = a + b * x[i]
        rows = dist.StudentT(3.0, mu, sigma) if robust else dist.Normal(mu, sigma)
        numpyro.sample("obs", rows, obs=y[i])


def log_regression(z, robust=False):
    a, b, s = z.T[..., None]
    mu, sigma = a + b * X[:, 1], np.exp(s)
    rows = stats.t(3, mu, sigma) if robust else stats.norm(mu, sigma)
    log_prior = normal(a, 0, 0.2) + normal(b, 0, 0.5) - sigma + s
    return log_prior[:, 0] + rows.logpdf(Y_REAL).sum(-1)


def pooled(hits):
    """`baseball.py`, one chance for all players."""
    phi = numpyro.sample("phi", dist.Uniform(0, 1))
    with numpyro.plate("players", len(hits)) as i:
        numpyro.sample("obs", dist.Binomial(TIMES, probs=phi), obs=hits[i])


def log_pooled(z):
    phi = special.expit(z)
    log_prior = special.log_expit(z) + special.log_expit(-z)
    return log_prior[:, 0] + stats.binom.logpmf(HITS, TIMES, phi).sum(-1)


def schools_inside(y, sd):
    """The README: effects inside the plate, centred."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("J", len(y)) as i:
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("obs", dist.Normal(theta, sd[i]), obs=y[i])


def partially_pooled(hits):
    """`baseball.py` with logits: a centred hierarchy outside the plate."""
    loc = numpyro.sample("loc", dist.Normal(-1, 1))
    scale = numpyro.sample("scale", dist.HalfCauchy(1))
    alpha = numpyro.sample("alpha", dist.Normal(loc, scale).expand([len(hits)]))
    with numpyro.plate("players", len(hits)) as i:
        numpyro.sample("obs", dist.Binomial(TIMES, logits=alpha[i]), obs=hits[i])


def normal(x, mean, sd):
    return stats.norm.logpdf(x, mean, sd)


class Example(NamedTuple):
    model: Callable[..., None]
    data: tuple[Any, ...]
    log_joint: Callable[[np.ndarray], np.ndarray]
    """In NumPy, of vectors in the order of the guide."""


EXAMPLES = {
    "logistic": Example(logistic, (X, Y_BINARY), log_logistic),
    "intercept": Example(logistic, (WITHOUT, Y_BINARY), lambda b: log_logistic(b, WITHOUT)),
    "zero-inflated": Example(zero_inflated, (X, Y_COUNTS), log_zero_inflated),
    "Poisson": Example(poisson, (X, Y_COUNTS), log_poisson),
    "regression": Example(regression, (X[:, 1], Y_REAL), log_regression),
    "robust": Example(regression, (X[:, 1], Y_REAL, True), lambda z: log_regression(z, True)),
    "pooled": Example(pooled, (HITS,), log_pooled),
}


@cache
def fitted(name):
    model, data, _ = EXAMPLES[name]
    return fit(model, *data)


def fit(model, *data):
    ep = EP(model)
    result = ep.run(random.key(0), 50, *arrays(data), progress_bar=False)
    assert result.state.report.converged
    L = np.asarray(result.params["auto_scale_tril"], float)
    return ep, result, np.asarray(result.params["auto_loc"], float), L @ L.T


def arrays(data):
    return jax.tree.map(lambda x: x if isinstance(x, bool) else jnp.asarray(x, float), data)


@cache
def exact(name):
    """Mean, standard deviations and log evidence, by a sum over 7 sd around q on every side."""
    _, _, mean, cov = fitted(name)
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


@pytest.mark.parametrize("name", EXAMPLES)
def test_moments_of_examples(name):
    """At .01 sd and 4 % where a normal distribution has the shape of the posterior."""
    *_, m, V = fitted(name)
    mean, sd, _ = exact(name)
    assert np.all(np.abs(m - mean) < 0.03 * sd)
    assert np.all(np.abs(np.sqrt(np.diag(V)) / sd - 1) < 0.07)


@pytest.mark.parametrize(
    "pair", [("logistic", "intercept"), ("zero-inflated", "Poisson"), ("robust", "regression")]
)
def test_evidence_of_pairs(pair):
    """Within .03 nats of the truth, as are 1,000 weighted draws of q within their error."""
    for name in pair:
        ep, result, *_ = fitted(name)
        *_, log_z = exact(name)
        bounds = evidence_bounds(
            ep, result, model_args=arrays(EXAMPLES[name].data), num_samples=1000, alphas=(0.0,)
        )
        assert abs(-result.losses[-1] - log_z) < 0.06
        assert abs(bounds.log_evidence - log_z) < 5 * bounds.log_evidence_se


@pytest.mark.nightly
def test_the_readmes_eight_schools():
    *_, m, V = fit(schools_inside, *SCHOOLS)
    mean, sd = (x[:2] for x in exact_schools())
    ratio = np.sqrt(np.diag(V)) / sd
    assert np.all(np.abs(m - mean) < 0.15 * sd)
    assert 0.97 < ratio[0] < 1.1 and 0.7 < ratio[1] < 1  # log tau has a long tail to the left


def test_a_centred_hierarchy_of_counts():
    """Beside a grid of (loc, log scale), and one of each player's logit."""
    _, result, m, V = fit(partially_pooled, HITS)
    loc, s = (x.ravel() for x in np.meshgrid(np.linspace(-4, 2, 61), np.linspace(-1.5, 2.5, 61)))
    a = np.linspace(-9, 5, 401)
    of_player = stats.binom.pmf(HITS, TIMES, special.expit(a)[:, None])
    prior = stats.norm.pdf(a, loc[:, None], np.exp(s)[:, None]) * (a[1] - a[0])
    Z, first, second = (prior @ (a[:, None] ** k * of_player) for k in range(3))
    log_p = np.log(Z).sum(-1) + normal(loc, -1, 1) + s - np.log1p(np.exp(2 * s)) + np.log(2 / np.pi)
    w = np.exp(log_p - log_p.max())
    log_z = log_p.max() + np.log(w.sum() * 0.1 * (4 / 60))
    w /= w.sum()
    x = np.column_stack([loc, s, first / Z])
    xx = np.column_stack([loc**2, s**2, second / Z])
    mean = w @ x
    sd = np.sqrt(w @ xx - mean**2)
    assert np.all(np.abs(m - mean) < 0.03 * sd)
    assert np.all(np.abs(np.sqrt(np.diag(V)) / sd - 1) < 0.14)
    assert abs(-result.losses[-1] - log_z) < 0.1
