"""Many groups on many rows: the methods of this package and NumPyro's own, in a process each.

`--part` compares with NUTS on a part of the data that NUTS can do: the largest error of a mean in
standard deviations and the ratios of standard deviations over all latent numbers and scales;
`right` are means within 0.2 sd and sds within 20 %. Otherwise the models have full size, and the
columns say how far they are from what the data were drawn from: the error of each scale and single
number in standard deviations (the largest), and of each plate's effects around their mean the root
mean square in standard deviations, which is 1 for a posterior that is right (the range over
plates). Seconds, processor seconds and memory are those of the process, with imports, compilation
and data; `fit` the processor seconds of the method alone.

- `AutoStructuredNormal`: all rows and no step, since it begins at the normal of greatest ELBO.
- `SGHMC`: nothing tuned, minibatches of 512 rows at full size; 2,000 draws, and on a part 2,000
  more at a time, six times at most, while the effective sample size of a scale is below 200.
- `AutoNormal`, `AutoLowRankMultivariateNormal`: 5,000 steps of Adam, 1e-2 falling, on minibatches
  of 512 rows.
- `NUTS`, 2 x (1,000 + 1,500) draws, on a part alone; it is the reference.
- `GPBoost`, `statsmodels`, `pymc-extras`: of `elsewhere.py`, if they are installed. Scales of the
  first are points. A row ends after `--limit` seconds of its processor, ten minutes.
- `LaplaceEM`: of `laplace_em.py`, in NumPy, of all but the panel. Its scales are points, so the row
  says how far they, and the means of effects, are from the ones of `AutoStructuredNormal` or NUTS,
  in the posterior sds of these, with the ratios of the sds of effects.
"""

import argparse
from itertools import product
import json
from pathlib import Path
import resource
import signal
import subprocess
import sys
import time
from typing import Any
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoNormal
import optax

from numpyro_ext.guides import AutoStructuredNormal
from numpyro_ext.mcmc import SGHMC

sys.path.append(str(Path(__file__).parents[1]))
from _shared.methods import smallest_ess
from _shared.verdicts import errors, moments
from groups import laplace_em
from groups.elsewhere import ELSEWHERE, Missing
from groups.models import MODELS, Groups

METHODS = ["AutoStructuredNormal", "SGHMC", "AutoNormal", "AutoLowRankMultivariateNormal"]
OTHERS = ["NUTS", *ELSEWHERE, "LaplaceEM"]
STEPS, BATCH = 5000, 512
MOST_RUNS, LEAST_ESS, MOST_SINGLES = 6, 200, 16
Draws = dict[str, np.ndarray]


def num_draws(problem: Groups) -> int:
    """2,000, or 200 of a hundred thousand effects."""
    return 200 if max(np.size(x) for x in problem.truth.values()) > 10_000 else 2000


def by_structured(problem: Groups) -> Draws:
    guide = AutoStructuredNormal(problem.model)
    svi = SVI(problem.model, guide, optax.adam(1e-3), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(1), **problem.data))
    draws = guide.sample_posterior(random.key(2), params, sample_shape=(num_draws(problem),))
    return {name: np.asarray(x) for name, x in draws.items()}


def by_numpyro(guide_class: Any, problem: Groups) -> Draws:
    guide = guide_class(problem.model)
    rate = optax.exponential_decay(1e-2, STEPS, 0.01)
    svi = SVI(problem.model, guide, optax.adam(rate), Trace_ELBO())
    data = {**problem.data, "batch": min(BATCH, len(problem.data["y"]))}
    params = svi.run(random.key(1), STEPS, progress_bar=False, **data).params
    draws = guide.sample_posterior(random.key(2), params, sample_shape=(num_draws(problem),))
    return {name: np.asarray(x) for name, x in draws.items()}


def by_sghmc(problem: Groups, full: bool) -> Draws:
    kernel = SGHMC(problem.model, steps_per_sample=20)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=num_draws(problem), progress_bar=False)
    data = {**problem.data, "batch": BATCH} if full else problem.data
    runs: list[Draws] = []
    while not runs or (not full and len(runs) < MOST_RUNS and of_singles(runs) < LEAST_ESS):
        mcmc.run(random.key(1 + len(runs)), **data)
        mcmc.post_warmup_state = mcmc.last_state
        runs.append({name: np.asarray(x) for name, x in mcmc.get_samples().items()})
    print(kernel.settings, file=sys.stderr)
    return joined(runs)


def joined(runs: list[Draws]) -> Draws:
    return {name: np.concatenate([x[name] for x in runs]) for name in runs[0]}


