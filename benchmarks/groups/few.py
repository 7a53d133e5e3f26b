"""Forty groups of two rows: the scale of the groups, which may be 0, and of an unknown noise.

python benchmarks/groups/few.py    # one minute of one core

Sixteen data sets of two scales. The truth is a grid: the sums of squares between groups and within
are independent, given a flat mean. For both scales: how far the mean by `AutoStructuredNormal`,
without a step, is from the right one, in standard deviations, and the ratio of these.
"""

import time
from typing import Any

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax

from numpyro_ext.guides import AutoStructuredNormal

GROUPS = 40


def model(y: Any) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(2.0))
    with numpyro.plate("groups", GROUPS):
        own = numpyro.sample("own", dist.Normal(mean, s))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(own[np.arange(len(y)) // 2], noise), obs=y)


def truth(y: np.ndarray) -> list[tuple[float, float]]:
    """Mean and standard deviation of the scale of groups, and of the noise."""
    pairs = y.reshape(-1, 2)
    between = np.sum((pairs.mean(1) - y.mean()) ** 2)
    within = np.sum((pairs - pairs.mean(1, keepdims=True)) ** 2)
    s, noise = np.exp(np.linspace(-9, 1, 500)), np.exp(np.linspace(-0.7, 0.7, 300))
    S, E = np.meshgrid(s, noise, indexing="ij")
    variance = S**2 + E**2 / 2
    log_p = np.log(S * E) - S**2 / 2 - E**2 / 8 - GROUPS * np.log(E) - within / E**2 / 2
    log_p -= ((GROUPS - 1) * np.log(variance) + between / variance) / 2
    p = np.exp(log_p - log_p.max())
    moments = []
    for x, axis in ((s, 1), (noise, 0)):
        q = p.sum(axis) / p.sum()
        mean = float(q @ x)
        moments.append((mean, float(q @ (x - mean) ** 2) ** 0.5))
    return moments


def main() -> None:
    print("| data | s | mean of s | sd of s | mean of noise | sd of noise | processor s |")
    print("|---|---|---|---|---|---|---|")
    for seed in range(8):
        for scale in (0.3, 0.7):
            rng = np.random.default_rng(seed)
            y = 2 + np.repeat(scale * rng.normal(size=GROUPS), 2) + rng.normal(size=2 * GROUPS)
            began = time.process_time()
            guide = AutoStructuredNormal(model)
            svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
            params = svi.get_params(svi.init(random.key(0), jnp.asarray(y)))
            draws = guide.sample_posterior(random.key(1), params, sample_shape=(4000,))
            cells = []
            for name, (mean, sd) in zip(("s", "noise"), truth(y), strict=True):
                x = np.asarray(draws[name], float)
                cells += [f"{(x.mean() - mean) / sd:.2f}", f"{x.std() / sd:.2f}"]
            seconds = time.process_time() - began
            print(f"| {seed} | {scale} | {' | '.join(cells)} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
