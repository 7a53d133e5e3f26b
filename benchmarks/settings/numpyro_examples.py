"""NumPyro's own examples, which were not chosen for these kernels: its models, with its data where
they are small or generated there, and generated ones of the same kind where they are downloaded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import exact
import jax
from jax import random, vmap
import jax.numpy as jnp
from models import Problem
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer.util import unconstrain_fn

FULL = (4, 1000, 1000)
"""Chains, warmup and draws of NUTS, which is the truth here."""


def _problem(
    model: Callable[..., None],
    *data: Any,
    batch: int | None = None,
    only: str | None = None,
    **more: Any,
) -> Problem:
    """Compared in unconstrained space, as scales with a heavy tail have no standard deviation."""

    def view(samples: dict[str, Any]) -> dict[str, Any]:
        one = partial(unconstrain_fn, model, (*data, None), {})
        found = jax.jit(vmap(vmap(one)))(samples)
        return {name: x for name, x in found.items() if only in (None, name)}

    def of_latents(samples: dict[str, Any]) -> dict[str, Any]:
        with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
            model(*data, None)
        names = {n for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
        return view({name: x for name, x in samples.items() if name in names})

    more = {"nuts": FULL, "dense": False} | more
    return Problem(model, data, batch, view=of_latents, **more)


def baseball(*, logits: bool) -> Problem:
    """Hits of 18 players in their first 45 times at bat (Efron and Morris)."""
    hits = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
    truth = (exact.baseball_logits if logits else exact.baseball)(hits, 45)

    def pooled(hits: Any, batch: int | None) -> None:
        m = numpyro.sample("m", dist.Uniform(0, 1))
        kappa = numpyro.sample("kappa", dist.Pareto(1, 1.5))
        with numpyro.plate("players", len(hits)):
            phi = numpyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
            numpyro.sample("hits", dist.Binomial(45, probs=phi), obs=hits)

    def pooled_logits(hits: Any, batch: int | None) -> None:
        loc = numpyro.sample("loc", dist.Normal(-1, 1))
        scale = numpyro.sample("scale", dist.HalfCauchy(1))
        with numpyro.plate("players", len(hits)):
            alpha = numpyro.sample("alpha", dist.Normal(loc, scale))
            numpyro.sample("hits", dist.Binomial(45, logits=alpha), obs=hits)

    return _problem(pooled_logits if logits else pooled, jnp.asarray(hits), truth=truth)


def admissions() -> Problem:
    """Varying intercepts and slopes of six departments (`ucbadmit`)."""
    dept, male = np.repeat(np.arange(6), 2), np.tile([1, 0], 6)
    applied = jnp.array([825, 108, 560, 25, 325, 593, 417, 375, 191, 393, 373, 341])
    admitted = jnp.array([512, 89, 353, 17, 120, 202, 138, 131, 53, 94, 22, 24])

    def model(applied: Any, admitted: Any, batch: int | None) -> None:
        v_mu = numpyro.sample("v_mu", dist.Normal(0, jnp.array([4.0, 1.0])))
        sigma = numpyro.sample("sigma", dist.HalfNormal(jnp.ones(2)))
        root = numpyro.sample("L_Rho", dist.LKJCholesky(2, concentration=2))
        z = numpyro.sample("z", dist.Normal(jnp.zeros((6, 2)), 1))
        v = z @ (sigma[:, None] * root).T
        logits = v_mu[0] + v[dept, 0] + (v_mu[1] + v[dept, 1]) * male
        numpyro.sample("admit", dist.Binomial(applied, logits=logits), obs=admitted)

    return _problem(model, applied, admitted)


def cover_types() -> Problem:
    """20,000 rows like those of `covtype`: ten columns of numbers and 44 of ones and zeros, some
    seldom one, that add up to constants."""
    rng = np.random.default_rng(4)
    rows = 20_000
    root = np.linalg.cholesky(0.6 * np.ones((10, 10)) + 0.4 * np.eye(10))
    numbers = np.exp(0.5 * rng.standard_normal((rows, 10)) @ root.T)
    area = rng.choice(4, rows, p=[0.45, 0.05, 0.44, 0.06])
    soil = rng.choice(40, rows, p=(p := 1 / np.arange(1, 41) ** 1.3) / p.sum())
    x = np.column_stack([numbers, np.eye(4)[area], np.eye(40)[soil]])
    x = np.column_stack([(x - x.mean(0)) / x.std(0), np.ones(rows)])
    y = rng.random(rows) < 1 / (1 + np.exp(-x @ (0.5 * rng.standard_normal(55))))

    def model(x: Any, y: Any, batch: int | None) -> None:
        coefs = numpyro.sample("coefs", dist.Normal(jnp.zeros(55), 1))
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            numpyro.sample("obs", dist.Bernoulli(logits=x[i] @ coefs), obs=y[i])

    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return _problem(model, *data, batch=200, nuts=(2, 500, 1000), dense=True)


def proportions() -> Problem:
    """100,000 customers, about half of whom were called (`proportion_test`)."""
    rng = np.random.default_rng(5)
    called = np.repeat([1.0, 0.0], [51_342, 48_658])
    x = np.column_stack([np.ones(100_000), called, rng.random(100_000) < 0.5])
    y = rng.random(100_000) < np.where(called == 1, 0.084, 0.061)

    def model(x: Any, y: Any, batch: int | None) -> None:
        prior = dist.MultivariateNormal(0.0, jnp.eye(3))
        beta = numpyro.sample("coefficients", prior)
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            numpyro.sample("obs", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])

    truth = {"coefficients": exact.logistic(x, y.astype(float), 1.0)}
    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Problem(model, data, 200, truth)


def network() -> Problem:
    """Two hidden layers of five units, 100 rows (`bnn`)."""
    rng = np.random.RandomState(0)
    x = np.linspace(-1, 1, 100)[:, None] ** np.arange(3)
    y = x @ (0.5 * rng.randn(3)) + 0.5 * (0.5 + x[:, 1]) ** 2 * np.sin(4 * x[:, 1])
    y = y + 0.05 * rng.randn(100)
    y = (y - y.mean()) / y.std()

    def predict(w1: Any, w2: Any, w3: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w1) @ w2) @ w3

    def model(x: Any, y: Any, batch: int | None) -> None:
        w1 = numpyro.sample("w1", dist.Normal(jnp.zeros((3, 5)), 1))
        w2 = numpyro.sample("w2", dist.Normal(jnp.zeros((5, 5)), 1))
        w3 = numpyro.sample("w3", dist.Normal(jnp.zeros((5, 1)), 1))
        precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
        numpyro.sample("Y", dist.Normal(predict(w1, w2, w3, x), precision**-0.5), obs=y)

    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y[:, None], jnp.float32)

    @jax.jit
    def view(samples: dict[str, Any]) -> dict[str, Any]:
        of_draws = vmap(vmap(partial(predict, x=x[::10])))
        weights = (samples[name] for name in ("w1", "w2", "w3"))
        return {"prediction": of_draws(*weights), "log precision": jnp.log(samples["prec_obs"])}

    return Problem(model, (x, y), view=view, nuts=FULL, dense=False)


def horseshoe() -> Problem:
    """100 rows, 32 columns of which three count (`horseshoe_regression`)."""
    rng = np.random.RandomState(0)
    x = rng.randn(100, 32)
    y = x[:, :3] @ np.array([2.0, -1.0, 0.5])
    y = y - y.mean() + 0.05 * rng.randn(100)

    def model(x: Any, y: Any, batch: int | None) -> None:
        lambdas = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(32)))
        tau = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
        unscaled = numpyro.sample("unscaled_betas", dist.Normal(0.0, jnp.ones(32)))
        betas = numpyro.deterministic("betas", tau * lambdas * unscaled)
        precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
        numpyro.sample("Y", dist.Normal(x @ betas, precision**-0.5), obs=y)

    return _problem(model, jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))


def gaussian_process() -> Problem:
    """Three hyperparameters of a Gaussian process on 25 points (`gp`)."""
    rng = np.random.RandomState(0)
    x = np.linspace(-1, 1, 25)
    y = x + 0.2 * x**3 + 0.5 * (0.5 + x) ** 2 * np.sin(4 * x) + 0.15 * rng.randn(25)
    y = (y - y.mean()) / y.std()

    def model(x: Any, y: Any, batch: int | None) -> None:
        names = ("kernel_var", "kernel_noise", "kernel_length")
        var, noise, length = (numpyro.sample(name, dist.LogNormal(0.0, 10.0)) for name in names)
        near = jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
        cov = var * near + (noise + 1e-6) * jnp.eye(len(x))
        numpyro.sample("Y", dist.MultivariateNormal(jnp.zeros(len(x)), cov), obs=y)

    return _problem(model, jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))


def stochastic_volatility() -> Problem:
    """600 generated daily returns: 602 latent numbers in a random walk."""
    rng = np.random.default_rng(6)
    walk = np.cumsum(np.append(-5.0, 0.05 * rng.standard_normal(599)))
    returns = np.exp(walk) * rng.standard_t(10, 600)

    def model(returns: Any, batch: int | None) -> None:
        sigma = numpyro.sample("sigma", dist.Exponential(50.0))
        s = numpyro.sample("s", dist.GaussianRandomWalk(sigma, num_steps=len(returns)))
        nu = numpyro.sample("nu", dist.Exponential(0.1))
        numpyro.sample("r", dist.StudentT(nu, 0.0, jnp.exp(s)), obs=returns)

    return _problem(model, jnp.asarray(returns, jnp.float32), nuts=(2, 500, 500))


def funnel(*, centred: bool) -> Problem:
    """Neal's funnel in ten dimensions, of which the first is compared, known as N(0, 3)."""

    def model(batch: int | None) -> None:
        y = numpyro.sample("y", dist.Normal(0, 3))
        if centred:
            numpyro.sample("x", dist.Normal(jnp.zeros(9), jnp.exp(y / 2)))
        else:
            numpyro.sample("x_decentered", dist.Normal(jnp.zeros(9), 1))

    return Problem(model, (), truth={"y": (np.zeros(()), np.full((), 3.0))})


