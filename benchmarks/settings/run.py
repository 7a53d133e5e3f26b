"""Default settings on known posteriors, compared with NUTS: no number is given by hand.

Every kernel is built as `Kernel(model, steps_per_sample=20)` and run for 2 chains of 200 + 2,500
draws, 100,000 transitions in all. Columns: `worst mean` is the largest distance between the means
of the draws and of the truth in standard deviations of the truth, `sd ratio` the least and the
largest standard deviation of the draws over that of the truth; `variance` is the predicted variance
over the right one in the noisiest direction beside the measured one in the mean over all numbers;
`ESS` is that of the number with the least; `found` the seconds of `kernel.init`, where the settings
are found, compilation included; `seconds` those of everything; `says` what the software itself says
is wrong: the warnings, and the lines of `diagnose` that are not fine or could not judge. `judged
by` has its quantities with a verdict about the draws, and a `false alarm` is a right row, nothing
given by hand, that it finds wrong.

The truth is exact (Gaussian given one or two scales, which are summed over a grid), the Laplace
approximation in double precision (logistic regression with 100,000 and more rows), that of
inference_gym (German credit), or NUTS on all rows. What NUTS gave is kept in `--out`, so that
another run takes it from there with its seconds; `--fresh` runs it again. Rows are kept there too,
so that a table which was stopped goes on; without the folder `rows` there they are run again.

Groups: `known`; `warned`, where settings cannot be found and the software must say so, with the
best of several settings by hand of `SGHMC(model, step, friction=...)` beside them; `examples`, the
models of NumPyro's own examples (`--newcomer` is short for this group).
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import re
import sys
import time
from typing import Any, NamedTuple

import jax
from jax import random
from models import PROBLEMS, WARNED, Problem
import numpy as np
from numpyro.infer import MCMC, NUTS
from numpyro_examples import EXAMPLES

from numpyro_ext.mcmc import SGHMC, SGLD, SGNHT

sys.path.append(str(Path(__file__).parents[1]))
from _shared.methods import STEPS, Chains, by_kernel, merged, smallest_ess
from _shared.verdicts import Line, Truth, Verdict, counted, errors, kept, moments

KERNELS: dict[str, Callable[..., Any]] = {"SGHMC": SGHMC, "SGNHT": SGNHT, "SGLD": SGLD}
ALL = [*PROBLEMS, *EXAMPLES]
GROUPS = {
    "known": [name for name in PROBLEMS if name not in WARNED],
    "warned": list(WARNED),
    "examples": list(EXAMPLES),
}
BANDS = {"known": (0.05, 0.05), "warned": (0.1, 0.1), "examples": (0.1, 0.1)}
"""Largest error of a mean in sds, and of an sd, that is called right; in the first group SGLD may
have twice that of an sd."""
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
    " | ESS | found, s | seconds | ESS per second | verdict | false alarm | says | judged by |"
)


class Fit(NamedTuple):
    """What a kernel gave, and the numbers that are compared."""

    label: str
    chains: Chains
    compared: dict[str, np.ndarray]
    settings: str
    predicted: float | None
    held_out: float | None

    @property
    def by_hand(self) -> bool:
        return self.label.endswith("by hand")


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
    known = moments(merged(values))
    held_out = np.nan if problem.held_out is None else problem.held_out(samples)
    facts = {"ess": smallest_ess(values), "seconds": seconds, "held_out": held_out}
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        flat = {f"{s}/mean": mean for s, (mean, _) in known.items()}
        flat |= {f"{s}/sd": sd for s, (_, sd) in known.items()}
        kept: dict[str, Any] = numbers | facts | flat
        np.savez(cache, **kept)
    return known, facts


def fit(label: str, problem: Problem, *given: float) -> Fit:
    """A run of a kernel with default settings, or with a step and a friction that are given."""
    model = partial(problem.model, batch=problem.batch)
    kernel: Any = KERNELS[label](model, steps_per_sample=STEPS)
    if given:
        kernel = SGHMC(model, given[0], friction=given[1], steps_per_sample=STEPS)
    chains = by_kernel(kernel, problem.data)
    settings = kernel.settings
    values = given if settings is None else (settings.step_size, settings.friction)
    return Fit(
        f"{label}, by hand" if given else label,
        chains,
        compared(problem, chains.samples),
        ", ".join("-" if x is None else f"{x:.2g}" for x in values),
        None if settings is None else settings.variance_ratio,
        None if problem.held_out is None else problem.held_out(chains.samples),
    )


def line(name: str, found: Fit, truth: Truth, group: str, said: str = "") -> tuple[str, Verdict]:
    error, ess = errors(merged(found.compared), truth), smallest_ess(found.compared)
    of_mean, of_sd = BANDS[group]
    of_sd *= 2 if group == "known" and found.label == "SGLD" else 1
    right, near = error.right(of_mean, of_sd), error.nearly(of_mean, of_sd, ess)
    chains = found.chains
    verdict = Verdict(right or near, chains.found, chains.told)
    measured = f"{np.mean(error.ratios**2):.2f}"
    predicted = measured if found.predicted is None else f"{found.predicted:.2f} / {measured}"
    word = "OFF, SILENT" if verdict.silent else "off, and says so"
    if verdict.right:
        word = "right" if right else "right within its Monte Carlo error"
    if found.held_out is not None:
        word += f"; new rows {found.held_out:.2f}"
    _, alarm, says, judged_by = verdict.cells
    cells = [
        name,
        found.label,
        found.settings,
        f"{error.mean:.3f}",
        f"{error.ratios.min():.2f} to {error.ratios.max():.2f}",
        predicted,
        f"{ess:,.0f}",
        "" if found.by_hand else f"{chains.start:.1f}",
        f"{chains.seconds:.1f}",
        f"{ess / chains.seconds:,.3g}",
        word,
        alarm,
        f"{said}; {says}" if said else says,
        judged_by,
    ]
    return f"| {' | '.join(cells)} |", verdict


def best_by_hand(problem: Problem, truth: Truth) -> tuple[Fit, str]:
    """The one of least error, or the one that predicts new rows best, and of how many."""

    def badness(found: Fit) -> float:
        if found.held_out is not None:
            return -found.held_out if np.isfinite(found.held_out) else np.inf
        error = errors(merged(found.compared), truth)
        worst = max(error.mean, float(np.max(np.abs(np.log(error.ratios)))))
        return worst if np.isfinite(worst) else np.inf

    fits = [fit("SGHMC", problem, *given) for given in problem.by_hand]
    return min(fits, key=badness), f"best of {len(fits)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--group", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--newcomer", action="store_true", help="the group examples alone")
    parser.add_argument("--problem", nargs="*", default=ALL, choices=ALL, metavar="NAME")
    parser.add_argument("--kernel", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--out", type=Path, default=Path("out/settings"))
    parser.add_argument("--fresh", action="store_true", help="run NUTS although it is kept")
    parser.add_argument("--no-nuts", action="store_true", help="NUTS only where it is the truth")
    args = parser.parse_args()
    left_out: set[str] = set()
    if not args.data_dir.is_dir():
        left_out = FROM_FOLDER
        names = ", ".join(sorted(left_out))
        print(f"There is no folder {args.data_dir} (--data-dir): {names} are left out.")
    print(HEAD + "\n|" + "---|" * 14, flush=True)
    lines: list[Line] = []
    for group in ["examples"] if args.newcomer else args.group:
        for name in GROUPS[group]:
            if name in args.problem and name not in left_out:
                lines += report(name, group, args)
    print(counted(lines))


def report(name: str, group: str, args: argparse.Namespace) -> list[Line]:
    """The rows of one posterior, of which those with nothing given by hand are counted."""
    problem = PROBLEMS[name](args.data_dir) if name in PROBLEMS else EXAMPLES[name]()
    truth = problem.truth
    if truth is None or not args.no_nuts:
        path = args.out / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.npz"
        if args.fresh:
            path.unlink(missing_ok=True)
        known, facts = nuts(problem, path)
        verdict = "" if np.isnan(facts["held_out"]) else f"new rows {facts['held_out']:.2f}"
        error = spread = ""
        if truth is not None:
            off = [np.max(np.abs(known[s][0] - m) / sd) for s, (m, sd) in truth.items()]
            ratios = np.concatenate([np.ravel(known[s][1] / sd) for s, (_, sd) in truth.items()])
            error, spread = f"{max(off):.3f}", f"{ratios.min():.2f} to {ratios.max():.2f}"
        ess, seconds = facts["ess"], facts["seconds"]
        print(
            f"| {name} | NUTS{', dense mass' if problem.dense else ''} |  | {error} | {spread} |  |"
            f" {ess:,.0f} |  | {seconds:.1f} | {ess / seconds:,.3g} | {verdict} |  |  |  |",
            flush=True,
        )
        truth = known if truth is None else truth

    def default(label: str) -> tuple[str, Verdict]:
        return line(name, fit(label, problem), truth, group)

    def by_hand() -> tuple[str, Verdict]:
        best, tried = best_by_hand(problem, truth)
        return line(name, best, truth, group, tried)

    lines = [
        kept(args.out, f"{name} {label} {group}", partial(default, label)) for label in args.kernel
    ]
    if problem.by_hand and group == "warned":
        kept(args.out, f"{name} by hand", by_hand)
    return lines


if __name__ == "__main__":
    main()
