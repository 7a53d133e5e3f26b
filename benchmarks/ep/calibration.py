"""Simulation-based calibration of the engines: are their posteriors right over data from the prior?

The engines fit a probit regression of 20 rows on two slopes, 200 data sets, 50 draws of each. For
`PBP`, whose weights are not identified, the network itself is drawn from the prior with known
precisions, and its values at five new rows are compared with the prediction, by z-scores whose
standard deviation is 1, and whose law is normal, if the prediction is calibrated.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import stats

from numpyro_ext.diagnostics import fit_engine, simulation_based_calibration
from numpyro_ext.ep import ADF, DAEP, DSEP, EP, PBP, StochasticEP

ROWS = np.random.default_rng(0).normal(size=(20, 2)) * np.array([1.0, 2.0]) + 0.5
ENGINES: dict[str, tuple[Callable[..., Any], int]] = {
    "EP": (EP, 20),
    "EP, parallel": (partial(EP, schedule="parallel"), 30),
    "EP, power 0.5": (partial(EP, power=0.5), 20),
    "ADF": (ADF, 1),
    "StochasticEP": (StochasticEP, 3000),
    "DSEP": (partial(DSEP, partition=4), 3000),
    "DAEP": (partial(DAEP, partition=4), 50),
}


def probit(x: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(dist.Normal().cdf(x @ w)), obs=y)


def engines(names: list[str], simulations: int) -> None:
    print("| engine | p of uniform ranks | by component | seconds |\n|---|---|---|---|")
    for name in names:
        make, steps = ENGINES[name]
        began = time.perf_counter()
        result = simulation_based_calibration(
            random.key(0),
            probit,
            fit_engine(make, steps),
            jnp.asarray(ROWS),
            jnp.zeros(len(ROWS), int),  # which are replaced
            num_simulations=simulations,
            num_samples=50,
        )
        each = ", ".join(f"{p:.2f}" for p in np.ravel(result.p_values["w"]))
        seconds = time.perf_counter() - began
        print(f"| {name} | {result.p_value:.2f} | {each} | {seconds:.0f} |", flush=True)


def networks(simulations: int, epochs: int) -> None:
    print(f"\n| PBP, {epochs} epochs | sd of z | p of a normal law | seconds |\n|---|---|---|---|")
    X = np.linspace(-2, 2, 40)[:, None]
    new = np.linspace(-1.9, 1.7, 5)[:, None]
    for method in ("adf", "ep", "sep"):
        pbp = PBP(
            [1, 20, 1],
            method=method,
            weight_precision=1.0,
            noise_precision=25.0,
            normalise=False,
        )
        began, z = time.perf_counter(), []
        for k in range(simulations):
            values, y = drawn(random.key(k), np.concatenate([X, new]))
            result = pbp.run(random.key(1000 + k), epochs, X, y[: len(X)], progress_bar=False)
            mean, variance = pbp.predict(result.params, new)
            z.append((values[len(X) :] - mean) / np.sqrt(variance - 1 / 25.0))
        p = stats.kstest(np.stack(z)[:, 2], "norm").pvalue  # the rows of one data set hang together
        seconds = time.perf_counter() - began
        print(f"| {method} | {np.std(z):.2f} | {p:.2g} | {seconds:.0f} |", flush=True)


@jax.jit
def drawn(rng_key: Any, X: Any) -> tuple[Any, Any]:
    """A network of the prior of `PBP` at the rows X, and labels."""
    keys = random.split(rng_key, 3)
    first, last = random.normal(keys[0], (20, 2)), random.normal(keys[1], (1, 21))
    ones = jnp.ones((len(X), 1))
    hidden = jax.nn.relu(jnp.concatenate([X, ones], 1) @ first.T / 2**0.5)
    values = (jnp.concatenate([hidden, ones], 1) @ last.T / 21**0.5)[:, 0]
    return values, values + 0.2 * random.normal(keys[2], values.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=[*ENGINES, "PBP"], choices=[*ENGINES, "PBP"])
    parser.add_argument("--simulations", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    engines([name for name in args.only if name != "PBP"], args.simulations)
    if "PBP" in args.only:
        networks(args.simulations, args.epochs)


if __name__ == "__main__":
    main()
