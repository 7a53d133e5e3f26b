"""Hamiltonian Monte Carlo without gradients
=========================================

The score of the banana is learnt from 200 draws.

The target is ``x1 ~ N(0, 100)``, ``x2 ~ N(0.03 (x1^2 - 100), 1)``. ``KernelHMC`` moves by the
estimate of ``SteinScore`` with an RBF kernel, whose bandwidth is the median rule times 1 to 5, and
accepts with the exact density; the reference is the same kernel with the true score. 200 chains of
2000 iterations start at draws of the target plus noise of variance 4. A wrong score costs
acceptance and speed, not correctness.

The script prints a table and saves a picture. The exit code is 1 if every bandwidth has an
acceptance below 0.5, or if the best of the others has a mean of x1 further than 0.5 from 0 (its
standard deviation is 10) or a kernel Stein discrepancy of more than twice the true score's.
::

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
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC

from numpyro_ext.diagnostics import kernel_stein_discrepancy
from numpyro_ext.mcmc import KernelHMC
from numpyro_ext.scores import IMQ, RBF, SteinScore
from numpyro_ext.targets import banana_potential

CHAINS, ITERATIONS, TRAINING = 200, 2000, 200
STEP, LEAPFROG, THIN, RIDGE = 0.6, 10, 10, 10.0
FACTORS = (1.0, 2.0, 3.0, 5.0)
MEAN_BAND, ACCEPT_BAND, KSD_BAND = 0.5, 0.5, 2.0


class Run(NamedTuple):
    draws: np.ndarray  # (chains, records, 2)
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
    accept = float(mcmc.get_extra_fields()["accept_prob"].mean())
    half = later(draws)
    ksd = discrepancy(pooled(half, 5000))
    ess = float(np.asarray(effective_sample_size(half[..., 1])))
    return Run(draws, accept, float(ksd), ess, seconds)


def later(draws: np.ndarray) -> np.ndarray:
    """The second half of each chain."""
    return draws[:, draws.shape[1] // 2 :]


def pooled(draws: np.ndarray, number: int) -> np.ndarray:
    """``number`` of the draws of all chains, at random, ``(number, 2)``."""
    points = draws.reshape(-1, 2)
    return points[np.random.default_rng(0).choice(len(points), number)]


@jax.jit
def discrepancy(x):
    """Kernel Stein discrepancy of ``(n, 2)`` points, with one length for all, in 1/length."""
    squared = kernel_stein_discrepancy(x, jax.vmap(true_score), IMQ(3.0), statistic="v")
    return jnp.sqrt(squared)


def draw_picture(runs: dict[str, Run], best: str, training, score, path: Path) -> None:
    fig, axes = plt.subplots(1, 3, figsize=(15, 4.8), constrained_layout=True)
    grid = np.stack(np.meshgrid(np.linspace(-25, 25, 200), np.linspace(-8, 18, 200)), -1)
    energy = np.asarray(jax.vmap(jax.vmap(banana_potential))(jnp.asarray(grid)))
    for ax in axes[:2]:
        ax.contour(
            grid[..., 0],
            grid[..., 1],
            np.exp(-energy),
            [0.05, 0.3, 0.7],
            colors="grey",
            linewidths=1,
        )
        ax.set(xlabel="x1", ylabel="x2", xlim=(-25, 25), ylim=(-8, 18))
    places = jnp.asarray(training[::3])
    arrows = {
        "true score": (jax.vmap(true_score)(places), "black"),
        "estimate": (score.fit(training)(places), "C1"),
    }
    axes[0].plot(*training.T, ".", color="C0", ms=3, label="training draws")
    for label, (value, colour) in arrows.items():
        axes[0].quiver(*places.T, *value.T, color=colour, angles="xy", scale=25, width=0.003)
        axes[0].plot([], [], color=colour, label=label)
    axes[0].set(title=f"The score, true and learnt ({best})")
    axes[0].legend(frameon=False, loc="upper center")
    some = later(runs[best].draws)[:, ::25].reshape(-1, 2)
    axes[1].plot(*some.T, ".", color="C0", ms=2)
    axes[1].set(title=f"Draws of KernelHMC ({best})")
    until = np.unique(np.geomspace(1, ITERATIONS // THIN, 9).astype(int))
    for name, run in runs.items():
        style = {"color": "black", "lw": 2} if name == "true score" else {"lw": 1.2}
        windows = (run.draws[:, k // 2 : k] for k in until)
        values = [float(discrepancy(pooled(window, 1000))) for window in windows]
        label = f"{name}, acceptance {run.accept:.2f}"
        axes[2].plot(THIN * until, values, marker="o", ms=3, label=label, **style)
    iid = float(discrepancy(exact_draws(random.key(1), 1000)))
    axes[2].axhline(iid, color="grey", ls=":", label="independent exact draws")
    axes[2].set(
        xlabel="iteration t",
        ylabel="kernel Stein discrepancy (1/length)",
        xscale="log",
        yscale="log",
        ylim=(0.02, 2),  # room for the legend above the curves
        title="1,000 draws of the second half of t iterations",
    )
    axes[2].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/kernel_hmc_banana.png"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    key_train, key_start, key_noise, key_run = random.split(random.key(options.seed), 4)
    training = exact_draws(key_train, TRAINING)
    start = exact_draws(key_start, CHAINS) + 2 * random.normal(key_noise, (CHAINS, 2))

    runs = {"true score": sample(key_run, start, true_score)}
    scores = {
        f"bandwidth x {factor:g}": SteinScore(
            RIDGE, RBF("median", factor=factor), form="parametric"
        )
        for factor in FACTORS
    }
    for name, score in scores.items():
        runs[name] = sample(key_run, start, score, training_samples={"x": training})
    best = min(scores, key=lambda name: (runs[name].accept < ACCEPT_BAND, runs[name].ksd))

    print(
        f"{'score':<16}{'acceptance':>11}{'E x1':>8}{'Var x1':>9}{'Var x2':>8}"
        f"{'KSD':>8}{'ESS of x2':>11}{'seconds':>9}"
    )
    print(f"{'exact':<16}{'':>11}{0:>8.2f}{100:>9.1f}{19:>8.1f}")
    for name, run in runs.items():
        x1, x2 = later(run.draws).reshape(-1, 2).T
        print(
            f"{name:<16}{run.accept:>11.3f}{x1.mean():>8.2f}{x1.var():>9.1f}{x2.var():>8.1f}{run.ksd:>8.4f}"
            f"{run.ess:>11.0f}{run.seconds:>9.1f}"
        )
    draw_picture(runs, best, training, scores[best], options.out)
    print(f"\nPicture: {options.out}")

    complaints, ours = [], runs[best]
    if not ours.accept > ACCEPT_BAND:
        complaints.append(f"The acceptance is {ours.accept:.2f}, below {ACCEPT_BAND}.")
    if not abs(later(ours.draws)[..., 0].mean()) < MEAN_BAND:
        complaints.append(f"The mean of x1 is more than {MEAN_BAND} from 0.")
    if not ours.ksd < KSD_BAND * runs["true score"].ksd:
        complaints.append(f"The discrepancy is more than {KSD_BAND:g} times the true score's.")
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    if main():
        sys.exit(1)
