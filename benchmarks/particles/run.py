"""What a step of particle inference costs, compared with NumPyro's and BlackJAX's SVGD.

Times are processor times of all threads together, which depend less than the clock on other work of
the machine.

- `step`: microseconds of a step in one compiled loop, Adam, SVGD with an RBF and the median rule, d
  = 50, 1,000 rows of logistic regression. `subsampled` is 40 particles and batches of 100 rows, and
  `all rows` 100 particles. The programs take turns; each time is the shortest of the repeats.
- `velocity`: 2,000 particles, d = 100. The time of the field over that of the two products K g and
  K x, with K given: the kernel matrix and the bandwidth are part of the field's time only.
- `memory`: 10,000 particles, d = 50, the default block size. `temporary` is what the compiled
  program allocates beside its arguments and its result; `peak` is the largest resident set
  of a process which computes one velocity, and `growth` what it grew by then.
- `compile`: a network of one hidden layer (13 inputs, 50 ReLU, 20 particles, batches of 100 rows),
  seconds from a guide without a start to the state after the first step, in a fresh process without
  a persistent compilation cache.
"""

import argparse
from collections.abc import Callable
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.einstein import SVGD as NumPyroSVGD
from numpyro.contrib.einstein import RBFKernel
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.optim import Adam
import optax

from numpyro_ext.particles import (
    GFSD,
    GFSF,
    SVGD,
    AutoParticles,
    Blob,
    RegularizedSVGD,
    particle_step,
)
from numpyro_ext.scores import RBF

ROWS, DIM, BATCH = 1000, 50, 100
FIELDS = {f.__name__: f for f in (SVGD, RegularizedSVGD, Blob, GFSD, GFSF)}
Step = Callable[[Any], Any]


def logistic(x: Array, y: Array, batch: int | None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch):
        x, y = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def network(x: Array, y: Array, batch: int | None) -> None:
    precision = numpyro.sample("precision", dist.Gamma(1.0, 0.1))
    scale = numpyro.sample("scale", dist.Gamma(1.0, 0.1)) ** -0.5
    w1 = numpyro.sample("w1", dist.Normal(0, scale).expand([x.shape[1], 50]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, scale).expand([50]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, scale).expand([50]).to_event(1))
    b2 = numpyro.sample("b2", dist.Normal(0, scale))
    with numpyro.plate("data", len(x), subsample_size=batch):
        x, y = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        mean = jax.nn.relu(x @ w1 + b1) @ w2 + b2
        numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=y)


def problem(dim: int) -> tuple[Array, Array]:
    key_x, key_w, key_y = random.split(random.key(0), 3)
    x = random.normal(key_x, (ROWS, dim))
    p = jax.nn.sigmoid(x @ random.normal(key_w, (dim,)) / dim**0.5)
    return x, random.bernoulli(key_y, p).astype(float)


def numpyros(model: Any, number: int, args: tuple) -> tuple[Any, Step]:
    stein = NumPyroSVGD(model, Adam(0.01), RBFKernel(), number)
    return stein.init(random.key(0), *args), lambda state: stein.update(state, *args)[0]


def ours(model: Any, number: int, args: tuple, field: Any, optim: Any) -> tuple[Any, Step]:
    svi = SVI(model, AutoParticles(model, number), optim, loss=field)
    return svi.init(random.key(0), *args), lambda state: svi.update(state, *args)[0]


def blackjaxs(number: int, args: tuple) -> tuple[Any, Step]:
    import blackjax

    x, y, _ = args

    def log_density(w: Array) -> Array:
        logits = x @ w
        return jnp.sum(y * logits - jnp.logaddexp(0, logits)) - 0.5 * jnp.sum(w**2)

    algorithm = blackjax.svgd(jax.grad(log_density), optax.adam(0.01))
    start = random.uniform(random.key(0), (number, x.shape[1]), minval=-2, maxval=2)
    return algorithm.init(start), algorithm.step


