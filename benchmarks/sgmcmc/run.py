"""Speed of the stochastic-gradient kernels: against the number of rows, BlackJAX, a bare loop, and
one another.

Logistic regression with 10 coefficients and batches of 100 rows, drawn with replacement inside the
timed loop.
"""

import argparse
from collections.abc import Callable
import contextlib
import io
import time
from typing import Any

import blackjax
from blackjax.sgmcmc import diffusions
import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from tqdm import tqdm

import numpyro_ext.mcmc as sg
from numpyro_ext.mcmc import SGHMC, SGLD

DIM = 10
STEP = 1e-6


def make_data(rows: int) -> tuple[Array, Array]:
    key_x, key_w, key_y = random.split(random.key(0), 3)
    x = random.normal(key_x, (rows, DIM))
    w = random.normal(key_w, (DIM,))
    return x, random.bernoulli(key_y, jax.nn.sigmoid(x @ w)).astype(float)


def make_model(batch: int | None) -> Callable[[Array, Array], None]:
    def model(x: Array, y: Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=batch) as idx:
            numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    return model


def best_of(repeats: int, *runs: Callable[[], Any]) -> list[float]:
    """Shortest wall-clock seconds of each run; the runs take turns, so that all see the same
    machine.
    """
    for run in runs:
        jax.block_until_ready(run())
    times = [[] for _ in runs]
    for _ in tqdm(range(repeats), leave=False):
        for seconds, run in zip(times, runs, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in times]


def kernel_run(kernel: Any, data: tuple[Array, Array], *, warm: bool = True) -> Callable[[], Any]:
    """``steps_per_sample`` transitions of the kernel, in one compiled call, data as arguments."""
    state = kernel.init(random.key(1), 1, None, data, {})
    sample = jax.jit(lambda state, data: kernel.sample(state, data, {}))
    state = sample(state, data) if warm else state  # one draw of warmup
    return lambda: sample(state, data)


def call_run(kernel: Any, data: tuple[Array, Array], calls: int) -> Callable[[], Any]:
    """``calls`` transitions, each dispatched by itself, as ``MCMC`` does with a progress bar."""
    state = kernel.init(random.key(1), 1, None, data, {})
    sample = jax.jit(lambda state, data: kernel.sample(state, data, {}))

    def run() -> Any:
        last = state
        for _ in range(calls):
            last = sample(last, data)
        return last

    return run


def rows_against_time(args: argparse.Namespace) -> None:
    print("\n## Microseconds of a transition against the number of rows\n")
    print("Each called by itself, and in one compiled loop:\n")
    print(
        "| rows | SGLD, called | ratio | SGHMC, called | ratio"
        " | SGLD, loop | ratio | SGHMC, loop | ratio | bare SGLD loop | ratio |"
    )
    print("|---" * 11 + "|")
    calls, model = args.steps // 20, make_model(args.batch)
    transitions = [calls, calls, args.steps, args.steps, args.steps]
    runs = []
    for rows in args.rows:
        data = make_data(rows)
        runs += [call_run(kernel(model, STEP), data, calls) for kernel in (SGLD, SGHMC)]
        runs += [
            kernel_run(kernel(model, STEP, steps_per_sample=args.steps), data)
            for kernel in (SGLD, SGHMC)
        ]
        runs.append(bare_run(data, args.batch, args.steps))
    columns = len(transitions)
    seconds = best_of(args.repeats, *runs)
    micros = [1e6 * t / transitions[k % columns] for k, t in enumerate(seconds)]
    for k, rows in enumerate(args.rows):
        row = micros[columns * k : columns * (k + 1)]
        cells = [
            f"{t:.2f} | {t / first:.2f}" for t, first in zip(row, micros[:columns], strict=True)
        ]
        print(f"| {rows:.0e} | {' | '.join(cells)} |")


