"""How long does a user wait for the first draw?

Each line is a fresh process without a persistent compilation cache. It has the seconds from
``MCMC.run`` to its end, with one draw of warmup and one to keep, and the number of compilations.
They are medians of ``--repeats`` processes, in which the kernels are interleaved.
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

def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([10]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(x), subsample_size=SIZE) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=scale * (x[idx] @ w)), obs=y[idx])

x = jax.block_until_ready(random.normal(random.key(0), (1000, 10)))
y = jax.block_until_ready((x[:, 0] > 0).astype(float))
mcmc = MCMC(KERNEL, num_warmup=1, num_samples=1, progress_bar=False)
key = jax.block_until_ready(random.key(1))
compiled.clear()
start = time.perf_counter()
mcmc.run(key, x, y)
jax.block_until_ready(mcmc.get_samples())
print(time.perf_counter() - start, sum(compiled))
"""


def measure(name: str) -> tuple[float, int]:
    script = SCRIPT.replace("SIZE", "None" if name == "NUTS" else "100")
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
    args = parser.parse_args()
    runs = [{name: measure(name) for name in KERNELS} for _ in range(args.repeats)]
    print("| kernel | seconds to the first draw | over NUTS | compilations |\n|---|---|---|---|")
    seconds = {name: statistics.median(run[name][0] for run in runs) for name in KERNELS}
    for name, value in seconds.items():
        ratio = value / seconds["NUTS"]
        print(f"| {name} | {value:.2f} | {ratio:.2f} | {runs[0][name][1]} |")


if __name__ == "__main__":
    main()
