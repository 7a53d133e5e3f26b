"""NumPyro's own examples: its models, with its data where they are small or generated there, and
others of the same kind, generated here, where they are downloaded."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.distributions.transforms import AffineTransform
from numpyro.infer.reparam import TransformReparam
from sklearn.datasets import load_iris

from numpyro_ext.targets import breast_cancer


class Example(NamedTuple):
    """A model of ``(*data, batch)``, where ``batch`` may be left out for all rows."""

    model: Callable[..., None]
    data: tuple[Any, ...]
    compared: tuple[str, ...]
    """Sites, latent or deterministic, that say whether an answer is right."""
    batch: int | None = None
    """Rows of a minibatch, for a model that can have one."""


def logistic() -> Example:
    """The model of `examples/covtype.py`, on ten features of the breast cancer data."""

    def model(x: Array, y: Array, batch: int | None = None) -> None:
        coefs = numpyro.sample("coefs", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ coefs), obs=y[i])

    data = breast_cancer()
    x = jnp.column_stack([data.x_train, jnp.ones(len(data.x_train))])
    return Example(model, (x, data.y_train), ("coefs",))


def eight_schools(*, centred: bool) -> Example:
    """NumPyro's README, with and without its reparametrisation; both compare theta."""
    sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])

    def model(sigma: Array, y: Array, batch: int | None = None) -> None:
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", len(y)):
            if centred:
                theta = numpyro.sample("theta", dist.Normal(mu, tau))
            else:
                base = dist.TransformedDistribution(dist.Normal(0.0, 1.0), AffineTransform(mu, tau))
                with numpyro.handlers.reparam(config={"theta": TransformReparam()}):
                    theta = numpyro.sample("theta", base)
            numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)

    return Example(model, (sigma, y), ("mu", "tau", "theta"))


HITS = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
TIMES = 45


def baseball(*, logits: bool = False) -> Example:
    """Hits of 18 players in their first 45 times at bat (Efron and Morris)."""

    def pooled(hits: Array, batch: int | None = None) -> None:
        m = numpyro.sample("m", dist.Uniform(0, 1))
        kappa = numpyro.sample("kappa", dist.Pareto(1, 1.5))
        with numpyro.plate("players", len(hits)):
            phi = numpyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
            numpyro.sample("hits", dist.Binomial(TIMES, probs=phi), obs=hits)

    def pooled_logits(hits: Array, batch: int | None = None) -> None:
        loc = numpyro.sample("loc", dist.Normal(-1, 1))
        scale = numpyro.sample("scale", dist.HalfCauchy(1))
        with numpyro.plate("players", len(hits)):
            alpha = numpyro.sample("alpha", dist.Normal(loc, scale))
            numpyro.sample("hits", dist.Binomial(TIMES, logits=alpha), obs=hits)

    if logits:
        return Example(pooled_logits, (jnp.asarray(HITS),), ("loc", "scale", "alpha"))
    return Example(pooled, (jnp.asarray(HITS),), ("m", "phi"))


def correlations() -> Example:
    """The example of `LKJCholesky`'s docstring, on the four measurements of the iris setosa."""

    def model(y: Array, batch: int | None = None) -> None:
        d = y.shape[1]
        theta = numpyro.sample("theta", dist.HalfCauchy(jnp.ones(d)))
        factor = numpyro.sample("L_omega", dist.LKJCholesky(d, concentration=1.0))
        below = np.tril_indices(d, -1)
        numpyro.deterministic("correlations", (factor @ factor.T)[below])
        with numpyro.plate("observations", len(y)):
            scale = theta[:, None] * factor
            numpyro.sample("obs", dist.MultivariateNormal(jnp.zeros(d), scale_tril=scale), obs=y)

    x: Any = load_iris().data[:50]  # type: ignore[attr-defined]
    y = jnp.asarray((x - x.mean(0)) / x.std(0), jnp.float32)
    return Example(model, (y,), ("theta", "correlations"))