def blackjax_run(name: str, data: tuple[Array, Array], batch: int, steps: int) -> Callable[[], Any]:
    rows = len(data[0])

    def log_prior(w: Array) -> Array:
        return dist.Normal(0, 1).log_prob(w).sum()

    def log_likelihood(w: Array, row: tuple[Array, Array]) -> Array:
        x, y = row
        return dist.Bernoulli(logits=x @ w).log_prob(y)

    grad = blackjax.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, rows)
    sgld, sghmc = blackjax.sgld(grad), diffusions.sghmc()

    def body(_: int, carry: Any, data: Any) -> Any:
        rng_key, position, momentum = carry
        rng_key, key_index, key_step = random.split(rng_key, 3)
        idx = random.randint(key_index, (batch,), 0, rows)
        minibatch = jax.tree.map(lambda x: x[idx], data)
        if name == "SGLD":
            return rng_key, sgld.step(key_step, position, minibatch, STEP), momentum
        # Its integrator by itself: `blackjax.sghmc` takes all steps of a trajectory on one batch.
        g = grad(position, minibatch)
        return rng_key, *sghmc(key_step, position, momentum, g, STEP, 1.0)

    loop = jax.jit(
        lambda carry, data: lax.fori_loop(0, steps, lambda i, c: body(i, c, data), carry)
    )
    return lambda: loop((random.key(1), jnp.zeros(DIM), jnp.zeros(DIM)), data)


def bare_run(data: tuple[Array, Array], batch: int, steps: int) -> Callable[[], Any]:
    """SGLD written out by hand, without a model or a library."""
    rows = len(data[0])

    def potential(w: Array, x: Array, y: Array) -> Array:
        logits = x @ w
        fit = jnp.sum(y * logits - jnp.logaddexp(0.0, logits))
        return 0.5 * w @ w - rows / batch * fit

    def body(_: int, carry: tuple[Array, Array], data: Any) -> tuple[Array, Array]:
        rng_key, key_index, key_noise = random.split(carry[0], 3)
        idx = random.randint(key_index, (batch,), 0, rows)
        w = carry[1]
        g = jax.grad(potential)(w, *(x[idx] for x in data))
        return rng_key, w - STEP * g + (2 * STEP) ** 0.5 * random.normal(key_noise, w.shape)

    loop = jax.jit(
        lambda carry, data: lax.fori_loop(0, steps, lambda i, c: body(i, c, data), carry)
    )
    return lambda: loop((random.key(1), jnp.zeros(DIM)), data)


def against_others(args: argparse.Namespace) -> None:
    print("\n## Transitions per second\n")
    print("| kernel | rows | here | BlackJAX | here / BlackJAX | bare SGLD loop | here / bare |")
    print("|---|---|---|---|---|---|---|")
    for rows in args.rows:
        data = make_data(rows)
        for make in (SGLD, SGHMC):
            here, other, bare = best_of(
                args.repeats,
                kernel_run(make(make_model(args.batch), STEP, steps_per_sample=args.steps), data),
                blackjax_run(make.__name__, data, args.batch, args.steps),
                bare_run(data, args.batch, args.steps),
            )
            print(
                f"| {make.__name__} | {rows:.0e} | {args.steps / here:,.0f} |"
                f" {args.steps / other:,.0f} |"
                f" {other / here:.2f} | {args.steps / bare:,.0f} | {bare / here:.2f} |"
            )