def take_turns(programs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The shortest time of each, in seconds of the processor."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            began = time.process_time()
            jax.block_until_ready(program())
            times[name].append(time.process_time() - began)
    return {name: min(each) for name, each in times.items()}


def loop_of(start: Any, step: Step, length: int) -> Callable[[], Any]:
    def loop(state: Any) -> Any:
        return lax.scan(lambda s, _: (step(s), None), state, length=length)[0]

    program = jax.jit(loop).lower(start).compile()
    return lambda: program(start)


def steps(repeats: int) -> None:
    print("\n| model | method | microseconds of a step | over SVGD here |\n|---|---|---|---|")
    adam = optax.adam(0.01)
    data = problem(DIM)
    for label, number, batch in (("subsampled", 40, BATCH), ("all rows", 100, None)):
        args = (*data, batch)
        lengths = {"NumPyro": 20}
        made = {
            "SVGD": ours(logistic, number, args, SVGD(RBF("median")), adam),
            "RegularizedSVGD": ours(
                logistic, number, args, RegularizedSVGD(), particle_step(10_000)
            ),
            "NumPyro": numpyros(logistic, number, args),
        }
        if batch is None:
            made["BlackJAX"] = blackjaxs(number, args)
        programs = {name: loop_of(*each, lengths.get(name, 200)) for name, each in made.items()}
        times = take_turns(programs, repeats)
        each = {name: t / lengths.get(name, 200) for name, t in times.items()}
        for name, t in each.items():
            print(f"| {label} | {name} | {1e6 * t:,.0f} | {t / each['SVGD']:.2f} |", flush=True)


def velocities(repeats: int) -> None:
    number, dim = 2000, 100
    key_x, key_g, key_k = random.split(random.key(1), 3)
    x, g = random.normal(key_x, (number, dim)), random.normal(key_g, (number, dim))
    k = random.uniform(key_k, (number, number))
    products = jax.jit(lambda k, x, g: (k @ g, k @ x))
    programs: dict[str, Callable[[], Any]] = {"K g and K x": lambda: products(k, x, g)}
    for name in ("SVGD", "Blob", "GFSD", "RegularizedSVGD"):
        field = jax.jit(FIELDS[name]().velocity)
        programs[name] = lambda field=field: field(x, g)
    jax.block_until_ready([program() for program in programs.values()])
    times = take_turns(programs, repeats)
    print("\n| m = 2,000, d = 100 | milliseconds | over the two products |\n|---|---|---|")
    for name, t in times.items():
        print(f"| {name} | {1e3 * t:.1f} | {t / times['K g and K x']:.1f} |")


def memory_of(name: str) -> dict[str, float]:
    """In a process of its own, because a resident set never becomes smaller."""
    x = random.normal(random.key(0), (10_000, 50))
    program = jax.jit(FIELDS[name]().velocity).lower(x, -x).compile()
    analysis: Any = program.memory_analysis()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    jax.block_until_ready(program(x, -x))
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "temporary": analysis.temp_size_in_bytes / 1e9,
        "growth": (peak - before) * 1024 / 1e9,
        "peak": peak * 1024 / 1e9,
        "seconds": seconds,
    }


def compile_of(name: str) -> dict[str, float]:
    jax.block_until_ready(jnp.zeros(3) + 1)
    x = np.random.default_rng(0).standard_normal((455, 13)).astype(np.float32)
    args = jnp.asarray(x), jnp.asarray(x[:, 0]), BATCH
    began = time.perf_counter(), time.process_time()
    if name == "NumPyro":
        state, step = numpyros(network, 20, args)
    else:
        state, step = ours(network, 20, args, FIELDS[name](), particle_step(1000))
    jax.block_until_ready(jax.jit(step)(state))
    clock, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    return {"clock": clock, "processor": processor}


def in_a_process(part: str, name: str) -> dict[str, float]:
    """What the child prints, as JSON in its last line."""
    command = [sys.executable, __file__, "--child", part, name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--part", nargs="*", default=["step", "velocity", "memory", "compile"], help="default all"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        part, name = args.child
        print(json.dumps({"memory": memory_of, "compile": compile_of}[part](name)))
        return
    if "step" in args.part:
        steps(args.repeats)
    if "velocity" in args.part:
        velocities(args.repeats)
    if "memory" in args.part:
        print("\n| m = 10,000, d = 50 | temporary, GB | growth, GB | peak, GB | seconds |")
        print("|---|---|---|---|---|")
        for name in ("SVGD", "Blob", "GFSD", "GFSF", "RegularizedSVGD"):
            r = in_a_process("memory", name)
            numbers = (f"{r[key]:.2f}" for key in ("temporary", "growth", "peak"))
            print(f"| {name} | {' | '.join(numbers)} | {r['seconds']:.1f} |", flush=True)
    if "compile" in args.part:
        print("\n| network | seconds of the processor | seconds |\n|---|---|---|")
        for name in ("SVGD", "RegularizedSVGD", "Blob", "NumPyro"):
            r = in_a_process("compile", name)
            print(f"| {name} | {r['processor']:.1f} | {r['clock']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
