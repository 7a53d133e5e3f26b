"""Default settings on known posteriors, compared with NUTS: no number is given by hand.

Every kernel is built as `Kernel(model, steps_per_sample=20)` and run for 2 chains of 200 + 2,500
draws, 100,000 transitions in all. Columns: `worst mean` is the largest distance between the means
of the draws and of the truth in standard deviations of the truth, `sd ratio` the least and the
largest standard deviation of the draws over that of the truth; `variance` is the predicted variance
over the right one in the noisiest direction beside the measured one in the mean over all numbers;
`ESS` is that of the number with the least; `found` the seconds of `kernel.init`, where the settings
are found, compilation included; `seconds` those of everything; `says` what the software itself says
is wrong: the warnings, and the lines of `diagnose` that are not fine.

The truth is exact (Gaussian given one or two scales, which are summed over a grid), the Laplace
approximation in double precision (logistic regression with 100,000 and more rows), published
(German credit), or NUTS on all rows. What NUTS gave is kept in `--cache`, so that another run takes
it from there with its seconds; `--fresh` runs it again.

Groups: `known`; `warned`, where settings cannot be found and the software must say so, with the
best of several settings by hand of `SGHMC(model, step, friction=...)` beside them; `examples`, the
models of NumPyro's own examples (`--newcomer` is short for this group).
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import re
import time
from typing import Any, NamedTuple
import warnings

from arviz_stats.base import array_stats
import jax
from jax import random
from models import PROBLEMS, WARNED, Problem
import numpy as np
from numpyro.infer import MCMC, NUTS
from numpyro_examples import EXAMPLES

from numpyro_ext.diagnostics import InferenceWarning, diagnose
from numpyro_ext.mcmc import SGHMC, SGLD, SGNHT

KERNELS: dict[str, Callable[..., Any]] = {"SGHMC": SGHMC, "SGNHT": SGNHT, "SGLD": SGLD}
DRAWS, WARMUP, STEPS = 2500, 200, 20
ALL = [*PROBLEMS, *EXAMPLES]
GROUPS = {
    "known": [name for name in PROBLEMS if name not in WARNED],
    "warned": list(WARNED),
    "examples": list(EXAMPLES),
}
BANDS = {"known": (0.05, 0.05), "warned": (0.1, 0.1), "examples": (0.1, 0.1)}
"""Largest error of a mean in sds, and of an sd, that is called right; in the first group SGLD may
have twice that of an sd."""
LEAST_ESS = 300
FROM_FOLDER = {
    "German credit",
    "arK",
    "blr",
    "eight schools, centred",
    "eight schools, non-centred",
    "kidscore_momiq",
    "network, boston",
}
HEAD = (
    "| posterior | kernel | step, friction | worst mean | sd ratio | variance, predicted / measured"
    " | ESS | found, s | seconds | ESS per second | verdict | says |"
)
Truth = dict[str, tuple[Any, Any]]


class Fit(NamedTuple):
    """What a kernel gave: the numbers that are compared, and what was said."""

    label: str
    compared: dict[str, np.ndarray]
    settings: str
    predicted: float | None
    found: float | None
    seconds: float
    said: str
    held_out: float | None

    def error(self, truth: Truth) -> float:
        values = {s: np.reshape(x, (-1, *np.shape(x)[2:])) for s, x in self.compared.items()}
        return max(
            float(np.max(np.abs(values[s].mean(0) - mean) / sd)) for s, (mean, sd) in truth.items()
        )

    def ratios(self, truth: Truth) -> np.ndarray:
        values = {s: np.reshape(x, (-1, *np.shape(x)[2:])) for s, x in self.compared.items()}
        return np.concatenate([np.ravel(values[s].std(0) / sd) for s, (_, sd) in truth.items()])


def smallest_ess(samples: dict[str, Any]) -> float:
    """The least effective sample size of a number, from ``(chain, draw, ...)`` arrays."""
    sizes = []
    for value in samples.values():
        columns = np.asarray(value, float).reshape(*np.shape(value)[:2], -1)
        sizes += [array_stats.ess(columns[..., k]) for k in range(columns.shape[-1])]
    return float(np.min(sizes))


def compared(problem: Problem, samples: dict[str, Any]) -> dict[str, np.ndarray]:
    found = samples if problem.view is None else problem.view(samples)
    names = found if problem.truth is None else problem.truth
    return {name: np.asarray(found[name], float) for name in names}


def nuts(problem: Problem, cache: Path | None) -> tuple[Truth, dict[str, float]]:
    """Moments of what is compared, and effective sample size, seconds and R-hat; from the cache if
    it has them for as many draws."""
    chains, warmup, draws = problem.nuts
    numbers = {"chains": chains, "warmup": warmup, "draws": draws}
    if cache is not None and cache.exists():
        kept = dict(np.load(cache))
        if all(kept.pop(name) == value for name, value in numbers.items()):
            facts = {name: float(kept.pop(name)) for name in ("ess", "seconds", "held_out")}
            sites = sorted({name.rsplit("/", 1)[0] for name in kept})
            return {s: (kept[f"{s}/mean"], kept[f"{s}/sd"]) for s in sites}, facts
    kernel = NUTS(partial(problem.model, batch=None), dense_mass=problem.dense)
    options = {"num_chains": chains, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, **options)
    began = time.perf_counter()
    mcmc.run(random.key(0), *problem.data)
    samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - began
    values = compared(problem, samples)
    flat = {site: np.reshape(x, (-1, *np.shape(x)[2:])) for site, x in values.items()}
    moments = {site: (x.mean(0), x.std(0)) for site, x in flat.items()}
    held_out = np.nan if problem.held_out is None else problem.held_out(samples)
    facts = {"ess": smallest_ess(values), "seconds": seconds, "held_out": held_out}
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        flat = {f"{s}/mean": mean for s, (mean, _) in moments.items()}
        flat |= {f"{s}/sd": sd for s, (_, sd) in moments.items()}
        kept: dict[str, Any] = numbers | facts | flat
        np.savez(cache, **kept)
    return moments, facts


def fit(label: str, problem: Problem, *given: float) -> Fit:
    """A run of a kernel with default settings, or with a step and a friction that are given."""
    model = partial(problem.model, batch=problem.batch)
    kernel: Any = KERNELS[label](model, steps_per_sample=STEPS)
    if given:
        kernel = SGHMC(model, given[0], friction=given[1], steps_per_sample=STEPS)
    mcmc = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", InferenceWarning)
        keys = random.split(random.key(1), 2)
        state = kernel.init(keys, WARMUP * STEPS, None, problem.data, {})
        jax.block_until_ready(state.i)
        found = time.perf_counter() - began
        mcmc.run(random.key(1), *problem.data)
        samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
        seconds = time.perf_counter() - began
        rows = diagnose(mcmc).rows
    told = [str(w.message) for w in seen if issubclass(w.category, InferenceWarning)]
    said = [f"warning: {_short(text)}" for text in told[:1]]
    if bad := [f"{row.quantity} {row.shown}" for row in rows if row.ok is False]:
        said.append("diagnose: " + ", ".join(bad))
    settings = kernel.settings
    values = given if settings is None else (settings.step_size, settings.friction)
    return Fit(
        f"{label}, by hand" if given else label,
        compared(problem, samples),
        ", ".join("-" if x is None else f"{x:.2g}" for x in values),
        None if settings is None else settings.variance_ratio,
        None if given else found,
        seconds,
        "; ".join(said),
        None if problem.held_out is None else problem.held_out(samples),
    )


def _short(message: str) -> str:
    """The first clause of a warning, without the numbers that follow it."""
    return message.split(", so ")[0].split(":")[0]


def line(name: str, found: Fit, truth: Truth, group: str) -> str:
    error, ratios = found.error(truth), found.ratios(truth)
    of_mean, of_sd = BANDS[group]
    of_sd *= 2 if group == "known" and found.label == "SGLD" else 1
    ess = smallest_ess(found.compared)
    off = max(error / of_mean, float(np.max(np.abs(ratios - 1))) / of_sd)
    # Of a mean, and of an sd: three standard errors of the number that is known least.
    error_of_mean, error_of_sd = 3 / np.sqrt(ess), 3 / np.sqrt(2 * ess)
    near = error <= of_mean + error_of_mean and np.all(np.abs(ratios - 1) <= of_sd + error_of_sd)
    measured = f"{np.mean(ratios**2):.2f}"
    predicted = measured if found.predicted is None else f"{found.predicted:.2f} / {measured}"
    verdict = "off, and says so" if found.said else "OFF, SILENT"
    if off <= 1 or (near and ess >= LEAST_ESS):
        verdict = "right" if off <= 1 else "right within its Monte Carlo error"
    if found.held_out is not None:
        verdict += f"; new rows {found.held_out:.2f}"
    cells = [
        name,
        found.label,
        found.settings,
        f"{error:.3f}",
        f"{ratios.min():.2f} to {ratios.max():.2f}",
        predicted,
        f"{ess:,.0f}",
        "" if found.found is None else f"{found.found:.1f}",
        f"{found.seconds:.1f}",
        f"{ess / found.seconds:,.3g}",
        verdict,
        found.said,
    ]
    return "| " + " | ".join(cells) + " |"


def best_by_hand(problem: Problem, truth: Truth) -> Fit:
    """The one of least error, or the one that predicts new rows best."""

    def badness(found: Fit) -> float:
        if found.held_out is not None:
            return -found.held_out if np.isfinite(found.held_out) else np.inf
        error = max(found.error(truth), float(np.max(np.abs(np.log(found.ratios(truth))))))
        return error if np.isfinite(error) else np.inf

    fits = [fit("SGHMC", problem, *given) for given in problem.by_hand]
    best = min(fits, key=badness)
    tried = f"best of {len(fits)}"
    return best._replace(said=f"{tried}; {best.said}" if best.said else tried)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    parser.add_argument("--group", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--newcomer", action="store_true", help="the group examples alone")
    parser.add_argument("--problem", nargs="*", default=ALL, choices=ALL, metavar="NAME")
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--cache", type=Path, default=Path("out/settings"))
    parser.add_argument("--fresh", action="store_true", help="run NUTS although it is kept")
    parser.add_argument("--no-nuts", action="store_true", help="NUTS only where it is the truth")
    args = parser.parse_args()
    left_out: set[str] = set()
    if not args.data_dir.is_dir():
        left_out = FROM_FOLDER
        names = ", ".join(sorted(left_out))
        print(f"There is no folder {args.data_dir} (--data-dir): {names} are left out.")
    print(HEAD + "\n|" + "---|" * 12, flush=True)
    for group in ["examples"] if args.newcomer else args.group:
        for name in GROUPS[group]:
            if name in args.problem and name not in left_out:
                report(name, group, args)


def report(name: str, group: str, args: argparse.Namespace) -> None:
    """The rows of one posterior."""
    problem = PROBLEMS[name](args.data_dir) if name in PROBLEMS else EXAMPLES[name]()
    truth = problem.truth
    if truth is None or not args.no_nuts:
        kept = args.cache / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.npz"
        if args.fresh:
            kept.unlink(missing_ok=True)
        moments, facts = nuts(problem, kept)
        verdict = "" if np.isnan(facts["held_out"]) else f"new rows {facts['held_out']:.2f}"
        error = spread = ""
        if truth is not None:
            error = max(
                float(np.max(np.abs(moments[s][0] - m) / sd)) for s, (m, sd) in truth.items()
            )
            ratios = np.concatenate([np.ravel(moments[s][1] / sd) for s, (_, sd) in truth.items()])
            error, spread = f"{error:.3f}", f"{ratios.min():.2f} to {ratios.max():.2f}"
        ess, seconds = facts["ess"], facts["seconds"]
        print(
            f"| {name} | NUTS{', dense mass' if problem.dense else ''} |  | {error} | {spread} |  |"
            f" {ess:,.0f} |  | {seconds:.1f} | {ess / seconds:,.3g} | {verdict} |  |",
            flush=True,
        )
        truth = moments if truth is None else truth
    for label in args.kernel:
        print(line(name, fit(label, problem), truth, group), flush=True)
    if problem.by_hand and group == "warned":
        print(line(name, best_by_hand(problem, truth), truth, group), flush=True)


if __name__ == "__main__":
    main()