def zero_inflated_poisson() -> Example:
    """`examples/zero_inflated_poisson.py`, on 250 rows drawn from its model."""

    def model(x: Array, y: Array, batch: int | None = None) -> None:
        b1 = numpyro.sample("b1", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        b2 = numpyro.sample("b2", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("obs", len(x), subsample_size=batch) as i:
            gate, rate = jax.nn.sigmoid(x[i] @ b1), jnp.exp(x[i] @ b2)
            numpyro.sample("y", dist.ZeroInflatedPoisson(gate=gate, rate=rate), obs=y[i])

    rng = np.random.default_rng(0)
    livebait, camper = rng.binomial(1, 0.85, 250), rng.binomial(1, 0.6, 250)
    persons, child = rng.integers(1, 5, 250), rng.integers(0, 3, 250)
    x = np.column_stack([livebait, camper, persons, child, np.ones(250)]).astype(np.float32)
    gate = 1 / (1 + np.exp(-x @ np.array([0.3, -0.8, -0.8, 1.5, 0.8])))
    y = rng.poisson(np.exp(x @ np.array([0.8, 0.6, 0.8, -1.1, -1.6]))) * (rng.random(250) > gate)
    return Example(model, (jnp.asarray(x), jnp.asarray(y)), ("b1", "b2"), batch=50)


def network(rows: int = 50) -> Example:
    """`examples/bnn.py`: two layers of 5 tanh units; the function is compared.

    The weights are not: their posterior is a sum of many permuted copies.
    """

    def model(x: Array, y: Array, batch: int | None = None) -> None:
        w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([x.shape[1], 5]).to_event(2))
        w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([5, 5]).to_event(2))
        w3 = numpyro.sample("w3", dist.Normal(0, 1).expand([5]).to_event(1))
        f = numpyro.deterministic("f", jnp.tanh(jnp.tanh(x @ w1) @ w2) @ w3)
        precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
        numpyro.sample("y", dist.Normal(f, precision**-0.5), obs=y)

    rng = np.random.RandomState(0)
    x = np.linspace(-1, 1, rows)[:, None] ** np.arange(3)
    y = x @ (0.5 * rng.randn(3)) + 0.5 * (0.5 + x[:, 1]) ** 2 * np.sin(4.0 * x[:, 1])
    y += 0.05 * rng.randn(rows)
    y = (y - y.mean()) / y.std()
    return Example(model, (jnp.asarray(x, float), jnp.asarray(y, float)), ("f", "prec_obs"))


def admissions() -> Example:
    """Varying intercepts and slopes of six departments (`ucbadmit`)."""
    dept, male = np.repeat(np.arange(6), 2), np.tile([1, 0], 6)
    applied = jnp.array([825, 108, 560, 25, 325, 593, 417, 375, 191, 393, 373, 341])
    admitted = jnp.array([512, 89, 353, 17, 120, 202, 138, 131, 53, 94, 22, 24])

    def model(applied: Array, admitted: Array, batch: int | None = None) -> None:
        v_mu = numpyro.sample("v_mu", dist.Normal(0, jnp.array([4.0, 1.0])))
        sigma = numpyro.sample("sigma", dist.HalfNormal(jnp.ones(2)))
        root = numpyro.sample("L_Rho", dist.LKJCholesky(2, concentration=2))
        z = numpyro.sample("z", dist.Normal(jnp.zeros((6, 2)), 1))
        v = z @ (sigma[:, None] * root).T
        logits = v_mu[0] + v[dept, 0] + (v_mu[1] + v[dept, 1]) * male
        numpyro.sample("admit", dist.Binomial(applied, logits=logits), obs=admitted)

    return Example(model, (applied, admitted), ("v_mu", "sigma"))


def cover_types() -> Example:
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

    def model(x: Array, y: Array, batch: int | None = None) -> None:
        coefs = numpyro.sample("coefs", dist.Normal(jnp.zeros(55), 1))
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            numpyro.sample("obs", dist.Bernoulli(logits=x[i] @ coefs), obs=y[i])

    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Example(model, data, ("coefs",), batch=200)


def proportions() -> Example:
    """100,000 customers, about half of whom were called (`proportion_test`)."""
    rng = np.random.default_rng(5)
    called = np.repeat([1.0, 0.0], [51_342, 48_658])
    x = np.column_stack([np.ones(100_000), called, rng.random(100_000) < 0.5])
    y = rng.random(100_000) < np.where(called == 1, 0.084, 0.061)

    def model(x: Array, y: Array, batch: int | None = None) -> None:
        prior = dist.MultivariateNormal(0.0, jnp.eye(3))
        beta = numpyro.sample("coefficients", prior)
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            numpyro.sample("obs", dist.Bernoulli(logits=x[i] @ beta), obs=y[i])

    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Example(model, data, ("coefficients",), batch=200)


