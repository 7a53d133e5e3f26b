"""The models of the benchmark of default settings, each with its data and what its posterior is known by."""

from collections.abc import Callable
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from sklearn.datasets import load_diabetes, load_wine


class Problem(NamedTuple):
    """A model of ``(*data, batch)``, and means and standard deviations of its sites where they are published."""

    model: Callable[..., None]
    data: tuple[Any, ...]
    batch: int | None
    truth: dict[str, tuple[np.ndarray, np.ndarray]] | None = None


def german_credit(folder: Path) -> Problem:
    table = np.loadtxt(folder / "german_credit" / "german.data-numeric")
    x = (table[:, :-1] - table[:, :-1].mean(0)) / table[:, :-1].std(0)
    x = np.column_stack([x, np.ones(len(x))]).astype(np.float32)
    moments = np.loadtxt(folder / "german_credit" / "posterior_mean_sd.csv", delimiter=",").T
    data = jnp.asarray(x), jnp.asarray(table[:, -1] == 2, jnp.float32)
    return Problem(logistic, data, 100, {"w": (moments[0], moments[1])})


def logistic(x: Any, y: Any, batch: int | None, scale: float = 1.0) -> None:
    w = numpyro.sample("w", dist.Normal(0, scale).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def wide_logistic(x: Any, y: Any, batch: int | None) -> None:
    logistic(x, y, batch, 10.0)


def large_logistic(rows: int) -> Problem:
    """Ten correlated columns of unequal scale: the curvature has a condition number of several thousand."""
    rng = np.random.default_rng(0)
    root = np.linalg.cholesky(0.9 * np.ones((10, 10)) + 0.1 * np.eye(10))
    x = rng.standard_normal((rows, 10)) @ root.T * np.geomspace(0.1, 10, 10)
    w = rng.standard_normal(10) / np.geomspace(0.1, 10, 10)
    y = rng.random(rows) < 1 / (1 + np.exp(-x @ w))
    return Problem(
        wide_logistic,
        (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)),
        256,
        {"w": _laplace(x, y.astype(float), 10.0)},
    )


