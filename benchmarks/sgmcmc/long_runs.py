"""A million steps of each kernel in float32: nothing breaks, drifts or grows.

The model has 100 rows, of which each step takes 50: a normal mean and a Poisson rate, whose
posterior is a normal and a Gamma distribution. 1000 draws of 1000 steps, each draw one call of a
kernel's ``sample``. The script prints a table in Markdown. The exit code is 1 if a value is not
finite, a draw diverges, a moment of the last tenth is outside of the band, or the memory of the
process grows between the first and the last tenth.
"""

import argparse
from functools import partial
import os
from pathlib import Path
import resource
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TQDM_DISABLE", "1")

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.mcmc import (
    PSGLD,
    SGHMC,
    SGLD,
    SGNHT,
    SGRLD,
    SVRG,
    ControlVariate,
    ExpandedMean,
    KernelHMC,
    RecipeKernel,
)

STEPS_PER_SAMPLE, TENTHS, WARMUP = 1000, 10, 5
MEAN_BAND = 0.4  # posterior standard deviations; 100 draws have an error of 0.1
SD_BAND = 0.3  # relative; 100 draws have an error of 0.07
MEMORY_BAND = 5.0  # MiB
STATM = Path("/proc/self/statm")


def model(x, y, subsample_size=50):
    loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", len(x), subsample_size=subsample_size) as idx:
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=x[idx])
        numpyro.sample("y", dist.Poisson(rate), obs=y[idx])


def make_data():
    n = np.arange(100)
    return np.asarray(0.7 + np.sin(1.7 * n), np.float32), np.asarray(n % 7, np.float32)


def exact_moments():
    """Mean and standard deviation of each site."""
    x, y = make_data()
    precision, shape, rate = len(x) + 0.01, 2.0 + float(y.sum()), 1.0 + len(y)
    return {
        "loc": (float(x.sum()) / precision, precision**-0.5),
        "rate": (shape / rate, shape**0.5 / rate),
    }


def gaussian_score(z):
    """Of the normal distribution at the mode of ``(loc, log rate)``."""
    moments = exact_moments()
    loc, rate = moments["loc"], moments["rate"]
    center = jnp.array([loc[0], np.log(rate[0])])
    return (center - z) / jnp.array([loc[1] ** 2, (rate[1] / rate[0]) ** 2])


def kernels():
    center = {name: mean for name, (mean, _) in exact_moments().items()}
    turn = jnp.array([[0.0, 0.5], [-0.5, 0.0]])
    whole = partial(model, subsample_size=None)
    return {
        "SGLD": partial(SGLD, model, 1e-4),
        "SGLD, epochs, SVRG": partial(SGLD, model, 5e-4, minibatch="epoch", gradient=SVRG(1000)),
        "SGLD, ControlVariate": partial(SGLD, model, 5e-4, gradient=ControlVariate(center)),
        "PSGLD": partial(PSGLD, model, 2e-3),
        "SGRLD, ExpandedMean": partial(SGRLD, model, 1e-4, metric=ExpandedMean()),
        "SGHMC": partial(SGHMC, model, 0.01, friction=5.0, noise_variance="warmup"),
        "SGHMC, epochs": partial(SGHMC, model, 0.01, friction=5.0, minibatch="epoch"),
        "SGNHT": partial(SGNHT, model, 0.01, friction=5.0, thermostat="per_parameter"),
        "RecipeKernel": partial(
            RecipeKernel, model, 1e-4, diffusion=jnp.ones_like, curl=lambda z: turn
        ),
        "KernelHMC": partial(KernelHMC, whole, 0.02, score=gaussian_score, num_leapfrog=5),
    }


def memory_in_use() -> float:
    """MiB in physical memory now; where the system does not say, the most there ever was."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * resource.getpagesize() / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def long_run(make_kernel, draws: int):
    """The draws of each tenth, the memory after it, the number of divergent draws, and the last
    state.
    """
    kernel = make_kernel(steps_per_sample=STEPS_PER_SAMPLE)
    data = tuple(map(jnp.asarray, make_data()))
    state = kernel.init(random.key(0), WARMUP, None, data, {})
    sample = jax.jit(lambda state: kernel.sample(state, data, {}))
    for _ in range(WARMUP):
        state = sample(state)
    tenths, memory, diverging = [], [], 0
    start = time.perf_counter()
    for _ in range(TENTHS):
        values = []
        for _ in range(draws):
            state = sample(state)
            values.append((float(state.z["loc"]), np.exp(float(state.z["rate"]))))
            diverging += int(state.diverging)
        tenths.append(np.array(values))
        memory.append(memory_in_use())
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.z))
    return tenths, memory, diverging, state, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=100, help="draws in a tenth")
    options = parser.parse_args()
    exact = exact_moments()
    print(
        "| kernel | steps | diverging | mean of loc, first / last tenth | sd ratio of loc", end=""
    )
    print(" | mean of rate | sd ratio of rate | memory grows by, MiB | seconds |")
    print("|---" * 9 + "|")
    failures = []
    for name, make_kernel in kernels().items():
        tenths, memory, diverging, state, seconds = long_run(make_kernel, options.draws)
        cells, good = [], diverging == 0
        for j, (mean, sd) in enumerate(exact.values()):
            values = [tenth[:, j] for tenth in (tenths[0], tenths[-1])]
            errors = [float((x.mean() - mean) / sd) for x in values]
            ratios = [float(x.std() / sd) for x in values]
            # A comparison with a value that is not finite is False.
            good &= abs(errors[1]) < MEAN_BAND and abs(ratios[1] - 1) < SD_BAND
            cells += [f"{errors[0]:+.2f} / {errors[1]:+.2f}", f"{ratios[0]:.2f} / {ratios[1]:.2f}"]
        good &= np.all(np.isfinite(tenths))
        growth = memory[-1] - memory[0]
        good &= growth < MEMORY_BAND
        row = [name, f"{int(state.i):,}", diverging, *cells, f"{growth:.1f}", f"{seconds:.1f}"]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
        if not good:
            failures.append(name)
    if failures:
        print(f"\nOutside of the bands: {', '.join(failures)}.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
