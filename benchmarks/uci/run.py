"""Networks of 50 rectifiers on small tables: error and log density on rows left out.

The protocol is that of the literature: 20 random splits of 90/10, one hidden layer of 50
rectifiers, columns and target standardised on the training rows, 40 epochs. A number is the mean
over the splits with its standard error, in the units of the data.

- `RMSE` is that of the predictive mean; of classes it is the share of wrong ones, in per cent.
- `pointwise` is the mean over the rows of the log predictive density, each row by itself; that of
  a normal guide is the log of a mean over draws, that of PBP a closed form.
- `joint` is the log predictive density of all test rows together, divided by their number.
- `calibration` is the error of `regression_calibration` on the test rows of all splits together,
  in thousandths, and in brackets that of a perfect model on as many independent rows; of classes
  the `expected_calibration_error`, in per cent.
- `seconds` is the median time of a fit, and `first` that of the first one, with compilation.

- `published` and `re-run` are the RMSE and log density of others after 40 epochs: pointwise of PBP
  and joint of the mean field and Vadam, which is our reading of the published ones.
  `benchmarks/figures.tsv` names the paper, or the code and the settings. The published mean field
  and Vadam have noise and prior precisions that were tuned on each set.

`digits` (of scikit-learn, 10 classes) and `german_credit` have random splits of 90/10 too. Pixels
have one scale, because a test row may be tens of standard deviations off in a rare one. A new
method is a line of `METHODS` in `methods.py`, and if it was published a line of `figures.tsv` for
each set.
"""

import argparse
from pathlib import Path
import sys
import time
from typing import NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
import numpyro.distributions as dist
from sklearn.datasets import load_digits

sys.path.append(str(Path(__file__).parents[1]))
from _shared import german_credit
from _shared.figures import figures
from _shared.uci import uci_regression
from methods import HIDDEN, METHODS, Method

from numpyro_ext.diagnostics import predictive_scores, regression_calibration
from numpyro_ext.ep import PBP
from numpyro_ext.targets import RegressionSplit, regression_data

SETS = ["yacht", "boston", "energy", "concrete", "kin8nm"]
CLASSES = ["digits", "german_credit"]
OF_NUMBERS = "PBP", "ridge", "Vadam", "two heads"


class Scores(NamedTuple):
    """Of one split."""

    error: float
    pointwise: float
    joint: float
    seconds: float
    seen: tuple[np.ndarray, ...]
    """The pit of each row, or its probabilities and its class."""


def load(data_dir: Path | None, name: str, split: int) -> RegressionSplit:
    """Rows and targets of a split, in their own units; classes are integers."""
    if name in SETS and data_dir:
        return uci_regression(data_dir / "uci", name, split)
    if name not in CLASSES:
        return regression_data(name, split)
    if name == "digits":
        X, y = load_digits(return_X_y=True)
    else:
        X, bad = german_credit.read(data_dir or Path("data"))
        y = bad.astype(int)
    order = np.random.default_rng(split).permutation(len(y))
    test, train = np.split(order, [round(0.1 * len(y))])
    return RegressionSplit(X[train], y[train], X[test], y[test])


def score(
    method: Method, split: RegressionSplit, rng_key: Array, epochs: int, pixels: bool = False
) -> Scores:
    X, y, X_test, y_test = split
    classes = int(y.max()) + 1 if y.dtype.kind == "i" else None
    sd = np.full(X.shape[1], X.std()) if pixels else X.std(0)
    X_mean, X_sd = X.mean(0), np.where(sd > 0, sd, 1)
    y_mean, y_sd = (0, 1) if classes else (y.mean(), y.std())
    target, target_test = (a if classes else (a - y_mean) / y_sd for a in (y, y_test))
    rows, new = (jnp.asarray((a - X_mean) / X_sd) for a in (X, X_test))
    began = time.perf_counter()
    found = method(rng_key, rows, jnp.asarray(target), new, epochs, classes)
    found = jax.block_until_ready(found)
    seconds = time.perf_counter() - began
    log_density = found.log_prob(target_test) - np.log(y_sd)
    draws, n = log_density.shape
    pointwise = jnp.mean(logsumexp(log_density, axis=0) - np.log(draws))
    joint = (logsumexp(jnp.sum(log_density, 1)) - np.log(draws)) / n if draws > 1 else np.nan
    if classes:
        probs = np.asarray(found.probs.mean(0), float)
        error, seen = 100 * np.mean(probs.argmax(-1) != y_test), (probs, y_test)
    else:
        error = jnp.sqrt(jnp.mean((target_test - found.mean.mean(0)) ** 2)) * y_sd
        seen = (np.clip(np.asarray(found.cdf(target_test).mean(0)), 0, 1),)
    return Scores(float(error), float(pointwise), float(joint), seconds, seen)


def calibration(found: list[Scores]) -> str:
    """Of the rows of all splits together."""
    pooled = [np.concatenate(parts) for parts in zip(*(one.seen for one in found), strict=True)]
    if not np.isfinite(pooled[0]).all():
        return "-"
    if len(pooled) == 1:
        one = regression_calibration(pit=pooled[0])
        return f"{1e3 * one.error:.2f} ({1e3 * one.perfect_error:.2f})"
    probs = pooled[0] / pooled[0].sum(1, keepdims=True)
    scores = predictive_scores(dist.Categorical(probs=probs), y=pooled[1])
    error, perfect = scores.calibration_error, scores.perfect_calibration_error
    return f"{100 * error:.2f} ({100 * perfect:.2f})"


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
    parser.add_argument("--sets", nargs="+", help="default: the five, or diabetes")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--epochs", type=int, nargs="+", default=[40])
    parser.add_argument("--seed", type=int, default=0, help="of the keys of all fits")
    parser.add_argument("--quick", action="store_true", help="three splits")
    parser.add_argument("--memory", action="store_true", help="of states of PBP, and no fits")
    args = parser.parse_args()
    sets = args.sets or (SETS if args.data_dir else ["diabetes"])
    if args.memory:
        print("| set | rows | method | MiB |\n|---|---|---|---|")
        for name in sets:
            memory(name, load(args.data_dir, name, 0))
        return
    columns = "set | method | epochs | RMSE | pointwise | joint | calibration | seconds (first)"
    print(f"| {columns} | published | re-run |\n|" + "---|" * 10, flush=True)
    for name in sets:
        for title in args.only:
            if name in CLASSES and (" at " in title or title.startswith(OF_NUMBERS)):
                continue
            for epochs in args.epochs:
                found, told = [], 0
                for k in range(min(args.splits, 3) if args.quick else args.splits):
                    with warnings.catch_warnings(record=True) as seen:
                        warnings.simplefilter("always")
                        key = random.fold_in(random.key(args.seed), k)
                        split = load(args.data_dir, name, k)
                        found.append(score(METHODS[title], split, key, epochs, name == "digits"))
                    told += bool(seen)
                error, pointwise, joint, seconds = np.array([one[:4] for one in found]).T
                theirs = [
                    of_others(kind, name, title) if epochs == 40 else ""
                    for kind in ("published", "re-run")
                ]
                took = f"{np.median(seconds):.2f} ({seconds[0]:.1f}) | {' | '.join(theirs)}"
                note = f" ({told} warned)" if told else ""
                print(
                    f"| {name} | {title}{note} | {epochs} | {shown(error)} | {shown(pointwise)} |"
                    f" {shown(joint)} | {calibration(found)} | {took} |",
                    flush=True,
                )
            jax.clear_caches()  # the programs of all methods together are too many mappings


if __name__ == "__main__":
    main()