def _laplace(x: np.ndarray, y: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Mode and standard deviations of a logistic regression in double precision: exact up to order 1/N."""
    w = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(w)) / scale**2
        w = w - np.linalg.solve(hessian, x.T @ (p - y) + w / scale**2)
    return w, np.sqrt(np.diag(np.linalg.inv(hessian)))


def _linear(prior: float | None, noise: dist.Distribution) -> Callable[..., None]:
    def model(x: Any, y: Any, batch: int | None) -> None:
        d = x.shape[1]
        flat = dist.ImproperUniform(constraints.real_vector, (), (d,))
        given = flat if prior is None else dist.Normal(0, prior).expand([d]).to_event(1)
        beta, sigma = numpyro.sample("beta", given), numpyro.sample("sigma", noise)
        with numpyro.plate("data", len(x), subsample_size=batch) as idx:
            numpyro.sample("y", dist.Normal(x[idx] @ beta, sigma), obs=y[idx])

    return model


def _posteriordb(folder: Path, name: str, data: str) -> tuple[dict[str, Any], Any]:
    draws = np.load(folder / "posteriordb" / f"{name}.npz")
    values = json.loads((folder / "posteriordb" / f"{data}.json").read_text())
    return values, lambda *names: (
        np.squeeze(np.stack([np.mean(draws[n]) for n in names])),
        np.squeeze(np.stack([np.std(draws[n]) for n in names])),
    )


def _regression(
    x: np.ndarray,
    y: np.ndarray,
    prior: float | None,
    noise: Any,
    batch: int,
    moments: Any,
    names: Any,
) -> Problem:
    truth = {"beta": moments(*names), "sigma": moments("sigma")}
    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Problem(_linear(prior, noise), data, batch, truth)


def blr(folder: Path) -> Problem:
    values, moments = _posteriordb(folder, "sblrc-blr", "sblrc")
    x, y = np.array(values["X"], float), np.array(values["y"], float)
    names = [f"beta[{k + 1}]" for k in range(x.shape[1])]
    return _regression(x, y, 10.0, dist.HalfNormal(10.0), 20, moments, names)


def kidscore_momiq(folder: Path) -> Problem:
    values, moments = _posteriordb(folder, "kidiq-kidscore_momiq", "kidiq")
    y = np.array(values["kid_score"], float)
    x = np.column_stack([np.ones(len(y)), np.array(values["mom_iq"], float)])
    names = ["beta[1]", "beta[2]"]
    return _regression(x, y, None, dist.HalfCauchy(2.5), 50, moments, names)


def ark(folder: Path) -> Problem:
    values, moments = _posteriordb(folder, "arK-arK", "arK")
    series, lags = np.array(values["y"], float), values["K"]
    columns = [series[lags - k : len(series) - k] for k in range(1, lags + 1)]
    x = np.column_stack([np.ones(len(series) - lags), *columns])
    names = ["alpha", *(f"beta[{k + 1}]" for k in range(lags))]
    return _regression(x, series[lags:], 10.0, dist.HalfCauchy(2.5), 40, moments, names)


def eight_schools(folder: Path, *, centred: bool = False) -> Problem:
    values, _ = _posteriordb(folder, "eight_schools-eight_schools_noncentered", "eight_schools")

    def model(y: Any, sigma: Any, batch: int | None) -> None:
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", len(y)):
            if centred:
                theta = numpyro.sample("theta", dist.Normal(mu, tau))
            else:
                theta = mu + tau * numpyro.sample("theta_trans", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    return Problem(model, (jnp.array(values["y"], float), jnp.array(values["sigma"], float)), None)


def varying_intercepts(*, centred: bool) -> Problem:
    """60 groups of 50 rows."""
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(60), 50)
    x = rng.standard_normal(3000)
    intercepts = 1.0 + 0.7 * rng.standard_normal(60)
    y = intercepts[group] + 0.5 * x + 0.8 * rng.standard_normal(3000)

    def model(group: Any, x: Any, y: Any, batch: int | None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        slope = numpyro.sample("slope", dist.Normal(0, 5))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("groups", 60):
            if centred:
                a = numpyro.sample("a", dist.Normal(mu, tau))
            else:
                a = mu + tau * numpyro.sample("a_raw", dist.Normal(0, 1))
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            numpyro.sample("y", dist.Normal(a[group[i]] + slope * x[i], sigma), obs=y[i])

    data = jnp.asarray(group), jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Problem(model, data, 100)


def poisson() -> Problem:
    """20,000 rows of five correlated columns."""
    rng = np.random.default_rng(2)
    x = (
        rng.standard_normal((20_000, 5))
        @ np.linalg.cholesky(0.8 * np.ones((5, 5)) + 0.2 * np.eye(5)).T
    )
    y = rng.poisson(np.exp(1.0 + x @ np.array([0.3, -0.2, 0.1, 0.0, -0.25])))

    def model(x: Any, y: Any, batch: int | None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 5))
        w = numpyro.sample("w", dist.Normal(0, 2).expand([5]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(a + x[i] @ w)), obs=y[i])

    return Problem(model, (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)), 100)


def diabetes(*, robust: bool) -> Problem:
    """442 rows, columns of unequal scale, two of them nearly collinear."""
    raw: Any = load_diabetes(scaled=False)
    x, y = jnp.asarray(raw.data, jnp.float32), jnp.asarray(raw.target, jnp.float32)
    middle = jnp.mean(x, 0)

    def model(x: Any, y: Any, batch: int | None) -> None:
        a = numpyro.sample("a", dist.Normal(150, 100))
        w = numpyro.sample("w", dist.Normal(0, 20).expand([10]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(100))
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            mean = a + (x[i] - middle) @ w
            likelihood = dist.StudentT(4, mean, sigma) if robust else dist.Normal(mean, sigma)
            numpyro.sample("y", likelihood, obs=y[i])

    return Problem(model, (x, y), 40)


def wine() -> Problem:
    """178 rows, six columns: the first class against the others."""
    raw: Any = load_wine()
    x = raw.data[:, :6]
    x = np.column_stack([np.ones(len(x)), (x - x.mean(0)) / x.std(0)])
    data = jnp.asarray(x, jnp.float32), jnp.asarray(raw.target == 0, jnp.float32)
    return Problem(lambda x, y, batch: logistic(x, y, batch, 2.5), data, 30)


def boston_network(folder: Path) -> Problem:
    """A network of 20 tanh units, whose posterior is neither near Gaussian nor of one mode."""
    table = np.loadtxt(folder / "uci" / "boston" / "data.txt")
    table = (table - table.mean(0)) / table.std(0)

    def model(x: Any, y: Any, batch: int | None) -> None:
        d = x.shape[1]
        w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([d, 20]).to_event(2))
        b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([20]).to_event(1))
        w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([20]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            mean = jnp.tanh(x[i] @ w1 + b1) @ w2
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y[i])

    data = jnp.asarray(table[:, :-1], jnp.float32), jnp.asarray(table[:, -1], jnp.float32)
    return Problem(model, data, 50)


def mixture() -> Problem:
    """The mean of one of two components: two modes of equal mass."""
    x = 2.0 * jax.random.normal(jax.random.key(3), (100,)) * 0.3 + 2.0 * (
        jnp.arange(100) % 2 * 2 - 1
    )

    def model(x: Any, batch: int | None) -> None:
        loc = numpyro.sample("loc", dist.Normal(0, 3).expand([2]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=batch) as i:
            parts = dist.Normal(loc, 0.6)
            numpyro.sample(
                "x",
                dist.MixtureSameFamily(dist.Categorical(jnp.full(2, 0.5)), parts),
                obs=x[i],
            )

    return Problem(model, (x,), 20)


PROBLEMS: dict[str, Callable[[Path], Problem]] = {
    "German credit": german_credit,
    "blr": blr,
    "kidscore_momiq": kidscore_momiq,
    "arK": ark,
    "eight schools, non-centred": eight_schools,
    "diabetes": lambda folder: diabetes(robust=False),
    "diabetes, Student-t": lambda folder: diabetes(robust=True),
    "wine": lambda folder: wine(),
    "Poisson, 20,000 rows": lambda folder: poisson(),
    "varying intercepts, centred": lambda folder: varying_intercepts(centred=True),
    "logistic, 100,000 rows": lambda folder: large_logistic(100_000),
    "logistic, 1,000,000 rows": lambda folder: large_logistic(1_000_000),
    "eight schools, centred": lambda folder: eight_schools(folder, centred=True),
    "varying intercepts, non-centred": lambda folder: varying_intercepts(centred=False),
    "network, boston": boston_network,
    "two modes": lambda folder: mixture(),
}
