"""Speed of the stochastic-gradient kernels: against the number of rows, BlackJAX and a bare loop.

Logistic regression with 10 coefficients and batches of 100 rows, drawn with replacement inside the timed loop.
"""

import argparse
from collections.abc import Callable
import os
import time
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import blackjax
from blackjax.sgmcmc import diffusions
import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_ext.mcmc import SGHMC, SGLD

DIM = 10
STEP = 1e-6


def make_data(rows: int) -> tuple[Array, Array]:
    key_x, key_w, key_y = random.split(random.key(0), 3)
    x = random.normal(key_x, (rows, DIM))
    w = random.normal(key_w, (DIM,))
    return x, random.bernoulli(key_y, jax.nn.sigmoid(x @ w)).astype(float)


def make_model(batch: int) -> Callable[[Array, Array], None]:
    def model(x: Array, y: Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=batch) as idx:
            numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])

    return model


def best_of(repeats: int, *runs: Callable[[], Any]) -> list[float]:
    """Shortest wall-clock seconds of each run; the runs take turns, so that all see the same machine."""
    for run in runs:
        jax.block_until_ready(run())
    times = [[] for _ in runs]
    for _ in range(repeats):
        for seconds, run in zip(times, runs, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in times]


def kernel_run(kernel: Any, data: tuple[Array, Array]) -> Callable[[], Any]:
    """``steps_per_sample`` transitions of the kernel, in one compiled call, data as its arguments."""
    state = kernel.init(random.key(1), 0, None, data, {})
    sample = jax.jit(lambda state, data: kernel.sample(state, data, {}))
    return lambda: sample(state, data)


def mcmc_run(kernel: Any, data: tuple[Array, Array], draws: int) -> Callable[[], Any]:
    """
    The same through ``MCMC``, ``draws`` dispatches of a compiled draw that stays compiled between runs.

    With ``progress_bar=False`` each ``run`` compiles its loop anew, and ``progress_bar=True`` together with
    ``jit_model_args=True`` copies the data at every draw, as the compiled draw returns its arguments.
    """
    mcmc = MCMC(kernel, num_warmup=0, num_samples=draws, progress_bar=True)
    mcmc.run(random.key(1), *data)

    def run() -> Any:
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(mcmc.last_state.rng_key, *data)
        return mcmc.last_state

    return run


def rows_against_time(args: argparse.Namespace) -> None:
    print("\n## Microseconds of a transition against the number of rows\n")
    print("| rows | SGLD | ratio | SGLD in MCMC | ratio | SGHMC | ratio | bare SGLD loop | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    runs, draws = [], 10
    for rows in args.rows:
        data, model = make_data(rows), make_model(args.batch)
        runs += [
            kernel_run(SGLD(model, STEP, steps_per_sample=args.steps), data),
            mcmc_run(SGLD(model, STEP, steps_per_sample=args.steps // draws), data, draws),
            kernel_run(SGHMC(model, STEP, steps_per_sample=args.steps), data),
            bare_run(data, args.batch, args.steps),
        ]
    seconds = best_of(args.repeats, *runs)
    for k, rows in enumerate(args.rows):
        cells = [
            f"{seconds[4 * k + j] / args.steps * 1e6:.2f} | {seconds[4 * k + j] / seconds[j]:.2f}"
            for j in range(4)
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
                f"| {make.__name__} | {rows:.0e} | {args.steps / here:,.0f} | {args.steps / other:,.0f} |"
                f" {other / here:.2f} | {args.steps / bare:,.0f} | {bare / here:.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=lambda text: int(float(text)), nargs="+", default=[1000, 1_000_000]
    )
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000, help="transitions per timed run")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, batch {args.batch}, d {DIM}")
    rows_against_time(args)
    against_others(args)


if __name__ == "__main__":
    main()