def autoregression() -> Problem:
    """A sine with noise, 142 points (`ar2`, by `scan`)."""
    y = jnp.sin(jnp.arange(142)) + random.normal(random.key(0), (142,)) * 0.1

    def model(y: Any, batch: int | None) -> None:
        names = ("alpha_1", "alpha_2", "const")
        alpha_1, alpha_2, const = (numpyro.sample(name, dist.Normal(0, 1)) for name in names)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))

        def transition(carry: Any, _: Any) -> Any:
            last, one_before = carry
            mean = const + alpha_1 * last + alpha_2 * one_before
            now = numpyro.sample("y", dist.Normal(mean, sigma))
            return (now, last), None

        with numpyro.handlers.condition(data={"y": y[2:]}):
            scan(transition, (y[1], y[0]), jnp.arange(len(y) - 2))

    return _problem(model, y)


def holt_winters() -> Problem:
    """A trend with seasons, 60 points: exponential smoothing by `scan`."""
    t = jnp.linspace(0, 7, 70)
    y = (jnp.sin(2 * jnp.pi * t) + 0.3 * t + 0.1 * random.normal(random.key(0), t.shape))[:60]

    def model(y: Any, batch: int | None) -> None:
        names = ("level_smoothing", "trend_smoothing", "seasonality_smoothing")
        a, b, c = (numpyro.sample(name, dist.Beta(1, 1)) for name in names)
        c = c * (1 - a)
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        level = numpyro.sample("level_init", dist.Normal(0, 1))
        trend = numpyro.sample("trend_init", dist.Normal(0, 1))
        with numpyro.plate("seasons", 10):
            seasons = numpyro.sample("seasonality_init", dist.Normal(0, 1))

        def transition(carry: Any, y_t: Any) -> Any:
            level, trend, seasons = carry
            new = a * (y_t - seasons[0]) + (1 - a) * (level + trend)
            new_trend = b * (new - level) + (1 - b) * trend
            season = c * (y_t - level - trend) + (1 - c) * seasons[0]
            numpyro.sample("pred", dist.Normal(level + trend + seasons[0], noise))
            return (new, new_trend, jnp.append(seasons[1:], season)), None

        with numpyro.handlers.condition(data={"pred": y}):
            scan(transition, (level, trend, seasons), y)

    return _problem(model, y)


