"""Accuracy of the minibatch kernels on German credit, beside BlackJAX's and NUTS.

Logistic regression: 1000 rows, 24 standardised features and an intercept, prior N(0, 1), batches of 100 rows drawn
with replacement, every chain started at zero, float32. The truth is a published mean and standard deviation of each
coefficient (`posterior_mean_sd.csv`). With mu and sigma the truth of one coefficient z, the error of a chain is the
average over the coefficients of

    (average of z^2 - (mu^2 + sigma^2))^2 / Var z^2,    Var z^2 = 4 mu^2 sigma^2 + 2 sigma^4,

the variance being that of a Gaussian. n independent exact draws have an expected error of 1/n. `error of a chain`
is the average over the chains (with its standard error), `error of all` is that of the chains together, which shows
more of the bias and less of the Monte Carlo error.

Every kernel has a grid of step sizes of factor 2, the same number for each; `--tune` prints the grid (with keys of its
own), without it the best of the grid is used, written in the table `METHODS`.
"""

import argparse
from collections.abc import Callable
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

from numpyro_ext.mcmc import PSGLD, SGHMC, SGLD, SGNHT, SVRG, ControlVariate, PolynomialSchedule

BATCH = 100
THIN = 10
BURN_IN = 0.1  # of the steps
FRICTION = 20.0  # near the critical damping of these posteriors' curvatures, for every kernel with momentum
GRID = 2.0 ** np.arange(-3, 4)  # factors on the middle of a kernel's grid

Data = tuple[Array, Array]


class Result(NamedTuple):
    """Draws ``(chains, draws, d)`` and their weights ``(draws,)``."""

    draws: np.ndarray
    weights: np.ndarray


class Method(NamedTuple):
    """``run(data, step_size, rng_key, args)`` and the step size that the grid found."""

    run: Callable[..., Result]
    middle: float
    best: float
    published: float | None = None


def load(folder: Path) -> tuple[Data, np.ndarray, np.ndarray]:
    if not (folder / "german.data-numeric").is_file():
        sys.exit(
            f"There is no german.data-numeric in {folder}; give its folder's parent as --data-dir."
        )
    table = np.loadtxt(folder / "german.data-numeric")
    x = (table[:, :-1] - table[:, :-1].mean(0)) / table[:, :-1].std(0)
    x = np.column_stack([x, np.ones(len(x))]).astype(np.float32)
    mean, sd = np.loadtxt(folder / "posterior_mean_sd.csv", delimiter=",").T
    return (jnp.asarray(x), jnp.asarray(table[:, -1] == 2, jnp.float32)), mean, sd


def model(x: Array, y: Array, batch: int | None = BATCH) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def mode(data: Data) -> Array:
    guide = AutoDelta(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.02), Trace_ELBO())
    result = svi.run(random.key(0), 1000, *data, None, progress_bar=False)
    return guide.median(result.params)["w"]


