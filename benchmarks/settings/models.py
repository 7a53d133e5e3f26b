"""The models of the benchmark of default settings, each with its data and what its posterior is
known by."""

from collections.abc import Callable
import json
from pathlib import Path
import sys
from typing import Any, NamedTuple

import exact
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from sklearn.datasets import load_diabetes, load_wine

sys.path.append(str(Path(__file__).parents[1]))
from _shared.german_credit import load, logistic


class Problem(NamedTuple):
    """A model of ``(*data, batch)``, and what is known of its posterior."""

    model: Callable[..., None]
    data: tuple[Any, ...]
    batch: int | None = None
    truth: dict[str, tuple[Any, Any]] | None = None
    """Means and standard deviations of what is compared; None: NUTS tells them."""
    view: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """What is compared, from the samples ``(chain, draw, ...)``; None: the samples themselves."""
    nuts: tuple[int, int, int] = (2, 500, 500)
    """Chains, warmup and draws of NUTS."""
    dense: bool = True
    """Whether NUTS has a dense mass."""
    held_out: Callable[[dict[str, Any]], float] | None = None
    """Mean log density of rows that the model has not seen."""
    by_hand: tuple[tuple[float, float], ...] = ()
    """Steps and frictions of SGHMC that a user would try."""


TRUTH = (4, 500, 2000)
"""Chains, warmup and draws of NUTS where it is the truth."""


def german_credit(folder: Path) -> Problem:
    data, mean, sd = load(folder)
    return Problem(logistic, data, 100, {"w": (mean, sd)})


def wide_logistic(x: Any, y: Any, batch: int | None) -> None:
    logistic(x, y, batch, 10.0)


def large_logistic(rows: int) -> Problem:
    """Ten correlated columns of unequal scale: the curvature has a condition number of several
    thousand."""
    rng = np.random.default_rng(0)
    root = np.linalg.cholesky(0.9 * np.ones((10, 10)) + 0.1 * np.eye(10))
    x = rng.standard_normal((rows, 10)) @ root.T * np.geomspace(0.1, 10, 10)
    w = rng.standard_normal(10) / np.geomspace(0.1, 10, 10)
    y = rng.random(rows) < 1 / (1 + np.exp(-x @ w))
    return Problem(
        wide_logistic,
        (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)),
        256,
        {"w": exact.logistic(x, y.astype(float), 10.0)},
        nuts=(1, 300, 200),
    )


def _linear(prior: float | None, noise: dist.Distribution) -> Callable[..., None]:
    def model(x: Any, y: Any, batch: int | None) -> None:
        d = x.shape[1]
        flat = dist.ImproperUniform(constraints.real_vector, (), (d,))
        given = flat if prior is None else dist.Normal(0, prior).expand([d]).to_event(1)
        beta, sigma = numpyro.sample("beta", given), numpyro.sample("sigma", noise)
        with numpyro.plate("data", len(x), subsample_size=batch) as idx:
            numpyro.sample("y", dist.Normal(x[idx] @ beta, sigma), obs=y[idx])

    return model


def _values(folder: Path, data: str) -> dict[str, Any]:
    return json.loads((folder / "posteriordb" / f"{data}.json").read_text())


def _regression(
    x: np.ndarray, y: np.ndarray, prior: float | None, noise: Any, batch: int
) -> Problem:
    d = x.shape[1]
    precision = np.full(d, 0.0 if prior is None else prior**-2)
    log_prior = {
        dist.HalfNormal: lambda s: -0.5 * (s / float(noise.scale)) ** 2,
        dist.HalfCauchy: lambda s: -np.log1p((s / float(noise.scale)) ** 2),
    }[type(noise)]
    beta, sigma = exact.linear_regression(x, y, np.zeros(d), precision, log_prior)
    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Problem(_linear(prior, noise), data, batch, {"beta": beta, "sigma": sigma})


def blr(folder: Path) -> Problem:
    values = _values(folder, "sblrc")
    x, y = np.array(values["X"], float), np.array(values["y"], float)
    return _regression(x, y, 10.0, dist.HalfNormal(10.0), 20)


def kidscore_momiq(folder: Path) -> Problem:
    values = _values(folder, "kidiq")
    y = np.array(values["kid_score"], float)
    x = np.column_stack([np.ones(len(y)), np.array(values["mom_iq"], float)])
    return _regression(x, y, None, dist.HalfCauchy(2.5), 50)


