"""Hamiltonian Monte Carlo without gradients: the score of the banana is learnt from 200 draws.

``x1 ~ N(0, 100)``, ``x2 ~ N(0.03 (x1^2 - 100), 1)``. ``KernelHMC`` moves by the estimate of ``SteinScore`` with an RBF
kernel, whose bandwidth is the median rule times 1 to 5, and accepts with the exact density; the reference is the same
kernel with the true score. 200 chains of 2000 iterations start at draws of the target plus noise of variance 4. A
wrong score costs acceptance and speed, not correctness.

Prints a table and saves a picture. Exit code 1 if the best bandwidth has an acceptance below 0.5, a mean of x1 further
than 0.5 from 0, or a kernel Stein discrepancy more than twice that of the true score.

    python examples/kernel_hmc_banana.py --out out/kernel_hmc_banana.png
"""

import argparse
from pathlib import Path
import sys
import time
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.distributions import constraints
from numpyro.infer import MCMC

from numpyro_ext.mcmc import KernelHMC
from numpyro_ext.scores import IMQ, RBF, SteinScore, kernel_stein_discrepancy
from numpyro_ext.targets import banana_potential

CHAINS, ITERATIONS, TRAINING = 200, 2000, 200
STEP, LEAPFROG, THIN = 0.5, 10, 10
FACTORS = (1.0, 2.0, 3.0, 4.0, 5.0)
MEAN_BAND, ACCEPT_BAND, KSD_BAND = 0.5, 0.5, 2.0


class Run(NamedTuple):
    draws: np.ndarray  # (chains, draws, 2), the second half
    accept: float
    ksd: float
    ess: float  # of x2
    seconds: float


def model():
    x = numpyro.sample("x", dist.ImproperUniform(constraints.real_vector, (), (2,)))
    numpyro.factor("potential", -banana_potential(x))


def true_score(x):
    return -jax.grad(banana_potential)(x)


def exact_draws(rng_key, number: int):
    e1, e2 = random.normal(rng_key, (2, number))
    return jnp.stack([10 * e1, 3.0 * (e1**2 - 1) + e2], 1)


def sample(rng_key, start, score, **options) -> Run:
    kernel = KernelHMC(model, STEP, score=score, num_leapfrog=LEAPFROG, **options)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=ITERATIONS,
        num_chains=CHAINS,
        chain_method="vectorized",
        thinning=THIN,
        progress_bar=False,
    )
    begin = time.perf_counter()
    mcmc.run(rng_key, init_params={"x": start})
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["x"])
    seconds = time.perf_counter() - begin
    draws = draws[:, draws.shape[1] // 2 :]
    accept = float(mcmc.get_extra_fields()["accept_prob"].mean())
    some = draws[:, -10:].reshape(-1, 2)
    ksd = kernel_stein_discrepancy(some, jax.vmap(true_score), IMQ(), statistic="v")
    return Run(draws, accept, float(ksd) ** 0.5, float(effective_sample_size(draws[..., 1])), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/kernel_hmc_banana.png"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    key_train, key_start, key_noise, key_run = random.split(random.key(options.seed), 4)
    training = exact_draws(key_train, TRAINING)
    start = exact_draws(key_start, CHAINS) + 2 * random.normal(key_noise, (CHAINS, 2))

    runs = {"true score": sample(key_run, start, true_score)}
    for factor in FACTORS:
        score = SteinScore(0.1, RBF("median", factor=factor), form="parametric")
        runs[f"bandwidth x {factor:g}"] = sample(
            key_run, start, score, training_samples={"x": training}
        )
    print(f"{'score':<16}{'acceptance':>11}{'E x1':>8}{'Var x1':>9}{'Var x2':>8}{'KSD':>8}{'ESS of x2':>11}{'seconds':>9}")
    print(f"{'exact':<16}{'':>11}{0:>8.2f}{100:>9.1f}{19:>8.1f}")
    for name, run in runs.items():
        x1, x2 = run.draws.reshape(-1, 2).T
        print(
            f"{name:<16}{run.accept:>11.3f}{x1.mean():>8.2f}{x1.var():>9.1f}{x2.var():>8.1f}{run.ksd:>8.4f}"
            f"{run.ess:>11.0f}{run.seconds:>9.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