def all_kernels(args: argparse.Namespace) -> None:
    rows = args.rows[0]
    data, model, whole = make_data(rows), make_model(args.batch), make_model(None)
    fast, slow = ({"step_size": STEP, "steps_per_sample": args.steps // k} for k in (1, 20))
    refresh = max(1, rows // args.batch)

    def dense(z: Array) -> Array:
        return jnp.eye(DIM) + z[:, None] * z

    center = sg.ControlVariate({"w": jnp.zeros(DIM)})
    kernels = {
        "SGLD": SGLD(model, **fast),
        "SGLD, batches by epoch": SGLD(model, minibatch="epoch", **fast),
        "SGLD, control variate": SGLD(model, gradient=center, **fast),
        f"SGLD, SVRG every {refresh} steps": SGLD(model, gradient=sg.SVRG(refresh), **fast),
        "PSGLD": sg.PSGLD(model, **fast),
        "PSGLD, in warmup": sg.PSGLD(model, **fast),
        "PSGLD, always, correction": sg.PSGLD(model, adapt="always", gamma="hutchinson", **fast),
        "SGRLD, diagonal metric": sg.SGRLD(model, metric=lambda z: 1 + z**2, **fast),
        "SGRLD, dense metric": sg.SGRLD(model, metric=dense, **slow),
        "SGHMC": SGHMC(model, **fast),
        "SGHMC, baoab": SGHMC(model, integrator="baoab", **fast),
        "SGHMC, noise estimate, in warmup": SGHMC(model, noise_variance="warmup", **fast),
        "SGNHT": sg.SGNHT(model, **fast),
        "SGNHT, per coordinate": sg.SGNHT(model, thermostat="per_parameter", **fast),
        "RecipeKernel, diagonal": sg.RecipeKernel(model, diffusion=lambda x: 1 + x**2, **fast),
        "RecipeKernel, dense": sg.RecipeKernel(model, diffusion=dense, **slow),
        "KernelHMC, all rows": sg.KernelHMC(whole, score=lambda z: -z, **slow),
    }
    runs = [kernel_run(k, data, warm="in warmup" not in name) for name, k in kernels.items()]
    print(f"\n## Microseconds of a transition of each kernel, {rows:,} rows\n")
    print("| kernel | microseconds | over SGLD |\n|---|---|---|")
    micros = []
    for seconds, (name, kernel) in zip(best_of(args.repeats, *runs), kernels.items(), strict=True):
        micros.append(seconds / kernel.steps_per_sample * 1e6)
        print(f"| {name} | {micros[-1]:.2f} | {micros[-1] / micros[0]:.2f} |")


def progress_bar(args: argparse.Namespace) -> None:
    """A ``run`` without a bar compiles, so the time of a draw is the slope between two numbers of
    draws.
    """
    data, total = make_data(args.rows[0]), 500_000

    def seconds(steps: int, bar: bool, draws: int) -> float:
        kernel = SGLD(make_model(args.batch), STEP, steps_per_sample=steps)
        mcmc = MCMC(
            kernel, num_warmup=0, num_samples=draws, num_chains=args.chains, progress_bar=bar
        )
        start = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            mcmc.run(random.key(1), *data)
        jax.block_until_ready(mcmc.last_state)
        return time.perf_counter() - start

    print("\n## Microseconds of a draw without and with the progress bar\n")
    print("| transitions per draw | off | on | ratio |\n|---|---|---|---|")
    for steps in (100, 300, 1000):
        few, many = total // steps // 20, total // steps
        cases = [(steps, bar, draws) for bar in (False, True) for draws in (few, many)]
        repeats = tqdm(range(max(1, args.repeats // 4)), leave=False)
        turns = [[seconds(*case) for case in cases] for _ in repeats]
        best = [min(turn[k] for turn in turns) for k in range(4)]
        off, on = ((best[k + 1] - best[k]) / (many - few) * 1e6 for k in (0, 2))
        print(f"| {steps} | {off:.0f} | {on:.0f} | {on / off:.2f} |")


TABLES = {
    "rows": rows_against_time,
    "others": against_others,
    "kernels": all_kernels,
    "bar": progress_bar,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    integer, rows = (lambda text: int(float(text))), [1000, 1_000_000, 10_000_000]
    parser.add_argument("--rows", type=integer, nargs="+", default=rows)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000, help="transitions per timed run")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument(
        "--chains",
        type=int,
        default=1,
        help="under the bar; side by side with"
        " XLA_FLAGS=--xla_force_host_platform_device_count=CHAINS",
    )
    args = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, batch {args.batch}, d {DIM}")
    for name in args.tables:
        TABLES[name](args)


if __name__ == "__main__":
    main()