def here(
    make: Callable[..., Any], schedule: Callable = float, mode_center: bool = False
) -> Callable:
    """The runs of a kernel of this package."""

    def run(data: Data, step_size: float, rng_key: Array, args: argparse.Namespace) -> Result:
        keywords = {"gradient": ControlVariate({"w": mode(data)})} if mode_center else {}
        kernel = make(
            model,
            schedule(step_size),
            steps_per_sample=THIN,
            init_strategy=init_to_value(values={"w": jnp.zeros(data[0].shape[1])}),
            **keywords,
        )
        warmup = int(args.steps * BURN_IN) // THIN
        mcmc = MCMC(
            kernel,
            num_warmup=warmup,
            num_samples=args.steps // THIN - warmup,
            num_chains=args.chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(rng_key, *data, extra_fields=("step_size", "diverging"))
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
        fields = mcmc.get_extra_fields(group_by_chain=True)
        if np.any(fields["diverging"]):
            draws = np.full_like(draws, np.nan)
        return Result(draws, np.asarray(fields["step_size"][0]))

    return run


def nuts(data: Data, step_size: float, rng_key: Array, args: argparse.Namespace) -> Result:
    mcmc = MCMC(
        NUTS(model, init_strategy=init_to_value(values={"w": jnp.zeros(data[0].shape[1])})),
        num_warmup=500,
        num_samples=1000,
        num_chains=args.chains,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(rng_key, *data, None)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
    return Result(draws, np.ones(draws.shape[1]))


def theirs(kind: str, *, inner: int = 1, mode_center: bool = False) -> Callable[..., Result]:
    """The runs of a kernel of BlackJAX: ``inner`` gradients on one batch, each of which counts as a step."""

    def run(data: Data, step_size: float, rng_key: Array, args: argparse.Namespace) -> Result:
        rows, dim = data[0].shape
        gradient = grad_estimator(
            lambda w: dist.Normal(0, 1).log_prob(w).sum(),
            lambda w, row: dist.Bernoulli(logits=row[0] @ w).log_prob(row[1]),
            rows,
        )
        if mode_center:
            gradient = control_variates(gradient, mode(data), data)
        start, step, position = blackjax_kernel(kind, gradient, step_size, inner)

        def transition(_: int, carry: Any) -> Any:
            rng_key, key_index, key_step = random.split(carry[0], 3)
            idx = random.randint(key_index, (BATCH,), 0, rows)
            return rng_key, step(key_step, carry[1], jax.tree.map(lambda x: x[idx], data))

        def draw(carry: Any, _: None) -> tuple[Any, Array]:
            carry = lax.fori_loop(0, THIN // inner, transition, carry)
            return carry, position(carry[1])

        def chain(rng_key: Array) -> Array:
            key_start, rng_key = random.split(rng_key)
            carry = rng_key, start(key_start, jnp.zeros(dim))
            return lax.scan(draw, carry, length=args.steps // THIN)[1]

        draws = np.asarray(jax.jit(jax.vmap(chain))(random.split(rng_key, args.chains)))
        draws = draws[:, int(args.steps * BURN_IN) // THIN :]
        return Result(draws, np.ones(draws.shape[1]))

    return run


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
        # `blackjax.sghmc` redraws the momentum at each batch, so at one step to a batch only the integrator is of use.
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


def polynomial(step_size: float) -> PolynomialSchedule:
    """Falls from 4 times the step size; at 200,000 steps it ends at 0.6 times."""
    return PolynomialSchedule(4 * step_size * 1000**0.35, 1000.0, 0.35)


def sghmc(*args: Any, **kwargs: Any) -> SGHMC:
    return SGHMC(*args, friction=FRICTION, **kwargs)


def sghmc_noise(*args: Any, **kwargs: Any) -> SGHMC:
    return sghmc(*args, noise_variance="warmup", **kwargs)


def sgnht(*args: Any, **kwargs: Any) -> SGNHT:
    return SGNHT(*args, friction=FRICTION, **kwargs)


def sgnht_each(*args: Any, **kwargs: Any) -> SGNHT:
    return sgnht(*args, thermostat="per_parameter", **kwargs)


def sgld_svrg(*args: Any, **kwargs: Any) -> SGLD:
    return SGLD(*args, gradient=SVRG(100), **kwargs)


def sgld_epoch(*args: Any, **kwargs: Any) -> SGLD:
    return SGLD(*args, minibatch="epoch", **kwargs)


# Kernel: run, middle of its grid, best of the grid, published figure of a peer.
METHODS = {
    "SGLD": Method(here(SGLD), 4e-5, 4e-5, 0.0024),
    "SGLD, polynomial schedule": Method(here(SGLD, polynomial), 4e-5, 4e-5, 0.0024),
    "SGLD, batches by epoch": Method(here(sgld_epoch), 4e-5, 4e-5, 0.0024),
    "SGLD, control variate": Method(here(SGLD, mode_center=True), 1e-4, 1e-4, 0.0015),
    "SGLD, SVRG": Method(here(sgld_svrg), 1e-4, 1e-4, 0.0015),
    "PSGLD": Method(here(PSGLD), 4e-3, 4e-3, 0.0024),
    "SGHMC": Method(here(sghmc), 0.01, 0.01, 0.0114),
    "SGHMC, noise estimate": Method(here(sghmc_noise), 0.01, 0.01, 0.0114),
    "SGNHT": Method(here(sgnht), 0.01, 0.01, 0.0020),
    "SGNHT, per coordinate": Method(here(sgnht_each), 0.01, 0.01, 0.0020),
    "BlackJAX SGLD": Method(theirs("SGLD"), 4e-5, 4e-5, 0.0024),
    "BlackJAX SGLD, control variate": Method(theirs("SGLD", mode_center=True), 1e-4, 1e-4, 0.0015),
    "BlackJAX SGHMC, its integrator": Method(theirs("SGHMC"), 0.01, 0.01, 0.0114),
    "BlackJAX SGHMC, 10 steps to a batch": Method(theirs("SGHMC", inner=10), 0.01, 0.01, 0.0114),
    "BlackJAX SGNHT": Method(theirs("SGNHT"), 0.01, 0.01, 0.0020),
}
NUTS_PUBLISHED = 0.0007


def judge(result: Result, mean: np.ndarray, sd: np.ndarray) -> dict[str, Any]:
    """Errors of the single chains and of all together, and the average ratio of standard deviations."""
    draws = result.draws.astype(np.float64)
    weights = result.weights / result.weights.sum()
    variance = 4 * mean**2 * sd**2 + 2 * sd**4

    def error(second: np.ndarray) -> np.ndarray:
        return np.mean((second - mean**2 - sd**2) ** 2 / variance, -1)

    first, second = (np.einsum("cnd,n->cd", draws**k, weights) for k in (1, 2))
    spread = np.sqrt(second.mean(0) - first.mean(0) ** 2)
    return {"chains": error(second), "all": error(second.mean(0)), "sd": np.mean(spread / sd)}


def tune(names: list[str], data: Data, truth: Any, args: argparse.Namespace) -> None:
    print("| kernel | " + " | ".join(f"x {factor:g}" for factor in GRID) + " | best |")
    print("|---" * (len(GRID) + 2) + "|")
    for name in names:
        method, errors = METHODS[name], []
        for factor in tqdm(GRID, desc=name, leave=False):
            result = method.run(data, method.middle * factor, random.key(100), args)
            errors.append(np.mean(judge(result, *truth)["chains"]))
        best = method.middle * GRID[np.nanargmin(errors)]
        print(
            f"| {name} | " + " | ".join(f"{e:.4f}" for e in errors) + f" | {best:.3g} |", flush=True
        )


def table(names: list[str], data: Data, truth: Any, args: argparse.Namespace) -> dict[str, Any]:
    print(
        "| kernel | step size | error of a chain | of all | published | reached | sd ratio | seconds | steps/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    judged = {}
    # The first chain of a process also compiles small operations that the later ones find ready.
    METHODS["SGLD"].run(
        data, 1e-5, random.key(0), argparse.Namespace(steps=1000, chains=args.chains)
    )
    methods = {name: METHODS[name] for name in names}
    methods["NUTS, 1000 draws"] = Method(nuts, 1.0, 1.0, NUTS_PUBLISHED)
    bar = tqdm(methods.items())
    for name, method in bar:
        bar.set_description(name)
        start = time.perf_counter()
        result = method.run(data, method.best, random.key(0), args)
        seconds = time.perf_counter() - start
        judged[name] = found = judge(result, *truth)
        error = np.mean(found["chains"])
        standard = np.std(found["chains"], ddof=1) / np.sqrt(args.chains)
        is_nuts = method.run is nuts
        tqdm.write(
            f"| {name} | {'adapted' if is_nuts else f'{method.best:.3g}'} | {error:.4f} +- {standard:.4f} |"
            f" {found['all']:.4f} | {method.published:.4f} | {'yes' if error <= method.published else 'no'} |"
            f" {found['sd']:.3f} | {seconds:.1f} |"
            f" {'' if is_nuts else f'{args.chains * args.steps / seconds:,.0f}'} |"
        )
    return judged


def plot(judged: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    published = {name: method.published for name, method in METHODS.items()}
    published["NUTS, 1000 draws"] = NUTS_PUBLISHED
    figure, axes = plt.subplots(figsize=(8, 0.36 * len(judged) + 1.2), layout="constrained")
    for row, (name, found) in enumerate(judged.items()):
        colour = "C1" if name.startswith("BlackJAX") else "C2" if name.startswith("NUTS") else "C0"
        axes.plot(
            found["chains"], [row] * len(found["chains"]), "o", color=colour, alpha=0.35, ms=5
        )
        axes.plot(np.mean(found["chains"]), row, "D", color=colour, ms=7)
        axes.plot(published[name], row, "|", color="k", ms=16)
    axes.set_yticks(range(len(judged)), list(judged))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(
        "error of the second moment (circles: chains, diamond: average, bar: published peer)"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"\nWrote {path}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    parser.add_argument("--steps", type=int, default=200_000, help="gradients to a chain")
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--tune", action="store_true", help="print the grid of step sizes")
    parser.add_argument("--out", type=Path, default=Path("out/german_credit.png"))
    args = parser.parse_args()
    data, *truth = load(args.data_dir / "german_credit")
    names = [name for name in METHODS if args.only in name]
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {args.chains} chains of {args.steps:,} steps,"
        f" the first {BURN_IN:.0%} left out, every {THIN}th kept\n"
    )
    if args.tune:
        tune(names, data, truth, args)
    else:
        plot(table(names, data, truth, args), args.out)


if __name__ == "__main__":
    main()