def zero_inflated() -> Problem:
    """250 groups of visitors who fished or not: counts generated by the model."""
    rng = np.random.default_rng(7)
    persons = rng.integers(1, 5, 250)
    child = np.minimum(rng.integers(0, 4, 250), persons - 1)
    x = np.column_stack([rng.random(250) < 0.86, rng.random(250) < 0.59, persons, child])
    x = np.column_stack([x, np.ones(250)]).astype(float)
    gate = 1 / (1 + np.exp(-x @ np.array([0.8, -0.8, -0.9, 1.9, 0.5])))
    rate = np.exp(x @ np.array([0.9, 0.5, 0.7, -1.0, -1.4]))
    y = np.where(rng.random(250) < gate, 0, rng.poisson(rate))

    def model(x: Any, y: Any, batch: int | None) -> None:
        b1 = numpyro.sample("b1", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        b2 = numpyro.sample("b2", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        with numpyro.plate("obs", len(x), subsample_size=batch) as i:
            gate, rate = jax.nn.sigmoid(x[i] @ b1), jnp.exp(x[i] @ b2)
            numpyro.sample("Y", dist.ZeroInflatedPoisson(gate=gate, rate=rate), obs=y[i])

    return _problem(model, jnp.asarray(x, jnp.float32), jnp.asarray(y), batch=50)


EXAMPLES: dict[str, Callable[[], Problem]] = {
    "baseball": partial(baseball, logits=False),
    "baseball, logits": partial(baseball, logits=True),
    "ucbadmit": admissions,
    "covtype-like": cover_types,
    "proportion_test": proportions,
    "bnn": network,
    "horseshoe_regression": horseshoe,
    "gp": gaussian_process,
    "stochastic_volatility": stochastic_volatility,
    "funnel, centred": partial(funnel, centred=True),
    "funnel, non-centred": partial(funnel, centred=False),
    "ar2": autoregression,
    "holt_winters": holt_winters,
    "zero_inflated_poisson": zero_inflated,
}
