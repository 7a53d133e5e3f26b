"""Small models whose fixed points are known from quadrature in double precision."""

from jax import random
import jax.numpy as jnp
from jax.scipy.special import log_ndtr, logsumexp
import numpy as np
import numpyro
import numpyro.distributions as dist


def fit(engine, *args, num_steps=80):
    return engine.run(random.key(0), num_steps, *args, progress_bar=False)


def moments_of(params):
    """The mean, and the covariance as far as it is not the same twice."""
    L = params["auto_scale_tril"]
    return params["auto_loc"], (L @ L.T)[np.triu_indices(len(L))]


X_PROBIT = jnp.array([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, -1.5])
Y_PROBIT = jnp.array([-1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0])
PROBIT = X_PROBIT, Y_PROBIT

X_LOGISTIC = jnp.array(
    [[1, 0.8], [0.5, -0.9], [1.2, 1], [-0.8, 0.6], [0.7, -1.1], [-1, -1.1], [2, 0.3]]
)
Y_LOGISTIC = jnp.array([1, 0, 1, 0, 1, 0, 0])
LOGISTIC = X_LOGISTIC, Y_LOGISTIC

Y_SCALE = jnp.array([0.3, 1.9, -0.7, 2.4, 0.8, 1.1])

SCHOOLS = (
    jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]),
    jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]),
)


def probit(x, y, sd=2.0):
    """Fixture A: one coefficient."""
    theta = numpyro.sample("theta", dist.Normal(0.0, sd))
    with numpyro.plate("rows", len(x)) as idx:
        numpyro.factor("y", log_ndtr(y[idx] * x[idx] * theta))


WEIGHTS = jnp.array([[0.6, 0.4], [0.5, 0.5]])
MEANS = jnp.array([[1.0, -1.5], [2.0, 0.5]])
VARIANCES = jnp.array([[0.5, 0.8], [1.0, 2.0]])


def mixture():
    """Fixture B: two factors that are mixtures of two normal densities."""
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("rows", 2) as idx:
        parts = dist.Normal(MEANS[idx], jnp.sqrt(VARIANCES[idx])).log_prob(theta)
        numpyro.factor("f", logsumexp(parts + jnp.log(WEIGHTS[idx]), axis=-1))


def logistic(X, y):
    """Fixture C: two coefficients whose priors differ."""
    w = numpyro.sample("w", dist.Normal(jnp.array([0.5, -0.5]), jnp.array([2.0, 1.5])).to_event(1))
    with numpyro.plate("rows", len(X)) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=X[idx] @ w), obs=y[idx])


def unknown_scale(y, half_normal=False):
    """Fixture D: factors of rank 2, and a site that is not the alphabet's first."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    prior = dist.HalfNormal(1.5) if half_normal else dist.LogNormal(0.2, 0.6)
    sigma = numpyro.sample("a_sigma", prior)
    with numpyro.plate("rows", len(y)) as idx:
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y[idx])


def schools(y, sd):
    """The centred eight schools, whose effects lie outside the plate of the data."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([len(y)]))
    with numpyro.plate("schools", len(y)) as idx:
        numpyro.sample("y", dist.Normal(theta[idx], sd[idx]), obs=y[idx])


def linear(X, y):
    """A normal likelihood: every approximation is exact."""
    w = numpyro.sample("w", dist.Normal(jnp.array([0.4, -1.0]), jnp.array([1.5, 0.7])).to_event(1))
    with numpyro.plate("rows", len(X)) as idx:
        numpyro.sample("y", dist.Normal(X[idx] @ w, 0.8), obs=y[idx])


X_LINEAR = jnp.array([[1.0, 0.3], [-0.4, 2.0], [0.8, -1.1], [2.0, 0.5], [0.1, 0.9]])
Y_LINEAR = jnp.array([0.7, -2.9, 1.5, 0.2, -1.4])


def exact_linear(times=1):
    """Mean, covariance, log evidence of ``linear``, its data counted so often."""
    P0, h0 = np.diag([1.5**-2, 0.7**-2]), np.array([0.4, -1.0]) / np.array([1.5, 0.7]) ** 2
    X, y = np.asarray(X_LINEAR, float), np.asarray(Y_LINEAR, float)
    V = np.linalg.inv(P0 + times * X.T @ X / 0.64)
    S = 0.64 * np.eye(len(y)) + X @ np.linalg.inv(P0) @ X.T
    r = y - X @ np.array([0.4, -1.0])
    log_z = -0.5 * (r @ np.linalg.solve(S, r) + np.linalg.slogdet(2 * np.pi * S)[1])
    return V @ (h0 + times * X.T @ y / 0.64), V, log_z
