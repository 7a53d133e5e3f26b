"""Networks of 50 rectifiers on small regressions: error and log density on rows left out.

The protocol is that of the literature: 20 random splits of 90/10, one hidden layer of 50
rectifiers, columns and target standardised on the training rows, 40 epochs. A number is the mean
over the splits with its standard error, in the units of the data.

- `RMSE` is that of the predictive mean.
- `pointwise` is the mean over the rows of the log predictive density, each row by itself; that of
  a normal guide is the log of a mean over draws, that of PBP a closed form.
- `joint` is the log predictive density of all test rows together, divided by their number.
- `calibration` is the error of `regression_calibration` on the test rows of all splits together,
  in thousandths, and in brackets that of a perfect model on as many independent rows.
- `seconds` is the median time of a fit, and `first` that of the first one, with compilation.

- `published` and `re-run` are the RMSE and log density (pointwise, if not said to be joint) of
  others after 40 epochs; `benchmarks/figures.tsv` names the paper, or the code and the settings.
  The published mean field and Vadam have noise and prior precisions that were tuned on each set.

A method is a function of a key, the standardised training rows, the test inputs and the number of
epochs, and returns a `Prediction`. A new one is a line of `METHODS` in `methods.py`, and if it was
published a line of `figures.tsv` for each set.
"""

import argparse
from functools import partial
from pathlib import Path
import sys
import time
from typing import NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from _shared.figures import figures
from _shared.uci import uci_regression
from methods import HIDDEN, METHODS, Method

from numpyro_ext.diagnostics import regression_calibration
from numpyro_ext.ep import PBP
from numpyro_ext.targets import RegressionSplit, regression_data

SETS = ["yacht", "boston", "energy", "concrete", "kin8nm"]


class Scores(NamedTuple):
    """Of one split."""

    rmse: float
    pointwise: float
    joint: float
    seconds: float
    pit: np.ndarray


def score(method: Method, split: RegressionSplit, rng_key: Array, epochs: int) -> Scores:
    X, y, X_test, y_test = split
    sd = X.std(0)
    X_mean, X_sd, y_mean, y_sd = X.mean(0), np.where(sd > 0, sd, 1), y.mean(), y.std()
    arrays = (jnp.asarray(x) for x in ((X - X_mean) / X_sd, (y - y_mean) / y_sd))
    began = time.perf_counter()
    found = method(rng_key, *arrays, jnp.asarray((X_test - X_mean) / X_sd), epochs)
    mean, variance = jax.block_until_ready(found)
    seconds = time.perf_counter() - began
    target, noise = (y_test - y_mean) / y_sd, jnp.sqrt(variance)
    error = target - mean.mean(0)
    log_density = norm.logpdf(target, mean, noise) - np.log(y_sd)
    pit = np.asarray(norm.cdf(target, mean, noise).mean(0))
    draws, n = log_density.shape
    pointwise = jnp.mean(logsumexp(log_density, axis=0) - np.log(draws))
    joint = (logsumexp(jnp.sum(log_density, 1)) - np.log(draws)) / n if draws > 1 else np.nan
    rmse = float(jnp.sqrt(jnp.mean(error**2)) * y_sd)
    return Scores(rmse, float(pointwise), float(joint), seconds, np.clip(pit, 0, 1))


def shown(values: np.ndarray) -> str:
    if np.all(np.isnan(values)):
        return "-"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{values.mean():.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def memory(name: str, split: RegressionSplit) -> None:
    """What a state of PBP takes, besides the data."""
    X, y = (jnp.asarray(x, jnp.float32) for x in split[:2])
    for method in ("adf", "sep", "ep"):
        state = PBP([X.shape[1], HIDDEN, 1], method=method).init(random.key(0), X, y)
        size = sum(x.nbytes for x in jax.tree.leaves(state)) / 2**20
        print(f"| {name} | {len(X):,} | {method} | {size:,.3f} |", flush=True)


def of_others(kind: str, name: str, title: str) -> str:
    """The figure of a method with exactly these settings, or else with its own."""
    found = figures(kind)
    return found.get(f"{name} / {title}", found.get(f"{name} / {title.split(' at ')[0]}", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="holds uci/; without it: diabetes")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epochs", type=int, nargs="+", default=[40])
    parser.add_argument("--seed", type=int, default=0, help="of the keys of all fits")
    parser.add_argument("--quick", action="store_true", help="three splits")
    parser.add_argument("--memory", action="store_true", help="of states of PBP, and no fits")
    args = parser.parse_args()
    load = partial(uci_regression, args.data_dir / "uci") if args.data_dir else regression_data
    if args.memory:
        print("| set | rows | method | MiB |\n|---|---|---|---|")
        for name in args.sets:
            memory(name, load(name, 0))
        return
    columns = "set | method | epochs | RMSE | pointwise | joint | calibration | seconds (first)"
    print(f"| {columns} | published | re-run |\n|" + "---|" * 10, flush=True)
    for name in args.sets if args.data_dir else ["diabetes"]:
        for title in args.only:
            for epochs in args.epochs:
                found, told = [], 0
                for k in range(min(args.splits, 3) if args.quick else args.splits):
                    with warnings.catch_warnings(record=True) as seen:
                        warnings.simplefilter("always")
                        key = random.fold_in(random.key(args.seed), k)
                        found.append(score(METHODS[title], load(name, k), key, epochs))
                    told += bool(seen)
                rmse, pointwise, joint, seconds = np.array([one[:4] for one in found]).T
                pit = np.concatenate([one.pit for one in found])
                calibration = regression_calibration(pit=pit) if np.isfinite(pit).all() else None
                theirs = [
                    of_others(kind, name, title) if epochs == 40 else ""
                    for kind in ("published", "re-run")
                ]
                took = f"{np.median(seconds):.2f} ({seconds[0]:.1f})"
                note = f" ({told} warned)" if told else ""
                error = "-"
                if calibration is not None:
                    error = f"{1e3 * calibration.error:.2f} ({1e3 * calibration.perfect_error:.2f})"
                print(
                    f"| {name} | {title}{note} | {epochs} | {shown(rmse)} | {shown(pointwise)} |"
                    f" {shown(joint)} | {error} | {took} | {theirs[0]} | {theirs[1]} |",
                    flush=True,
                )
            jax.clear_caches()  # the programs of all methods together are too many mappings


if __name__ == "__main__":
    main()
