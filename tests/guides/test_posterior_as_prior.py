"""A fitted normal as the prior of a model: its density, its draws, and what is refused.

A law takes the place of training: parameters of the guide are given, and the potential of the new
model is that of the normal in unconstrained space.
"""

import functools

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.util import potential_energy
import pytest

from numpyro_ext._model.read import read_model
from numpyro_ext.guides import posterior_as_prior

Y = jnp.array([0.3, -1.2, 0.8])


def model(y=None, n=3):
    """Supports of every kind, not in the order of the alphabet, in a plate and partly masked."""
    numpyro.sample("scale", dist.HalfNormal(2.0))
    numpyro.sample("parts", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("effects", 2), numpyro.handlers.scale(scale=3.0):
        effects = numpyro.sample("effects_of", dist.Normal(0.0, 1.0).mask(jnp.array([True, False])))
    numpyro.sample("corr", dist.LKJCholesky(2))
    low = numpyro.sample("low", dist.Normal(0.0, 1.0))
    inside = numpyro.sample("inside", dist.Uniform(low, low + 2))
    with numpyro.plate("rows", n):
        z = numpyro.sample("local", dist.Normal(effects[0], 1.0))
        numpyro.sample("y", dist.Normal(z + inside, 0.5), obs=y)


GLOBAL = ["scale", "parts", "effects_of", "corr", "low", "inside"]
D = 8


def normal(n, rng_seed=0):
    rng = np.random.default_rng(rng_seed)
    loc = rng.normal(size=n) / 2
    tril = np.tril(rng.normal(size=(n, n)) / 4, -1) + np.diag(rng.uniform(0.3, 1.0, n))
    return jnp.asarray(loc, float), jnp.asarray(tril, float)


@functools.cache
def fitted():
    guide = AutoMultivariateNormal(model)
    seed(guide, 0)(Y)
    loc, tril = normal(D + 3)
    return guide, {"auto_loc": loc, "auto_scale_tril": tril}


def log_prior(today, z, n=1):
    """Log density of the latent sites outside the rows, Jacobians included, at unconstrained z."""
    rows = {"local": jnp.zeros(n)}
    y = jnp.zeros(n)
    log_p = -potential_energy(today, (y,), {"n": n}, {**z, **rows})
    constrained = numpyro.infer.util.constrain_fn(model, (y,), {"n": n}, {**z, **rows})
    local = dist.Normal(constrained["effects_of"][0], 1.0).log_prob(rows["local"])
    seen = dist.Normal(constrained["inside"], 0.5).log_prob(y)
    return log_p - jnp.sum(local + seen)


@pytest.mark.slow
def test_the_prior_is_the_normal_to_the_power():
    """In unconstrained space, at other rows than yesterday's, whose local sites are gone."""
    factor = 0.4
    today = posterior_as_prior(model, fitted(), factor)
    assert [name for name, _ in today.shapes] == GLOBAL
    loc, tril = (x[:D] for x in fitted()[1].values())
    cov = tril @ tril.T / factor
    x = 0.7 * random.normal(random.key(3), (D,))
    z = read_model(today, (Y[:1],), {"n": 1}).unravel(jnp.append(x, 0.0))
    z.pop("local")
    expected = dist.MultivariateNormal(loc, cov).log_prob(x)
    np.testing.assert_allclose(log_prior(today, z), expected, rtol=1e-4, atol=1e-4)


def two(y):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    a = numpyro.sample("a", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(b, a), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal])
def test_every_normal_guide_is_a_prior(kind):
    guide = kind(two)
    seed(guide, 0)(Y)
    params = {
        AutoNormal: {
            "b_auto_loc": jnp.array(0.5), "b_auto_scale": jnp.array(0.3),
            "a_auto_loc": jnp.array(-0.2), "a_auto_scale": jnp.array(0.7),
        },
        AutoDiagonalNormal: {
            "auto_loc": jnp.array([0.5, -0.2]), "auto_scale": jnp.array([0.3, 0.7]),
        },
    }[kind]  # fmt: skip
    z = {"b": jnp.array(0.1), "a": jnp.array(0.3)}
    x = jnp.array([0.1, 0.3])
    likelihood = dist.Normal(0.1, jnp.exp(0.3)).log_prob(Y).sum()
    log_p = -potential_energy(posterior_as_prior(two, (guide, params)), (Y,), {}, z) - likelihood
    expected = dist.Normal(jnp.array([0.5, -0.2]), jnp.array([0.3, 0.7])).log_prob(x).sum()
    np.testing.assert_allclose(log_p, expected, rtol=1e-5)


