"""Noise in the gradient, and two cures
====================================

Noise in the gradient heats Hamiltonian dynamics. A correction for known noise and a thermostat are
two remedies. The moments of two potentials in one dimension are known by quadrature, and Gaussian
noise is added to their gradients.

1. Chen, Fox & Guestrin (2014), figure 1: ``U = -2 z^2 + z^4``, noise of variance 4 in the gradient,
   friction 3. Without friction the noise heats the chain; ``SGHMC`` with ``noise_variance=4`` takes
   the known noise out.
2. Ding et al. (2014), figure 1: ``U = (z + 4) (z + 1) (z - 1) (z - 3) / 14 + 0.5``, step 0.01,
   friction 1, noise of variance ``2 B / eps`` with B = 1. ``SGHMC`` without a correction has the
   temperature 2. ``E z^2`` is then smaller, because the shallow mode has more of the mass.
   ``SGNHT`` finds the friction 1 + B = 2 by itself.

Each row of the table has 400 chains. The exit code is 1 if ``E z^2`` is more than 5 % off at the
step 0.05 for ``SGHMC`` with the noise given, or for ``SGNHT``, or if the friction of the latter is
further than 0.1 from 2, or if a method without a remedy is not too hot. ::

    python examples/noisy_gradients.py --out out/noisy_gradients.png

.. image:: /recorded/noisy_gradients.png
   :alt: Densities and biases of SGHMC and SGNHT under noisy gradients.

.. literalinclude:: /recorded/noisy_gradients.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/noisy_gradients.png"

import argparse
from functools import partial
from pathlib import Path
import sys
from typing import NamedTuple

from jax import random
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC

from numpyro_ext.mcmc import SGHMC, SGNHT

CHAINS, DRAWS, STEPS = 400, 250, 50
BAND = 0.05


def double_well(z):
    return -2 * z**2 + z**4


def two_modes(z):
    return (z + 4) * (z + 1) * (z - 1) * (z - 3) / 14 + 0.5


def model(potential):
    z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))
    numpyro.factor("potential", -potential(z))


class NoisyGradient:
    """The gradient of the model plus Gaussian noise of this variance."""

    def __init__(self, variance: float) -> None:
        self.variance = variance

    def init(self, z, potential):
        return ()

    def estimate(self, rng_key, i, z, idx, potential, state):
        value, grad = potential.value_and_grad(z, idx)
        noise = self.variance**0.5 * random.normal(rng_key)
        return value, {"z": grad["z"] + noise}, state


class Run(NamedTuple):
    draws: np.ndarray
    second_moment: float
    error: float  # standard error of the second moment
    temperature: float  # kinetic
    friction: float  # of the thermostat


def sample(rng_key, kernel, warmup: int = 100, draws: int = DRAWS) -> Run:
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(rng_key)
    z = np.asarray(mcmc.get_samples(group_by_chain=True)["z"])
    chains = (z**2).mean(1)
    fields = {name: float(x.mean()) for name, x in mcmc.get_extra_fields().items()}
    return Run(
        z.ravel(),
        chains.mean(),
        chains.std(ddof=1) / CHAINS**0.5,
        fields["kinetic_temperature"],
        fields.get("thermostat", np.nan),
    )


def exact(potential):
    """A grid, the density on it, and E z^2."""
    z = np.linspace(-6, 6, 4001)
    density = np.exp(-np.asarray(potential(z)))
    density /= np.trapezoid(density, z)
    return z, density, float(np.trapezoid(z**2 * density, z))


def in_the_well(rng_key, eps: float, variance: float = 4.0, **options) -> Run:
    kernel = SGHMC(
        partial(model, double_well),
        eps,
        gradient=NoisyGradient(variance),
        steps_per_sample=STEPS,
        **options,
    )
    return sample(rng_key, kernel)


def in_two_modes(rng_key, kernel_class, **options) -> Run:
    kernel = kernel_class(
        partial(model, two_modes),
        0.01,
        friction=1.0,
        gradient=NoisyGradient(2 / 0.01),
        steps_per_sample=8 * STEPS,
        **options,
    )
    return sample(rng_key, kernel)


def show_densities(ax, potential, runs: dict[str, Run], title: str) -> None:
    z, density, _ = exact(potential)
    ax.fill_between(z, density, color="lightgrey", label="exact")
    for label, run in runs.items():
        height, edges = np.histogram(run.draws, bins=120, range=(-6, 6), density=True)
        ax.plot((edges[1:] + edges[:-1]) / 2, height, label=label, lw=1.5)
    seen = z[density > 1e-3 * density.max()]
    ax.set(
        xlabel="z",
        ylabel="density",
        title=title,
        xlim=(seen[0] - 1, seen[-1] + 1),
        ylim=(0, 1.35 * density.max()),
    )
    ax.legend(frameon=False, fontsize=8, loc="upper right")


def draw_picture(wells, biases, modes, truth: float, path: Path) -> None:
    fig, axes = plt.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    show_densities(axes[0], double_well, wells, "Known noise (Chen et al.), step 0.1")
    for (C, V), runs in biases.items():
        steps = np.array(list(runs))
        values = np.array([100 * (run.second_moment / truth - 1) for run in runs.values()])
        errors = np.array([200 * run.error / truth for run in runs.values()])
        axes[1].errorbar(
            steps,
            values,
            errors,
            marker="o",
            capsize=3,
            color="C0" if C == 3 else "C1",
            ls="-" if V else "--",
            label=f"friction {C:g}, noise {'corrected' if V else 'not corrected'}",
        )
    axes[1].axhline(0, color="grey", lw=1)
    axes[1].set(
        xlabel="step size (units of time)",
        ylabel="bias of E z², per cent (bars: 2 standard errors)",
        title="SGHMC in the double well, noise of variance 4",
    )
    axes[1].legend(frameon=False, loc="lower left")
    show_densities(axes[2], two_modes, modes, "Unknown noise (Ding et al.), step 0.01")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/noisy_gradients.png"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    keys = iter(random.split(random.key(options.seed), 32))

    steps = (0.2, 0.1, 0.05)
    no_friction = {"friction": 1e-6, "resample_every": STEPS}
    wells = {
        "no friction, exact gradient": in_the_well(next(keys), 0.1, 0.0, **no_friction),
        "no friction, noisy gradient": in_the_well(next(keys), 0.1, **no_friction),
    }
    biases = {
        (C, V): {eps: in_the_well(next(keys), eps, friction=C, noise_variance=V) for eps in steps}
        for C in (0.5, 3.0)
        for V in (0.0, 4.0)
    }
    known = biases[3.0, 4.0]
    modes = {
        "SGHMC, unaware": in_two_modes(next(keys), SGHMC),
        "SGNHT": in_two_modes(next(keys), SGNHT),
        "SGNHT, thermal_mass=1": in_two_modes(next(keys), SGNHT, thermal_mass=1.0),
    }

    print(
        f"{'':<48}{'step':>5}{'temperature':>12}{'E z^2':>8}{'+-':>7}"
        f"{'exact':>8}{'off by':>8}{'friction found':>15}"
    )

    def row(name: str, eps: float, run: Run, truth: float) -> None:
        friction = "-" if np.isnan(run.friction) else f"{run.friction:.3f}"
        print(
            f"{name:<48}{eps:>5}{run.temperature:>12.3f}{run.second_moment:>8.4f}{run.error:>7.4f}{truth:>8.4f}"
            f"{run.second_moment / truth - 1:>8.1%}{friction:>15}"
        )

    well, mode = exact(double_well)[2], exact(two_modes)[2]
    for name, run in wells.items():
        row(f"double well, {name}", 0.1, run, well)
    for (C, V), runs in biases.items():
        for eps, run in runs.items():
            row(f"double well, friction {C:g}, noise_variance {V:g}", eps, run, well)
    for name, run in modes.items():
        row(f"two modes, {name}", 0.01, run, mode)

    shown = wells | {"friction 3, noise_variance=4": known[0.1]}
    draw_picture(shown, biases, modes, well, options.out)
    print(f"\nPicture: {options.out}")

    def off(run: Run, truth: float) -> float:
        return abs(run.second_moment / truth - 1)

    complaints = []
    if not off(known[0.05], well) < BAND:
        complaints.append("SGHMC that knows the noise is off by more than 5 % at the step 0.05.")
    if not off(known[0.05], well) < off(known[0.2], well):
        complaints.append("The bias of SGHMC does not fall with the step.")
    if not wells["no friction, noisy gradient"].second_moment > (1 + 2 * BAND) * well:
        complaints.append("Without friction the chain is not too hot.")
    if not modes["SGHMC, unaware"].temperature > 1.5:
        complaints.append("SGHMC that does not know the noise is not too hot.")
    if not (off(modes["SGNHT"], mode) < BAND and abs(modes["SGNHT"].friction - 2) < 0.1):
        complaints.append("SGNHT is off by more than 5 %, or its friction by more than 0.1.")
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    if main():
        sys.exit(1)
