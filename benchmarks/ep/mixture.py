"""The means of a mixture of four normal distributions, with the labels of its rows summed out.

.. math:: \\mu_j \\sim N(m_j, I), \\quad h_n \\sim \\text{Cat}(1/4), \\quad
    x_n \\mid h_n \\sim N(\\mu_{h_n}, I/4)

in two dimensions, 200 rows. A row depends on all eight numbers, so its moments are found by
importance sampling. With a common m the posterior has 24 equal modes, and EP stays at the mean of
them; here the prior means are the corners of a square of side 2, so that one mode has the mass, and
NUTS starts in it.
"""

import argparse
import time
import warnings

from fits import Moments, Table, fit, of_draws, of_params, passes
import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_value

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import ADF, DSEP, EP, ImportanceSampling

CORNERS = jnp.array([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
ROWS = 200


def means() -> Array:
    return numpyro.sample("mu", dist.Normal(CORNERS, 1).to_event(2))


def labelled(x: Array) -> None:
    mu = means()
    with numpyro.plate("rows", len(x)) as idx:
        h = numpyro.sample("h", dist.Categorical(jnp.full(4, 0.25)))
        numpyro.sample("x", dist.Normal(mu[h], 0.5).to_event(1), obs=x[idx])


def marginal(x: Array) -> None:
    """The same without labels, for NUTS."""
    mu = means()
    parts = dist.Normal(mu, 0.5).to_event(1)
    with numpyro.plate("rows", len(x)):
        mixture = dist.MixtureSameFamily(dist.Categorical(jnp.full(4, 0.25)), parts)
        numpyro.sample("x", mixture, obs=x)


def distances(exact: Moments, q: Moments) -> tuple[float, float]:
    """Mean Frobenius distance of the four means, and of their four covariances."""
    (m, V), (a, B) = exact, q
    blocks = [slice(2 * j, 2 * j + 2) for j in range(4)]
    return (
        float(np.mean([np.linalg.norm((a - m)[s]) for s in blocks])),
        float(np.mean([np.linalg.norm((B - V)[s, s]) for s in blocks])),
    )


def run_mixture(args: argparse.Namespace) -> None:
    rows = Table("key", "method", "means", "covariances", "seconds")
    way = {"projection": ImportanceSampling(), "max_rank": 0}
    ep, sep, adf = EP(labelled, **way), DSEP(labelled, 1, **way), ADF(labelled, **way)
    for seed in range(args.repeats):
        keys = random.split(random.key(seed), 4)
        truth = CORNERS + random.normal(keys[0], (4, 2))
        x = truth[random.randint(keys[1], (ROWS,), 0, 4)] + random.normal(keys[2], (ROWS, 2)) / 2
        kernel = NUTS(marginal, init_strategy=init_to_value(values={"mu": truth}))
        mcmc = MCMC(kernel, num_warmup=1000, num_samples=5 * args.draws, progress_bar=False)
        start = time.perf_counter()
        mcmc.run(keys[3], x)
        draws = jax.block_until_ready(mcmc.get_samples()["mu"]).reshape(-1, 8)
        exact, half = of_draws(draws), len(draws) // 2
        halves = distances(of_draws(draws[:half]), of_draws(draws[half:]))
        rows.append(row(seed, "NUTS, its two halves", halves, start))
        start = time.perf_counter()
        with warnings.catch_warnings():
            # Sites by sampling do not settle below their noise.
            warnings.filterwarnings("ignore", "EP has not converged", InferenceWarning)
            with_ep = of_params(fit(ep, 20, x).params)
        rows.append(row(seed, "EP, 20 sweeps", distances(exact, with_ep), start))
        start = time.perf_counter()
        averaged, last = passes(sep, 20 * ROWS, x)
        rows.append(row(seed, "SEP, 20 passes", distances(exact, averaged), start))
        rows.append(row(seed, "SEP, last", distances(exact, last)))
        for num_passes in (1, 10):
            start = time.perf_counter()
            found = of_params(fit(adf, num_passes, x).params)
            name = "ADF, 1 pass" if num_passes == 1 else f"ADF, {num_passes} passes"
            rows.append(row(seed, name, distances(exact, found), start))


def row(seed: int, name: str, found: tuple[float, float], start: float | None = None) -> list:
    seconds = f"{time.perf_counter() - start:.1f}" if start else ""
    return [seed, name, *(f"{x:.4f}" for x in found), seconds]
