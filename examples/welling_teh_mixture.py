"""The mixture of Welling and Teh
==============================

``SGLD`` with one row per step (Welling & Teh, 2011), beside the posterior on a grid.

The prior is ``theta1 ~ N(0, 10)``, ``theta2 ~ N(0, 1)`` (variances), and the data are 100 rows from
``0.5 N(theta1, 2) + 0.5 N(theta1 + theta2, 2)`` at theta = (0, 1). The posterior has a second mode
near (1, -1). ``SGLD`` makes 10 000 passes over the rows with the paper's schedule
``a (b + i)^-0.55`` from 0.01 to 0.0001 (our steps are half of it), and draws are weighted by their
steps. There are 8 chains, because one chain changes mode too seldom for two digits.

The script prints moments and the mass near each mode, and saves a picture. The exit code is 1 if a
mean is more than 0.1 from the grid's, or a mode has less than 10 % of the draws. ::

    python examples/welling_teh_mixture.py --out out/welling_teh_mixture.png
"""

import argparse
from pathlib import Path
import sys

import jax
from jax import random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_ext.mcmc import SGLD, PolynomialSchedule

ROWS, PASSES, GAMMA = 100, 10_000, 0.55
FIRST, LAST = 0.01 / 2, 0.0001 / 2
STEPS_PER_SAMPLE, CHAINS = 100, 8
MEAN_BAND, MODE_BAND = 0.1, 0.1


def model(x, subsample_size=1):
    theta1 = numpyro.sample("theta1", dist.Normal(0.0, 10**0.5))
    theta2 = numpyro.sample("theta2", dist.Normal(0.0, 1.0))
    halves = dist.Categorical(probs=jnp.array([0.5, 0.5]))
    means = jnp.stack([theta1, theta1 + theta2])
    with numpyro.plate("data", len(x), subsample_size=subsample_size) as idx:
        numpyro.sample("x", dist.MixtureSameFamily(halves, dist.Normal(means, 2**0.5)), obs=x[idx])


def make_data(rng_key):
    key_part, key_noise = random.split(rng_key)
    part = random.bernoulli(key_part, 0.5, (ROWS,))
    return part + 2**0.5 * random.normal(key_noise, (ROWS,))


def schedule() -> PolynomialSchedule:
    """From FIRST to LAST in all steps."""
    b = ROWS * PASSES / ((FIRST / LAST) ** (1 / GAMMA) - 1)
    return PolynomialSchedule(FIRST * b**GAMMA, b, GAMMA)


def grid_posterior(x):
    """The grids of theta1 and theta2, and the probability of their cells, ``(theta1, theta2)``."""
    theta1, theta2 = np.linspace(-3, 4, 401), np.linspace(-4, 4, 401)

    @jax.jit
    @jax.vmap
    def log_density(theta1):
        def at(theta2):
            densities = dist.Normal(jnp.stack([theta1, theta1 + theta2]), 2**0.5).log_prob(
                x[:, None]
            )
            prior = dist.Normal(0, 10**0.5).log_prob(theta1) + dist.Normal(0, 1).log_prob(theta2)
            return prior + jnp.sum(jnp.logaddexp(*densities.T))

        return jax.vmap(at)(theta2)

    values = np.asarray(log_density(theta1), float)
    mass = np.exp(values - values.max())
    return theta1, theta2, mass / mass.sum()


def mass_near_modes(theta2, weights) -> tuple[float, float]:
    """On the sides of theta2 > 0, where (0, 1) is, and theta2 < 0, where (1, -1) is."""
    right = float(np.sum(weights * (theta2 > 0)) / np.sum(weights))
    return right, 1 - right


def draw_picture(draws, weights, grid, path: Path) -> None:
    theta1, theta2, mass = grid
    fig, axes = plt.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    ranges = [(-2, 3), (-3, 3)]
    cell = (theta1[1] - theta1[0]) * (theta2[1] - theta2[0])
    height, *edges = np.histogram2d(*draws, bins=100, range=ranges, weights=weights, density=True)
    shown = axes[0].pcolormesh(*edges, height.T, cmap="Blues")
    fig.colorbar(shown, ax=axes[0], label="density of the draws of SGLD")
    levels = (mass / cell).max() * np.array([0.05, 0.2, 0.4, 0.6, 0.8])
    axes[0].contour(theta1, theta2, (mass / cell).T, levels, colors="black", linewidths=0.8)
    axes[0].set(
        xlabel="theta1",
        ylabel="theta2",
        title="Draws, and contours of the exact posterior",
        xlim=ranges[0],
        ylim=ranges[1],
    )
    marginals = ((theta1, mass.sum(1)), (theta2, mass.sum(0)))
    for j, (ax, (values, marginal)) in enumerate(zip(axes[1:], marginals, strict=True)):
        ax.hist(
            draws[j],
            bins=100,
            range=ranges[j],
            weights=weights,
            density=True,
            color="C0",
            alpha=0.5,
            label="SGLD",
        )
        ax.plot(values, marginal / (values[1] - values[0]), color="black", label="grid quadrature")
        ax.set(
            xlabel=f"theta{j + 1}",
            ylabel="density",
            title=f"Marginal of theta{j + 1}",
            xlim=ranges[j],
        )
        ax.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/welling_teh_mixture.png"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    key_data, key_run = random.split(random.key(options.seed))

    x = make_data(key_data)
    kernel = SGLD(model, schedule(), minibatch="epoch", steps_per_sample=STEPS_PER_SAMPLE)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=ROWS * PASSES // STEPS_PER_SAMPLE,
        num_chains=CHAINS,
        chain_method="vectorized",
    )
    mcmc.run(key_run, x)
    samples = mcmc.get_samples()
    weights = np.asarray(mcmc.get_extra_fields()["step_size"], float)
    draws = np.stack([np.asarray(samples[name], float) for name in ("theta1", "theta2")])

    grid = grid_posterior(x)
    points = np.stack(np.meshgrid(grid[0], grid[1], indexing="ij"))
    tables = {"grid": (points.reshape(2, -1), grid[2].ravel()), "SGLD": (draws, weights)}
    print(
        f"\n{'':<6}{'E theta1':>10}{'E theta2':>10}{'sd theta1':>11}"
        f"{'sd theta2':>11}{'near (0, 1)':>13}{'near (1, -1)':>14}"
    )
    means, modes = {}, {}
    for name, (values, w) in tables.items():
        means[name] = mean = np.average(values, axis=1, weights=w)
        sd = np.sqrt(np.average((values - mean[:, None]) ** 2, axis=1, weights=w))
        modes[name] = near = mass_near_modes(values[1], w)
        print(
            f"{name:<6}{mean[0]:>10.3f}{mean[1]:>10.3f}{sd[0]:>11.3f}{sd[1]:>11.3f}{near[0]:>13.1%}{near[1]:>14.1%}"
        )

    draw_picture(draws, weights, grid, options.out)
    print(f"\nPicture: {options.out}")
    complaints = []
    if not np.all(np.abs(means["SGLD"] - means["grid"]) < MEAN_BAND):
        complaints.append(f"A mean is more than {MEAN_BAND} from the grid's.")
    if not min(modes["SGLD"]) > MODE_BAND:
        complaints.append(f"A mode has less than {MODE_BAND:.0%} of the draws.")
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    if main():
        sys.exit(1)