def of_singles(runs: list[Draws]) -> float:
    """The least effective sample size of a number that is no effect."""
    sites = joined(runs).items()
    return smallest_ess({k: x[None] for k, x in sites if np.size(x[0]) <= MOST_SINGLES})


def by_nuts(problem: Groups) -> Draws:
    """With a mass matrix of what trades against the intercept, and pairs that are decentred: as it
    is, NUTS has 12 effective draws of the intercept of the counts, and 63 of a scale of pairs."""
    mcmc = MCMC(
        NUTS(problem.model, dense_mass=list(problem.dense)),
        num_warmup=1000,
        num_samples=1500,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    better = {"decentred": True} if problem.decentred else {}
    mcmc.run(random.key(3), **problem.data, **better)
    return {name: np.asarray(x) for name, x in mcmc.get_samples().items()}


def milliseconds_of_a_step(problem: Groups, guide_class: Any, most: int = 500) -> float:
    """Of SVI on minibatches, from the difference of two runs."""
    guide = guide_class(problem.model)
    svi = SVI(problem.model, guide, optax.adam(1e-4), Trace_ELBO())
    data = {**problem.data, "batch": BATCH}
    state = svi.init(random.key(0), **data)

    @jax.jit
    def run(state: Any, num_steps: Any) -> Any:
        return lax.fori_loop(0, num_steps, lambda _, state: svi.update(state, **data)[0], state)

    seconds = []
    for num_steps in (1, most // 5, most):
        began = time.process_time()
        jax.block_until_ready(run(state, num_steps))
        seconds.append(time.process_time() - began)
    return 1e3 * (seconds[2] - seconds[1]) / (most - most // 5)


def by_em(name: str, data: dict[str, np.ndarray]) -> Draws:
    """Scales and the shape as ``(1,)``, effects by their mean and sd, ``(2, size)``."""
    found = laplace_em.fit(laplace_em.MODELS[name](data))
    result = {f"s_{k}": np.array([x]) for k, x in found.scales.items()}
    if name == "claims":
        result["shape"] = np.array([found.shape])
    if name == "answers":  # effects of the model are around another mean
        return {**result, "slope": found.means["columns"][None, 1]}
    effects = {k: np.stack([found.means[k], found.sds[k]]) for k in found.means if k != "columns"}
    if "week" in effects:
        effects["walk"] = effects.pop("week")
    return result | effects


def far_from_em(em: Draws, draws: dict[str, np.ndarray]) -> str:
    """The largest difference of scales and of means of effects, and the ratios of sds."""
    singles = [abs(em[k][0] - draws[k].mean()) / draws[k].std() for k in em if em[k].ndim == 1]
    effects = [k for k in em if em[k].ndim == 2]
    text = f"scales {max(singles):.2f}"
    if effects:
        means, sds = ([f(draws[k], 0) for k in effects] for f in (np.mean, np.std))
        pairs = [(em[k], m, s) for k, m, s in zip(effects, means, sds, strict=True)]
        shift = max(float(np.max(np.abs(e[0] - m) / s)) for e, m, s in pairs)
        ratios = np.concatenate([e[1] / s for e, _, s in pairs])
        text += f", effects {shift:.2f}; sds [{ratios.min():.2f}, {ratios.max():.2f}]"
    return text


def on_device(problem: Groups) -> Groups:
    data = {k: jnp.asarray(v, jnp.result_type(v, np.int32)) for k, v in problem.data.items()}
    return problem._replace(data=data)


def one(name: str, method: str, full: bool, out: Path) -> None:
    """Fit, keep the draws, and print what it took."""
    problem = on_device(MODELS[name](full))
    before, began, notes = time.process_time(), time.perf_counter(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if method == "AutoStructuredNormal":
            draws = by_structured(problem)
        elif method == "SGHMC":
            draws = by_sghmc(problem, full)
        elif method == "NUTS":
            draws = by_nuts(problem)
        elif name == "visits" and method in {*ELSEWHERE, "LaplaceEM"}:
            raise Missing("not written for visits")
        elif method in ELSEWHERE:
            draws = ELSEWHERE[method](name, MODELS[name](full).data)
        elif method == "LaplaceEM":
            draws = by_em(name, MODELS[name](full).data)
        else:
            guides = {"AutoNormal": AutoNormal}
            draws = by_numpyro(guides.get(method, AutoLowRankMultivariateNormal), problem)
        notes = [str(x.message) for x in caught if "numpyro_ext" in str(type(x.message))]
    np.savez(out / f"{name}_{'full' if full else 'part'}_{method}.npz", **draws)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "fit": time.process_time() - before,
                "seconds": time.perf_counter() - began,
                "processor": usage.ru_utime + usage.ru_stime,
                "memory": usage.ru_maxrss / 2**20,
                "says": " ".join(notes) or "-",
            }
        )
    )


def far_from_truth(draws: Draws, truth: dict[str, Any]) -> tuple[float, list[float]]:
    """The largest error of single numbers in sds, and the rms of each plate's contrasts in sds."""
    singles, plates = [], []
    for name, right in truth.items():
        x = draws[name].reshape(len(draws[name]), -1).astype(float)
        right = np.ravel(right)
        if len(right) > MOST_SINGLES:
            x, right = x - x.mean(1, keepdims=True), right - right.mean()
            plates.append(float(np.mean(((x.mean(0) - right) / x.std(0)) ** 2) ** 0.5))
        else:
            singles.append(float(np.max(np.abs(x.mean(0) - right) / x.std(0))))
    return max(singles), plates


def row(name: str, method: str, full: bool, out: Path, again: bool, limit: int) -> list[str]:
    size = "full" if full else "part"
    path = out / f"{name}_{size}_{method}.npz"
    kept = path.with_suffix(".json")
    if again or not kept.is_file():
        command = [sys.executable, __file__, "--one", "--model", name, "--only", method]
        command += ["--out", str(out), "--limit", str(limit)] + ([] if full else ["--part"])
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode == -signal.SIGXCPU:
            return [name, method, size, f"not done in {limit} processor seconds"]
        if run.returncode:
            said = run.stderr.strip() or f"ended by the signal {-run.returncode}"
            why = said.splitlines()[-1].split(f"{Missing.__name__}: ")[-1]
            return [name, method, size, why[:120]]
        kept.write_text(run.stdout.strip().splitlines()[-1])
    took = json.loads(kept.read_text())
    draws = dict(np.load(path))
    if method == "GPBoost":
        first = ", ".join(f"{k} {float(v):.4g}" for k, v in draws.items())
    elif method == "LaplaceEM":
        first = ", ".join(f"{k} {x[0]:.4g}" for k, x in draws.items() if x.ndim == 1)
    elif full or name == "panel":
        worst, plates = far_from_truth(draws, MODELS[name](full).truth)
        first = f"{worst:.2f} sd; {min(plates):.2f} to {max(plates):.2f}"
    else:
        first = ""
    second = ""
    reference = out / f"{name}_{size}_NUTS.npz"
    if method == "LaplaceEM":
        others = ["AutoStructuredNormal"] + ([] if full else ["NUTS"])
        paths = {other: out / f"{name}_{size}_{other}.npz" for other in others}
        found = {k: far_from_em(draws, dict(np.load(p))) for k, p in paths.items() if p.is_file()}
        second = "; ".join(f"from {k}: {text}" for k, text in found.items())
    elif reference.is_file() and method not in ("NUTS", "GPBoost"):
        kept_sites = {k: x for k, x in np.load(reference).items() if k not in ("root", "unit")}
        wrong = errors(draws, moments(kept_sites))
        second = f"{wrong.mean:.2f}; {wrong.spread}; {'right' if wrong.right() else 'wrong'}"
    numbers = (f"{took[k]:.3g}" for k in ("seconds", "processor", "fit", "memory"))
    return [name, method, size, first, second, *numbers, took["says"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", default=METHODS, choices=[*METHODS, *OTHERS])
    parser.add_argument("--part", action="store_true", help="a part that NUTS can do")
    parser.add_argument("--again", action="store_true", help="fit what is kept under --out anew")
    parser.add_argument("--limit", type=int, default=600, help="processor seconds of a row")
    parser.add_argument("--one", action="store_true", help="fit in this process")
    parser.add_argument("--step", action="store_true", help="only the time of a guide's step")
    parser.add_argument("--out", type=Path, default=Path("out/groups"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        resource.setrlimit(resource.RLIMIT_CPU, (args.limit, args.limit + 10))
        one(args.model[0], args.only[0], not args.part, args.out)
        return
    if args.step:
        for name, guide in product(args.model, (AutoNormal, AutoStructuredNormal)):
            step = milliseconds_of_a_step(on_device(MODELS[name](not args.part)), guide)
            print(f"{name}, {guide.__name__}: {step:.3g} processor ms a step", flush=True)
        return
    head = ["model", "method", "size", "from the truth", "from NUTS"]
    head += ["seconds", "processor s", "fit", "GiB", "says"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    for name in args.model:
        for method in args.only:
            cells = row(name, method, not args.part, args.out, args.again, args.limit)
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