def test_some_sites_have_their_marginal_and_the_others_their_prior():
    """Of a normal over (b, log a): a alone, whose mean and variance are in the second place."""
    guide = AutoMultivariateNormal(two)
    seed(guide, 0)(Y)
    loc, tril = normal(2, 5)
    fit = guide, {"auto_loc": loc, "auto_scale_tril": tril}
    today = posterior_as_prior(two, fit, sites=["a"])
    z = {"b": jnp.array(0.1), "a": jnp.array(0.3)}
    likelihood = dist.Normal(0.1, jnp.exp(0.3)).log_prob(Y).sum()
    sd = jnp.linalg.norm(tril[1])
    expected = dist.Normal(0.0, 2.0).log_prob(0.1) + dist.Normal(loc[1], sd).log_prob(0.3)
    result = -potential_energy(today, (Y,), {}, z) - likelihood
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    # A prior of b alone beside it, and then one of both, which leaves nothing of the two.
    both = posterior_as_prior(today, fit, sites=["b"])
    result = -potential_energy(both, (Y,), {}, z) - likelihood
    expected = dist.Normal(loc[1], sd).log_prob(0.3)
    expected += dist.Normal(loc[0], tril[0, 0]).log_prob(0.1)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert posterior_as_prior(posterior_as_prior(two, fit), fit).model is two


def linear(X, y):
    w = numpyro.sample("w", dist.Normal(jnp.array([0.4, -1.0]), jnp.array([1.5, 0.7])).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 0.8), obs=y)


@pytest.mark.slow
def test_days_have_the_posterior_and_the_evidence_of_all_rows():
    """Exact normals as fits: log p(w, y_2 | y_1) - log q(w | y_1, y_2) is log p(y_2 | y_1) at every
    w, so that the loss of SVI is at its optimum, and the days' evidences add up to the batch's."""
    X = random.normal(random.key(0), (12, 2))
    y = X @ jnp.array([1.0, 2.0]) + random.normal(random.key(1), (12,))
    prior_mean, prior_sd = jnp.array([0.4, -1.0]), jnp.array([1.5, 0.7])

    def exact(X, y):
        precision = X.T @ X / 0.64 + jnp.diag(1 / prior_sd**2)
        cov = jnp.linalg.inv(precision)
        return cov @ (X.T @ y / 0.64 + prior_mean / prior_sd**2), cov

    def evidence(X, y):
        cov = 0.64 * jnp.eye(len(y)) + X * prior_sd**2 @ X.T
        return dist.MultivariateNormal(X @ prior_mean, cov).log_prob(y)

    guide = AutoMultivariateNormal(linear)
    seed(guide, 0)(X, y)
    w, today, total = random.normal(random.key(2), (5, 2)), linear, 0.0
    for n in (4, 8, 12):
        loc, cov = exact(X[:n], y[:n])
        q = dist.MultivariateNormal(loc, cov)
        rows = X[n - 4 : n], y[n - 4 : n]
        log_p = jnp.stack([-potential_energy(today, rows, {}, {"w": one}) for one in w])
        gains = log_p - q.log_prob(w)
        np.testing.assert_allclose(gains, gains[0], rtol=2e-4, atol=2e-4)
        total += gains[0]
        params = {"auto_loc": loc, "auto_scale_tril": jnp.linalg.cholesky(cov)}
        today = posterior_as_prior(today, (guide, params))
    np.testing.assert_allclose(total, evidence(X, y), rtol=1e-4)


@pytest.mark.slow
def test_wrong_calls_are_sentences():
    guide, params = fitted()
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        posterior_as_prior(model, (guide, params), 1.5)
    with pytest.raises(
        TypeError, match=r"\(engine, result\), \(svi, result\) or \(guide, params\)"
    ):
        posterior_as_prior(model, params)
    with pytest.raises(ValueError, match="it must be a list of sites of"):
        posterior_as_prior(model, (guide, params), sites=["nothing"])
    nan = {**params, "auto_loc": params["auto_loc"] * jnp.nan}
    with pytest.raises(ValueError, match="is not finite; fit it"):
        posterior_as_prior(model, (guide, nan))
    kept = posterior_as_prior(model, (guide, params), sites=["local"])
    with pytest.raises(ValueError, match=r"shape \(1,\) in the model and \(3,\) in the fit"):
        seed(kept, 0)(Y[:1], n=1)


def test_other_sites_than_those_of_the_fit_are_named():
    def turned(y):
        a = numpyro.sample("a", dist.HalfNormal(1.0))
        b = numpyro.sample("b", dist.Normal(0.0, 2.0))
        numpyro.sample("y", dist.Normal(b, a), obs=y)

    def without(y):
        numpyro.sample("b", dist.Normal(0.0, 2.0))

    guide = AutoMultivariateNormal(two)
    seed(guide, 0)(Y)
    loc, tril = normal(2)
    fit = guide, {"auto_loc": loc, "auto_scale_tril": tril}
    with pytest.raises(ValueError, match="samples 'a' in another order than its prior"):
        seed(posterior_as_prior(turned, fit), 0)(Y)
    with pytest.raises(ValueError, match=r"has no latent sites \['a'\]"):
        seed(posterior_as_prior(without, fit), 0)(Y)