def horseshoe() -> Example:
    """100 rows, 32 columns of which three count (`horseshoe_regression`)."""
    rng = np.random.RandomState(0)
    x = rng.randn(100, 32)
    y = x[:, :3] @ np.array([2.0, -1.0, 0.5])
    y = y - y.mean() + 0.05 * rng.randn(100)

    def model(x: Array, y: Array, batch: int | None = None) -> None:
        lambdas = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(32)))
        tau = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
        unscaled = numpyro.sample("unscaled_betas", dist.Normal(0.0, jnp.ones(32)))
        betas = numpyro.deterministic("betas", tau * lambdas * unscaled)
        precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
        numpyro.sample("Y", dist.Normal(x @ betas, precision**-0.5), obs=y)

    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Example(model, data, ("betas", "prec_obs"))


def gaussian_process() -> Example:
    """Three hyperparameters of a Gaussian process on 25 points (`gp`)."""
    rng = np.random.RandomState(0)
    x = np.linspace(-1, 1, 25)
    y = x + 0.2 * x**3 + 0.5 * (0.5 + x) ** 2 * np.sin(4 * x) + 0.15 * rng.randn(25)
    y = (y - y.mean()) / y.std()

    def model(x: Array, y: Array, batch: int | None = None) -> None:
        names = ("kernel_var", "kernel_noise", "kernel_length")
        var, noise, length = (numpyro.sample(name, dist.LogNormal(0.0, 10.0)) for name in names)
        near = jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
        cov = var * near + (noise + 1e-6) * jnp.eye(len(x))
        numpyro.sample("Y", dist.MultivariateNormal(jnp.zeros(len(x)), cov), obs=y)

    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Example(model, data, ("kernel_var", "kernel_noise", "kernel_length"))


def stochastic_volatility() -> Example:
    """600 generated daily returns: 602 latent numbers in a random walk."""
    rng = np.random.default_rng(6)
    walk = np.cumsum(np.append(-5.0, 0.05 * rng.standard_normal(599)))
    returns = np.exp(walk) * rng.standard_t(10, 600)

    def model(returns: Array, batch: int | None = None) -> None:
        sigma = numpyro.sample("sigma", dist.Exponential(50.0))
        s = numpyro.sample("s", dist.GaussianRandomWalk(sigma, num_steps=len(returns)))
        nu = numpyro.sample("nu", dist.Exponential(0.1))
        numpyro.sample("r", dist.StudentT(nu, 0.0, jnp.exp(s)), obs=returns)

    return Example(model, (jnp.asarray(returns, jnp.float32),), ("sigma", "s", "nu"))


def funnel(*, centred: bool) -> Example:
    """Neal's funnel in ten dimensions, of which the first is compared, known as N(0, 3)."""

    def model(batch: int | None = None) -> None:
        y = numpyro.sample("y", dist.Normal(0, 3))
        if centred:
            numpyro.sample("x", dist.Normal(jnp.zeros(9), jnp.exp(y / 2)))
        else:
            numpyro.sample("x_decentered", dist.Normal(jnp.zeros(9), 1))

    return Example(model, (), ("y",))


def autoregression() -> Example:
    """A sine with noise, 142 points (`ar2`, by `scan`)."""
    y = jnp.sin(jnp.arange(142)) + random.normal(random.key(0), (142,)) * 0.1

    def model(y: Array, batch: int | None = None) -> None:
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

    return Example(model, (y,), ("alpha_1", "alpha_2", "const", "sigma"))


def holt_winters() -> Example:
    """A trend with seasons, 60 points: exponential smoothing by `scan`."""
    t = jnp.linspace(0, 7, 70)
    y = (jnp.sin(2 * jnp.pi * t) + 0.3 * t + 0.1 * random.normal(random.key(0), t.shape))[:60]

    def model(y: Array, batch: int | None = None) -> None:
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

    names = ("level_smoothing", "trend_smoothing", "seasonality_smoothing", "noise")
    return Example(model, (y,), names)


EXAMPLES: dict[str, Callable[[], Example]] = {
    "logistic": logistic,
    "eight schools": partial(eight_schools, centred=False),
    "eight schools, centred": partial(eight_schools, centred=True),
    "baseball": baseball,
    "baseball, logits": partial(baseball, logits=True),
    "correlations": correlations,
    "zero-inflated Poisson": zero_inflated_poisson,
    "network": network,
    "admissions": admissions,
    "cover types": cover_types,
    "proportions": proportions,
    "horseshoe": horseshoe,
    "Gaussian process": gaussian_process,
    "stochastic volatility": stochastic_volatility,
    "funnel, centred": partial(funnel, centred=True),
    "funnel, non-centred": partial(funnel, centred=False),
    "autoregression": autoregression,
    "Holt-Winters": holt_winters,
}
