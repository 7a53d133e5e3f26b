"""Accuracy of the minibatch kernels on German credit, compared with BlackJAX's and NUTS.

Logistic regression: 1000 rows, 24 standardised features and an intercept, prior N(0, 1), batches of
100 rows drawn with replacement, every chain started at zero, float32. The truth is the mean and
standard deviation of each coefficient by inference_gym (`posterior_mean_sd.csv`). With mu and sigma
the truth of one coefficient z, the error of a chain is the average over the coefficients of

    (average of z^2 - (mu^2 + sigma^2))^2 / Var z^2,    Var z^2 = 4 mu^2 sigma^2 + 2 sigma^4,

the variance being that of a Gaussian. n independent exact draws have an expected error of 1/n.
`error of a chain` is the average over the chains (with its standard error), `of all` is that of the
chains together, which shows more of the bias and less of the Monte Carlo error. `re-run` is the
error of one chain of the same algorithm, run for this package with the code of its peers; no paper
has it (`benchmarks/figures.tsv`). A variant stands beside the kernel that it varies.

The metric of SGRLD is the curvature at the mode; RecipeKernel is SGHMC written as a pair of
matrices, without splitting. KernelHMC reads all 1000 rows, so it takes one transition for ten steps
of the others; its score is that of the Laplace approximation.

`--tune` prints the errors of every kernel, BlackJAX's too, on a grid of as many step sizes, with
other keys than the table's; the table takes the best of each grid, which is written down in
`METHODS`. All kernels with momentum have one friction. Compilation and the search of the mode,
which is the center of the control variate, are not timed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple

import blackjax
from blackjax.sgmcmc import diffusions
from blackjax.sgmcmc.gradients import control_variates, grad_estimator
import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta
from tqdm import tqdm
from unsplit import unsplit_sghmc

from numpyro_ext.mcmc import (
    PSGLD,
    SGHMC,
    SGLD,
    SGNHT,
    SGRLD,
    SVRG,
    ControlVariate,
    KernelHMC,
    PolynomialSchedule,
    RecipeKernel,
)

sys.path.append(str(Path(__file__).parents[1]))
from _shared.figures import figures
from _shared.german_credit import Data, load, logistic

BATCH = 100
THIN = 10
BURN_IN = 0.1  # of the steps
# Near the critical damping of these posteriors' curvatures, for every kernel with momentum.
FRICTION = 20.0
GRID = 2.0 ** np.arange(-2, 3)  # factors on the middle of a kernel's grid


class Draws(NamedTuple):
    """Draws ``(chains, draws, d)``, their weights ``(draws,)`` and whether a chain met a value that
    is not finite.
    """

    z: Any
    weights: Any
    diverged: Any


class Problem(NamedTuple):
    """``curvature`` is the ``(d, d)`` matrix of second derivatives of the potential at the mode."""

    data: Data
    mode: Array
    curvature: Array
    steps: int


class Method(NamedTuple):
    """``chains(problem, step_size, keys)``, the middle and the best of the grid."""

    chains: Callable[[Problem, Array, Array], Draws]
    middle: float
    best: float


def mode(data: Data) -> Array:
    guide = AutoDelta(logistic)
    svi = SVI(logistic, guide, numpyro.optim.Adam(0.02), Trace_ELBO())
    result = svi.run(random.key(0), 1000, *data, progress_bar=False)
    return guide.median(result.params)["w"]


def curvature(data: Data, w: Array) -> Array:
    x, _ = data
    p = jax.nn.sigmoid(x @ w)
    return jnp.eye(len(w)) + (x * (p * (1 - p))[:, None]).T @ x


def nuts(data: Data, num_chains: int) -> Draws:
    mcmc = MCMC(
        NUTS(logistic, init_strategy=init_to_value(values={"w": jnp.zeros(data[0].shape[1])})),
        num_warmup=500,
        num_samples=1000,
        num_chains=num_chains,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *data)
    z = mcmc.get_samples(group_by_chain=True)["w"]
    return Draws(z, jnp.ones(z.shape[1]), False)


def here(
    make: Callable[..., Any],
    schedule: Callable | None = None,
    *,
    batch: int | None = BATCH,
    options: Callable[[Problem], dict[str, Any]] = lambda problem: {},
) -> Any:
    """Chains of a kernel of this package: draws of ``THIN`` gradients of a batch, as ``MCMC`` takes
    them.
    """

    def chains(problem: Problem, step_size: Array, keys: Array) -> Draws:
        data, burn_in = problem.data, int(problem.steps * BURN_IN) // THIN
        kernel = make(
            partial(logistic, batch=batch),
            (lambda i: step_size) if schedule is None else schedule(step_size),
            steps_per_sample=THIN * BATCH // (batch or len(data[0])),
            init_strategy=init_to_value(values={"w": jnp.zeros_like(problem.mode)}),
            **options(problem),
        )

        def draw(state: Any, _: None) -> tuple[Any, Any]:
            state = kernel.sample(state, data, {})
            return state, Draws(state.z["w"], state.step_size[0], jnp.any(state.diverging))

        state = kernel.init(keys, burn_in, None, data, {})
        z, weights, diverging = lax.scan(draw, state, length=problem.steps // THIN)[1]
        return Draws(jnp.swapaxes(z, 0, 1)[:, burn_in:], weights[burn_in:], jnp.any(diverging))

    return chains


def theirs(kind: str, *, inner: int = 1, centered: bool = False) -> Any:
    """Chains of a kernel of BlackJAX: ``inner`` gradients on one batch, each of which counts as a
    step.
    """

    def chains(problem: Problem, step_size: Array, keys: Array) -> Draws:
        (rows, dim), burn_in = problem.data[0].shape, int(problem.steps * BURN_IN) // THIN
        gradient = grad_estimator(
            lambda w: dist.Normal(0, 1).log_prob(w).sum(),
            lambda w, row: dist.Bernoulli(logits=row[0] @ w).log_prob(row[1]),
            rows,
        )
        if centered:
            gradient = control_variates(gradient, problem.mode, problem.data)
        start, step, position = blackjax_kernel(kind, gradient, step_size, inner)

        def transition(_: int, carry: Any) -> Any:
            rng_key, key_index, key_step = random.split(carry[0], 3)
            idx = random.randint(key_index, (BATCH,), 0, rows)
            return rng_key, step(key_step, carry[1], jax.tree.map(lambda x: x[idx], problem.data))

        def draw(carry: Any, _: None) -> tuple[Any, Array]:
            carry = lax.fori_loop(0, THIN // inner, transition, carry)
            return carry, position(carry[1])

        def chain(rng_key: Array) -> Array:
            key_start, rng_key = random.split(rng_key)
            carry = rng_key, start(key_start, jnp.zeros(dim))
            return lax.scan(draw, carry, length=problem.steps // THIN)[1]

        z = jax.vmap(chain)(keys)[:, burn_in:]
        return Draws(z, jnp.ones(z.shape[1]), ~jnp.all(jnp.isfinite(z)))

    return chains


def blackjax_kernel(
    kind: str, gradient: Callable, eps: float, inner: int
) -> tuple[Callable, Callable, Callable]:
    """``start(key, z)``, ``step(key, state, batch)`` and ``position(state)``."""
    if kind == "SGLD":
        kernel = blackjax.sgld(gradient)
    elif kind == "SGNHT":
        kernel = blackjax.sgnht(gradient, alpha=FRICTION)
    elif inner > 1:
        kernel = blackjax.sghmc(gradient, num_integration_steps=inner, alpha=FRICTION)
    else:
        # `blackjax.sghmc` redraws the momentum at each batch, so at one step to a batch only the
        # integrator is of use.
        integrator = diffusions.sghmc(alpha=FRICTION)
        return (
            lambda key, z: (z, random.normal(key, z.shape)),
            lambda key, state, batch: integrator(key, *state, gradient(state[0], batch), eps),
            lambda state: state[0],
        )
    return (
        lambda key, z: kernel.init(z, key),
        lambda key, state, batch: kernel.step(key, state, batch, eps),
        lambda state: state.position if kind == "SGNHT" else state,
    )


def polynomial(step_size: Array) -> Callable[[Array], Array]:
    """Falls from 4 times the step size; after 200,000 steps it ends at 0.6 times."""
    shape = PolynomialSchedule(4 * 1000**0.35, 1000.0, 0.35)
    return lambda i: step_size * shape(i)


def center(problem: Problem) -> dict[str, Any]:
    return {"gradient": ControlVariate({"w": problem.mode})}


def curvature_metric(problem: Problem) -> dict[str, Any]:
    return {"metric": lambda z: problem.curvature, "correction": jnp.zeros_like}


def laplace_score(problem: Problem) -> dict[str, Any]:
    return {"score": lambda z: -problem.curvature @ (z - problem.mode)}


sghmc, sgnht = partial(SGHMC, friction=FRICTION), partial(SGNHT, friction=FRICTION)
recipe = partial(RecipeKernel, **unsplit_sghmc(FRICTION))


# Kernel: run, middle of its grid, best of the grid.
METHODS = {
    "SGLD": Method(here(SGLD), 0.0001, 0.0001),
    "SGLD, polynomial schedule": Method(here(SGLD, polynomial), 0.0001, 0.0001),
    "SGLD, batches by epoch": Method(here(partial(SGLD, minibatch="epoch")), 0.0001, 0.0002),
    "SGLD, control variate": Method(here(SGLD, options=center), 0.0004, 0.0004),
    "SGLD, SVRG": Method(here(partial(SGLD, gradient=SVRG(10))), 0.0004, 0.0004),
    "PSGLD": Method(here(PSGLD), 0.004, 0.004),
    "SGRLD": Method(here(SGRLD, options=curvature_metric), 0.01, 0.01),
    "SGHMC": Method(here(sghmc), 0.0025, 0.0025),
    "SGHMC, baoab": Method(here(partial(sghmc, integrator="baoab")), 0.0025, 0.0025),
    "SGHMC, noise estimate": Method(here(partial(sghmc, noise_variance="warmup")), 0.005, 0.0025),
    "SGNHT": Method(here(sgnht), 0.005, 0.0025),
    "SGNHT, per coordinate": Method(
        here(partial(sgnht, thermostat="per_parameter")), 0.005, 0.0025
    ),
    "RecipeKernel": Method(here(recipe), 0.0025, 0.0025),
    "KernelHMC": Method(here(KernelHMC, batch=None, options=laplace_score), 0.015, 0.015),
    "BlackJAX SGLD": Method(theirs("SGLD"), 0.0001, 0.0001),
    "BlackJAX SGLD, control variate": Method(theirs("SGLD", centered=True), 0.0004, 0.0004),
    "BlackJAX SGHMC, its integrator": Method(theirs("SGHMC"), 0.0025, 0.0025),
    "BlackJAX SGHMC, 10 steps to a batch": Method(theirs("SGHMC", inner=10), 0.005, 0.0025),
    "BlackJAX SGNHT": Method(theirs("SGNHT"), 0.005, 0.0025),
}


def rerun(name: str) -> float | None:
    """The error of one chain of this kernel, or of the one that it varies, by the code of peers."""
    found, kernel = figures("re-run"), name.removeprefix("BlackJAX ")
    error = found.get(kernel, found.get(kernel.split(",")[0]))
    return None if error is None else float(error)


def judge(draws: Draws, mean: np.ndarray, sd: np.ndarray) -> dict[str, Any]:
    """Errors of the single chains and of all together, and the average ratio of standard
    deviations.
    """
    z, weights = np.asarray(draws.z, np.float64), np.asarray(draws.weights, np.float64)
    variance = 4 * mean**2 * sd**2 + 2 * sd**4

    def error(second: np.ndarray) -> np.ndarray:
        return np.mean((second - mean**2 - sd**2) ** 2 / variance, -1)

    first, second = (np.einsum("cnd,n->cd", z**k, weights / weights.sum()) for k in (1, 2))
    spread = np.sqrt(second.mean(0) - first.mean(0) ** 2)
    chains = error(second) if not draws.diverged else np.full(len(z), np.nan)
    return {"chains": chains, "all": error(second.mean(0)), "sd": np.mean(spread / sd)}


def compiled(method: Method, problem: Problem, args: argparse.Namespace) -> Callable[..., Draws]:
    """``run(step_size, rng_key)``."""

    def run(step_size: Array, rng_key: Array, data: Data) -> Draws:
        keys = random.split(rng_key, args.chains)
        return method.chains(problem._replace(data=data), step_size, keys)

    example = jnp.float32(method.middle), random.key(0), problem.data
    program = jax.jit(run).lower(*example).compile()
    return lambda step_size, rng_key: jax.block_until_ready(
        program(jnp.float32(step_size), rng_key, problem.data)
    )


def tune(names: list[str], problem: Problem, truth: Any, args: argparse.Namespace) -> None:
    print("| kernel | middle | " + " | ".join(f"x {factor:g}" for factor in GRID) + " |")
    print("|---" * (len(GRID) + 2) + "|")
    for name in (bar := tqdm(names)):
        bar.set_description(name)
        method = METHODS[name]
        run = compiled(method, problem, args)
        found = [judge(run(method.middle * k, random.key(100)), *truth) for k in GRID]
        errors = [f"{np.mean(each['chains']):.4f}" for each in found]
        tqdm.write(f"| {name} | {method.middle:.3g} | {' | '.join(errors)} |")


def table(
    names: list[str], problem: Problem, truth: Any, args: argparse.Namespace
) -> dict[str, Any]:
    print(
        "| kernel | step size | error of a chain | of all | re-run | reached | sd ratio |"
        " seconds | steps/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    judged = {}
    for name in (bar := tqdm([*names, "NUTS"])):
        bar.set_description(name)
        if name == "NUTS":
            step = "adapted"
            start = time.perf_counter()
            draws = nuts(problem.data, args.chains)
        else:
            method = METHODS[name]
            step = f"{method.best:.3g}"
            run = compiled(method, problem, args)
            start = time.perf_counter()
            draws = run(method.best, random.key(0))
        seconds = time.perf_counter() - start
        judged[name] = found = judge(draws, *truth)
        error = np.mean(found["chains"])
        standard = np.std(found["chains"]) / np.sqrt(max(1, args.chains - 1))
        speed = "" if name == "NUTS" else f"{args.chains * args.steps / seconds:,.0f}"
        peer = rerun(name)
        reached = ("", "") if peer is None else (f"{peer:.4f}", "yes" if error <= peer else "no")
        tqdm.write(
            f"| {name} | {step} | {error:.4f} +- {standard:.4f} | {found['all']:.4f} |"
            f" {' | '.join(reached)} | {found['sd']:.3f} | {seconds:.1f} | {speed} |"
        )
    return judged


def plot(judged: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.36 * len(judged) + 1.2), layout="constrained")
    for row, (name, found) in enumerate(judged.items()):
        colour = "C1" if name.startswith("BlackJAX") else "C2" if name.startswith("NUTS") else "C0"
        axes.plot(
            found["chains"], [row] * len(found["chains"]), "o", color=colour, alpha=0.35, ms=5
        )
        axes.plot(np.mean(found["chains"]), row, "D", color=colour, ms=7)
        if (peer := rerun(name)) is not None:
            axes.plot(peer, row, "|", color="k", ms=16)
    axes.set_yticks(range(len(judged)), list(judged))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(
        "error of the second moment\n(circles: chains, diamond: average, bar: re-run of a peer)"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"\nWrote {path}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=200_000, help="gradients to a chain")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tune", action="store_true", help="print the grid of step sizes")
    parser.add_argument("--out", type=Path, default=Path("out/german_credit.png"))
    args = parser.parse_args()
    data, *truth = load(args.data_dir)
    w = mode(data)
    problem = Problem(data, w, curvature(data, w), args.steps)
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {args.chains} chains of"
        f" {args.steps:,} steps,"
        f" the first {BURN_IN:.0%} left out, every {THIN}th kept\n"
    )
    if args.tune:
        tune(args.only, problem, truth, args)
    else:
        plot(table(args.only, problem, truth, args), args.out)


if __name__ == "__main__":
    main()
