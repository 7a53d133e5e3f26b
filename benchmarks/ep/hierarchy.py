"""Logistic regressions of 20 groups, whose coefficients have a common mean and spread.

.. math:: \\mu \\sim N(0, I), \\quad \\log \\tau \\sim N(0, 1/4), \\quad
    \\beta_j \\sim N(\\mu, \\operatorname{diag} \\tau^2), \\quad
    y_{jn} \\sim \\text{Bernoulli}(\\text{logit} = x_{jn}^\\top \\beta_j)

with four coefficients and 50 rows in a group. What is compared are the eight numbers (mu, log tau).

- `EP`: all 88 numbers are in q; a row depends on one direction, and a coefficient's prior on two.
- `DEP`: the groups are the factors, as functions of (mu, log tau) alone. A group's own coefficients
  are sites inside the plate of the groups, which NUTS or importance sampling integrates out of
  its factor.
- `SDEP`: the same with one site that all groups share, 15 passes over one group after the other,
  with steps of 1/20, or of 1/20 that decrease to 1/90.
"""

import argparse
from functools import partial
import time
import warnings

from fits import Moments, Table, fit, of_draws, of_params
import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import (
    EP,
    DistributedEP,
    ImportanceSampling,
    NUTSProjection,
    StochasticDistributedEP,
)

GROUPS, ROWS, D = 20, 50, 4
SPREAD = 0.5


def common() -> tuple[Array, Array]:
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([D]).to_event(1))
    return mu, numpyro.sample("log_tau", dist.Normal(0, SPREAD).expand([D]).to_event(1))


def standardised(X: Array, y: Array) -> None:
    """With coefficients in units of their spread, for NUTS."""
    mu, log_tau = common()
    z = numpyro.sample("z", dist.Normal(0, 1).expand([GROUPS, D]).to_event(2))
    logits = jnp.einsum("jnd,jd->jn", X, mu + jnp.exp(log_tau) * z)
    with numpyro.plate("groups", GROUPS):
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)


def centred(X: Array, y: Array) -> None:
    """With all coefficients as they are, a row at a time."""
    mu, log_tau = common()
    beta = numpyro.sample("beta", dist.Normal(mu, jnp.exp(log_tau)).expand([GROUPS, D]))
    with numpyro.plate("rows", GROUPS * ROWS) as idx:
        logits = jnp.sum(X.reshape(-1, D)[idx] * beta[idx // ROWS], -1)
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y.reshape(-1)[idx])


def grouped(X: Array, y: Array) -> None:
    """A group is a row, with coefficients of its own."""
    mu, log_tau = common()
    with numpyro.plate("groups", GROUPS) as idx:
        beta = numpyro.sample("beta", dist.Normal(mu, jnp.exp(log_tau)).to_event(1))
        logits = jnp.einsum("jnd,jd->jn", X[idx], beta)
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y[idx])


def distance(exact: Moments, q: Moments) -> list[str]:
    """The largest error of a mean, in standard deviations, and all ratios of these."""
    (m, V), (a, B) = exact, q
    sd = np.sqrt(np.diag(V))
    ratio = np.sqrt(np.diag(B)) / sd
    return [f"{np.max(np.abs(a - m) / sd):.2f} sd", f"{ratio.min():.2f} to {ratio.max():.2f}"]


def run_hierarchy(args: argparse.Namespace) -> None:
    rows = Table("key", "method", "largest mean error", "sd ratio", "seconds")
    by_nuts = NUTSProjection(num_warmup=200, num_samples=args.part_draws)
    drawn = {"projection": ImportanceSampling(num_samples=2048)}
    tied = partial(StochasticDistributedEP, grouped, schedule="serial")
    engines = {
        "EP": (EP(centred, schedule="parallel"), 100),
        "DEP, NUTS": (DistributedEP(grouped, GROUPS, projection=by_nuts), 8),
        "DEP, importance sampling": (DistributedEP(grouped, GROUPS, **drawn), 15),
        "SDEP, importance sampling": (tied(GROUPS, **drawn), 15),
        "SDEP, decreasing steps": (tied(GROUPS, step=lambda i: 1 / (GROUPS + 5 * i), **drawn), 15),
    }
    for seed in range(args.repeats):
        keys = random.split(random.key(seed), 6)
        mu, log_tau = random.normal(keys[0], (D,)), SPREAD * random.normal(keys[1], (D,))
        beta = mu + jnp.exp(log_tau) * random.normal(keys[2], (GROUPS, D))
        X = random.normal(keys[3], (GROUPS, ROWS, D))
        p = jax.nn.sigmoid(jnp.einsum("jnd,jd->jn", X, beta))
        y = random.bernoulli(keys[4], p).astype(float)
        start = time.perf_counter()
        mcmc = MCMC(NUTS(standardised), num_warmup=1000, num_samples=args.draws, progress_bar=False)
        mcmc.run(keys[5], X, y)
        draws = jax.block_until_ready(mcmc.get_samples())
        x = np.concatenate([draws["log_tau"], draws["mu"]], -1)
        exact, half = of_draws(x), len(x) // 2
        rows.append(
            [
                seed,
                "NUTS, its two halves",
                *distance(of_draws(x[:half]), of_draws(x[half:])),
                f"{time.perf_counter() - start:.1f}",
            ]
        )
        for name, (engine, num_steps) in engines.items():
            start = time.perf_counter()
            with warnings.catch_warnings():
                # Sites by NUTS do not settle below their noise.
                warnings.filterwarnings("ignore", "EP has not converged", InferenceWarning)
                result = fit(engine, num_steps, X, y)
            places = order(engine, result.params)
            m, V = of_params(result.params)
            seconds = f"{time.perf_counter() - start:.1f}"
            q = m[places], V[np.ix_(places, places)]
            rows.append([seed, name, *distance(exact, q), seconds])


def order(engine: EP, params: dict[str, Array]) -> np.ndarray:
    """The places of (log tau, mu) in the vector of the guide."""
    at = engine.guide.median(
        {**params, "auto_loc": jnp.arange(len(params["auto_loc"]), dtype=float)}
    )
    return np.concatenate([at["log_tau"], at["mu"]]).astype(int)