def ark(folder: Path) -> Problem:
    values = _values(folder, "arK")
    series, lags = np.array(values["y"], float), values["K"]
    columns = [series[lags - k : len(series) - k] for k in range(1, lags + 1)]
    x = np.column_stack([np.ones(len(series) - lags), *columns])
    return _regression(x, series[lags:], 10.0, dist.HalfCauchy(2.5), 40)


def eight_schools(folder: Path, *, centred: bool = False) -> Problem:
    values = _values(folder, "eight_schools")

    def model(y: Any, sigma: Any, batch: int | None) -> None:
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", len(y)):
            if centred:
                theta = numpyro.sample("theta", dist.Normal(mu, tau))
            else:
                theta = mu + tau * numpyro.sample("theta_trans", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    y, sigma = (np.array(values[name], float) for name in ("y", "sigma"))
    return Problem(
        model,
        (jnp.asarray(y, jnp.float32), jnp.asarray(sigma, jnp.float32)),
        truth=exact.eight_schools(y, sigma, centred=centred),
        by_hand=tuple((step, 0.5) for step in (0.01, 0.03, 0.1, 0.3)),
    )


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
    return Problem(
        model,
        data,
        100,
        exact.varying_intercepts(group, x, y, centred=centred),
        by_hand=tuple((step, 2 / 0.02) for step in (0.0005, 0.001, 0.002, 0.004)),
    )


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

    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Problem(model, data, 100, nuts=TRUTH)


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

    truth = None
    if not robust:
        z = np.asarray(raw.data, float)
        z = np.column_stack([np.ones(len(z)), z - np.asarray(middle, float)])
        coefficients, scale = exact.linear_regression(
            z,
            np.asarray(raw.target, float),
            np.array([150.0, *np.zeros(10)]),
            np.array([100.0**-2, *np.full(10, 20.0**-2)]),
            lambda s: -0.5 * (s / 100) ** 2,
        )
        a, w = (tuple(x[k] for x in coefficients) for k in (0, slice(1, None)))
        truth = {"a": a, "w": w, "sigma": scale}
    return Problem(model, (x, y), 40, truth, nuts=TRUTH if robust else (2, 500, 500))


def wine() -> Problem:
    """178 rows, six columns: the first class against the others."""
    raw: Any = load_wine()
    x = raw.data[:, :6]
    x = np.column_stack([np.ones(len(x)), (x - x.mean(0)) / x.std(0)])
    data = jnp.asarray(x, jnp.float32), jnp.asarray(raw.target == 0, jnp.float32)
    return Problem(lambda x, y, batch: logistic(x, y, batch, 2.5), data, 30, nuts=TRUTH)


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

    order = np.random.default_rng(0).permutation(len(table))
    rows = jnp.asarray(table[order[50:]], jnp.float32)
    new = jnp.asarray(table[order[:50]], jnp.float32)

    @jax.jit
    def predict(samples: dict[str, Any]) -> Any:
        hidden = jnp.tanh(
            jnp.einsum("nd,csdh->csnh", new[:, :-1], samples["w1"]) + samples["b1"][..., None, :]
        )
        return jnp.einsum("csnh,csh->csn", hidden, samples["w2"])

    def held_out(samples: dict[str, Any]) -> float:
        log_prob = dist.Normal(predict(samples), samples["sigma"][..., None]).log_prob(new[:, -1])
        draws = log_prob.shape[0] * log_prob.shape[1]
        return float(jnp.mean(jax.nn.logsumexp(log_prob, (0, 1)) - np.log(draws)))

    return Problem(
        model,
        (rows[:, :-1], rows[:, -1]),
        50,
        view=lambda samples: {"prediction": predict(samples), "sigma": samples["sigma"]},
        nuts=(2, 300, 500),
        dense=False,
        held_out=held_out,
        by_hand=tuple((step, 2 / 0.05) for step in (0.001, 0.003, 0.01, 0.03)),
    )


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

    return Problem(
        model,
        (x,),
        20,
        {"loc, sorted": exact.sorted_pair(np.asarray(x, float), 0.6, 3.0)},
        view=lambda samples: {"loc, sorted": np.sort(samples["loc"], -1)},
        by_hand=tuple((step, 2 / 0.08) for step in (0.003, 0.01, 0.03, 0.1)),
    )


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
WARNED = (
    "eight schools, centred",
    "varying intercepts, non-centred",
    "network, boston",
    "two modes",
)
"""Where settings cannot be found."""
