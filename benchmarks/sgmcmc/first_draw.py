"""How long does a user wait for the first draw?

Each line is a fresh process without a persistent compilation cache. It has the seconds from
``MCMC.run`` to its end, with one draw of warmup and one to keep, and the number of compilations.
They are medians of ``--repeats`` processes, in which the kernels are interleaved. NUTS takes all
rows, the others minibatches; ``MODELS`` has the five models.
"""

import argparse
import os
import statistics
import subprocess
import sys

KERNELS = {
    "NUTS": "numpyro.infer.NUTS(model)",
    "SGLD": "sg.SGLD(model, 1e-4)",
    "SGHMC": "sg.SGHMC(model, 1e-3)",
    "SGLD, settings found": "sg.SGLD(model)",
    "SGHMC, settings found": "sg.SGHMC(model)",
}
LOGISTIC = """
def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([10]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(x), subsample_size=SIZE) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=scale * (x[idx] @ w)), obs=y[idx])

x = random.normal(random.key(0), (1000, 10))
y = (x[:, 0] > 0).astype(float)
"""
MEASUREMENTS = """
def model(x, y):
    loc = numpyro.sample("loc", dist.Normal(0, 100))
    sd = numpyro.sample("sd", dist.HalfNormal(10))
    with numpyro.plate("data", len(y), subsample_size=SIZE) as idx:
        numpyro.sample("y", dist.Normal(loc, sd), obs=y[idx])

x, y = jnp.zeros(1000), 3.0 + 2.0 * random.normal(random.key(0), (1000,))
"""
HIERARCHY = """
def model(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("groups", 85):
        e = numpyro.sample("e", dist.Normal(0, 1))
    with numpyro.plate("data", len(y), subsample_size=SIZE) as idx:
        numpyro.sample("y", dist.Normal(mu + tau * e[x[idx]], sigma), obs=y[idx])

x = random.randint(random.key(0), (900,), 0, 85)
y = random.normal(random.key(1), (85,))[x] + random.normal(random.key(2), (900,))
"""
COUNTS = """
def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([20]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=SIZE) as idx:
        numpyro.sample("y", dist.Poisson(jnp.exp(x[idx] @ w)), obs=y[idx])

x = random.normal(random.key(0), (1_000_000, 20))
y = random.poisson(random.key(1), jnp.exp(0.2 * x[:, 0])).astype(float)
"""
NETWORK = """
def model(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([12, 50]).to_event(2))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([50]).to_event(1))
    c = numpyro.sample("c", dist.Normal(0, 50**-0.5).expand([50]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=SIZE) as idx:
        mean = jnp.tanh(x[idx] @ a + b) @ c
        numpyro.sample("y", dist.Normal(mean, 0.3), obs=y[idx])

x = random.normal(random.key(0), (10_000, 12))
y = jnp.sin(x[:, 0]) + 0.3 * random.normal(random.key(1), (10_000,))
"""
MODELS = {
    "logistic regression, d = 11, N = 1,000": LOGISTIC,
    "measurements, d = 2, N = 1,000": MEASUREMENTS,
    "hierarchy, d = 88, N = 900": HIERARCHY,
    "counts, d = 20, N = 1,000,000": COUNTS,
    "network, d = 700, N = 10,000": NETWORK,
}
SCRIPT = """
import logging, sys, time
import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC
import numpyro_ext.mcmc as sg

compiled = []
class Count(logging.Handler):
    def emit(self, record):
        compiled.append(record.getMessage().startswith("Finished XLA compilation"))
jax.config.update("jax_log_compiles", True)
for name in ("jax._src.dispatch", "jax._src.interpreters.pxla"):
    logger = logging.getLogger(name)
    logger.propagate = False
    logger.addHandler(Count())

MODEL
x, y = jax.block_until_ready((x, y))
mcmc = MCMC(KERNEL, num_warmup=1, num_samples=1, progress_bar=False)
key = jax.block_until_ready(random.key(1))
compiled.clear()
start = time.perf_counter()
mcmc.run(key, x, y)
jax.block_until_ready(mcmc.get_samples())
print(time.perf_counter() - start, sum(compiled))
"""


def measure(model: str, name: str) -> tuple[float, int]:
    size = "None" if name == "NUTS" else "100"
    script = SCRIPT.replace("MODEL", MODELS[model]).replace("SIZE", size)
    script = script.replace("KERNEL", KERNELS[name])
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    seconds, compilations = done.stdout.split()
    return float(seconds), int(compilations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=[next(iter(MODELS))], choices=list(MODELS))
    parser.add_argument("--all", action="store_true", help="all five models")
    args = parser.parse_args()
    print("| model | kernel | seconds to the first draw | over NUTS | compilations |")
    print("|---|---|---|---|---|")
    for model in MODELS if args.all else args.models:
        runs = [{name: measure(model, name) for name in KERNELS} for _ in range(args.repeats)]
        seconds = {name: statistics.median(run[name][0] for run in runs) for name in KERNELS}
        for name, value in seconds.items():
            ratio = value / seconds["NUTS"]
            cells = f"{value:.2f} | {ratio:.2f} | {runs[0][name][1]}"
            print(f"| {model} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
