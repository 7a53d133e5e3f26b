"""Simulation-based calibration of the engines: are their posteriors right over data from the prior?

The engines fit a probit regression of 20 rows on two slopes, 200 data sets, 50 draws of each. For
`PBP`, whose weights are not identified, the network itself is drawn from the prior with known
precisions, and its values at five new rows are compared with the prediction, by z-scores whose
standard deviation is 1, and whose law is normal, if the prediction is calibrated. ``--only rows``
asks how many rows the methods of `PBP` need to learn a sine.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any
import warnings

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import stats

from numpyro_ext.diagnostics import fit_engine, simulation_based_calibration
from numpyro_ext.ep import ADF, DAEP, DSEP, EP, PBP, StochasticEP
from numpyro_ext.ep.pbp.epochs import Gamma, Site

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
CHOICES = [*ENGINES, "PBP", "rows"]


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


def rows() -> None:
    """Errors of 50 units for sin(2 x) with a noise of 0.1, five starts, by the rows and epochs."""

    def curve(x: Any) -> Any:
        return jnp.sin(2 * x[:, 0])

    print("| rows | epochs | ADF | EP | SEP | EP from ADF |\n|---|---|---|---|---|---|")
    new = jnp.linspace(-2.9, 2.9, 200)[:, None]
    for num_rows in (80, 250, 1000):
        x = random.uniform(random.key(1), (num_rows, 1), minval=-3, maxval=3)
        y = curve(x) + 0.1 * random.normal(random.key(2), (num_rows,))

        def error(pbp: PBP, state: Any) -> float:
            mean = pbp.predict(pbp.get_params(state), new)[0]
            return float(jnp.sqrt(jnp.mean((mean - curve(new)) ** 2)))

        for epochs in (40, 200):
            found: dict[str, list[float]] = {"adf": [], "ep": [], "sep": [], "ep from adf": []}
            for k in range(5):
                for method in ("adf", "ep", "sep"):
                    pbp = PBP([1, 50, 1], method=method)
                    fit = pbp.run(random.key(k), epochs, x, y, progress_bar=False)
                    found[method].append(error(pbp, fit.state))
                    if method == "adf":
                        start = fit.state
                ep = PBP([1, 50, 1], method="ep")
                state = start._replace(site=sites_of(start, num_rows))
                for _ in range(epochs):
                    state, _ = ep.update(state, x, y)
                found["ep from adf"].append(error(ep, state))
            cells = [f"{np.median(e):.2f} [{min(e):.2f}, {max(e):.2f}]" for e in found.values()]
            print(f"| {num_rows} | {epochs} | {' | '.join(cells)} |", flush=True)


def sites_of(state: Any, num_rows: int) -> Site:
    """Equal sites of the rows whose product with the prior is the fit of a state without sites."""
    _, layers = ravel_pytree(state.q.means)
    shift = [m / v for m, v in zip(state.q.means, state.q.variances, strict=True)]
    left = zip(state.q.variances, layers(state.prior.precision), strict=True)
    precision = [jnp.maximum(1 / v - p, 0.0) for v, p in left]
    noise = Gamma(*(x - 6.0 for x in state.q.noise))
    total = Site(shift, precision, noise)
    return jax.tree.map(lambda x: jnp.broadcast_to(x / num_rows, (num_rows, *x.shape)), total)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=[*ENGINES, "PBP"], choices=CHOICES)
    parser.add_argument("--simulations", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if "rows" in args.only:
        rows()
    engines([name for name in args.only if name in ENGINES], args.simulations)
    if "PBP" in args.only:
        networks(args.simulations, args.epochs)


if __name__ == "__main__":
    main()
